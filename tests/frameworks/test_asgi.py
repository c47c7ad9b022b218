"""uvicorn, gunicorn and hypercorn as their users start them, serving applications that know nothing of aiozc.

The clients are http.client and `websockets`' blocking one, in this process, which has no loop at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import EXAMPLES, HERE, LIMIT, Server, program

import aiozc

pytest.importorskip("starlette", reason="needs the extra `frameworks`: make frameworks")

import starlette_app

Serve = Callable[..., Server]
LOOP = "aiozc:new_event_loop"


def uvicorn(serve: Serve, app: str, *more: str, loop: str = LOOP) -> Server:
    command = [program("uvicorn"), app, "--loop", loop, "--port", "{port}", *more]
    return serve(command, env={"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{HERE}"}, stop=signal.SIGINT)


def gunicorn(serve: Serve, app: str) -> Server:
    config = ["-k", "gunicorn_worker.AiozcWorker", "-w", "2", "-b", "127.0.0.1:{port}"]
    path = {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{HERE}"}
    return serve([program("gunicorn"), app, *config], env=path)


def hypercorn(serve: Serve, app: str) -> Server:
    # It knows asyncio, uvloop and trio by name: one starts its worker in a loop of one's own.
    path = {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{HERE}"}
    return serve([sys.executable, str(HERE / "run_hypercorn.py"), app, "{port}"], env=path)


def get(connection: http.client.HTTPConnection, path: str) -> bytes:
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, (answer.status, body)
    return body


def check(server: Server, rounds: int = 3) -> dict[str, Any]:
    """Every route, on one connection kept alive; what /loop said at the end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT)
    for _ in range(rounds):
        for path in ("/blob", "/view", "/chunked"):
            assert get(connection, path) == starlette_app.BLOB, path
        assert json.loads(get(connection, "/json")) == starlette_app.SMALL
        assert json.loads(get(connection, "/large")) == starlette_app.LARGE
        data = os.urandom(3_000_001)
        connection.request("POST", "/upload", body=data)
        assert connection.getresponse().read().decode() == hashlib.sha256(data).hexdigest()
    told: dict[str, Any] = json.loads(get(connection, "/loop"))
    connection.close()
    return told


def check_websocket(server: Server) -> None:
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{server.port}/echo", max_size=None, close_timeout=5) as peer:
        for size in (0, 1, 125, 126, 65536, 1 << 20):
            data = os.urandom(size)
            peer.send(data)
            assert peer.recv(timeout=LIMIT) == data


@pytest.mark.parametrize("http_", ["httptools", "h11"])
def test_uvicorn_serves_http(serve: Serve, backend: str, http_: str) -> None:
    server = uvicorn(serve, "starlette_app:app", "--http", http_)
    told = check(server)
    assert (told["loop"], told["backend"]) == ("aiozc.loop.EventLoop", backend)


@pytest.mark.parametrize("ws", ["websockets", "websockets-sansio", "wsproto"])
def test_uvicorn_serves_websockets(serve: Serve, ws: str) -> None:
    check_websocket(uvicorn(serve, "starlette_app:app", "--ws", ws))


def test_uvicorn_with_workers_of_its_own(serve: Serve, backend: str) -> None:
    told = check(uvicorn(serve, "starlette_app:app", "--workers", "2"))
    assert told["backend"] == backend


def test_gunicorn_serves_by_uvicorns_worker(serve: Serve, backend: str) -> None:
    server = gunicorn(serve, "starlette_app:app")
    told = check(server)
    assert (told["loop"], told["backend"]) == ("aiozc.loop.EventLoop", backend)
    check_websocket(server)


def test_hypercorn_serves_http_and_websockets(serve: Serve, backend: str) -> None:
    server = hypercorn(serve, "starlette_app:app")
    told = check(server)
    assert (told["loop"], told["backend"]) == ("aiozc.loop.EventLoop", backend)
    check_websocket(server)


@pytest.mark.parametrize("server_of", [uvicorn, gunicorn, hypercorn])
def test_the_examples_application_under_each_server(serve: Serve, server_of: Any) -> None:
    server = server_of(serve, "asgi_app:app")
    client = subprocess.run(
        [sys.executable, str(EXAMPLES / "asgi_app.py"), "--port", str(server.port)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert client.stdout == "ok: 12 answers, 7865169 bytes, every byte checked\n", client.stderr


# Fails when: uvicorn copies a body before it writes it, or write() does not take it by reference.
@pytest.mark.parametrize("path", ["/blob", "/view"])
def test_bodies_of_an_unmodified_application_are_sent_by_reference(
    serve: Serve, backend: str, path: str
) -> None:
    """Asked for zero-copy in plain writes on loopback; by itself it does so where the path does not copy
    (test_zero_copy.py), which loopback is known to."""
    if backend == "epoll" and not aiozc.capabilities().features["msg_zerocopy"]:
        pytest.skip("no MSG_ZEROCOPY here")
    server = uvicorn(serve, "starlette_app:app", loop="loops:always")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT)
    before = json.loads(get(connection, "/loop"))
    for _ in range(20):
        assert get(connection, path) == starlette_app.BLOB
    after = json.loads(get(connection, "/loop"))
    assert after["zc_requests"] - before["zc_requests"] >= 20
    connection.close()


def test_many_clients_at_once_each_get_their_own_bytes(serve: Serve, run: Any) -> None:
    server = uvicorn(serve, "starlette_app:app")

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for turn in range(6):
            path = ("/blob", "/json")[(number + turn) % 2]
            writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            if path == "/blob":
                assert body == starlette_app.BLOB
            else:
                assert json.loads(body) == starlette_app.SMALL
        writer.close()

    async def main() -> None:
        await asyncio.gather(*map(one, range(32)))

    run(main())


def test_the_starlette_application_is_what_the_tests_say(tmp_path: Path) -> None:
    size = len(json.dumps(starlette_app.LARGE, separators=(",", ":")))
    assert abs(size - (1 << 20)) < 20_000
    assert 280 < len(json.dumps(starlette_app.SMALL, separators=(",", ":"))) < 320
