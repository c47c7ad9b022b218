"""Echo benchmark: the echo rows of peers.py, with message sizes and connections of one's own choice.

    python bench/echo.py --size 1024 16384 --loops aiozc-uring uvloop

How it is measured, and what is shown: see peers.py.
"""

from __future__ import annotations

import sys

from harness import front
from harness.rows import bytes_text, echo

LOOPS = ("aiozc-uring", "aiozc-epoll", "uvloop", "asyncio")


def main() -> int:
    parser = front.parser(__doc__, rounds=5, seconds=2.0)
    parser.add_argument(
        "--size",
        type=front.positive,
        action="extend",
        nargs="+",
        help="bytes of a message (default 1024); may be given several times",
    )
    parser.add_argument("--connections", type=front.positive, default=64)
    parser.add_argument("--mode", choices=("protocol", "streams", "buffered"), default="protocol")
    args = parser.parse_args()
    rows = [
        echo(bytes_text(size), f"{args.mode} echo", args.mode, args.connections, size)
        for size in dict.fromkeys(args.size or [1024])
    ]
    return front.run("echo", args, rows, LOOPS)


if __name__ == "__main__":
    sys.exit(main())
