"""Our side of one connection, on the loop under test: opens it, plays the plan's steps, ends it, judges.

Made by soak.py, which owns the peers and where violations go. What arrived at the other side is told by the
peer process, never by the loop under test. Buffers that were given back are overwritten at once: an early
release shows at the peer as POISON.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import random
import sys
import termios
from collections import Counter
from typing import Any, Protocol

import aiozc

from . import pattern, peer
from .plan import ACK, HEADER, Plan, Step

LIMIT = 30  # seconds for one life; the longest plan needs some five on an idle machine
_ENDED = (
    aiozc.OperationState.RELEASED,
    aiozc.OperationState.FAILED,
    aiozc.OperationState.WITHDRAWN,
)


class Soak(Protocol):
    """What a life needs to know of the run."""

    seed: int
    totals: Counter[str]

    async def open(
        self, what: Plan
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None: ...

    def report(self, number: int) -> asyncio.Future[peer.Report]: ...

    def wrong(self, what: Plan, text: str) -> None: ...


class BufferedStream(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Streams whose bytes come through get_buffer, in pieces of odd sizes."""

    def get_buffer(self, sizehint: int) -> bytearray:
        self._room = bytearray(random.choice((1000, 4096, 65536, 100_000)))
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._room[:nbytes]))


def overwrite(buffer: Any) -> None:
    if isinstance(buffer, bytearray):
        buffer[:] = pattern.POISON[: len(buffer)]
    elif isinstance(buffer, mmap.mmap):
        buffer[:] = pattern.POISON[: len(buffer)]
        buffer.close()  # BufferError: somebody still has a lock on it


def unread(transport: Any) -> int:
    """Bytes that lie in the socket: not 0 where nobody was told of them."""
    sock = transport and transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return 0
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


class Life:
    def __init__(self, soak: Soak, what: Plan) -> None:
        self.soak = soak
        self.plan = what
        self.rng = random.Random(f"{soak.seed}:{what.number}:ours")
        self.position = 0  # bytes of our stream that were accepted by the transport
        self.got = 0
        self.ops: list[tuple[int, aiozc.Operation]] = []  # and where in the stream they end
        self.spoilers: list[asyncio.Task[None]] = []
        self.acknowledged = asyncio.Event()
        self.reader: Any = None
        self.writer: Any = None
        self.step = "opening"

    async def run(self) -> None:
        living = asyncio.create_task(self.live())
        # Not by the clock: a machine that stands still for a while is no hang of ours.
        for _ in range(LIMIT):
            if (await asyncio.wait({living}, timeout=1.0))[0]:
                break
        else:
            transport = self.writer and self.writer.transport
            waiting = [op for _, op in self.ops if not op.released.done()]
            self.wrong(
                f"not over after {LIMIT} s: {self.step}; {transport!r} {waiting}; {self.got} received, "
                f"{unread(transport)} unread"
            )
            living.cancel()
            await asyncio.wait({living})
        if not living.cancelled() and (error := living.exception()) is not None:
            self.wrong(f"{self.step}: {type(error).__name__}: {error}")
        if self.writer is not None:
            self.writer.transport.abort()
        for task in self.spoilers:
            task.cancel()

    def wrong(self, text: str) -> None:
        self.soak.wrong(self.plan, text)

    async def live(self) -> None:
        what = self.plan
        report = self.soak.report(what.number)
        streams = await self.soak.open(what)
        if streams is None:
            self.wrong(f"the peer's connection never came: {await report}")
            return
        self.reader, self.writer = streams
        self.configure()
        drinking = asyncio.create_task(self.drink())
        feeding = asyncio.create_task(self.feed())
        try:
            await self.end(drinking, feeding)
            self.step = "connection_lost"
            await self.lost()
            self.step = "end of reading"
            await drinking
            self.step = "release of the operations"
            await asyncio.gather(*(op.released for _, op in self.ops), return_exceptions=True)
            await asyncio.gather(*self.spoilers)
            self.step = "the peer's report"
            self.judge(await report)
        finally:
            for task in (drinking, feeding):
                task.cancel()
            await asyncio.gather(drinking, feeding, return_exceptions=True)

    def configure(self) -> None:
        what, transport = self.plan, self.writer.transport
        if what.sndbuf:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(peer.socket.SOL_SOCKET, peer.socket.SO_SNDBUF, what.sndbuf)
        transport.zc_configure(
            threshold=None if what.threshold < 0 else what.threshold,
            cap=None if what.cap < 0 else what.cap,
        )
        if self.rng.random() < 0.3:
            transport.set_write_buffer_limits(high=self.rng.choice((0, 1000, 1 << 20)))

    # -- the end --

    async def end(self, drinking: asyncio.Task[None], feeding: asyncio.Task[None]) -> None:
        what, writer = self.plan, self.writer
        if what.cut >= 0:
            await asyncio.wait({feeding}, timeout=what.cut)
            feeding.cancel()
            await asyncio.wait({feeding})
        else:
            await feeding
        self.step = what.end
        if what.end == "eof":
            writer.write_eof()
            await drinking
            writer.close()
        elif what.end == "close" or what.end == "peer":
            await drinking
            writer.close()
        else:
            # Else the peer could be gone before it knows who we are, and would not report.
            await self.acknowledged.wait()
            if what.end == "abort":
                writer.transport.abort()
            else:
                writer.transport.zc_reset()

    async def lost(self) -> None:
        try:
            await self.writer.wait_closed()
        except OSError as error:
            if self.plan.end != "peer":
                self.wrong(f"connection_lost({error!r})")

    # -- receiving --

    async def drink(self) -> None:
        """Read the peer's stream to its end, or as much as it sends where we close first."""
        what, reader = self.plan, self.reader
        try:
            if what.dialled:
                ack = await reader.readexactly(len(ACK))
                if ack != ACK:
                    self.wrong(f"{ack!r} instead of the acknowledgement")
            self.acknowledged.set()
            while what.end != "close" or self.got < what.sends:
                if not self.take(await self.read()):
                    break
                if what.pauses and self.rng.random() < 0.2:
                    await self.pause()
        except asyncio.IncompleteReadError as error:
            self.take(error.partial)
        except OSError as error:
            if what.exact:
                self.wrong(f"reading at {self.got} of {what.sends}: {error!r}")
        finally:
            self.acknowledged.set()

    async def read(self) -> bytes | bytearray:
        left = self.plan.sends - self.got
        size = int(2 ** self.rng.uniform(0, 18))
        kind = self.rng.choice(("read", "read", "exactly", "into"))
        if kind == "exactly" and left:
            return await self.reader.readexactly(min(size, left))
        if kind == "into" and left:
            target = bytearray(min(size, left))
            n = await aiozc.read_into(self.reader, target)
            return target[:n]
        return await self.reader.read(max(size, 4096))

    def take(self, data: bytes | bytearray) -> bool:
        if not data:
            return False
        stream = 2 * self.plan.number + 1
        if pattern.first_wrong(stream, self.got, data) is not None:
            self.wrong(f"received {pattern.describe(stream, self.got, data)}")
        self.got += len(data)
        self.soak.totals["bytes received"] += len(data)
        return True

    async def pause(self) -> None:
        transport = self.writer.transport
        if transport.is_reading():
            transport.pause_reading()
            await asyncio.sleep(self.rng.choice((0, 0.001, 0.02)))
            transport.resume_reading()

    # -- sending --

    async def feed(self) -> None:
        try:
            for step in self.plan.steps:
                self.step = step.how
                await self.play(step)
        except OSError as error:
            if self.plan.exact:
                self.wrong(f"sending at {self.position} ({self.step}): {error!r}")

    def buffer(self, kind: str, start: int, size: int, for_write: bool) -> tuple[Any, Any]:
        """What is handed to the transport, and the memory that is overwritten afterwards (or None)."""
        data = pattern.piece(2 * self.plan.number, start, size)
        if kind == "bytearray":
            memory = bytearray(data)
            return memory, memory
        if kind == "view":
            if start % 2:
                return memoryview(b"xyz" + data)[3:], None
            memory = bytearray(data)
            return memoryview(memory), memory
        if kind == "frozen":
            return aiozc.frozen(bytearray(data)), None
        if kind == "mmap" and size:
            mapping = mmap.mmap(-1, size)
            mapping[:] = data
            return (memoryview(mapping) if for_write else mapping), mapping
        return data, None

    def buffers(self, step: Step) -> tuple[list[Any], list[Any]]:
        parts, memory, at = [], [], self.position
        for size, kind in step.parts:
            part, own = self.buffer(kind, at, size, step.how.startswith("write"))
            parts.append(part)
            memory.append(own)
            at += size
        return parts, memory

    async def play(self, step: Step) -> None:
        parts, memory = self.buffers(step)
        size = sum(size for size, _ in step.parts)
        one = parts[0] if len(parts) == 1 else parts
        writer = self.writer
        op = None
        self.soak.totals["bytes accepted"] += size
        self.soak.totals[step.how] += 1
        if step.how == "write":
            writer.write(one)
        elif step.how == "writelines":
            writer.writelines(parts)
        elif step.how == "zc_send":
            await self.zc_send(one, step, size, memory)
            return
        else:
            op = self.submit(one, size)
            if step.how == "withdraw":
                # The one behind it says the same bytes: it moves up.
                again, memory = self.buffers(step)
                first, op = op, self.submit(again, size)
                if not first.withdraw() and size and not writer.transport.is_closing():
                    self.wrong(f"cannot withdraw {first!r} in the turn of its submission")
                self.ops = [(at, one) for at, one in self.ops if one is not first]
            self.spoilers.append(asyncio.create_task(self.spoil(op, memory)))
        self.position += size
        if op is None:
            for part in parts:
                if isinstance(part, memoryview):
                    part.release()
            for own in memory:
                overwrite(own)
        del parts, one, memory
        await self.follow(step.then, op)

    def submit(self, data: Any, size: int) -> aiozc.Operation:
        op = self.writer.zc_submit(data)
        self.ops.append((self.position + size, op))
        return op

    async def zc_send(self, one: Any, step: Step, size: int, memory: list[Any]) -> None:
        """zc_send submits in its first step, before it can be cancelled."""
        self.position += size
        patience = 0.002 if step.then == "impatient" else None
        try:
            async with asyncio.timeout(patience):
                result = await self.writer.zc_send(one)
        except TimeoutError:
            return  # the bytes still go
        if result.nbytes != size:
            self.wrong(f"zc_send of {size} bytes: {result}")
        for part in one if isinstance(one, list) else [one]:
            if isinstance(part, memoryview):
                part.release()
        for own in memory:
            overwrite(own)

    async def spoil(self, op: aiozc.Operation, memory: list[Any]) -> None:
        with contextlib.suppress(OSError):
            await op.released
        self.soak.totals[f"operations {op.state.name.lower()}"] += 1
        for own in memory:
            overwrite(own)

    async def follow(self, then: str, op: aiozc.Operation | None) -> None:
        if then == "turn":
            await asyncio.sleep(0)
        elif then == "sleep":
            await asyncio.sleep(self.rng.uniform(0, 0.03))
        elif then == "drain":
            await self.writer.drain()
        elif then == "zc_drain":
            await self.writer.zc_drain()
        elif op is not None and then == "sent":
            result = await op.sent
            if result.nbytes != op.nbytes:
                self.wrong(f"{op!r} says sent: {result}")
        elif op is not None and then == "released":
            await op.released
        elif op is not None and then == "impatient":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.002):
                    await op

    # -- judging --

    def judge(self, said: peer.Report) -> None:
        what = self.plan
        self.soak.totals[f"ended by {what.end}"] += 1
        self.soak.totals["bytes checked by peers"] += said.got
        if said.wrong:
            self.wrong(f"{what.peer} peer: {said.wrong}")
        if said.got > self.position:
            self.wrong(f"the peer received {said.got} bytes of {self.position}")
        if self.got > said.sent:
            self.wrong(f"received {self.got} bytes of {said.sent}")
        for _, op in self.ops:
            if op.state not in _ENDED:
                self.wrong(f"{op!r} says released")
            elif what.exact and (op.bytes_sent != op.nbytes or op.state.name != "RELEASED"):
                self.wrong(f"{op!r} on a connection that was not cut")
        if what.exact:
            if (said.got, said.end) != (self.position, "eof"):
                self.wrong(f"the peer received {said.got} of {self.position}, then {said.end}")
            if (self.got, said.sent) != (what.sends, what.sends):
                self.wrong(f"received {self.got} of {what.sends} (the peer sent {said.sent})")
        elif what.end == "reset" and what.family != "unix":
            if said.end != "reset":
                self.wrong(f"the peer saw {said.end} after zc_reset()")
        elif what.end == "abort" and not what.sends:
            # Nothing was unread at our side, so this is no reset: what was sent is delivered.
            # (An operation of no bytes is released at once.)
            released = (at for at, op in self.ops if op.nbytes and op.state.name == "RELEASED")
            least = max(released, default=0)
            if said.got < least or said.end != "eof":
                self.wrong(f"the peer received {said.got}, then {said.end}; {least} were released")


async def greet(writer: asyncio.StreamWriter, number: int) -> None:
    """We dialled: say who we are."""
    writer.write(number.to_bytes(HEADER, "big"))


async def greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """The peer dialled: who is it?"""
    number = int.from_bytes(await reader.readexactly(HEADER), "big")
    writer.write(ACK)
    return number
