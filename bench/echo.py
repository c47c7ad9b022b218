"""Echo benchmark: requests per second, latency, and the server's CPU time for each request.

    python bench/echo.py --size 1024 --size 16384 --loops aiozc-uring uvloop

Contestants (echo_server.py) run one at a time, each in a fresh process, interleaved in rounds; what
is shown is the median over the rounds. The server has one core to itself and the client
(echo_client.c, compiled when needed) another; this process sleeps while they run. The client
checks every byte, and a wrong one ends the benchmark: there is no figure for a broken echo.

The server's CPU time and page faults are the operating system's count for its process, read before
and after the measured window while nothing is in flight.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOOPS = ("aiozc-uring", "aiozc-epoll", "uvloop", "asyncio")
BASELINE = "uvloop"
WARMUP = 0.5
PATIENCE = 60.0  # seconds beyond the measured window before a run counts as hung
PROFILE_LINES = 25


class BenchmarkError(Exception):
    """No figure can be given; the message says why."""


@dataclass(frozen=True)
class Figures:
    """One measurement, or the medians of several."""

    requests_per_s: float
    p50_us: float
    p99_us: float
    cpu_us: float  # of the server, for each request; user and system together
    user_us: float
    system_us: float
    minor_faults: float  # for each request


@dataclass(frozen=True)
class Counters:
    """What the operating system has counted for one process, all threads together."""

    run_ns: dict[str, int]  # by thread: exact, but gone when the thread ends
    user_ticks: int
    system_ticks: int
    minor_faults: int

    @classmethod
    def read(cls, pid: int) -> Counters:
        threads = Path(f"/proc/{pid}/task")
        run_ns = {}
        for thread in threads.iterdir():
            # A worker thread of the kernel may end between the listing and the reading.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                run_ns[thread.name] = int((thread / "schedstat").read_text().split()[0])
        # The name in the second field may hold spaces: count from behind it.
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return cls(run_ns, int(stat[11]), int(stat[12]), int(stat[7]))

    def since(self, before: Counters) -> tuple[float, float, float, int]:
        """CPU, user and system microseconds, and minor faults.

        The split between user and system is sampled by the timer tick; the sum is exact as long as
        no thread ended in between (else it comes from the ticks too).
        """
        tick_us = 1e6 / os.sysconf("SC_CLK_TCK")
        user = (self.user_ticks - before.user_ticks) * tick_us
        system = (self.system_ticks - before.system_ticks) * tick_us
        total = user + system
        if before.run_ns.keys() <= self.run_ns.keys():
            total = (sum(self.run_ns.values()) - sum(before.run_ns.values())) / 1e3
        share = user / (user + system) if user + system else 0.0
        return total, total * share, total * (1 - share), self.minor_faults - before.minor_faults


@contextlib.contextmanager
def only_benchmark() -> Iterator[None]:
    """Waits until no other benchmark runs on this machine, and keeps others waiting."""
    path = Path(tempfile.gettempdir()) / "aiozc-bench.lock"
    # Without O_CREAT where it exists: another user's file in /tmp may refuse that flag.
    fd = os.open(path, os.O_RDONLY if path.exists() else os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another benchmark ({path})", file=sys.stderr)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def compile_client() -> Path:
    """The client's path; compiled once for each version of its source."""
    source = HERE / "echo_client.c"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise BenchmarkError("a C compiler is needed for the client: install gcc")
    directory = Path(tempfile.gettempdir()) / f"aiozc-bench-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise BenchmarkError(f"{directory} belongs to somebody else")
    program = directory / f"echo_client-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        unfinished = program.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-o", unfinished, source], check=True)
        unfinished.rename(program)
    return program


@contextlib.contextmanager
def pinned(command: list[str], core: int, limit: float) -> Iterator[subprocess.Popen[str]]:
    """A process on one core, killed if it outlives `limit` seconds or this block."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path()},
    )
    os.sched_setaffinity(process.pid, {core})  # at once: before it has threads
    # A hung process then shows as an end of its output, so that no read here waits for ever.
    watchdog = threading.Timer(limit, process.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def python_path() -> str:
    """The source tree first, so that an interpreter without aiozc installed finds it."""
    return os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))


def read_line(process: subprocess.Popen[str], name: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise BenchmarkError(f"{name} ended with status {process.wait()}")
    return line


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def stop(process: subprocess.Popen[str], name: str) -> str:
    """Ends the server; what it still has to say (its profile)."""
    process.terminate()
    assert process.stdout is not None
    output = process.stdout.read()
    if process.wait() != 0:
        raise BenchmarkError(f"{name} ended with status {process.returncode}")
    return output


def measure(
    args: argparse.Namespace, client: Path, loop: str, size: int, *, profile: bool = False
) -> tuple[Figures, str]:
    server_core, client_core = args.cores
    limit = args.seconds + WARMUP + PATIENCE
    server_command = [args.python, str(HERE / "echo_server.py"), loop, "--mode", args.mode]
    if profile:
        server_command += ["--profile", str(PROFILE_LINES)]
    with pinned(server_command, server_core, limit) as server:
        port = read_line(server, loop).removeprefix("port ")
        numbers = (port, args.connections, size, args.seconds, WARMUP)
        with pinned([str(client), *map(str, numbers)], client_core, limit) as load:
            name = f"the client of {loop}"
            if read_line(load, name) != "ready":
                raise BenchmarkError(f"{name} did not get ready")
            before = Counters.read(server.pid)
            go_on(load)
            result = read_line(load, name)
            after = Counters.read(server.pid)
            go_on(load)
            if load.wait() != 0:
                raise BenchmarkError(f"{name} ended with status {load.returncode}")
        output = stop(server, loop)
    requests, elapsed_ns, p50_ns, p99_ns = map(int, result.split())
    cpu, user, system, faults = after.since(before)
    figures = Figures(
        requests_per_s=requests / elapsed_ns * 1e9,
        p50_us=p50_ns / 1e3,
        p99_us=p99_ns / 1e3,
        cpu_us=cpu / requests,
        user_us=user / requests,
        system_us=system / requests,
        minor_faults=faults / requests,
    )
    return figures, output


def medians(rounds: list[Figures]) -> Figures:
    return Figures(
        **{f.name: statistics.median(getattr(r, f.name) for r in rounds) for f in fields(Figures)}
    )


def usable(args: argparse.Namespace) -> list[str]:
    """The contestants that this interpreter has; those asked for by name must be there."""
    found = []
    for loop in args.loops or LOOPS:
        probe = subprocess.run(
            [args.python, HERE / "echo_server.py", loop, "--probe"],
            env=os.environ | {"PYTHONPATH": python_path()},
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
        )
        if probe.returncode == 0:
            found.append(loop)
            continue
        reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        if args.loops:
            raise BenchmarkError(f"{loop}: {reason}")
        print(f"left out: {loop} ({reason})", file=sys.stderr)
    return found


def run_rounds(
    args: argparse.Namespace, client: Path, loops: list[str]
) -> dict[tuple[int, str], list[Figures]]:
    results: dict[tuple[int, str], list[Figures]] = {(s, n): [] for s in args.size for n in loops}
    for number in range(args.rounds):
        for size in args.size:
            # Another one goes first in each round: none profits from its place.
            shift = number % len(loops)
            for loop in loops[shift:] + loops[:shift]:
                figures, _ = measure(args, client, loop, size)
                results[size, loop].append(figures)
                print(
                    f"round {number + 1}/{args.rounds}  {size:>8} bytes  {loop:<12}"
                    f"{figures.requests_per_s:>10,.0f} req/s  {figures.cpu_us:7.2f} us",
                    file=sys.stderr,
                )
    return results


def show(args: argparse.Namespace, results: dict[tuple[int, str], Figures]) -> None:
    from rich.console import Console
    from rich.table import Table

    # Wide enough for the whole table also where the output is a file.
    console = Console(width=None if sys.stdout.isatty() else 120)
    for size in args.size:
        table = Table(
            title=f"{args.mode} echo, {args.connections} connections, {size:,} bytes, "
            f"medians of {args.rounds}"
        )
        table.add_column("loop")
        for heading in ("req/s", f"/{BASELINE}", "CPU us", f"/{BASELINE}", "user", "system"):
            table.add_column(heading, justify="right")
        for heading in ("p50 us", "p99 us", "faults"):
            table.add_column(heading, justify="right")
        base = results.get((size, BASELINE))
        for (row_size, loop), row in results.items():
            if row_size != size:
                continue
            table.add_row(
                loop,
                f"{row.requests_per_s:,.0f}",
                f"{row.requests_per_s / base.requests_per_s:.2f}" if base else "-",
                f"{row.cpu_us:.2f}",
                f"{row.cpu_us / base.cpu_us:.2f}" if base else "-",
                f"{row.user_us:.2f}",
                f"{row.system_us:.2f}",
                f"{row.p50_us:,.0f}",
                f"{row.p99_us:,.0f}",
                f"{row.minor_faults:.3f}",
            )
        console.print(table)
    console.print("CPU time and minor page faults: the server's, for each request.")


def write_json(
    args: argparse.Namespace, rounds: dict[tuple[int, str], list[Figures]], path: Path
) -> None:
    version = subprocess.run(
        [args.python, "-c", "import platform; print(platform.python_version())"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    document = {
        "benchmark": "echo",
        "command": ["bench/echo.py", *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": version,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "mode": args.mode,
        "connections": args.connections,
        "seconds": args.seconds,
        "results": [
            {
                "loop": loop,
                "size": size,
                "median": asdict(medians(measured)),
                "rounds": [asdict(figures) for figures in measured],
            }
            for (size, loop), measured in rounds.items()
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size",
        type=positive,
        action="extend",
        nargs="+",
        help="bytes of a message (default 1024); may be given several times",
    )
    parser.add_argument("--connections", type=positive, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="the measured window")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, help="default: all that there are")
    parser.add_argument("--mode", choices=("protocol", "streams"), default="protocol")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the servers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds to FILE")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="one round under cProfile, no figures (default loop: aiozc-uring)",
    )
    args = parser.parse_args()
    args.size = list(dict.fromkeys(args.size or [1024]))
    if args.seconds <= 0:
        parser.error("--seconds must be above 0")
    if args.profile and not args.loops:
        args.loops = ["aiozc-uring"]
    args.cores = sorted(os.sched_getaffinity(0))[:2]
    if len(args.cores) < 2:
        parser.error("two cores are needed: one for the server, one for the client")
    return args


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main() -> None:
    args = parse()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        loops = usable(args)
        client = compile_client()
        with only_benchmark():
            if args.profile:
                for size in args.size:
                    for loop in loops:
                        print(f"{loop}, {size:,} bytes:")
                        print(measure(args, client, loop, size, profile=True)[1])
                return
            rounds = run_rounds(args, client, loops)
        if args.json:
            write_json(args, rounds, args.json)
        show(args, {key: medians(measured) for key, measured in rounds.items()})
    except BenchmarkError as error:
        raise SystemExit(f"echo.py: {error}") from None


if __name__ == "__main__":
    main()
