"""The exceptions: conformance_expected.toml, read. Called by conformance.py.

An [[exception]] has `suite`, `tests` (patterns of fnmatch) and `reason`; with `run = false` the tests are left
out, else they run and are expected to fail. `python` (list of versions) and `loop` (list) narrow it.
`may_pass = true` is for what depends on timing, `limit` (seconds) for what is known to hang.
"""

from __future__ import annotations

import fnmatch
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).parent.parent / "conformance_expected.toml"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass
class Exception_:
    suite: str
    tests: list[str]
    reason: str
    run: bool = True
    may_pass: bool = False
    limit: float | None = None
    python: list[str] = field(default_factory=list)
    loop: list[str] = field(default_factory=list)

    def applies(self, suite: str, loop: str, python: str = PYTHON) -> bool:
        # Stock asyncio has no exceptions: the same tests are left out, the rest is what it is.
        here = not self.python or python in self.python
        return self.suite == suite and here and (not self.loop or loop in self.loop)

    def names(self, test: str) -> bool:
        return any(fnmatch.fnmatchcase(test, pattern) for pattern in self.tests)


def load() -> list[Exception_]:
    with FILE.open("rb") as file:
        return [Exception_(**entry) for entry in tomllib.load(file)["exception"]]
