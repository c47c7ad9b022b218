"""The examples as a user runs them: server and client as processes of their own, on each backend.

Owns no fixture. Every wait is bounded by LIMIT; a server that does not end by itself after the
number of connections that it was told is a failure, not something to clean up silently.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LIMIT = 60.0

# Each example with the client arguments of a short run, and the line that the client must print.
RUNS = {
    "echo_server": (["--bytes", "3000001"], r"ok: 3000001 bytes echoed, every byte checked"),
    "echo_protocol": (
        ["--bytes", "3000001"],
        r"ok: 3000001 bytes echoed, every byte checked, engine \w+",
    ),
    "blob_server": (
        ["--rounds", "2"],
        rf"ok: 8 buffers, {2 * (1000 + 65536 + (16 << 20))} bytes, every byte checked",
    ),
}


def command(example: str, *args: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{example}.py"), *args]


def listening_port(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(server.stdout, selectors.EVENT_READ)
        assert selector.select(LIMIT), "the server did not say where it listens"
    line = server.stdout.readline()
    match = re.fullmatch(r"listening on 127\.0\.0\.1:(\d+)\n", line)
    assert match, f"{line!r}, then: {server.communicate(timeout=LIMIT)}"
    return match[1]


@contextlib.contextmanager
def running_server(
    example: str, backend: str, connections: int
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    server = subprocess.Popen(
        command(example, "serve", "--backend", backend, "--connections", str(connections)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield server, listening_port(server)
    finally:
        server.kill()
        server.communicate()


def run_client(example: str, backend: str, port: str) -> subprocess.CompletedProcess[str]:
    args, _ = RUNS[example]
    return subprocess.run(
        command(example, "client", "--port", port, "--backend", backend, *args),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.parametrize("example", RUNS)
def test_an_example_serves_its_own_client_and_ends_by_itself(example: str, backend: str) -> None:
    with running_server(example, backend, connections=2) as (server, port):
        for connection in range(2):
            assert server.poll() is None, "the server ended before its last connection"
            client = run_client(example, backend, port)
            assert client.returncode == 0, f"connection {connection}: {client.stderr}"
            assert re.fullmatch(RUNS[example][1] + "\n", client.stdout), client.stdout
            assert client.stderr == ""
        out, err = server.communicate(timeout=LIMIT)
    assert (server.returncode, out, err) == (0, "", "")


def test_the_protocol_example_names_its_connections_zero_copy_engine(backend: str) -> None:
    with running_server("echo_protocol", backend, connections=1) as (_, port):
        client = run_client("echo_protocol", backend, port)
    engine = {"uring": "uring", "epoll": "msg_zerocopy"}[backend]
    assert client.stdout.endswith(f"engine {engine}\n"), client.stdout


def spoil_one_byte(listener: socket.socket, example: str) -> None:
    """A server that answers with the right bytes but one; the socket's timeout bounds it."""
    connection, _ = listener.accept()
    connection.settimeout(LIMIT)
    with connection, contextlib.suppress(OSError):  # the client may hang up at once
        if example == "blob_server":
            connection.recv(65536)
            connection.sendall(b"0\n1000\n" + bytes(1000))
        else:
            left = 2_000_000  # of the client's bytes: the wrong one is far into the stream
            while data := connection.recv(65536):
                if 0 <= left < len(data):
                    spoiled = bytearray(data)
                    spoiled[left] ^= 1
                    data = bytes(spoiled)
                left -= len(data)
                connection.sendall(data)


@pytest.mark.parametrize("example", RUNS)
def test_a_client_that_gets_wrong_data_says_so_and_fails(example: str, backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT)
        thread = threading.Thread(target=spoil_one_byte, args=(listener, example), daemon=True)
        thread.start()
        client = run_client(example, backend, str(listener.getsockname()[1]))
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert client.returncode == 1
    assert "wrong data" in client.stderr
    assert "Traceback" not in client.stderr, client.stderr
    assert client.stdout == ""


@pytest.mark.parametrize("example", RUNS)
def test_a_client_without_a_server_fails_with_one_line(example: str, backend: str) -> None:
    with socket.socket() as reserved:  # bound but not listening: nobody else can get the port
        reserved.bind(("127.0.0.1", 0))
        client = run_client(example, backend, str(reserved.getsockname()[1]))
    assert client.returncode == 1
    assert re.fullmatch(r"error: .*refused.*\n|error: .*Connect call failed.*\n", client.stderr)


@pytest.mark.parametrize("example", RUNS)
def test_an_example_is_short_and_says_what_it_shows(example: str) -> None:
    text = (EXAMPLES / f"{example}.py").read_text()
    assert text.startswith('"""') and "What it shows:" in text
    assert len(text.splitlines()) <= 120
