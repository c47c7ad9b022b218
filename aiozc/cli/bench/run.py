"""Runs senders: one process for each row in each round, rounds interleaved, and the medians of them.

Called by the subcommands with a list of things to measure. Knows no table and no plot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from aiozc.cli.bench.cases import Case
from aiozc.cli.bench.errors import BenchError, RowFailed
from aiozc.cli.bench.job import Job, Result
from aiozc.cli.bench.path import Path

T = TypeVar("T")
Row = dict[str, Any]
STARTING = 30.0  # seconds that a child may take beside those that it measures


def run_sender(path: Path, case: Case, pattern: bytes, seconds: float, **more: Any) -> Result:
    """One measurement of one case; counted only if everything arrived."""
    connections = more.get("connections", 1)
    with path.endpoint(case.protocol, case.family, case.size, pattern, connections) as endpoint:
        job = Job(
            **dataclasses.asdict(case),
            address=endpoint.address,
            port=endpoint.port,
            counter=endpoint.counter,
            device=endpoint.device,
            seconds=seconds,
            cpu=path.cpu,
            **{"engine": "engine" if case.mode.startswith("zc") else "bare", **more},
        )
        command = [
            sys.executable,
            "-m",
            "aiozc.cli.bench.sender",
            json.dumps(dataclasses.asdict(job)),
        ]
        answer = json.loads(call(path, command, seconds, endpoint.counter))
        if "failed" in answer:
            raise RowFailed(answer["failed"])
        result = Result(**answer)
        endpoint.check(result.nbytes, result.arrived)
        return result


def call(path: Path, command: Sequence[str], seconds: float, inherit: int = -1) -> str:
    """A command in the path, its standard output. RowFailed, with its words: it failed, or took too long."""
    try:
        done = subprocess.run(
            [*path.prefix, *command],
            capture_output=True,
            text=True,
            timeout=seconds + STARTING,
            pass_fds=[inherit] if inherit >= 0 else [],
        )
    except subprocess.TimeoutExpired as error:
        raise RowFailed(f"no answer within {error.timeout:g} s") from error
    except OSError as error:
        raise BenchError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RowFailed(words[-1])
    return done.stdout


def rounds(
    items: Sequence[T],
    count: int,
    measure: Callable[[T], Row],
    label: Callable[[T], str],
    show: Callable[[str], contextlib.AbstractContextManager[Any]],
) -> tuple[list[tuple[T, Row]], list[tuple[T, str]]]:
    """Every item in every round, interleaved. The rows (medians), and what failed with the reason.

    An item that failed once is not asked again, and has no row.
    """
    measured: list[list[Row]] = [[] for _ in items]
    failed: dict[int, str] = {}
    for number in range(count):
        for index, item in enumerate(items):
            with show(f"round {number + 1}/{count} {label(item)}"):
                if index in failed:
                    continue
                try:
                    measured[index].append(measure(item))
                except RowFailed as error:
                    failed[index] = str(error)
    rows = [
        (item, median(measured[index])) for index, item in enumerate(items) if index not in failed
    ]
    return rows, [(items[index], reason) for index, reason in failed.items()]


def median(rows: Sequence[Row]) -> Row:
    """Of each number; counts stay whole. Text is that of the last round."""
    merged: Row = {}
    for key, value in rows[-1].items():
        values = [row[key] for row in rows]
        if isinstance(value, int) and not isinstance(value, bool):
            merged[key] = int(statistics.median_low(values))
        elif isinstance(value, float):
            merged[key] = statistics.median(values)
        else:
            merged[key] = value
    return merged


def row_of(case: Case, result: Result) -> Row:
    """A row of the JSON object: the case, and the figures."""
    gigabytes = result.nbytes / 1e9
    return {
        **dataclasses.asdict(case),
        "sends_per_s": result.sends / result.seconds,
        "gb_per_s": gigabytes / result.seconds,
        "cpu_s_per_gb": result.cpu / gigabytes,
        "user_us_per_send": result.user * 1e6 / result.sends,
        "segments": result.segments,
        "requests": result.requests,
        "parts_per_request": result.parts_per_request,
        "notifications": result.notifications,
        "peak_pinned": result.peak_pinned,
        "kernel_path": result.path,
        "outstanding": result.outstanding,
        "engine": result.engine,
        "note": result.note,
    }
