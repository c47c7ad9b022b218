"""The tests of one module, in a process of their own. Started by run.py, which reads the results.

Orders are JSON on standard input. Results are JSON lines on the descriptor that they name: {"start": id}
before a test, then {"id", "outcome", "seconds", "loops", "message"}, and {"end": true} behind the last.
A test that takes longer than the limit ends the process, with all stacks on stderr; so does a process that
does not end afterwards. Tracebacks of failures go to stderr too.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Iterator
from faulthandler import dump_traceback_later
from pathlib import Path
from typing import Any

# Tests must not find our files by their names.
sys.path[0] = str(Path(__file__).parent.parent)
from conforming import inject  # noqa: E402

del sys.path[0]

PREFIX = re.compile(r"^(unittest\.loader\.(_FailedTest|ModuleSkipped)\.)?(test\.test_asyncio\.)?")


def name_of(test: Any) -> str:
    """`test_streams.StreamTests.test_read`, or the module's name where it could not be imported."""
    return PREFIX.sub("", test.id())


class Recorder(unittest.TestResult):
    """Tells run.py of each test, and of fixtures of classes and modules that fail or skip."""

    def __init__(self, out: Any, limit: float, limits: list[tuple[str, float]]) -> None:
        super().__init__()
        self.out = out
        self.limit = limit
        self.limits = limits
        self.running: Any = None

    def limit_of(self, name: str) -> float:
        limits = [limit for pattern, limit in self.limits if fnmatch.fnmatchcase(name, pattern)]
        return limits[0] if limits else self.limit

    def tell(self, **fields: Any) -> None:
        self.out.write(json.dumps(fields) + "\n")
        self.out.flush()

    def startTest(self, test: Any) -> None:
        name = name_of(test)
        limit = self.limit_of(name)
        dump_traceback_later(limit, exit=True)
        self.running = test
        self.outcome, self.message = "passed", ""
        self.loops = inject.loops_made
        self.tell(start=name, limit=limit)
        self.began = time.monotonic()

    def stopTest(self, test: Any) -> None:
        if self.running is None:  # Python 3.12.1 does not start what it skips
            self.startTest(test)
            self.outcome = "skipped"
        seconds = time.monotonic() - self.began
        dump_traceback_later(self.limit, exit=True)
        loops = inject.loops_made - self.loops
        self.running = None
        self.tell(
            id=name_of(test),
            outcome=self.outcome,
            seconds=seconds,
            loops=loops,
            message=self.message,
        )

    def note(self, test: Any, outcome: str, message: str) -> None:
        if self.running is None:  # setUpClass and the like
            self.tell(id=name_of(test), outcome=outcome, seconds=0.0, loops=0, message=message)
        elif self.outcome != "failed":  # what failed first is the cause
            self.outcome, self.message = outcome, message

    def addError(self, test: Any, err: Any) -> None:
        print(f"==== {name_of(test)}", file=sys.stderr)
        traceback.print_exception(*err)
        sys.stderr.flush()
        lines = traceback.format_exception_only(*err[:2])
        self.note(test, "failed", " ".join(lines[-1].split())[:300])

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self.note(test, "skipped", reason)

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.note(test, "failed", "unexpected success")


def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


def wanted(test: unittest.TestCase, orders: dict[str, Any]) -> bool:
    name = name_of(test)
    return (
        name not in orders["done"]
        and (orders["only"] is None or name in orders["only"])
        and re.search(orders["match"], name) is not None
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in orders["left_out"])
        and not inject.for_asyncio_alone(test)
    )


def main() -> None:
    orders = json.loads(sys.stdin.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(orders["out"], False)
    # Jobs in the background, and nohup, have them ignored; tests send them to themselves and to children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    module = orders["module"].rpartition(".")[2]
    recorder = Recorder(os.fdopen(orders["out"], "w"), orders["limit"], orders["limits"])
    dump_traceback_later(orders["limit"], exit=True)
    if orders["suite"] == "uvloop":
        inject.into_uvloop(orders["loop"] == "stock")
    elif orders["loop"] != "stock":
        inject.into_cpython()
    try:
        tests = unittest.defaultTestLoader.loadTestsFromName(orders["module"])
    except unittest.SkipTest as exc:
        recorder.tell(id=module, outcome="skipped", seconds=0.0, loops=0, message=str(exc))
        tests = unittest.TestSuite()
    unittest.TestSuite(test for test in flat(tests) if wanted(test, orders)).run(recorder)
    limit = recorder.limit_of(f"{module}.(exit)")
    dump_traceback_later(limit, exit=True)
    recorder.tell(end=True, limit=limit)


if __name__ == "__main__":
    main()
