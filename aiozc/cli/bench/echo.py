"""`aiozc bench echo`: how many small requests a loop answers, ours beside asyncio and uvloop.

Owns its arguments, the client (a thread here) and the rows. The server is echo_server.py, in a process of
its own. Loopback only: the client verifies every byte. Written in Python, it has its own limit on the
rate; the server's CPU time a request has not. bench/peers.py of a source checkout has a client in C, more
loops and more workloads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import aiozc
from aiozc.cli.bench import options, report
from aiozc.cli.bench.errors import RowFailed, WrongData
from aiozc.cli.bench.path import Path, open_path
from aiozc.cli.bench.run import Row, rounds

LOOPS = ("aiozc-uring", "aiozc-epoll", "asyncio", "uvloop")
PATIENCE = 10.0
COLUMNS: tuple[report.Column, ...] = (
    ("loop", lambda row: row["loop"]),
    ("connections", lambda row: str(row["connections"])),
    ("size", lambda row: str(row["size"])),
    ("req/s", lambda row: report.rate(row["sends_per_s"])),
    ("CPU us/req", lambda row: report.short(row["cpu_us_per_request"])),
    ("GB/s", lambda row: report.short(row["gb_per_s"])),
)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "echo",
        help="requests a second of our loop beside others",
        description="Small requests over loopback, answered by the same protocol on each loop: the rate, and "
        "the server's CPU time a request. The client is Python, and limits the rate.",
    )
    parser.add_argument("--size", type=options.whole(1, 1 << 20), default=1024)
    parser.add_argument("--connections", type=options.whole(1, 500), default=16)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    options.add_common(parser, run)


def draw(figure: Any, rows: list[Row]) -> None:
    keys = (("sends_per_s", "requests a second"), ("cpu_us_per_request", "CPU us a request"))
    report.bars(figure, rows, "loop", keys)


def why_not(loop: str) -> str | None:
    if loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        return "uvloop is not installed: pip install 'aiozc[bench]'"
    if loop == "aiozc-uring" and aiozc.capabilities().backend != "uring":
        return f"no io_uring here: {aiozc.capabilities().reason} (python -m aiozc doctor says what to do)"
    return None


def run(args: argparse.Namespace) -> int:
    reasons = {loop: why_not(loop) for loop in dict.fromkeys(args.loops)}
    todo = [loop for loop, reason in reasons.items() if reason is None]
    with open_path("loopback") as path, report.progress(len(todo) * args.rounds) as show:
        rows, failed = rounds(
            todo, args.rounds, lambda loop: measure(loop, path, args), lambda loop: loop, show
        )
    told = report.document(args, "echo", path, [row for _, row in rows])
    told["left_out"] = [
        {"label": loop, "reason": reason} for loop, reason in reasons.items() if reason
    ]
    told["failed"] = [{"label": loop, "reason": reason} for loop, reason in failed]
    remark = "CPU: of the server's process. One request in flight on each connection."
    return report.finish(args, told, COLUMNS, [remark], draw=draw)


def measure(loop: str, path: Path, args: argparse.Namespace) -> Row:
    # -P: its directory has modules that are not meant to be found. Where the package was found, by contrast,
    # may be the current directory.
    command = [sys.executable, "-P", str(FilePath(__file__).with_name("echo_server.py"))]
    command += [loop, str(args.connections), str(path.cpu)]
    places = [str(FilePath(aiozc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            port = _line(server)["port"]
            load = Load(port, args.connections, args.size, args.seconds, path.other_cpu)
            load.start()
            load.join(args.seconds + 2 * PATIENCE)
            if load.wrong:
                raise WrongData(f"wrong data: {loop} answered what was not sent")
            if load.error or load.is_alive():
                raise RowFailed(load.error or "the client did not end")
            told = _line(server)
            server.wait(PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise RowFailed("the server did not end") from error
        finally:
            server.kill()
    nbytes = load.answered * args.size
    cpu = told["user"] + told["system"]
    return {
        "protocol": "tcp",
        "family": 4,
        "size": args.size,
        "parts": 1,
        "mode": "copy",
        "loop": loop,
        "connections": args.connections,
        "sends_per_s": load.answered / load.seconds,
        "gb_per_s": nbytes / 1e9 / load.seconds,
        "cpu_s_per_gb": cpu / (nbytes / 1e9),
        "cpu_us_per_request": cpu * 1e6 / load.answered,
        "user_us_per_send": told["user"] * 1e6 / load.answered,
        "segments": None,
        "parts_per_request": None,
        "notifications": None,
        "peak_pinned": None,
        "engine": loop,
        "label": loop,
    }


def _line(server: subprocess.Popen[str]) -> dict[str, Any]:
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], PATIENCE)
    line = server.stdout.readline() if ready else ""
    if not line:
        raise RowFailed("the server ended early, or said nothing")
    answer: dict[str, Any] = json.loads(line)
    return answer


@dataclass
class _Connection:
    sock: socket.socket
    got: int = 0


class Load(threading.Thread):
    """Keeps one request in flight on each connection, and compares each answer with it."""

    def __init__(self, port: int, connections: int, size: int, seconds: float, cpu: int) -> None:
        super().__init__(daemon=True)
        self._port, self._connections, self._cpu = port, connections, cpu
        self._wanted = seconds
        self._message = random.Random(size).randbytes(size)
        self.answered = 0
        self.seconds = 0.0
        self.wrong = False
        self.error = ""

    def run(self) -> None:
        if self._cpu >= 0:
            os.sched_setaffinity(0, {self._cpu})  # of this thread only
        try:
            with contextlib.ExitStack() as stack:
                self._drive(stack)
        except OSError as error:
            self.error = f"the client failed: {error}"

    def _drive(self, stack: contextlib.ExitStack) -> None:
        message, size = self._message, len(self._message)
        buffer = bytearray(size)
        view = memoryview(buffer)
        epoll = stack.enter_context(select.epoll())
        connections: dict[int, _Connection] = {}
        for _ in range(self._connections):
            sock = stack.enter_context(
                socket.create_connection(("127.0.0.1", self._port), PATIENCE)
            )
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections[sock.fileno()] = _Connection(sock)
            epoll.register(sock.fileno(), select.EPOLLIN)
        start = time.monotonic()
        end = start + self._wanted
        for each in connections.values():
            each.sock.sendall(message)
        flying = len(connections)
        while flying:
            events = epoll.poll(PATIENCE)
            if not events:
                self.error = "the server did not answer"
                return
            more = time.monotonic() < end
            for fd, _ in events:
                each = connections[fd]
                count = each.sock.recv_into(view, size - each.got)
                if not count:
                    self.error = "the server closed a connection"
                    return
                if message[each.got : each.got + count] != view[:count]:
                    self.wrong = True
                    return
                each.got += count
                if each.got < size:
                    continue
                each.got = 0
                self.answered += 1
                if more:
                    each.sock.sendall(message)
                else:
                    flying -= 1
        self.seconds = time.monotonic() - start
