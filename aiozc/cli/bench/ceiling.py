"""What the kernel allows, as a row beside ours: a C program that gathers registered memory and does nothing
else (bench/sink/gather.c of a source checkout), compiled here.

Called by send.py for `--ceiling`, into the sink alone, for nobody compares its bytes. It puts as many whole
calls of so many parts into a request as our rows do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path as FilePath

import aiozc
from aiozc.cli.bench import cases
from aiozc.cli.bench.cases import Case
from aiozc.cli.bench.errors import BenchError, RowFailed
from aiozc.cli.bench.job import Result
from aiozc.cli.bench.path import Path
from aiozc.cli.bench.run import Row, call, row_of

_REQUEST_PARTS = 1024
_NOTE = "a C program: no loop, no objects, one socket"


def build(directory: str) -> str:
    """The program, compiled into `directory`. BenchError: what is missing."""
    source = FilePath(aiozc.__file__).resolve().parents[1] / "bench" / "sink" / "gather.c"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not source.is_file() or compiler is None:
        raise BenchError("--ceiling needs a source checkout, gcc, and liburing's headers")
    binary = FilePath(directory) / "gather"
    command = [compiler, "-O2", "-o", str(binary), str(source), "-luring"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"--ceiling: {source.name} does not compile: {done.stderr.strip()}")
    return str(binary)


def measure(binary: str, path: Path, case: Case, args: argparse.Namespace) -> Row:
    """args: those of `send`."""
    seconds, window = args.seconds, args.window
    calls = min(args.max_request // (case.size * case.parts), _REQUEST_PARTS // case.parts)
    parts = case.parts * max(1, calls)
    with path.endpoint(case.protocol, case.family, case.size, b"") as endpoint:
        command = [binary, endpoint.address, str(case.size), str(parts)]
        command += [str(cases.slots(case.size, case.parts)), str(window), str(seconds)]
        pin = ["taskset", "-c", str(path.cpu)] if path.cpu >= 0 else []
        told = json.loads(call(path, [*pin, *command], seconds))
    if told["arrived"] < told["nbytes"]:
        raise RowFailed(f"only {told['arrived']} of {told['nbytes']} bytes arrived")
    result = Result(
        nbytes=told["nbytes"],
        sends=told["nbytes"] // case.size,
        requests=told["requests"],
        seconds=told["seconds"],
        cpu=told["user"] + told["system"],
        user=told["user"],
        segments=told["segments"],
        parts_per_request=float(parts),
        notifications=told["notifications"],
        outstanding=window // (parts * case.size) + 1,
        engine="C",
        note=_NOTE,
    )
    return row_of(case, result)
