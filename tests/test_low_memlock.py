"""Little locked memory, without CAP_IPC_LOCK: the loop gets smaller rings, or epoll, and works.

The limit counts for a user, so each test has a process of its own that becomes nobody: whatever it needs
is imported before, for that user may not be able to read the library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import aiozc

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user"),
    pytest.mark.skipif(aiozc.capabilities().backend != "uring", reason="limits of the ring"),
]

HEAD = """
import asyncio, concurrent.futures.thread, encodings.idna, json, os, resource, stringprep, sys
import aiozc
LIMIT = int(sys.argv[1])

def become_nobody():
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT, LIMIT))
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

async def echo(reader, writer):
    writer.write(await reader.readexactly(1 << 20))
    await writer.drain()
    writer.close()

async def exchange():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    data = bytearray(os.urandom(1 << 20))
    expected = bytes(data)
    await writer.zc_send(data)
    data[:] = bytes(len(data))
    assert await reader.readexactly(1 << 20) == expected
    writer.close()
    server.close()
    return asyncio.get_running_loop().zc_stats().backend
"""


def said(body: str, limit: int, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD + textwrap.dedent(body), str(limit)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)


LOOPS = """
become_nobody()
can = aiozc.capabilities()
backends = []
for _ in range(4):  # what a closed ring was charged comes back later
    loop = aiozc.new_event_loop(adaptive=False, zc_threshold=0)
    backends.append(loop.run_until_complete(exchange()))
    loop.close()
print(json.dumps([can.backend, can.reason, backends]))
"""


@pytest.mark.parametrize("kib", [64, 150, 1024])
def test_a_ring_that_does_not_fit_is_made_smaller(kib: int) -> None:
    backend, _, backends = said(LOOPS, kib << 10)
    assert backend == "uring"
    assert backends[0] == "uring"  # a later one may find what the earlier ones were charged


@pytest.mark.parametrize("kib", [0, 8])
def test_where_nothing_fits_epoll_is_chosen_and_says_why(kib: int) -> None:
    backend, reason, backends = said(LOOPS, kib << 10)
    assert (backend, set(backends)) == ("epoll", {"epoll"})
    assert "RLIMIT_MEMLOCK" in reason


LATER = """
assert aiozc.capabilities().zerocopy
become_nobody()  # from now on there is no room: as if other processes of the user had taken it
loop = aiozc.new_event_loop(adaptive=False, zc_threshold=0)
backend = loop.run_until_complete(exchange())
again = loop.run_until_complete(exchange())
can = loop._reactor.capabilities
loop.close()
print(json.dumps([backend, again, can.backend, can.zerocopy, can.reason]))
"""


def test_a_loop_that_gets_no_ring_when_it_starts_goes_on_with_epoll() -> None:
    backend, again, now, zerocopy, reason = said(LATER, 0)
    # MSG_ZEROCOPY was there when it was tried; what now meets ENOBUFS is copied.
    assert (backend, again, now, zerocopy) == ("epoll", "epoll", "epoll", True)
    assert "RLIMIT_MEMLOCK" in reason


DEMANDED = """
assert aiozc.capabilities().zerocopy
become_nobody()
for settings in json.loads(os.environ["SETTINGS"]):
    loop = aiozc.new_event_loop(**settings)
    try:
        loop.run_until_complete(exchange())
    except OSError as exc:
        print(json.dumps([exc.errno, str(exc)]))
    loop._ready.clear()
    loop.close()
"""


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_epoll_is_not_put_in_place_of_a_ring_that_was_demanded(where: str) -> None:
    settings = [{"backend": "uring"} if where == "argument" else {}]
    env = {"SETTINGS": json.dumps(settings)}
    if where == "environment":
        env["AIOZC_BACKEND"] = "uring"
    error, text = said("import warnings; warnings.simplefilter('ignore')\n" + DEMANDED, 0, **env)
    assert error == 12
    assert "ulimit -l" in text and "epoll" in text


USER_NAMESPACE = """
before = aiozc.capabilities
from aiozc.capabilities import default_caps, may_lock_anything
resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT, LIMIT))
first = may_lock_anything()
import ctypes
CLONE_NEWUSER = 0x10000000
if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER):
    print(json.dumps(None))
    raise SystemExit
print(json.dumps([first, may_lock_anything(), default_caps()]))
"""


def test_capabilities_of_a_user_namespace_lock_nothing() -> None:
    answer = said(USER_NAMESPACE, 8 << 20)
    if answer is None:
        pytest.skip("no user namespaces here")
    first, inside, caps = answer
    assert first  # else this says nothing
    assert not inside
    assert caps == [1 << 20, 4 << 20]
