"""aiohttp, websockets, anyio and pytest-asyncio on our loop, each both serving and asking."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from children import HERE, LIMIT, Server

import aiozc

aiohttp = pytest.importorskip("aiohttp")
anyio = pytest.importorskip("anyio")
websockets = pytest.importorskip("websockets")

Serve = Callable[..., Server]


# --- aiohttp ---


async def ask_aiohttp(port: int) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def one(number: int) -> None:
            data = os.urandom(1_000_000 + number)
            async with session.post("/echo", data=data) as answer:
                assert await answer.read() == data
            async with session.post("/digest", data=parts(data)) as answer:  # chunked
                assert await answer.text() == hashlib.sha256(data).hexdigest()
            async with session.get("/json") as answer:
                assert (await answer.json())["loop"] == "EventLoop"

        await asyncio.gather(*map(one, range(8)))
        async with session.ws_connect("/ws", max_msg_size=0) as socket:
            for size in (0, 125, 126, 65536, 1 << 20):
                data = os.urandom(size)
                await socket.send_bytes(data)
                assert await socket.receive_bytes(timeout=LIMIT) == data


async def parts(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


def test_aiohttp_serves_and_asks_on_one_loop(run: Any) -> None:
    import aiohttp_app

    async def main() -> None:
        runner = aiohttp.web.AppRunner(aiohttp_app.make())
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        await ask_aiohttp(runner.addresses[0][1])
        await runner.cleanup()

    run(main())


def test_aiohttp_serves_by_run_app(serve: Serve, run: Any) -> None:
    server = serve([sys.executable, str(HERE / "aiohttp_app.py"), "{port}"])
    run(ask_aiohttp(server.port))


# --- websockets ---


def test_websockets_serves_and_asks(run: Any) -> None:
    from websockets.asyncio.client import connect
    from websockets.asyncio.server import serve as serve_websockets

    async def echo(socket: Any) -> None:
        async for message in socket:
            await socket.send(message)

    async def one(port: int) -> None:
        async with connect(f"ws://127.0.0.1:{port}", max_size=None) as socket:
            for size in (0, 125, 126, 65536, 1 << 20):
                data = os.urandom(size)
                await socket.send(data)
                assert await socket.recv() == data
            await socket.send("text")
            assert await socket.recv() == "text"

    async def main() -> None:
        async with serve_websockets(echo, "127.0.0.1", 0, max_size=None) as server:
            port = server.sockets[0].getsockname()[1]
            await asyncio.gather(*(one(port) for _ in range(8)))

    run(main())


def test_websockets_broadcasts_to_all(run: Any) -> None:
    from websockets.asyncio.client import connect
    from websockets.asyncio.server import broadcast
    from websockets.asyncio.server import serve as serve_websockets

    async def main() -> None:
        async def stay(socket: Any) -> None:
            await socket.wait_closed()

        async with serve_websockets(stay, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            peers = [await connect(f"ws://127.0.0.1:{port}") for _ in range(20)]
            messages = [os.urandom(200_000) for _ in range(10)]
            for message in messages:
                broadcast(server.connections, message)
                await asyncio.sleep(0)
            for peer in peers:
                assert [await peer.recv() for _ in messages] == messages
                await peer.close()

    run(main())


# --- anyio ---


def test_anyio_runs_on_the_loop_that_it_is_given(loop_factory: Callable[[], Any]) -> None:
    async def main() -> list[bytes]:
        assert isinstance(asyncio.get_running_loop(), aiozc.EventLoop)
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        data = os.urandom(3_000_001)
        answers = []

        async def echo(stream: Any) -> None:
            async with stream:
                async for piece in stream:
                    await stream.send(piece)

        async def ask() -> None:
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                async with anyio.create_task_group() as group:
                    group.start_soon(stream.send, data)
                    got = bytearray()
                    while len(got) < len(data):
                        got += await stream.receive()
                answers.append(bytes(got))

        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with anyio.fail_after(LIMIT):
            async with anyio.create_task_group() as group:
                group.start_soon(listener.serve, echo)
                async with anyio.create_task_group() as asking:
                    for _ in range(4):
                        asking.start_soon(ask)
                done = await anyio.to_thread.run_sync(lambda: "thread")
                assert done == "thread"
                result = await anyio.run_process(["cat"], input=b"process")
                assert result.stdout == b"process"
                group.cancel_scope.cancel()
        return [a == data for a in answers]  # type: ignore[misc]

    options = {"loop_factory": loop_factory}
    assert anyio.run(main, backend_options=options) == [True] * 4


def test_anyio_cancels_and_closes_cleanly(loop_factory: Callable[[], Any]) -> None:
    async def main() -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as group:
            group.start_soon(listener.serve, lambda stream: anyio.sleep_forever())
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                with anyio.move_on_after(0.1) as scope:
                    while True:  # nobody reads: it waits, and is cancelled
                        await stream.send(bytes(1 << 20))
                assert scope.cancelled_caught
            group.cancel_scope.cancel()

    anyio.run(main, backend_options={"loop_factory": loop_factory})


# --- the plugins of pytest ---

CONFTEST = {
    "pytest-asyncio": """
        import aiozc

        def pytest_asyncio_loop_factories(config, item):
            return {"aiozc": aiozc.new_event_loop}
        """,
    "anyio": """
        import aiozc, pytest

        @pytest.fixture
        def anyio_backend():
            return "asyncio", {"loop_factory": aiozc.new_event_loop}
        """,
}
OPTIONS = ["-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]
MARK = {"pytest-asyncio": "asyncio", "anyio": "anyio"}


@pytest.mark.parametrize("plugin", CONFTEST)
def test_a_plugin_of_pytest_makes_our_loops(plugin: str, backend: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(textwrap.dedent(CONFTEST[plugin]))
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(f"""
        import asyncio, pytest

        @pytest.mark.{MARK[plugin]}
        async def test_loop():
            loop = asyncio.get_running_loop()
            assert (type(loop).__module__, loop.zc_stats().backend) == ("aiozc.loop", "{backend}")
            await asyncio.sleep(0.01)
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", *OPTIONS, str(tmp_path)],
        env=os.environ | {"AIOZC_BACKEND": backend},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
