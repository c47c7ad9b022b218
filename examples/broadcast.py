"""One feed to many subscribers, slow ones among them: frames out of a pool, each sent by one call.

What it shows: `aiozc.broadcast` queues one buffer on every connection, locks it once, and says who got it.
A subscriber with more than `max_queued` bytes outstanding misses the frame, and delays nobody. One
that reads nothing is reset after `zc_timeout`. A frame's buffer is the pool's again when the last
subscriber's kernel has released it, so the next one is filled in another: nothing here ever waits.

    python examples/broadcast.py serve --port 8012
    python examples/broadcast.py client --port 8012 --subscribers 20 --slow 2 --frames 40
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import socket

import aiozc

FRAME = 256 * 1024
HEAD = 8  # the frame's number


def content(number: int) -> bytes:
    """A frame's bytes follow from its number, so that the client can check every one of them."""
    return number.to_bytes(HEAD, "big") + hashlib.shake_128(b"%d" % number).digest(FRAME - HEAD)


async def serve(args: argparse.Namespace) -> None:
    pool = aiozc.BufferPool(size=FRAME, count=16, max_count=256)
    subscribers: set[aiozc.StreamWriter] = set()
    served = 0
    enough = asyncio.Event()

    async def on_client(reader: asyncio.StreamReader, writer: aiozc.StreamWriter) -> None:
        nonlocal served
        # A frame that waits here is late anyway; the kernel's default is 4 MiB.
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FRAME)
        subscribers.add(writer)
        try:
            await reader.read()  # until it goes; whatever it says
        except ConnectionError:
            pass
        finally:
            subscribers.discard(writer)
            writer.close()
            served += 1
            if served == args.connections:
                enough.set()

    async def publish() -> None:
        loop = asyncio.get_running_loop()
        sending: set[asyncio.Task[object]] = set()
        due, number = loop.time(), 0
        while True:
            with pool.acquire() as frame:  # PoolExhausted: so far behind is an error of the set-up
                frame[:] = content(number)
                call = aiozc.broadcast(  # a slice, since `frame` itself ends with this block
                    list(subscribers), frame[:], max_queued=FRAME, on_slow="drop"
                )
                task = loop.create_task(call)  # it ends when the slowest has released the frame
            sending.add(task)
            task.add_done_callback(sending.discard)
            number += 1
            due += 1 / args.rate
            await asyncio.sleep(max(0, due - loop.time()))

    server = await aiozc.start_server(on_client, args.host, args.port)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"listening on {host}:{port}", flush=True)
    publishing = asyncio.create_task(publish())
    waiting = asyncio.create_task(enough.wait())  # without --connections: until interrupted
    async with server:
        await asyncio.wait([publishing, waiting], return_when=asyncio.FIRST_COMPLETED)
        if publishing.done():
            publishing.result()  # raises
        publishing.cancel()


async def client(args: argparse.Namespace) -> None:
    async def one(slow: bool) -> tuple[int, int]:
        sock = socket.socket()
        if slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, FRAME // 4)
        await asyncio.get_running_loop().sock_connect(sock, (args.host, args.port))
        reader, writer = await aiozc.open_connection(sock=sock)
        seen = missed = 0
        last = None
        while seen < (args.frames // 5 if slow else args.frames):
            frame = await reader.readexactly(FRAME)
            number = int.from_bytes(frame[:HEAD], "big")
            if (last is not None and number <= last) or frame != content(number):
                raise ValueError(f"wrong data in frame {number} after {last}")
            missed += 0 if last is None else number - last - 1
            last = number
            seen += 1
            if slow:
                await asyncio.sleep(5 / args.rate)  # a fifth of what is sent
        writer.close()
        return seen, missed

    kinds = [number < args.slow for number in range(args.subscribers)]
    results = await asyncio.gather(*map(one, kinds))
    missed = [
        sum(r[1] for r, k in zip(results, kinds, strict=True) if k == slow) for slow in (0, 1)
    ]
    frames = sum(seen for seen, _ in results)
    print(f"ok: {frames} frames, every byte checked; missed: {missed[0]}, by slow ones {missed[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["serve", "client"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (serve only)")
    parser.add_argument("--backend", choices=["auto", "uring", "epoll"], default="auto")
    parser.add_argument("--connections", type=int, default=0, help="serve: end after so many")
    parser.add_argument("--rate", type=float, default=20.0, help="frames a second")
    parser.add_argument("--subscribers", type=int, default=10, help="client")
    parser.add_argument("--slow", type=int, default=1, help="client: how many of them are slow")
    parser.add_argument("--frames", type=int, default=40, help="client: so many to each")
    args = parser.parse_args()
    backend = None if args.backend == "auto" else args.backend
    try:
        aiozc.run(
            serve(args) if args.mode == "serve" else client(args), backend=backend, zc_timeout=10.0
        )
    except (OSError, EOFError, ValueError) as exc:
        raise SystemExit(f"error: {exc}") from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
