"""Runs one module of a suite in child processes: child.py, as often as it takes to come to the end.

A test that hangs or kills the interpreter counts as one failure, and the next child goes on behind it.
Called by conformance.py. Everything that a child started is killed with its process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .suites import Suite

HERE = Path(__file__).parent
GRACE = 10.0  # seconds beyond the limit, if the child cannot end itself

Outcome = Literal["passed", "failed", "skipped"]


@dataclass
class Result:
    id: str
    outcome: Outcome
    seconds: float = 0.0
    loops: int = 0  # of the kind under test, made in the child
    message: str = ""
    attempts: int = 1
    reason: str = ""  # why the failure is expected

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Orders:
    """What child.py is told, but for what it takes from the module at hand."""

    suite: Suite
    loop: str  # "uring", "epoll" or "stock"
    limit: float
    match: str = ""
    left_out: list[str] = field(default_factory=list)
    limits: list[tuple[str, float]] = field(default_factory=list)  # for what is known to hang

    def environment(self) -> dict[str, str]:
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "CONFORMANCE_LOOP": self.loop}
        env.pop("AIOZC_BACKEND", None)
        if self.loop != "stock":
            env["AIOZC_BACKEND"] = self.loop
        if self.suite.path:
            env["PYTHONPATH"] = os.pathsep.join(map(str, self.suite.path))
        if self.suite.helpers:
            env["CONFORMANCE_UVLOOP"] = str(self.suite.helpers)
        return env


def run_module(
    orders: Orders, module: str, log: Path, only: list[str] | None = None
) -> list[Result]:
    """The results in the order in which they came. Output and tracebacks go to `log`."""
    results: list[Result] = []
    with log.open("a") as output:
        while True:
            done = [result.id for result in results]
            ended = False
            running, limit, since = "", orders.limit, time.monotonic()
            with Child(orders, module, output, done, only) as child:
                for line in child.lines():
                    since = time.monotonic()
                    if "start" in line:
                        running, limit = line["start"], line["limit"]
                    elif "end" in line:
                        ended, running, limit = True, "", line["limit"]
                    else:
                        running, limit = "", orders.limit
                        results.append(Result(**line))
                seconds = time.monotonic() - since
            status = child.process.returncode
            if ended and status == 0:
                return results
            # Where nothing was running, it is the module's import, a fixture, or the exit.
            name = running or (f"{module}.(exit)" if ended else f"{module}.(between tests)")
            hung = seconds > limit - 1
            why = f"timeout: {limit:.0f} s" if hung else f"the process ended: {status}"
            results.append(Result(name, "failed", seconds, message=f"{why}; stacks in {log}"))
            if not running:
                return results


class Child:
    """The process, its pipe, and the end of all that it started."""

    def __init__(
        self, orders: Orders, module: str, output: Any, done: list[str], only: list[str] | None
    ) -> None:
        self.patience = orders.limit + GRACE
        self.folder = tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True)
        self.pipe, out = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py")],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=orders.environment(),
            cwd=self.folder.name,
            pass_fds=[out],
            start_new_session=True,
        )
        os.close(out)
        told = {
            "suite": orders.suite.name,
            "loop": orders.loop,
            "module": orders.suite.package + module,
            "limit": orders.limit,
            "limits": orders.limits,
            "match": orders.match,
            "left_out": orders.left_out,
            "done": done,
            "only": only,
            "out": out,
        }
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(json.dumps(told).encode())

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()  # before it is reaped: until then nobody else can have its number
        self.process.wait()
        os.close(self.pipe)
        self.folder.cleanup()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Until the process has ended; a grandchild may hold the pipe open for longer."""
        pending = b""
        pidfd = os.pidfd_open(self.process.pid)
        sources = [self.pipe, pidfd]
        try:
            while True:
                ready, _, _ = select.select(sources, [], [], self.patience)
                if not ready:
                    self.kill()
                    continue
                if self.pipe not in ready:
                    return
                data = os.read(self.pipe, 1 << 16)
                if not data:
                    sources = [pidfd]
                    continue
                *lines, pending = (pending + data).split(b"\n")
                yield from map(json.loads, lines)
        finally:
            os.close(pidfd)
