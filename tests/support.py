"""Helpers of the ownership-contract tests.

Owns the peer that separates `sent` from `released` (a plain blocking socket that accepts and does
not read until it is told), the run-length print of what that peer received, and the subprocess
whose freed memory is poisoned. Called by tests/test_contract*.py, in the test's own process and,
as a module on PYTHONPATH, in those subprocesses.

Must never use the loop under test to find out what arrived: the peer is an independent witness.
For the same reason this file imports nothing of aiozc.

What the kernel does with the sizes below (measured on loopback): the reader's receive buffer takes
RCVBUF bytes, by copy. Whatever else the sender's kernel accepted stays in the send queue. Sent
zero-copy, those bytes are read from the sender's pages only when the peer reads, so a change made
to the pages meanwhile shows at the peer: that is how these tests see a release that came too early.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import re
import resource
import select
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

KIB = 1024
MIB = 1024 * 1024

# Small enough that nearly everything stays with the sender, large enough that a reader which
# drains it is not slowed down by silly-window avoidance (4 KiB: seconds for a few hundred KiB).
RCVBUF = 16 * KIB
# The kernel doubles both. With the small one some 74 KiB are accepted and then nothing more; with
# the large one 8 MiB are accepted although the peer does not read.
SMALL_SNDBUF = 64 * KIB
LARGE_SNDBUF = 4 * MIB

WAIT = 20.0  # seconds that any single wait may take before it counts as a hang
# Turns and time enough for everything that can happen at once to have happened, before a test
# asserts that something is still pending. A release that is wrongly early comes within one turn.
PAUSE = 0.1

SIOCINQ = termios.FIONREAD
SIOCOUTQ = termios.TIOCOUTQ


def copies(backend: str) -> bool:
    """Whether `backend` copies every send in this test's variant: see conftest.py."""
    return backend == "epoll" and os.environ.get("AIOZC_ZEROCOPY") == "off"


# --- what arrived ---------------------------------------------------------------------------


def runs(data: bytes | bytearray | memoryview) -> list[tuple[int, int]]:
    """[(value, how many in a row), ...]"""
    return [(m.group()[0], m.end() - m.start()) for m in re.finditer(rb"(?s)(.)\1*", data)]


def show(data: bytes | bytearray | memoryview | list[tuple[int, int]], limit: int = 24) -> str:
    """The stream run-length coded: "65*1024 66*512 ..." (65 is the value, 1024 the count)."""
    pairs = data if isinstance(data, list) else runs(data)
    out = [f"{value}*{count}" for value, count in pairs[:limit]]
    if len(pairs) > limit:
        rest = pairs[limit:]
        out.append(f"... {len(rest)} runs, {sum(count for _, count in rest)} bytes more")
    return " ".join(out) or "(nothing)"


def merged(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours of one value made one run, empty runs dropped."""
    out: list[tuple[int, int]] = []
    for value, count in pairs:
        if not count:
            continue
        if out and out[-1][0] == value:
            out[-1] = (value, out[-1][1] + count)
        else:
            out.append((value, count))
    return out


def assert_stream(data: bytes | bytearray, expected: Iterable[tuple[int, int]]) -> None:
    """The whole stream is `expected`, given as (value, count) pairs."""
    want = merged(expected)
    # Compared as bytes first: the run-length coding of 50 MiB takes seconds.
    if data == b"".join(bytes([value]) * count for value, count in want):
        return
    got = runs(data)
    assert got == want, (
        f"the peer received another stream\n  expected {show(want)}\n  received {show(got)}"
    )


def assert_prefix(data: bytes | bytearray, expected: Iterable[tuple[int, int]]) -> None:
    """The stream is `expected`, cut off anywhere."""
    left = len(data)
    cut: list[tuple[int, int]] = []
    for value, count in expected:
        take = min(count, left)
        cut.append((value, take))
        left -= take
    assert not left, f"{left} bytes more than were ever sent: {show(data)}"
    assert_stream(data, cut)


# --- the peer -------------------------------------------------------------------------------


def set_sndbuf(sock: Any, size: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


def set_rcvbuf(sock: Any, size: int) -> None:
    """Before listen() or connect() it bounds the first window, too.

    Segments of loopback hold 64 KiB. A full window that is smaller than one is sent by the peer's kernel one
    probe at a time, 200 ms apart and more, as soon as it remembers 127.0.0.1 as a slow path (`ip tcp_metrics`):
    3 MiB took 10 s. So segments are made smaller than any window here.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)


def linger_0(sock: Any) -> None:
    """Its close() sends RST and throws away what is unread."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server called localhost, and of a client that trusts it."""
    import trustme

    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


def queued_in(sock: socket.socket) -> int:
    """Bytes in the socket's receive queue."""
    return int(struct.unpack("i", fcntl.ioctl(sock, SIOCINQ, b"\0" * 4))[0])


def queued_out(sock: Any) -> int:
    """Bytes that the kernel accepted on this socket and that the peer did not acknowledge."""
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), SIOCOUTQ, b"\0" * 4))[0])


class StalledReader:
    """A listener and the one connection it accepted, of which nothing is read until told.

    `connect()` makes the other end, a plain socket for the code under test. The `read` methods
    block, with a limit: call them from a thread (`await peer.take(n)` does).
    """

    def __init__(
        self, *, rcvbuf: int | None = RCVBUF, family: socket.AddressFamily = socket.AF_INET
    ) -> None:
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.sock: socket.socket | None = None
        self.received = 0
        try:
            if rcvbuf is not None:
                set_rcvbuf(self.listener, rcvbuf)
            # An AF_UNIX address of no bytes: the kernel picks an abstract one.
            self.listener.bind("" if family == socket.AF_UNIX else ("127.0.0.1", 0))
            self.listener.listen(128)
            self.listener.settimeout(WAIT)
        except BaseException:
            self.listener.close()
            raise

    @property
    def address(self) -> Any:
        return self.listener.getsockname()

    @property
    def port(self) -> int:
        return int(self.address[1])

    def accept(self) -> socket.socket:
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(WAIT)
        return self.sock

    def connect(self, *, sndbuf: int | None = None) -> socket.socket:
        """The other end, connected and accepted; its send buffer is set before the connection."""
        sock = socket.socket(self.listener.family, socket.SOCK_STREAM)
        try:
            if sndbuf is not None:
                set_sndbuf(sock, sndbuf)
            sock.connect(self.address)
            self.accept()
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock

    @property
    def peer(self) -> socket.socket:
        assert self.sock is not None, "nothing was accepted yet"
        return self.sock

    def waiting(self) -> int:
        """Bytes in the receive buffer: the only ones that were copied out of the sender."""
        return queued_in(self.peer)

    def read(self, n: int, *, pace: float = 0.0, step: int = 1 << 18) -> bytes:
        """Exactly n bytes, or fewer where the stream ends; `pace` seconds between two receives."""
        data = bytearray()
        while len(data) < n:
            piece = self.peer.recv(min(step, n - len(data)))
            if not piece:
                break
            data += piece
            if pace:
                time.sleep(pace)
        self.received += len(data)
        return bytes(data)

    def read_all(self, *, pace: float = 0.0, step: int = 1 << 18) -> bytes:
        """Everything up to the end of the stream."""
        return self.read(1 << 62, pace=pace, step=step)

    def read_until_reset(self) -> tuple[bytes, bool]:
        """Everything that can be read, and whether the stream ended by a reset."""
        data = bytearray()
        try:
            while piece := self.peer.recv(1 << 18):
                data += piece
        except ConnectionResetError:
            return bytes(data), True
        return bytes(data), False

    async def take(self, n: int, *, pace: float = 0.0, step: int = 1 << 18) -> bytes:
        return await in_thread(lambda: self.read(n, pace=pace, step=step))

    async def take_all(self, *, pace: float = 0.0, step: int = 1 << 18) -> bytes:
        return await in_thread(lambda: self.read_all(pace=pace, step=step))

    def reset(self) -> None:
        """RST: linger 0, whatever is unread is thrown away."""
        linger_0(self.peer)
        self.peer.close()

    def close(self) -> None:
        self.listener.close()
        if self.sock is not None:
            self.sock.close()

    def __enter__(self) -> StalledReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.asynccontextmanager
async def stalled(
    *,
    sndbuf: int | None = LARGE_SNDBUF,
    rcvbuf: int | None = RCVBUF,
    family: socket.AddressFamily = socket.AF_INET,
) -> AsyncIterator[tuple[StalledReader, asyncio.StreamWriter]]:
    """A stalled reader and the writer of the running loop that is connected to it."""
    with StalledReader(rcvbuf=rcvbuf, family=family) as peer:
        sock = peer.connect(sndbuf=sndbuf)
        _reader, writer = await asyncio.open_connection(sock=sock)
        try:
            yield peer, writer
        finally:
            writer.transport.abort()
            peer.close()  # with bytes unread, so a reset: it ends every pin of this connection


async def in_thread(function: Callable[[], Any]) -> Any:
    """Runs a blocking read beside the loop, in a thread that nobody has to shut down."""
    box: list[Any] = []
    done = threading.Event()

    def work() -> None:
        try:
            box.append((True, function()))
        except BaseException as error:
            box.append((False, error))
        finally:
            done.set()

    threading.Thread(target=work, daemon=True).start()
    await eventually(done.is_set, limit=2 * WAIT)
    ok, value = box[0]
    if not ok:
        raise value
    return value


async def eventually(condition: Callable[[], bool], *, limit: float = WAIT) -> None:
    """Waits by looking: it depends on timers of the loop only."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"not within {limit} s"
        await asyncio.sleep(0.002)


async def soon(awaitable: Awaitable[Any], limit: float = WAIT) -> Any:
    """`await awaitable`, bounded."""
    return await asyncio.wait_for(awaitable, limit)


async def accepted_by_kernel(peer: StalledReader, sock: Any) -> int:
    """How many bytes the sender's kernel took in all: those read, those waiting, those unsent.

    Only right when nothing moves, so it asks until the sum stood still (an acknowledgement that is
    still on its way counts bytes twice).
    """
    last, since = -1, time.monotonic()
    end = since + WAIT
    while time.monotonic() < end:
        now = peer.received + peer.waiting() + queued_out(sock)
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > 0.3:
            return now
        await asyncio.sleep(0.02)
    raise AssertionError("the connection did not come to rest")


class LoopErrors:
    """What the loop's exception handler was told."""

    def __init__(self) -> None:
        self.contexts: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: self.contexts.append(context)
        )

    def check(self) -> None:
        assert not self.contexts, f"the loop reported {self.contexts}"


def live_operations() -> int:
    """Operation objects that still exist in this process, by the garbage collector's list."""
    import gc

    return sum(type(thing).__name__ == "Operation" for thing in gc.get_objects())


def locked(buffer: bytearray) -> bool:
    """Does anything export it?"""
    try:
        buffer.append(0)
    except BufferError:
        return True
    buffer.pop()
    return False


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_descriptor_free() -> Iterator[None]:
    """Whatever takes a new descriptor meets EMFILE."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def numbers(value: int, count: int) -> array.array[int]:
    """An array of 4-byte integers whose bytes all have one value."""
    return array.array("I", [int.from_bytes(bytes([value]) * 4, "little")]) * count


def is_sanitized() -> bool:
    """AddressSanitizer is loaded: it keeps memory of its own for every allocation."""
    return "libasan" in Path("/proc/self/maps").read_text()


# --- subprocesses whose freed memory is poisoned -------------------------------------------

# glibc fills what is freed with POISON and what is allocated with its complement. Both show in a
# run-length print; the tests' own messages use neither.
POISON = 165
FRESH = 90

_PREAMBLE = """\
import asyncio, faulthandler, functools, gc, os, socket, sys
faulthandler.dump_traceback_later(60, exit=True)
import aiozc
from support import *
PORT, BACKEND = int(sys.argv[1]), sys.argv[2]
forced = functools.partial(
    aiozc.new_event_loop, backend=BACKEND, adaptive=False, zc_threshold=0
)
def say(word):
    print(word, flush=True)
def hear(word):
    line = sys.stdin.readline().strip()
    assert line == word, (line, word)
async def heard(word):
    # in a thread: the loop has to go on harvesting notifications meanwhile
    await in_thread(lambda: hear(word))
def connect(sndbuf=LARGE_SNDBUF):
    sock = socket.socket()
    set_sndbuf(sock, sndbuf)
    sock.connect(("127.0.0.1", PORT))
    sock.setblocking(False)
    return sock
def scribble():
    # Takes back what was freed and writes all over it, so that pages given back too early change.
    gc.collect()
    for size in (1024, 4096, 16384, 65536, 262144, 1 << 20):
        trash = [bytearray(b"\\xa5") * size for _ in range(max(1, (16 << 20) // size // 8))]
        del trash
    gc.collect()
"""


def poisoned_environment() -> dict[str, str]:
    """The environment in which memory that is freed changes its contents at once.

    Without pymalloc every object is glibc's, which fills it when it is freed. glibc gives large
    blocks back to the kernel instead (pages that are pinned keep their contents then, and the
    mistake would not show), so everything is kept in the heap, in a single arena.
    """
    environment = dict(os.environ)
    environment["PYTHONMALLOC"] = "malloc"
    environment["PYTHONUNBUFFERED"] = "1"
    environment["MALLOC_PERTURB_"] = str(POISON)
    environment["GLIBC_TUNABLES"] = ":".join(
        [
            f"glibc.malloc.perturb={POISON}",
            "glibc.malloc.mmap_threshold=1073741824",
            "glibc.malloc.mmap_max=0",
            "glibc.malloc.trim_threshold=4294967296",
            "glibc.malloc.arena_max=1",
            "glibc.malloc.tcache_count=0",  # its blocks are not filled before they are used again
        ]
    )
    # Under AddressSanitizer (which replaces malloc) the same by its own options: fill all of it,
    # and no quarantine, or the memory would never be used again.
    options = [part for part in environment.get("ASAN_OPTIONS", "").split(":") if part]
    options += [
        "detect_leaks=0",
        "max_free_fill_size=1073741824",
        f"free_fill_byte={POISON}",
        "max_malloc_fill_size=1073741824",
        f"malloc_fill_byte={FRESH}",
        "quarantine_size_mb=0",
        "thread_local_quarantine_size_kb=0",
    ]
    environment["ASAN_OPTIONS"] = ":".join(options)
    return environment


class Child:
    """A running script: `expect(word)` reads its standard output, `tell(word)` answers."""

    def __init__(
        self, script: str, *arguments: object, environment: dict[str, str] | None = None
    ) -> None:
        environment = dict(os.environ) if environment is None else environment
        here = Path(__file__).parent
        # This module only. Which aiozc is imported (the working tree's, an installed one with
        # sanitizers) is the business of whoever started the tests, and the same in the child.
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(here), environment.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep)
        self._errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "always::ResourceWarning", "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            bufsize=0,
        )
        self._out = b""

    def stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def line(self) -> str:
        """The next line of output, "" at its end; fails with the child's errors after WAIT s."""
        assert self.process.stdout is not None
        end = time.monotonic() + 2 * WAIT
        while b"\n" not in self._out:
            ready, _, _ = select.select([self.process.stdout], [], [], end - time.monotonic())
            if not ready:
                raise AssertionError(f"the child said nothing more\n{self.stderr()}")
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                break
            self._out += piece
        line, _, self._out = self._out.partition(b"\n")
        return line.decode().strip()

    def expect(self, word: str) -> list[str]:
        """The next line starts with `word`; the rest of its words."""
        line = self.line()
        assert line.split(" ")[0] == word, (
            f"expected {word!r}, the child said {line!r}\n{self.stderr()}"
        )
        return line.split(" ")[1:]

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")

    def finish(self, code: int = 0) -> str:
        """Waits for the end; the child's standard error."""
        try:
            status = self.process.wait(2 * WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the child did not end\n{self.stderr()}") from None
        errors = self.stderr()
        assert status == code, f"the child ended with {status}, not {code}\n{errors}"
        return errors

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@contextlib.contextmanager
def poisoned_python(script: str, *arguments: object) -> Iterator[Child]:
    """`script` behind the preamble, in a process that poisons what it frees."""
    child = Child(_PREAMBLE + script, *arguments, environment=poisoned_environment())
    try:
        yield child
    finally:
        child.kill()


@contextlib.contextmanager
def plain_python(script: str, *arguments: object) -> Iterator[Child]:
    """`script` behind the preamble, with the interpreter's own allocator."""
    child = Child(_PREAMBLE + script, *arguments)
    try:
        yield child
    finally:
        child.kill()
