"""A child process that answers one line of JSON to each line it is given. Used by idle.py.

No wait here is unbounded: who does not answer in time is killed, and that is an error. Waits are counted in
seconds that were waited, not by the clock: a machine that stands still for a while is no hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent.parent


class Failed(Exception):
    pass


class Child:
    def __init__(self, module: str, *args: str) -> None:
        self.name = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"soaking.{module}", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": f"{SCRIPTS}:{os.environ.get('PYTHONPATH', '')}"},
        )
        self.said = b""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.tell("quit")
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def hear(self, limit: int = 30) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self.said:
            if limit <= 0:
                raise Failed(f"{self.name} does not answer")
            if not select.select([self.process.stdout], [], [], 1.0)[0]:
                limit -= 1
                continue
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise Failed(f"{self.name} ended with status {self.process.wait(10.0)}")
            self.said += data
        line, _, self.said = self.said.partition(b"\n")
        return dict(json.loads(line))

    def ask(self, line: str, limit: int = 30) -> dict[str, Any]:
        self.tell(line)
        return self.hear(limit)
