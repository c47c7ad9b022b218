"""`python -m aiozc demo`: two processes, every byte checked, and what the loop did meanwhile.

Called by `aiozc.cli` alone. This process is the receiver and prints the table; its child (the same
command with `--role server`) is the sender: asyncio streams code under aiozc's event loop policy.
The same data goes over loopback twice, on a connection each:

    zc      messages by `zc_submit` + `zc_drain`, then one large buffer by `await zc_send`
    write   the same bytes by `write()` + `drain()`

The child computes the SHA-256 digests before it sends, and tells them over its standard output, not
over the connection; a message is built anew when it is sent, and the large buffer is overwritten as
soon as `zc_send` returns. So memory that was read after its release would show as wrong data.

The child's standard output is two lines of JSON: `{"port", "digests"}`, and at its end the report.
Nothing here may claim a speed-up: on loopback the kernel copies, and the text says so.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import random
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import aiozc

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

T = TypeVar("T")

HEADER = struct.Struct("!4sIQ")  # magic, the message's length with this header, sequence number
MAGIC = b"aiZC"
PASSES = ("zc", "write")
PIECE = 1 << 20  # of the large buffer: each starts with its index, so a reordering shows
CORRUPTIONS = ("message", "big", "order")


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="send between two processes, check every byte",
        description="Sends a stream of messages and one large buffer to another process over loopback, "
        "zero-copy and by write(), compares digests, and shows what the loop counted. No measure of speed.",
    )
    parser.add_argument("--messages", type=_number(1), default=1000, help="of the ordered stream")
    parser.add_argument("--message-bytes", type=_number(HEADER.size), default=65536, help="of each")
    parser.add_argument(
        "--big-bytes", type=_number(1), default=256 << 20, help="of the one large send"
    )
    parser.add_argument(
        "--backend",
        choices=["auto", "uring", "epoll"],
        default="auto",
        help="auto: what the machine has",
    )
    parser.add_argument("--forced", action="store_true", help="zero-copy even where it only costs")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for everything")
    parser.add_argument(
        "--corrupt",
        choices=CORRUPTIONS,
        help="spoil the data after its digest was computed; for the test of the check itself",
    )
    parser.add_argument(
        "--role", choices=["client", "server"], default="client", help=argparse.SUPPRESS
    )
    parser.set_defaults(run=run)


def _number(least: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return number


def run(args: argparse.Namespace) -> int:
    if args.backend != "auto":
        os.environ["AIOZC_BACKEND"] = args.backend
    if args.role == "server":
        _run_under_policy(asyncio.wait_for(_serve(args), args.timeout))
        return 0
    try:
        import rich.console  # noqa: F401
    except ImportError:
        print("error: the demo's table needs rich: pip install 'aiozc[demo]'", file=sys.stderr)
        return 2
    return _receive_and_report(args)


def _run_under_policy(main: Coroutine[Any, Any, T]) -> T:
    """Plain asyncio for what runs in it; a loop factory where policies are deprecated."""
    if sys.version_info >= (3, 14):
        return asyncio.run(main, loop_factory=aiozc.new_event_loop)
    asyncio.set_event_loop_policy(aiozc.EventLoopPolicy())
    return asyncio.run(main)


# ---- the data -----------------------------------------------------------------------------------


class Data:
    """What is sent: windows into one random block, so that content costs a copy and no more."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.messages: int = args.messages
        self.message_bytes: int = args.message_bytes
        self.corrupt: str | None = None
        self._block = random.Random(args.messages).randbytes(max(2 * args.message_bytes, PIECE))
        self.big = bytearray(args.big_bytes)
        self.fill_big()

    def fill_big(self) -> None:
        view = memoryview(self.big)
        for index, start in enumerate(range(0, len(view), PIECE)):
            piece = view[start : start + PIECE]
            piece[:] = self._block[: len(piece)]
            piece[:8] = index.to_bytes(8, "big")[: len(piece)]
        if self.corrupt == "big":
            view[len(view) // 2] ^= 1

    def message(self, number: int) -> bytes:
        middle = self.messages // 2
        if self.corrupt == "order" and number in (middle, middle - 1):
            number = 2 * middle - 1 - number  # the two change places
        size = self.message_bytes - HEADER.size
        start = number * 4099 % (len(self._block) - size)
        header = HEADER.pack(MAGIC, self.message_bytes, number)
        content = self._block[start : start + size]
        if self.corrupt == "message" and number == middle:
            content = content[:-1] + bytes([content[-1] ^ 1])
        return header + content

    def digests(self) -> dict[str, str]:
        together = hashlib.sha256()
        for number in range(self.messages):
            together.update(self.message(number))
        return {"messages": together.hexdigest(), "big": hashlib.sha256(self.big).hexdigest()}


def _faults(received: memoryview, args: argparse.Namespace, digests: dict[str, str]) -> list[str]:
    """What is wrong with the bytes of one pass; empty when all are right and in order."""
    faults = []
    size, end = args.message_bytes, args.messages * args.message_bytes
    for number in range(args.messages):
        magic, length, found = HEADER.unpack_from(received, number * size)
        if (magic, length) != (MAGIC, size):
            faults.append(f"message {number} does not start with a header")
            break
        if found != number:
            faults.append(f"message {found} arrived in the place of message {number}")
            break
    if hashlib.sha256(received[:end]).hexdigest() != digests["messages"]:
        faults.append("the messages do not have the sender's SHA-256")
    if hashlib.sha256(received[end:]).hexdigest() != digests["big"]:
        faults.append("the large buffer does not have the sender's SHA-256")
    return faults


# ---- the sender, a child process ----------------------------------------------------------------


async def _serve(args: argparse.Namespace) -> None:
    data = Data(args)
    digests = data.digests()
    data.corrupt = args.corrupt
    data.fill_big()
    report: dict[str, Any] = {}
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def on_client(reader: asyncio.StreamReader, writer: aiozc.StreamWriter) -> None:
        try:
            wanted = (await reader.readline()).decode().strip()
            if wanted == "zc":
                if args.forced:
                    cast(Any, writer.transport).zc_configure(adaptive=False, threshold=0)
                report.update(await _send_zero_copy(writer, data))
            else:
                await _send_written(writer, data)
            writer.close()
            await writer.wait_closed()
            if wanted == PASSES[-1]:
                done.set_result(None)
        except Exception as exc:
            writer.close()
            if not done.done():
                done.set_exception(exc)

    server = await aiozc.start_server(on_client, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"port": port, "digests": digests}), flush=True)
    async with server:
        await done
    print(json.dumps(report), flush=True)


async def _send_zero_copy(writer: aiozc.StreamWriter, data: Data) -> dict[str, Any]:
    operations = []
    for number in range(data.messages):
        operations.append(writer.zc_submit(data.message(number)))
        await writer.zc_drain()  # flow control: bounds what is queued and what is pinned
    results = [await writer.zc_send(data.big)]
    # Released: the buffer is ours again. Were that not true, the receiver would see these zeros.
    view = memoryview(data.big)
    for start in range(0, len(view), PIECE):
        view[start : start + PIECE] = bytes(min(PIECE, len(view) - start))
    results += [await operation.released for operation in operations]
    loop = cast(aiozc.EventLoop, asyncio.get_running_loop())
    stats = loop.zc_stats()  # before the other pass adds to it
    told = {**dataclasses.asdict(stats), "parts_per_request": stats.parts_per_request}
    data.fill_big()
    return {"stats": told, "paths": collections.Counter(result.path for result in results)}


async def _send_written(writer: aiozc.StreamWriter, data: Data) -> None:
    for number in range(data.messages):
        writer.write(data.message(number))
        await writer.drain()
    frozen: Any = aiozc.frozen(data.big)
    writer.write(frozen)  # nobody changes it any more: held by reference
    await writer.drain()


# ---- the receiver, this process -----------------------------------------------------------------


class Receiver(asyncio.BufferedProtocol):
    """Collects one pass in memory of its own; hashing comes after, and so slows no sender."""

    def __init__(self, wanted: str, size: int) -> None:
        self._wanted = wanted
        self.data = memoryview(bytearray(b"\xff") * size)  # written once: page faults come before
        self.received = self.surplus = 0
        self.seconds = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._started = time.perf_counter()
        cast(asyncio.WriteTransport, transport).write(self._wanted.encode() + b"\n")

    def get_buffer(self, sizehint: int) -> memoryview:
        rest = self.data[self.received : self.received + PIECE]
        return rest or memoryview(bytearray(4096))

    def buffer_updated(self, nbytes: int) -> None:
        if self.received == len(self.data):
            self.surplus += nbytes
            return
        self.received += nbytes
        if self.received == len(self.data):
            self.seconds = time.perf_counter() - self._started

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if exc is not None:
            self.done.set_exception(exc)
        else:
            self.done.set_result(None)


async def _receive(
    args: argparse.Namespace, hello: dict[str, Any], console: Console
) -> tuple[dict[str, float], list[str]]:
    """Both passes: their bytes per second, and everything that is wrong with what arrived."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    rates: dict[str, float] = {}
    faults: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        for wanted in PASSES:
            size = args.messages * args.message_bytes + args.big_bytes
            task = bar.add_task(f"{wanted:5}", total=size)
            show = functools.partial(_show, bar, task)
            received, rates[wanted] = await _receive_pass(wanted, size, hello["port"], show)
            faults += [f"{wanted}: {fault}" for fault in _faults(received, args, hello["digests"])]
            del received  # one pass in memory at a time
    return rates, faults


def _show(bar: Progress, task: TaskID, received: int) -> None:
    bar.update(task, completed=received)


async def _receive_pass(
    wanted: str, size: int, port: int, show: Callable[[int], None]
) -> tuple[memoryview, float]:
    receiver = Receiver(wanted, size)
    await asyncio.get_running_loop().create_connection(lambda: receiver, "127.0.0.1", port)
    while not receiver.done.done():
        await asyncio.wait([receiver.done], timeout=0.1)
        show(receiver.received)
    receiver.done.result()
    if receiver.received != size or receiver.surplus:
        total = receiver.received + receiver.surplus
        raise DemoFailed(f"{wanted}: {total} bytes arrived instead of {size}")
    return receiver.data, size / receiver.seconds


# ---- the two together ---------------------------------------------------------------------------


class DemoFailed(Exception):
    """The sender ended early, said nothing in time, or sent the wrong number of bytes."""


@contextlib.contextmanager
def _sender(args: argparse.Namespace, errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "aiozc", "demo", "--role", "server"]
    for name in ("messages", "message_bytes", "big_bytes", "backend", "timeout", "corrupt"):
        value = getattr(args, name)
        if value is not None:
            command += ["--" + name.replace("_", "-"), str(value)]
    command += ["--forced"] if args.forced else []
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    try:
        yield child
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(2)  # where it fails too, let it write why
        child.kill()  # does nothing to a child that has ended
        child.communicate()


def _line(child: subprocess.Popen[bytes], deadline: float) -> dict[str, Any]:
    """The child's next line. It writes a line at once: a readable pipe has one, or its end."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise DemoFailed("the sending process said nothing in time")
    line = child.stdout.readline()
    if not line:
        raise DemoFailed(f"the sending process ended early, exit code {child.wait(5)}")
    return cast(dict[str, Any], json.loads(line))


def _receive_and_report(args: argparse.Namespace) -> int:
    from rich.console import Console

    deadline = time.monotonic() + args.timeout
    progress = Console(stderr=True)
    error, faults = "", list[str]()
    with tempfile.TemporaryFile() as errors:
        try:
            with _sender(args, errors) as child:
                hello = _line(child, deadline)
                limit = deadline - time.monotonic()
                rates, faults = _run_under_policy(
                    asyncio.wait_for(_receive(args, hello, progress), limit)
                )
                report = _line(child, deadline)
                if code := child.wait(max(1.0, deadline - time.monotonic())):
                    raise DemoFailed(f"the sending process failed at its end, exit code {code}")
        except (DemoFailed, OSError, TimeoutError, subprocess.TimeoutExpired) as exc:
            error = f"error: {exc or 'not done in time'}"
        errors.seek(0)
        sys.stderr.write(errors.read().decode(errors="replace"))
    for line in [f"wrong data: {fault}" for fault in faults] + [error] * bool(error):
        print(line, file=sys.stderr)
    if error or faults:
        return 1
    console = Console()
    _print_table(console, args, report, rates)
    for line in _remarks(report):
        console.print(line, highlight=False)
    return 0


def _print_table(
    console: Console, args: argparse.Namespace, report: dict[str, Any], rates: dict[str, float]
) -> None:
    from rich.table import Table

    stats, paths = report["stats"], report["paths"]
    sent = f"{args.messages} x {_size(args.message_bytes)}, 1 x {_size(args.big_bytes)}"
    rows = {
        "backend": stats["backend"],
        "kernel release": platform.release(),
        "data, sent twice": sent,
        "order and SHA-256": "right",
        "requests": f"{stats['requests']}, {stats['zc_requests']} of them zero-copy",
        "parts per request": f"{stats['parts_per_request']:.1f}",
        "notifications": str(stats["notifications"]),
        "path (of results)": ", ".join(f"{path}: {n}" for path, n in sorted(paths.items())),
        "peak pinned": _size(stats["pinned_peak"]),
        "throughput zero-copy API": f"{_size(rates['zc'])}/s",
        "throughput write()": f"{_size(rates['write'])}/s",
    }
    table = Table("", "", title="aiozc demo, loopback TCP", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _remarks(report: dict[str, Any]) -> Sequence[str]:
    stats, paths = report["stats"], report["paths"]
    lines = []
    if stats["copied_reports"]:
        lines.append(f"The kernel copied: {stats['copied_reports']} of its reports say so.")
    elif set(paths) == {"copied"}:
        lines.append("Everything was copied: no request went as a zero-copy one.")
    else:
        lines.append("No report of the kernel says that it copied; over loopback it does.")
    if 0 < stats["zc_requests"] < stats["requests"]:
        lines.append("The other requests went as plain gathering sends.")
    for reason, count in stats["fallbacks"].items():
        if count:
            lines.append(f"Sent by copying instead of zero-copy, {reason}: {count} requests.")
    lines.append(
        "Why: loopback hands the very pages to a receiver on this machine, so the kernel must copy "
        "them first. Real zero-copy needs a network device; these figures say nothing about it."
    )
    return lines


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
