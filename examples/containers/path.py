"""Does the way to a host copy? Sends a few zero-copy requests and prints what the kernel reports of them.

    python examples/containers/path.py HOST PORT          TCP: the peer must take 8 MiB
    python examples/containers/path.py HOST PORT --udp    16 datagrams; nobody needs to listen

Prints "zero-copy", "copied" (a receiver on this machine, a capture, a device that cannot gather) or both.
"""

from __future__ import annotations

import argparse
import asyncio

import aiozc

REQUESTS = 16


async def tcp(host: str, port: int) -> set[str]:
    _, writer = await aiozc.open_connection(host, port)
    paths = {(await writer.zc_send(bytearray(512 * 1024))).path for _ in range(REQUESTS)}
    writer.close()
    return paths


async def udp(host: str, port: int) -> set[str]:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(
        asyncio.DatagramProtocol, remote_addr=(host, port)
    )
    paths = {(await transport.zc_sendto(bytearray(1200))).path for _ in range(REQUESTS)}
    transport.close()
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Does the way to a host copy?")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--udp", action="store_true")
    args = parser.parse_args()
    can = aiozc.capabilities()
    if not can.zerocopy:
        raise SystemExit(f"no zero-copy here: {can.reason}")
    way = udp if args.udp else tcp
    # Each request its own stack, for the kernel's report is right only of a stack's first.
    settings = {"adaptive": False, "zc_threshold": 0, "zc_eor_bytes": 1}
    print(", ".join(sorted(aiozc.run(way(args.host, args.port), **settings))))


if __name__ == "__main__":
    main()
