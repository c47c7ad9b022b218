"""A cache of 64 KiB values whose keys are overwritten while they are being sent: the reason for `released`.

What it shows: a GET sends the value where it lies, and the kernel reads it until `released`. A SET must
not write there. It takes another buffer; the old one is used again once every send from it is released.
(Overwritten in place, a slow client gets half of each value: take out the line marked below, and see.)

    python examples/cache_server.py serve --port 8014
    python examples/cache_server.py client --port 8014 --clients 8 --rounds 20

Requests: `GET key` and a line's end; `SET key`, a line's end and 64 KiB. Answers: OK, VALUE and 64 KiB,
or NONE.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket

import aiozc

SIZE = 64 * 1024
PIPELINE = 16
KEYS = [b"key%d" % number for number in range(4)]


class Values:
    """The newest buffer of each key, and those that the kernel may still read or nobody uses."""

    def __init__(self) -> None:
        self.newest: dict[bytes, bytearray] = {}
        self.sends: dict[int, list[aiozc.Operation]] = {}  # by the buffer's id: not yet released
        self.free: list[bytearray] = []
        self.retiring: set[asyncio.Task[None]] = set()

    def room(self) -> bytearray:
        return self.free.pop() if self.free else bytearray(SIZE)

    def sent(self, value: bytearray, operation: aiozc.Operation) -> None:
        before = self.sends.get(id(value), [])
        self.sends[id(value)] = [op for op in before if not op.released.done()] + [operation]

    def replace(self, key: bytes, value: bytearray) -> None:
        old, self.newest[key] = self.newest.get(key), value
        if old is not None:
            task = asyncio.create_task(self.retire(old, self.sends.pop(id(old), [])))
            self.retiring.add(task)
            task.add_done_callback(self.retiring.discard)

    async def retire(self, value: bytearray, sends: list[aiozc.Operation]) -> None:
        for operation in sends:
            with contextlib.suppress(OSError):  # a client was lost; the memory is free all the same
                await operation.released  # take this out, and see
        self.free.append(value)


async def serve(args: argparse.Namespace) -> None:
    values = Values()
    served = 0
    enough = asyncio.Event()

    async def on_client(reader: asyncio.StreamReader, writer: aiozc.StreamWriter) -> None:
        nonlocal served
        try:
            while line := await reader.readline():
                verb, _, key = line.strip().partition(b" ")
                if verb == b"SET":
                    value = values.room()
                    if await aiozc.read_into(reader, value) < SIZE:
                        break
                    values.replace(key, value)
                    writer.write(b"OK\n")
                elif (found := values.newest.get(key)) is not None:
                    values.sent(found, writer.zc_submit([b"VALUE\n", found]))
                else:
                    writer.write(b"NONE\n")
                await writer.zc_drain()
        except (ConnectionError, ValueError):
            pass  # the client went away, or sent a line without end
        finally:
            writer.close()
            served += 1
            if served == args.connections:
                enough.set()

    server = await aiozc.start_server(on_client, args.host, args.port)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"listening on {host}:{port}", flush=True)
    async with server:
        await enough.wait()  # without --connections: until interrupted


async def client(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    reading = args.clients - 1

    async def connect(slow: bool) -> tuple[asyncio.StreamReader, aiozc.StreamWriter]:
        sock = socket.socket()
        if slow:  # what it does not read stays with the server
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        await loop.sock_connect(sock, (args.host, args.port))
        return await aiozc.open_connection(sock=sock)

    async def overwrite() -> int:
        reader, writer = await connect(slow=False)
        stamp = 0
        ready.set_result(None)
        while reading:  # each value is one byte, 65536 times, and no two in a row are the same
            stamp = stamp % 251 + 1
            writer.write(b"".join(b"SET %b\n%b" % (key, bytes([stamp]) * SIZE) for key in KEYS))
            for _ in KEYS:
                if await reader.readline() != b"OK\n":
                    raise ValueError("wrong data: a SET was not answered with OK")
            await asyncio.sleep(0.001)
        writer.close()
        return stamp

    async def get() -> int:
        nonlocal reading
        try:
            reader, writer = await connect(slow=True)
            values = 0
            for _ in range(args.rounds):
                writer.write(b"".join(b"GET %b\n" % key for key in KEYS) * (PIPELINE // len(KEYS)))
                await asyncio.sleep(0.02)  # the answers wait, and are overwritten meanwhile
                for _ in range(PIPELINE):
                    head = await reader.readline()
                    if head == b"NONE\n":
                        continue  # not SET yet
                    value = await reader.readexactly(SIZE)
                    if head != b"VALUE\n" or value != value[:1] * SIZE:
                        raise ValueError(f"wrong data: {len(set(value))} values in one, {head!r}")
                    values += 1
            writer.close()
            return values
        finally:
            reading -= 1

    ready = loop.create_future()
    writing = asyncio.create_task(overwrite())
    await asyncio.wait([ready, writing], return_when=asyncio.FIRST_COMPLETED)
    _, *got = await asyncio.gather(writing, *(get() for _ in range(reading)))
    print(f"ok: {sum(got)} values, each of one piece")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["serve", "client"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (serve only)")
    parser.add_argument("--backend", choices=["auto", "uring", "epoll"], default="auto")
    parser.add_argument("--connections", type=int, default=0, help="serve: end after so many")
    parser.add_argument("--clients", type=int, default=4, help="client: one of them writes")
    parser.add_argument("--rounds", type=int, default=10, help="client: of each, with 16 GETs")
    args = parser.parse_args()
    backend = None if args.backend == "auto" else args.backend
    try:
        aiozc.run(serve(args) if args.mode == "serve" else client(args), backend=backend)
    except (OSError, EOFError, ValueError) as exc:
        raise SystemExit(f"error: {exc}") from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
