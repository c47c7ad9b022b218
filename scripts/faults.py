"""Runs the contract, order and fuzz tests under each fault knob of a build with AIOZC_FAULTS=1.

    python scripts/faults.py [KNOB ...] [--jobs 3] [-- arguments for pytest]

A run counts only if its fault happened (the last column), and every test passed but those that
tests/fault_support.py says cannot hold, with the reason. Ends with status 1 otherwise. Called by `make faults`.
The tests mostly wait, so some runs go side by side.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fault_support import UNDER  # noqa: E402

from aiozc import faults  # noqa: E402

LIMIT = 900.0  # seconds a run may take


def run(knob: str, more: list[str]) -> tuple[str, bool, str, str, float]:
    """(the knob, whether all is well, pytest's last line, how often the fault happened, seconds)"""
    began = time.monotonic()
    backends = UNDER[knob].backends
    # Tests without a backend in their name use the default one, which is uring where there is one.
    without = ["-k", "not epoll"] if backends == ("uring",) else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *without, *more]
    command += [f"tests/test_{name}.py" for name in UNDER[knob].tests]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, faults.VARIABLE: f"{knob}={UNDER[knob].every}"},
        )
        out, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        out, code = (late.stdout or b"").decode(errors="replace") + "\nhangs", 1
    fired = re.search(rf"fault {knob}: (\d+)", out)
    times = fired[1] if fired else "?"
    well = code == 0 and times not in ("?", "0")
    if not well:
        print(f"---- under {knob}\n{out}", file=sys.stderr, flush=True)
    last = next((line for line in reversed(out.splitlines()) if " in " in line), "")
    return knob, well, last.strip("= "), times, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("knobs", nargs="*", default=list(UNDER), help=", ".join(UNDER))
    parser.add_argument("--jobs", type=int, default=3)
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    args, more = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not faults.KNOBS:
        raise SystemExit("this build has no fault knobs: use `make faults`")
    if unknown := set(args.knobs) - UNDER.keys():
        raise SystemExit(
            f"no such knob: {', '.join(sorted(unknown))}; there are {', '.join(UNDER)}"
        )
    with ThreadPoolExecutor(args.jobs) as pool:
        results = []
        for result in pool.map(lambda knob: run(knob, more), args.knobs):
            knob, well, last, times, seconds = result
            state = "ok" if well else "FAILED"
            print(f"{knob:20} {state:7} {seconds:5.0f} s  fired {times:>7}  {last}", flush=True)
            results.append(well)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
