"""liburing's own `send-zerocopy`, as a row beside ours: started, and its one line of output read.

Called by send.py for `--reference BINARY`. It sends from one registered buffer and puts so many requests
into one submission as our rows have parts; it waits for no notification before the end, and over TCP its
requests may change places, so its bytes are counted by it and not verified.
"""

from __future__ import annotations

import math
import os
import re
import resource

from aiozc.cli.bench.cases import Case
from aiozc.cli.bench.errors import BenchError, RowFailed
from aiozc.cli.bench.path import Path
from aiozc.cli.bench.run import Row, call

_LINE = re.compile(r"packets=(\d+) \(MB=\d+\), rps=(\d+)")
_NOTE = "liburing's example: registered buffer, counted by itself, not verified"


def check(binary: str) -> str:
    """Its absolute path. BenchError: there is no such program."""
    if not (os.path.isfile(binary) and os.access(binary, os.X_OK)):
        raise BenchError(
            f"--reference {binary}: no such program; build examples/send-zerocopy of liburing and "
            "give the path of the binary"
        )
    return os.path.abspath(binary)


def measure(binary: str, path: Path, case: Case, seconds: float) -> Row:
    """It knows whole seconds only, and adds a fifth of one."""
    whole = max(1, math.ceil(seconds))
    with path.endpoint(case.protocol, case.family, case.size, b"") as endpoint:
        command = [binary, f"-{case.family}", "-D", endpoint.address, "-p", str(endpoint.port)]
        command += ["-s", str(case.size), "-n", str(case.parts), "-t", str(whole)]
        command += ["-d", "-z", "1", "-b", "1"]
        command += ["-C", str(path.cpu)] if path.cpu >= 0 else []
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        output = call(path, [*command, case.protocol], whole)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = _LINE.search(output)
    if found is None or not int(found[1]):
        raise RowFailed(f"{os.path.basename(binary)} printed no result")
    sends, per_second = int(found[1]), int(found[2])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "protocol": case.protocol,
        "family": case.family,
        "size": case.size,
        "parts": case.parts,
        "mode": case.mode,
        "sends_per_s": float(per_second),
        "gb_per_s": per_second * case.size / 1e9,
        "cpu_s_per_gb": cpu / (sends * case.size / 1e9),
        "user_us_per_send": (after.ru_utime - before.ru_utime) * 1e6 / sends,
        "segments": None,
        "requests": sends,
        "parts_per_request": 1.0,
        "notifications": None,
        "peak_pinned": None,
        "kernel_path": "unknown",
        "outstanding": None,
        "engine": "liburing send-zerocopy",
        "note": _NOTE,
    }
