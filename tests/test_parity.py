"""Faults that users of other loops reported, where asyncio has none; each on both backends."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import tempfile
import threading
import time
from typing import Any

import pytest
from support import LoopErrors, StalledReader, eventually, soon, tls_contexts


def test_closing_a_tls_connection_does_not_go_on_downloading(run: Any) -> None:
    # Case 33: closing waited for its timeout of 30 s while the peer kept sending.
    async def main() -> None:
        server_context, client_context = tls_contexts()
        ended = asyncio.Event()

        async def serve(_reader: Any, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    writer.write(bytes(65536))
                    await writer.drain()
                    await asyncio.sleep(0)  # a TLS transport that is being closed never pauses
            except OSError:
                ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context)
        reader, writer = await asyncio.open_connection(
            *server.sockets[0].getsockname(), ssl=client_context, server_hostname="localhost"
        )
        await reader.readexactly(1_000_000)
        began = time.monotonic()
        writer.close()
        try:
            await soon(writer.wait_closed())
        except ssl.SSLError as error:  # as asyncio: data came after close_notify
            assert "APPLICATION_DATA_AFTER_CLOSE_NOTIFY" in str(error)
        await soon(ended.wait())
        assert time.monotonic() - began < 5
        server.close()

    run(main())


def test_wait_closed_waits_for_connections_where_asyncio_does(run: Any) -> None:
    # Case 35.
    async def main() -> None:
        made: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(lambda _, w: made.append(w), "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()):
            await eventually(lambda: bool(made))
            server.close()
            waiting = asyncio.ensure_future(server.wait_closed())
            await asyncio.sleep(0.05)
            assert waiting.done() == (sys.version_info < (3, 12, 1))
            made[0].close()
            await soon(waiting)

    run(main())


def test_a_cancelled_sendfile_leaves_a_transport_that_writes_and_closes(run: Any) -> None:
    # Case 35.
    async def main() -> None:
        errors = LoopErrors()
        loop = asyncio.get_running_loop()
        with StalledReader() as peer, tempfile.TemporaryFile() as file:
            file.write(b"f" * 50_000_000)
            file.flush()
            _, writer = await asyncio.open_connection(sock=peer.connect(sndbuf=65536))
            sending = asyncio.ensure_future(loop.sendfile(writer.transport, file))
            await asyncio.sleep(0.1)
            assert not sending.done()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            writer.write(b"!" * 1000)
            writer.close()
            data = await peer.take_all()
            await soon(writer.wait_closed())
            assert data == b"f" * (len(data) - 1000) + b"!" * 1000
            assert 1000 < len(data) < 50_000_000
        errors.check()

    run(main())


def test_echo_beside_a_busy_thread_is_as_quick_as_asyncio_s(run: Any) -> None:
    # Case 43. Fails when: a native call keeps the interpreter's lock while it waits.
    class Echo(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)

    async def measure() -> float:
        server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        times: list[float] = []

        def client() -> None:
            with socket.create_connection(address) as sock:
                for _ in range(40):
                    began = time.monotonic()
                    sock.sendall(b"x" * 100)
                    sock.recv(200)
                    times.append(time.monotonic() - began)

        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                sum(range(1000))

        busy = threading.Thread(target=work)
        busy.start()
        try:
            await asyncio.to_thread(client)
        finally:
            stop.set()
            busy.join()
        server.close()
        return sorted(times)[len(times) // 2]

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        stock = runner.run(measure())
    assert run(measure()) < 3 * stock + 0.02
