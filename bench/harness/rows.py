"""The table of rows: what each measures, by which service and which client, and in which unit.

Read by measure.py (commands), report.py (units) and the fronts (choice). A row says everything that
tells it from the others; nothing else decides by a row's name.
"""

from __future__ import annotations

from dataclasses import dataclass

from .counters import Figures

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    service: str  # of contestant/
    client: str | None  # a C program; None: the contestant measures itself, without a network
    connections: int = 1
    size: int = KIB  # bytes of a request
    piece: int = 0  # bytes of one write, where the server pushes
    cycle: int = 1  # and after how many the data repeats
    floor: tuple[str, ...] = ()  # the C program that does the same, and what it must be told
    unit: str = "request"  # or "GB", or "call"

    @property
    def rate_unit(self) -> str:
        return {"request": "req/s", "GB": "GB/s", "call": "calls/s"}[self.unit]

    @property
    def cpu_unit(self) -> str:
        return {"request": "CPU us", "GB": "CPU s/GB", "call": "CPU us"}[self.unit]

    @property
    def gigabytes(self) -> float:
        """Of one request, all connections together."""
        return self.size * self.connections / 1e9

    def rate(self, figures: Figures) -> float:
        scale = self.gigabytes if self.unit == "GB" else 1
        return figures.requests_per_s * scale

    def cpu(self, figures: Figures) -> float:
        return figures.cpu_us / 1e6 / self.gigabytes if self.unit == "GB" else figures.cpu_us


def echo(name: str, how: str, service: str, connections: int, size: int, floor: bool = True) -> Row:
    many = f"{connections:,} connection{'s' if connections > 1 else ''}"
    title = f"{how}, {bytes_text(size)}, {many}"
    kind = ("echo_floor", "stream") if floor else ()
    return Row(name, title, service, "echo_client", connections, size, floor=kind)


def protocol_echo(size: int, connections: int) -> Row:
    name = f"echo-{bytes_text(size).replace(' ', '')}-x{connections}"
    return echo(name, "protocol echo", "protocol", connections, size)


def push(name: str, title: str, service: str, connections: int, *sizes: int) -> Row:
    """`sizes`: of a request, of a piece, of a cycle. The floor asks for at least 64 KiB a call."""
    numbers = (connections, *sizes, max(sizes[1], 64 * KIB))
    floor = ("push_floor", *map(str, numbers))
    return Row(name, title, service, "sink_client", connections, *sizes, floor=floor, unit="GB")


def bulk(size: int) -> Row:
    name, text = f"bulk-{bytes_text(size).replace(' ', '')}", bytes_text(size)
    return push(name, f"write + drain, {text}", "bulk", 1, 64 * MIB, size, 4 * size)


def scheduling(service: str, title: str) -> Row:
    return Row(service, title, service, None, unit="call")


def bytes_text(size: int) -> str:
    for unit, text in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {text}"
    return f"{size} B"


ROWS = (
    *(protocol_echo(size, 1) for size in (100, KIB, 10 * KIB, 64 * KIB)),
    *(protocol_echo(size, 64) for size in (100, KIB, 10 * KIB, 16 * KIB, 64 * KIB)),
    protocol_echo(KIB, 1000),
    echo("streams-1KiB-x64", "streams echo", "streams", 64, KIB),
    echo("buffered-1KiB-x64", "BufferedProtocol echo", "buffered", 64, KIB),
    Row(
        "udp-1KiB-x16",
        "UDP echo, 1 KiB, 16 sockets",
        "datagrams",
        "udp_client",
        16,
        floor=("echo_floor", "datagram"),
    ),
    Row(
        "churn",
        "connect, echo of 100 B, end; 16 at a time",
        "protocol",
        "churn_client",
        16,
        100,
        floor=("echo_floor", "stream"),
    ),
    echo("thread-1KiB-x64", "protocol echo beside a busy thread", "beside-thread", 64, KIB, False),
    *(bulk(size) for size in (4 * KIB, 64 * KIB, MIB)),
    Row(
        "sendfile",
        "loop.sendfile of 64 MiB",
        "sendfile",
        "sink_client",
        1,
        64 * MIB,
        64 * MIB,
        64 * MIB,
        unit="GB",
    ),
    push(
        "fan-out", "256 KiB to each of 100 connections", "fan-out", 100, 256 * KIB, 256 * KIB, MIB
    ),
    scheduling("call-soon", "call_soon, batches of 10,000"),
    scheduling("call-soon-chain", "call_soon, each callback the next"),
    scheduling("timers", "call_later, timers that fire"),
    scheduling("timer-cancel", "call_later, timers that are cancelled"),
    scheduling("sleep-0", "sleep(0)"),
    scheduling("gather", "gather of 1,000 (calls: tasks)"),
    scheduling("threadsafe", "call_soon_threadsafe, a thread without pause"),
    scheduling("threadsafe-wake", "call_soon_threadsafe, wakes a sleeping loop"),
)
