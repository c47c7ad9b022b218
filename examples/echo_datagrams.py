"""A datagram echo: asyncio's DatagramProtocol as it is, and many datagrams by one call.

What it shows: `zc_sendto(..., segment_size=1200)` hands the kernel one buffer, which leaves as many
datagrams of 1200 bytes (UDP GSO). The client numbers them and asks again for what was lost: UDP
promises nothing. It may reuse its buffer after `await op.released`, not before.

    python examples/echo_datagrams.py serve --port 8009
    python examples/echo_datagrams.py client --port 8009 --bytes 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import aiozc

SEGMENT = 1200
BATCH = 16  # datagrams in one call; few enough that no receive buffer on the way overflows
PATIENCE = 0.5  # seconds without an answer before what is missing is sent again
GOODBYE = b"bye"


class Echo(asyncio.DatagramProtocol):
    def __init__(self, on_goodbye: Callable[[Any], None]) -> None:
        self.on_goodbye = on_goodbye

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.transport.sendto(data, addr)
        if data == GOODBYE:
            self.on_goodbye(addr)


class Answers(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.queue.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        self.queue.put_nowait(exc)  # nobody listens there: the kernel says so to a connected socket

    async def next(self) -> bytes | None:
        """None: nothing came for a while."""
        try:
            answer = await asyncio.wait_for(self.queue.get(), PATIENCE)
        except TimeoutError:
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer


async def serve(args: argparse.Namespace) -> None:
    gone = set()  # a goodbye may come twice
    enough = asyncio.Event()

    def on_goodbye(addr: Any) -> None:
        gone.add(addr)
        if len(gone) == args.connections:
            enough.set()

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: Echo(on_goodbye), local_addr=(args.host, args.port)
    )
    host, port = transport.get_extra_info("sockname")[:2]
    print(f"listening on {host}:{port}", flush=True)
    await enough.wait()  # without --connections: until interrupted
    transport.close()


async def client(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    endpoint, answers = await loop.create_datagram_endpoint(
        Answers, remote_addr=(args.host, args.port)
    )
    transport = cast(aiozc.DatagramTransport, endpoint)
    pieces = -(-args.bytes // (SEGMENT - 4))
    content = random.Random(args.bytes)
    wanted = {i: i.to_bytes(4, "big") + content.randbytes(SEGMENT - 4) for i in range(pieces)}
    buffer = bytearray(SEGMENT * BATCH)
    silences = 0
    while wanted and silences < 20:
        batch = list(wanted)[:BATCH]
        used = memoryview(buffer)[: SEGMENT * len(batch)]
        used[:] = b"".join(wanted[i] for i in batch)
        operation = transport.zc_sendto(used, segment_size=SEGMENT)
        for _ in batch:
            answer = await answers.next()
            if answer is None:
                silences += 1
                break  # lost: in the next batch again
            number = int.from_bytes(answer[:4], "big")
            if answer != wanted.pop(number, answer):
                raise ValueError(f"wrong data in datagram {number}")
            silences = 0
        await operation.released  # now the buffer may be filled anew
    if wanted:
        raise ValueError(f"{len(wanted)} of {pieces} datagrams were never answered")
    transport.sendto(GOODBYE)
    while silences < 20 and (answer := await answers.next()) != GOODBYE:
        if answer is None:
            silences += 1
            transport.sendto(GOODBYE)
    transport.close()
    print(f"ok: {args.bytes} bytes echoed, every byte checked, {BATCH} datagrams a call")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["serve", "client"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (serve only)")
    parser.add_argument("--backend", choices=["auto", "uring", "epoll"], default="auto")
    parser.add_argument("--connections", type=int, default=0, help="serve: end after so many")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="client: how much to send")
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
