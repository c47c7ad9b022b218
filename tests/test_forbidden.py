"""Where io_uring is forbidden, in each of the ways seen in the field: the loop falls back, quietly.

A seccomp filter stays for the life of a process, so each test has a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

FILTER = """
import ctypes, struct, sys
# Load the number of the call; from 425 to 427 (io_uring_*) the action, else allow.
action = int(sys.argv[1])
steps = [(0x20, 0, 0, 0), (0x35, 0, 2, 425), (0x25, 1, 0, 427), (0x06, 0, 0, action),
         (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("=HBBI", *step) for step in steps)
program = struct.pack("@HxxxxxxP", len(steps), ctypes.addressof(held := ctypes.create_string_buffer(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, a filter
"""

BODY = """
import asyncio, signal
before = signal.getsignal(signal.SIGSYS)
import aiozc
can = aiozc.capabilities()
print(can.backend, "|", can.reason)
assert can is not None and can == aiozc.capabilities()
assert signal.getsignal(signal.SIGSYS) == before

async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    result = await writer.zc_send(b"hello")
    assert result.path == "copied"
    assert await reader.readexactly(5) == b"hello"
    writer.close()
    server.close()

async def echo(reader, writer):
    writer.write(await reader.readexactly(5))
    writer.close()

aiozc.run(main())
try:
    aiozc.new_event_loop(backend="uring")
except RuntimeError as error:
    assert "or use backend 'epoll'" in str(error), error
else:
    raise SystemExit("backend='uring' was not refused")
"""

ERRNO, TRAP = 0x00050000, 0x00030000


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (ERRNO | 1, "forbidden"),
        (ERRNO | 38, "no io_uring"),
        (TRAP, "no io_uring"),
    ],
    ids=["EPERM", "ENOSYS", "SIGSYS"],
)
def test_a_filter_that_forbids_io_uring_leaves_a_working_loop(action: int, why: str) -> None:
    # Case 36.
    done: Any = subprocess.run(
        [sys.executable, "-W", "error", "-c", FILTER + BODY, str(action)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    backend, _, reason = done.stdout.partition("|")
    assert backend.strip() == "epoll"
    assert why in reason
