"""Realistic workloads, loop beside loop: served memory to many clients, on loopback and into a path that does
not copy.

    python bench/workloads.py --rounds 3 --json workloads.json --markdown workloads.md
    python bench/workloads.py --only asgi cache --paths loopback

On loopback a client in this process compares every byte (for `asgi` it is wrk, and bodies are checked before
it); the kernel copies there. `sink` is sink/: what sending costs on a path that does not copy (needs root).
The server has the first core, client or sink the second. Rounds are interleaved, medians shown. The
requests of each workload are in workload/services.py, the clients in workload/clients.py.

Owns: the cases, and the table. Never: gives a figure for a run with a wrong byte.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import front
from harness.about import about
from harness.counters import Counters
from harness.lock import only_benchmark
from harness.paths import BENCH, python_path
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sink.sink import SinkError, sink
from workload.clients import CLIENTS, CorruptBytes, ProxyClient

WARMUP = 0.5
LIMIT = 60.0
APP = BENCH.parent / "tests" / "frameworks"
NGINX = """daemon off; master_process off; user root; pid {home}/pid; error_log {home}/error;
events {{ worker_connections 128; }}
http {{ access_log off; sendfile on; server {{ listen 127.0.0.1:{port}; root {root}; }} }}
"""

LOOPS = ("uvloop", "asyncio", "aiozc-uring", "aiozc-epoll")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One workload in one size, and who does it how (`loop way`), compared with the first of them."""

    workload: str
    name: str
    options: dict[str, Any]
    ways: tuple[str, ...]
    unit: str = "GB"  # or "request"
    on_sink: tuple[str, ...] = ()

    def label(self) -> str:
        return f"{self.workload} {self.name}".strip()


def cases(file: str, certificate: str = "") -> list[Case]:
    weights = {"file": file, "connections": 8, "largest": 64 << 20}
    zero_copy = ("aiozc-uring zc", "aiozc-uring pool")
    found = [
        Case(
            *("weights", "1-64 MiB x8", weights),
            (
                *("uvloop write", "asyncio sendfile", "nginx sendfile", "aiozc-uring sendfile"),
                *("aiozc-uring write", "aiozc-uring frozen", *zero_copy, "aiozc-epoll zc"),
            ),
            on_sink=(
                *("uvloop write", "asyncio sendfile", "aiozc-uring write", "aiozc-uring frozen"),
                *zero_copy,
            ),
        ),
        Case(
            *("broadcast", "256 KiB to 200 at 20/s", {"connections": 200, "rate": 20}),
            ("uvloop write", "aiozc-uring write", "aiozc-uring call", "aiozc-epoll call"),
            on_sink=("uvloop write", "aiozc-uring write", "aiozc-uring call", "aiozc-uring pool"),
        ),
    ]
    for pipeline in (1, 16):
        found.append(
            Case(
                *(
                    "cache",
                    f"64 KiB, pipeline {pipeline}",
                    {"connections": 8, "pipeline": pipeline},
                ),
                ("uvloop write", "aiozc-uring write", "aiozc-uring pool", "aiozc-epoll write"),
                unit="request",
                on_sink=("uvloop write", "aiozc-uring write", "aiozc-uring pool"),
            )
        )
    for size, name in ((64 << 10, "64 KiB"), (8 << 20, "8 MiB")):
        options = {"size": size, "pairs": 32, "certificate": "", "core": CLIENT_CORE}
        both = ("uvloop write", "aiozc-uring write", "aiozc-epoll write")
        there = ("uvloop write", "aiozc-uring write", "aiozc-uring pool") if size > 1 << 20 else ()
        found.append(
            Case("proxy", f"{name}, 32 pairs", options, (*both, "aiozc-uring pool"), on_sink=there)
        )
        found.append(
            Case("proxy", f"{name}, 32 pairs, TLS", options | {"certificate": certificate}, both)
        )
    options = {"connections": 64, "size": 256 << 10, "rate": 20}
    found.append(Case("websocket", "256 KiB to 64 at 20/s", options, both))
    routes = {
        "/json": "300 B JSON",
        "/large": "1 MiB JSON",
        "/view": "1 MiB view",
        "/chunked": "1 MiB chunked",
    }
    for route, name in routes.items():
        ways = ("uvloop uvicorn", "aiozc-uring uvicorn", "aiozc-epoll uvicorn")
        found.append(Case("asgi", name, {"route": route}, ways, "request", ways))
    return found


def core(number: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[min(number, len(cores) - 1)]


SERVER_CORE, CLIENT_CORE = core(0), core(1)


# -- loopback --


def on_loopback(case: Case, way: str, seconds: float) -> dict[str, float]:
    if case.workload == "asgi":
        return asgi_on_loopback(case, way, seconds)
    if way.startswith("nginx"):
        return nginx(case, seconds)
    loop, how = way.split()
    options = dict(case.options)
    client: Any = None
    if case.workload == "proxy":  # its origin is the client's
        client = ProxyClient(options)
        options["origin"] = client.origin
    command = [sys.executable, "-m", "workload.child", loop, case.workload, how]
    child = subprocess.Popen(
        [*command, json.dumps(options), str(SERVER_CORE)],
        env=os.environ | {"PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdin and child.stdout
        port = int(child.stdout.readline())
        if client is None:
            client = CLIENTS[case.workload](port, options)
        else:
            client.connect_all(port)
        took, cpu = window(client, child.pid, seconds)
        child.stdin.close()
        told = json.loads(child.stdout.readline())
        client.close()
    finally:
        child.kill()
        child.wait()
    return figures(case, client.load, took, cpu, told)


def window(client: Any, pid: int, seconds: float) -> tuple[float, float]:
    """Warm up, then count: what it took, and the server's CPU microseconds."""
    client.go(WARMUP)
    before, start, load = Counters.read(pid), time.monotonic(), client.load
    load.requests, load.bytes, load.times = 0, 0, []
    client.go(seconds)
    took, after = time.monotonic() - start, Counters.read(pid)
    if not load.requests:
        raise SystemExit("workloads.py: not one request was answered; use a longer --seconds")
    return took, after.since(before)[0]


def figures(
    case: Case, load: Any, took: float, cpu: float, told: dict[str, Any]
) -> dict[str, float]:
    return {
        "rate": load.requests / took,
        "gb_per_s": load.bytes / took / 1e9,
        "cpu": cpu / load.requests if case.unit == "request" else cpu / 1e6 / (load.bytes / 1e9),
        "p99_ms": load.p99() * 1e3,
        "anonymous": told["anonymous"],
        "pinned": told.get("pinned", 0),
        "dropped": told.get("dropped", 0),
    }


@contextlib.contextmanager
def uvicorn(loop: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    loop, _, backend = loop.partition("-")
    command = [sys.executable, "-m", "uvicorn", "starlette_app:app", "--port", str(port)]
    command += ["--http", "httptools", "--no-access-log", "--log-level", "warning"]
    command += ["--loop", "aiozc:new_event_loop" if loop == "aiozc" else loop]
    path = os.pathsep.join([str(APP), python_path()])
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path, "AIOZC_BACKEND": backend or "uring"},
        preexec_fn=lambda: os.sched_setaffinity(0, {SERVER_CORE}),
        stderr=subprocess.DEVNULL,  # each connection that wrk drops at its end
    )
    try:
        wait_for(port, process)
        yield port, process
    finally:
        process.kill()
        process.wait()


def asgi_on_loopback(case: Case, way: str, seconds: float) -> dict[str, float]:
    wrk = shutil.which("wrk")
    if wrk is None:
        raise SystemExit("workloads.py: wrk is needed for `asgi`: apt-get install wrk")
    with uvicorn(way.split()[0]) as (port, process):
        check_asgi(port, case.options["route"])
        url = f"http://127.0.0.1:{port}{case.options['route']}"
        subprocess.run([wrk, "-t1", "-c64", "-d1s", url], check=True, capture_output=True)
        served, before = when_idle(port, process.pid)
        done = subprocess.run(
            [
                *(
                    "taskset",
                    "-c",
                    str(CLIENT_CORE),
                    wrk,
                    "-t1",
                    "-c64",
                    "--timeout",
                    "10s",
                    "--latency",
                ),
                f"-d{max(2, round(seconds))}s",
                url,
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        then, after = when_idle(port, process.pid)
        served, cpu = then - served, after.since(before)[0]
        status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"(\d+) requests in ([\d.]+)s", done.stdout)
    p99 = re.search(r"99%\s+([\d.]+)(us|ms|s)", done.stdout)
    if found is None or p99 is None or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise SystemExit(f"workloads.py: wrk said:\n{done.stdout}")
    count, took = int(found[1]), float(found[2])
    if not count:
        raise SystemExit("workloads.py: not one request was answered; use a longer --seconds")
    return {
        "rate": count / took,
        "gb_per_s": 0.0,
        "cpu": cpu / served,
        "p99_ms": float(p99[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[p99[2]],
        "anonymous": int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024,  # type: ignore[index]
        "pinned": 0,
    }


def when_idle(port: int, pid: int) -> tuple[int, Counters]:
    """How many requests the application handled, and the server's counters, once it has done all that wrk left:
    64 requests more or less are a large part of two seconds of a slow route."""
    last, end = Counters.read(pid), time.monotonic() + LIMIT
    while time.monotonic() < end:
        time.sleep(0.1)
        now = Counters.read(pid)
        if now.since(last)[0] < 1000:  # microseconds
            break
        last = now
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    connection.request("GET", "/served")
    count = int(connection.getresponse().read())
    connection.close()
    return count, Counters.read(pid)


def check_asgi(port: int, route: str) -> None:
    """wrk compares nothing: some answers before it, with what the application has."""
    sys.path.insert(0, str(APP))
    import starlette_app

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    for _ in range(5):
        connection.request("GET", route)
        got = connection.getresponse().read()
        if route in ("/json", "/large"):
            good = json.loads(got) == (
                starlette_app.SMALL if route == "/json" else starlette_app.LARGE
            )
        else:
            good = got == starlette_app.BLOB
        if not good:
            raise CorruptBytes(f"wrong body of {route}")
    connection.close()


# -- the sink --


def on_sink(case: Case, way: str, seconds: float, given: dict[str, Any]) -> dict[str, float]:
    loop, how = way.split()
    where = [given["tcp"]["4"], str(given["port"])]
    if case.workload == "asgi":
        name, _, backend = loop.partition("-")
        child = [
            str(BENCH / "asgi_child.py"),
            name,
            backend or "-",
            case.options["route"],
            str(seconds),
        ]
        child += [str(SERVER_CORE), *where]
    else:
        child = ["-m", "workload.child", loop, case.workload, how, json.dumps(case.options)]
        child += [str(SERVER_CORE), *where, str(seconds)]
    done = subprocess.run(
        ["ip", "netns", "exec", given["namespace"], sys.executable, *child],
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=LIMIT + seconds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    if done.returncode:
        raise SystemExit(f"workloads.py: {case.label()}, {way}:\n{done.stderr}")
    told = json.loads(done.stdout)
    if case.workload == "asgi":
        counted = told.get("zc", {})
        cpu, rate, pinned = told["cpu_us"], told["requests_per_s"], counted.get("pinned_peak", 0)
    else:
        each = 65537 / 1e9 if case.unit == "request" else 0
        cpu = told["cpu_s_per_gb"] * (each * 1e6 or 1)
        rate = told["gb_per_s"] / each if each else 0.0
        pinned = told.get("pinned", 0)
    return {
        "rate": rate,
        "gb_per_s": told["gb_per_s"],
        "cpu": cpu,
        "p99_ms": 0.0,
        "call_p99_ms": told.get("call_p99_ms", 0.0),
        "anonymous": told.get("anonymous", 0),
        "pinned": pinned,
        "dropped": told.get("dropped", 0),
    }


# -- nginx and the file, for the weights --


def nginx(case: Case, seconds: float) -> dict[str, float]:
    """Debian's, with sendfile, one process: the same ranges by HTTP."""
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        raise SystemExit("workloads.py: nginx is not here: apt-get install nginx-light")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="aiozc-nginx-") as home:
        root = Path(case.options["file"]).parent
        config = Path(home) / "conf"
        config.write_text(NGINX.format(home=home, port=port, root=root))
        child = subprocess.Popen(
            ["taskset", "-c", str(SERVER_CORE), program, "-c", str(config), "-p", home],
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(port, child)
            client = CLIENTS["weights"](port, case.options | {"http": True})
            took, cpu = window(client, child.pid, seconds)
            status = Path(f"/proc/{child.pid}/status").read_text()
            client.close()
        finally:
            child.terminate()
            child.wait()
    told = {"anonymous": int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024}  # type: ignore[index]
    return figures(case, client.load, took, cpu, told)


def wait_for(port: int, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + LIMIT
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"workloads.py: {process.args!r} does not listen") from None
            time.sleep(0.05)


@contextlib.contextmanager
def material(gib: float) -> Iterator[str]:
    """A file of random bytes in the page cache. Random, for zeros would all be one page."""
    with temporary() as home:
        path = Path(home) / "weights"
        with path.open("wb") as file:
            block = os.urandom(64 << 20)
            for number in range(max(2, int(gib * 16))):
                turn = number * 4099 % len(block)  # no two blocks alike at the same place
                file.write(block[turn:])
                file.write(block[:turn])
        yield str(path)


def temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="aiozc-workloads-")


def make_certificate(path: str) -> None:
    """For localhost, with its key: the one of examples/echo_tls.py."""
    sys.path.insert(0, str(BENCH.parent / "examples"))
    import echo_tls

    echo_tls.certificate(Path(path))


# -- the table --


def rows_of(seen: dict[tuple[Case, str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    for (case, path, way), rounds in seen.items():
        middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        base = [r["cpu"] for r in seen.get((case, path, case.ways[0]), [])]
        ratio = middle["cpu"] / statistics.median(base) if base else 0.0
        row = {
            "case": case.label(),
            "path": path,
            "way": way,
            "unit": case.unit,
            "ratio": ratio,
            **middle,
        }
        rows.append(row | {"cpu_rounds": [r["cpu"] for r in rounds]})
    return rows


HEADINGS = (
    "workload",
    "path",
    "way",
    "rate",
    "CPU",
    "/uvloop",
    "p99 ms",
    "memory MiB",
    "pinned MiB",
)


def cells(row: dict[str, Any]) -> list[str]:
    request = row["unit"] == "request"
    return [
        row["case"],
        row["path"],
        row["way"],
        f"{row['rate']:,.0f}/s" if request else f"{row['gb_per_s']:.2f} GB/s",
        f"{row['cpu']:,.1f} us" if request else f"{row['cpu']:.4f} s/GB",
        f"{row['ratio']:.2f}" if row["ratio"] else "-",
        f"{row['p99_ms']:,.1f}" if row["p99_ms"] else "",
        f"{row['anonymous'] / 2**20:,.0f}" if row["anonymous"] else "",
        f"{row['pinned'] / 2**20:,.1f}" if row["pinned"] else "",
    ]


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| " + " | ".join(HEADINGS) + " |",
        "|---|---|---" + "|--:" * (len(HEADINGS) - 3) + "|",
    ]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=front.positive, default=3)
    parser.add_argument("--seconds", type=front.positive_float, default=2.0)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORKLOAD",
        help="those whose name begins like that: asgi, 'asgi 1 MiB'",
    )
    parser.add_argument(
        "--paths", nargs="+", choices=["loopback", "sink"], default=["loopback", "sink"]
    )
    parser.add_argument(
        "--gib", type=front.positive_float, default=4.0, help="of the weights' file"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to FILE")
    args = parser.parse_args()
    only = tuple(args.only or ("",))
    wanted = [case for case in cases("") if case.label().startswith(only)]
    if not wanted:
        parser.error("there is no such workload")
    os.sched_setaffinity(0, {CLIENT_CORE})
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(only_benchmark())
            needs_file = any(case.workload == "weights" for case in wanted)
            file = stack.enter_context(material(args.gib)) if needs_file else ""
            certificate = str(Path(stack.enter_context(temporary())) / "cert.pem")
            if any(case.workload == "proxy" for case in wanted):
                make_certificate(certificate)
            wanted = [c for c in cases(file, certificate) if c.label().startswith(only)]
            given = stack.enter_context(sink(CLIENT_CORE)) if "sink" in args.paths else {}
            seen = measure(wanted, args, given)
    except (SinkError, CorruptBytes) as error:
        print(f"workloads.py: {error}", file=sys.stderr)
        return 1
    rows = rows_of(seen)
    table = Table(title="Workloads; every byte that a client got was right")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in HEADINGS[:3] else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=150 if not sys.stdout.isatty() else None).print(table)
    if args.markdown:
        args.markdown.write_text(markdown(rows))
    if args.json:
        described = about("workloads", sys.executable, args.seconds, WARMUP, args.rounds)
        args.json.write_text(
            json.dumps({**dataclasses.asdict(described), "rows": rows}, indent=1) + "\n"
        )
    return 0


def measure(wanted: list[Case], args: argparse.Namespace, given: dict[str, Any]) -> Any:
    todo = [
        (case, "loopback", way) for case in wanted for way in case.ways if "loopback" in args.paths
    ]
    todo += [(case, "sink", way) for case in wanted for way in case.on_sink if "sink" in args.paths]
    todo.sort(key=lambda item: (wanted.index(item[0]), item[1]))
    seen: dict[Any, list[dict[str, float]]] = {}
    with Progress() as show:
        task = show.add_task("workloads", total=len(todo) * args.rounds)
        for _ in range(args.rounds):
            for case, path, way in todo:
                if path == "loopback":
                    figures = on_loopback(case, way, args.seconds)
                else:
                    figures = on_sink(case, way, args.seconds, given)
                seen.setdefault((case, path, way), []).append(figures)
                show.advance(task)
    return seen


if __name__ == "__main__":
    sys.exit(main())
