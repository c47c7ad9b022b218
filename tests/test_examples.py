"""The examples as a user runs them: server and client as processes of their own, on each backend.

Every wait is bounded by LIMIT; a server that does not end by itself after the number of connections that
it was told is a failure, not something to clean up silently. `asgi_app.py` needs a server of others:
tests/frameworks has it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LIMIT = 60.0


@dataclass(frozen=True)
class Run:
    """A short one. `FILE` among the arguments is a file of random bytes, for both sides the same."""

    client: list[str]
    says: str  # the line that the client must print
    serve: list[str] = field(default_factory=list)
    connections: int = 1  # of one client


RUNS = {
    "echo_server": Run(["--bytes", "3000001"], r"ok: 3000001 bytes echoed, every byte checked"),
    "echo_protocol": Run(
        ["--bytes", "3000001"], r"ok: 3000001 bytes echoed, every byte checked, engine \w+"
    ),
    "echo_datagrams": Run(
        ["--bytes", "300001"], r"ok: 300001 bytes echoed, every byte checked, 16 datagrams a call"
    ),
    "echo_tls": Run(
        ["--bytes", "3000001", "--cert", "FILE.pem"],
        r"ok: 3000001 bytes echoed, every byte checked, path copied",
        ["--cert", "FILE.pem"],
    ),
    "blob_server": Run(
        ["--rounds", "2"],
        rf"ok: 8 buffers, {2 * (1000 + 65536 + (16 << 20))} bytes, every byte checked",
    ),
    "weights_server": Run(
        ["--file", "FILE", "--ranges", "5"],
        r"ok: 20 ranges, \d{7,} bytes, every byte checked",
        ["--file", "FILE"],
        connections=4,
    ),
    "broadcast": Run(
        ["--rate", "50", "--frames", "60", "--subscribers", "6"],
        r"ok: 312 frames, every byte checked; missed: \d+, by slow ones \d+",
        ["--rate", "50"],
        connections=6,
    ),
    "proxy": Run(["--bytes", "5000001"], r"ok: 5000001 bytes there and back, every byte checked"),
    "cache_server": Run(["--rounds", "5"], r"ok: \d+ values, each of one piece", connections=4),
}
# What a server that spoils one byte sends; the others echo.
SPOILED = {
    "blob_server": b"0\n1000\n" + bytes(1000),
    "weights_server": b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\nwrong",
    "broadcast": bytes(256 * 1024),
    "cache_server": b"OK\n" * 3 + b"what\n",
}
# Over UDP and TLS a plain socket is no such server.
SPOILABLE = [example for example in RUNS if example not in ("echo_datagrams", "echo_tls")]


@pytest.fixture(scope="module", autouse=True)
def material(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `FILE` stands for."""
    global FILE
    FILE = str(tmp_path_factory.mktemp("examples") / "file")
    Path(FILE).write_bytes(os.urandom(20_000_001))
    yield


FILE = ""


def command(example: str, *args: str) -> list[str]:
    given = [arg.replace("FILE", FILE) for arg in args]
    return [sys.executable, str(EXAMPLES / f"{example}.py"), *given]


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
    example: str, backend: str, clients: int, *more: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    server = subprocess.Popen(
        command(
            *(example, "serve", "--backend", backend, *RUNS[example].serve, *more),
            *("--connections", str(clients * RUNS[example].connections)),
        ),
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
    return subprocess.run(
        command(example, "client", "--port", port, "--backend", backend, *RUNS[example].client),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.parametrize("example", RUNS)
def test_an_example_serves_its_own_client_and_ends_by_itself(example: str, backend: str) -> None:
    serve_two_clients(example, backend)


def test_weights_are_served_from_a_pool_as_well(backend: str) -> None:
    serve_two_clients("weights_server", backend, "--pool")


def serve_two_clients(example: str, backend: str, *more: str) -> None:
    with running_server(example, backend, 2, *more) as (server, port):
        for number in range(2):
            assert server.poll() is None, "the server ended before its last connection"
            client = run_client(example, backend, port)
            assert client.returncode == 0, f"client {number}: {client.stderr}"
            assert re.fullmatch(RUNS[example].says + "\n", client.stdout), client.stdout
            assert client.stderr == ""
        out, err = server.communicate(timeout=LIMIT)
    assert (server.returncode, out, err) == (0, "", "")


def test_only_the_slow_subscribers_of_the_broadcast_miss_frames(backend: str) -> None:
    with running_server("broadcast", backend, clients=1) as (_, port):
        client = run_client("broadcast", backend, port)
    found = re.search(r"missed: (\d+), by slow ones (\d+)", client.stdout)
    assert found, client.stderr
    missed, by_slow = int(found[1]), int(found[2])
    assert missed < by_slow >= 5, (
        client.stdout
    )  # a busy machine may miss a few, and the slow ones fewer


# Fails when: the cache does not await `released` before it uses a buffer again (uring).
def test_the_values_of_the_cache_are_never_torn(backend: str) -> None:
    with running_server("cache_server", backend, clients=1) as (_, port):
        client = run_client("cache_server", backend, port)
    assert re.fullmatch(RUNS["cache_server"].says + "\n", client.stdout), client.stderr
    assert int(client.stdout.split()[1]) > 200, "hardly a value was there to be overwritten"


def test_the_weights_server_answers_as_http_says(backend: str) -> None:
    data = Path(FILE).read_bytes()
    with running_server("weights_server", backend, clients=1) as (_, port):
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=LIMIT)
        for wanted, status, body in [
            ({}, 200, data),
            ({"Range": "bytes=100-199"}, 206, data[100:200]),
            ({"Range": "bytes=19999999-"}, 206, data[19999999:]),
            ({"Range": "bytes=19999999-99999999"}, 206, data[19999999:]),
            ({"Range": "bytes=20000001-"}, 416, b""),
        ]:
            connection.request("GET", "/", headers=wanted)
            answer = connection.getresponse()
            assert (answer.status, answer.read() == body) == (status, True), wanted
        connection.close()


def test_the_protocol_example_names_its_connections_zero_copy_engine(backend: str) -> None:
    with running_server("echo_protocol", backend, clients=1) as (_, port):
        client = run_client("echo_protocol", backend, port)
    engine = {"uring": "uring", "epoll": "msg_zerocopy"}[backend]
    assert client.stdout.endswith(f"engine {engine}\n"), client.stdout


def anonymous_bytes(pid: int) -> int:
    """Resident memory that is not the page cache's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


# Fails when: the server sends the view by `writelines`, which has to take a snapshot of it (4,092 MiB).
@pytest.mark.slow
def test_a_mapping_of_4_gib_is_served_within_64_mib_of_memory(backend: str, tmp_path: Path) -> None:
    """One answer of all of it, so over 2 GiB in one operation; every byte compared."""
    size, piece = 4 << 30, 8 << 20
    big = tmp_path / "big"
    with big.open("wb") as file:  # sparse: a mark in each piece, at another place each time
        for start in range(0, size, piece):
            file.seek(start + start // piece * 12345)
            file.write(os.urandom(8192))
        file.truncate(size)
    with running_server("weights_server", backend, 1, "--file", str(big)) as (server, port):
        before = anonymous_bytes(server.pid)
        peak = before
        with socket.create_connection(("127.0.0.1", int(port)), LIMIT) as peer, big.open("rb") as f:
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stream = peer.makefile("rb", buffering=1 << 20)
            while stream.readline() != b"\r\n":
                continue
            for start in range(0, size, piece):
                assert stream.read(piece) == f.read(piece), f"wrong within {piece} from {start}"
                peak = max(peak, anonymous_bytes(server.pid))
    assert peak - before < 64 << 20, f"grew by {(peak - before) >> 20} MiB"
    print(f"{backend}: anonymous memory {before >> 20} MiB, {(peak - before) / 2**20:.1f} MiB more")


def spoil_one_byte(listener: socket.socket, example: str) -> None:
    """A server that answers with the right bytes but one; the socket's timeout bounds it."""
    connection, _ = listener.accept()
    connection.settimeout(LIMIT)
    with connection, contextlib.suppress(OSError):  # the client may hang up at once
        if example in SPOILED:
            if example != "broadcast":
                connection.recv(65536)
            connection.sendall(SPOILED[example])
            while connection.recv(65536):
                continue
        else:
            left = 2_000_000  # of the client's bytes: the wrong one is far into the stream
            while data := connection.recv(65536):
                if 0 <= left < len(data):
                    spoiled = bytearray(data)
                    spoiled[left] ^= 1
                    data = bytes(spoiled)
                left -= len(data)
                connection.sendall(data)


@pytest.mark.parametrize("example", SPOILABLE)
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


def test_a_tls_client_without_the_certificate_names_it(backend: str, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.pem")
    options = ["--port", "9", "--backend", backend, "--cert", absent]
    client = subprocess.run(
        command("echo_tls", "client", *options), capture_output=True, text=True, timeout=LIMIT
    )
    assert client.returncode == 1
    assert client.stderr.startswith(f"error: no certificate {absent}: ")


@pytest.mark.parametrize("example", RUNS)
def test_a_client_without_a_server_fails_with_one_line(
    example: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if example == "echo_tls":  # its server makes it on first use, and there is none
        monkeypatch.syspath_prepend(str(EXAMPLES))
        import echo_tls

        echo_tls.certificate(Path(f"{FILE}.pem"))
    with socket.socket() as reserved:  # bound but not listening: nobody else can get the port
        reserved.bind(("127.0.0.1", 0))
        client = run_client(example, backend, str(reserved.getsockname()[1]))
    assert client.returncode == 1
    assert re.fullmatch(r"error: .*refused.*\n|error: .*Connect call failed.*\n", client.stderr)


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_is_short_and_says_what_it_shows(example: str) -> None:
    text = (EXAMPLES / f"{example}.py").read_text()
    assert text.startswith('"""') and "What it shows:" in text
    assert len(text.splitlines()) <= 170
