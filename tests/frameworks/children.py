"""Servers as child processes on loopback, started as their users start them, for the frameworks' tests.

`serve(command)` runs a server until the end of the test: `{port}` in the command is a free port, and the call
returns when it accepts connections. AIOZC_BACKEND chooses the backend. At the end the server gets SIGTERM
(or `stop`) and has to end by itself, without a traceback in what it said. Every wait is bounded by LIMIT.

Not part of `make test`: needs the extra `frameworks`, and Debian's packages for redis-server and PostgreSQL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT = 30.0
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HERE = Path(__file__).resolve().parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def program(name: str) -> str:
    """A console script of this environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed here: make frameworks")
    return str(path)


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int, said: Path) -> None:
        self.process = process
        self.port = port
        self._said = said

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            assert self.process.poll() is None, f"ended at once:\n{self.said()}"
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            time.sleep(0.05)
        raise AssertionError(f"does not listen on {self.port}:\n{self.said()}")

    def stop(self, how: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.said()}") from None
        assert "Traceback" not in self.said(), self.said()


@pytest.fixture
def serve(backend: str, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[tuple[Server, int]] = []

    def start(
        command: list[str],
        *,
        stop: int = signal.SIGTERM,
        env: dict[str, str] | None = None,
        **more: Any,
    ) -> Server:
        port = free_port()
        said = tmp_path / f"said{len(started)}"
        with said.open("wb") as output:
            process = subprocess.Popen(
                [part.replace("{port}", str(port)) for part in command],
                env=os.environ
                | {"AIOZC_BACKEND": backend, "PYTHONPATH": str(EXAMPLES)}
                | (env or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                **more,
            )
        server = Server(process, port, said)
        started.append((server, stop))
        server.wait_until_ready()
        return server

    try:
        yield start
        for server, stop in started:
            server.stop(stop)
    finally:
        for server, _ in started:
            server.process.kill()
            server.process.wait()
