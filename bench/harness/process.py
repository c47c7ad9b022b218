"""A process that is measured, or measures: pinned to a core, bounded in time, spoken to by lines.

Used by measure.py. Whatever goes wrong with it is told as Failed, with what it wrote to its standard
error. No read here waits for ever: a process that outlives its limit is killed, which ends its output.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from .errors import Failed
from .paths import python_path

END_LIMIT = 10.0  # seconds that a process may take to end when it is told to
SAID_LIMIT = 2000  # characters of its standard error that are kept
EXCEPTION = re.compile(r"[\w.]+(Error|Exception)\b")


class Process:
    def __init__(self, name: str, command: list[str | Path], core: int, limit: float) -> None:
        self.name = name
        self.limit = limit
        self.outlived = False
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | {"PYTHONPATH": python_path()},
        )
        os.sched_setaffinity(self.process.pid, {core})  # at once: before it has threads
        self.watchdog = threading.Timer(limit, self.kill)
        self.watchdog.daemon = True
        self.watchdog.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.watchdog.cancel()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.errors.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.outlived = True
        self.process.kill()

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            self.fail()
        return line

    def go_on(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail()

    def stop(self) -> str:
        """Tell it to end; what it still has to say (its profile)."""
        self.process.terminate()
        return self.finish()

    def finish(self) -> str:
        """It ends by itself, now, with status 0; what it still has to say."""
        try:
            output, _ = self.process.communicate(timeout=END_LIMIT)
        except subprocess.TimeoutExpired:
            self.fail("does not end")
        if self.process.returncode != 0:
            self.fail()
        return output

    def fail(self, what: str | None = None) -> NoReturn:
        if what is None:
            what = self.end()
        said = self.said()
        if said:
            what = f"{what}: {gist(said)}"
        raise Failed(f"{self.name} {what}".strip(), said)

    def end(self) -> str:
        """How it ended, in words."""
        try:
            status = self.process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            return "says nothing more"
        if self.outlived:
            return f"was killed after {self.limit:.0f} s"
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def said(self) -> str:
        """The end of its standard error until now."""
        size = os.fstat(self.errors.fileno()).st_size
        offset = max(0, size - SAID_LIMIT)
        return os.pread(self.errors.fileno(), SAID_LIMIT, offset).decode(errors="replace").strip()


def gist(said: str) -> str:
    """The line that says most: the last that names an exception, or else the last."""
    lines = [line.strip() for line in said.splitlines()]
    return next((line for line in reversed(lines) if EXCEPTION.match(line)), lines[-1])
