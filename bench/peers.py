"""The event loops side by side: network rows and scheduling rows, each loop in each row.

    python bench/peers.py --rows 'echo|udp' --loops aiozc-uring uvloop blazio --json peers.json

Contestants (contestant/) run one at a time, each in a fresh process, interleaved in rounds; what is
shown is the median over the rounds. The server has one core to itself and the client another; this
process sleeps while they run. Every byte is checked: a loop that corrupts, loses, hangs or crashes
in a row is shown there as "failed", with the reason below the tables and in the JSON.
"""

from __future__ import annotations

import argparse
import re
import sys

from harness import front
from harness.contestants import NAMES
from harness.rows import ROWS, Row


def matching(pattern: str) -> list[Row]:
    try:
        found = [row for row in ROWS if re.search(pattern, row.name)]
    except re.error as error:
        raise argparse.ArgumentTypeError(f"not a regular expression: {error}") from None
    if not found:
        raise argparse.ArgumentTypeError("no row has such a name: see --list")
    return found


def main() -> int:
    parser = front.parser(__doc__, rounds=5, seconds=1.0)
    parser.add_argument(
        "--rows", type=matching, default=list(ROWS), metavar="REGEX", help="default: all rows"
    )
    parser.add_argument("--list", action="store_true", help="show the rows' names, and end")
    args = parser.parse_args()
    if args.list:
        for row in args.rows:
            print(f"{row.name:<18}{row.title}")
        return 0
    return front.run("peers", args, args.rows, NAMES)


if __name__ == "__main__":
    sys.exit(main())
