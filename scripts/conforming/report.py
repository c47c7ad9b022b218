"""What people read: what failed and why, then the table; as text, as markdown for the docs, as JSON.

Called by conformance.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from . import expected
from .run import Result
from .summary import Run

WIDTH = 120  # where the output is a file
COLUMNS = ("passed", "failed", "expected", "skipped", "on our loop", "seconds")


def table(runs: list[Run]) -> Table:
    found = Table("suite", "Python", "loop")
    for heading in COLUMNS:
        found.add_column(heading, justify="right")
    for run in runs:
        stock = run.loop == "stock"
        failed = len(run.with_outcome("failed"))
        found.add_row(
            run.suite,
            run.python,
            "asyncio" if stock else run.loop,
            f"{len(run.with_outcome('passed')):,}",
            f"{failed if stock else len(run.unexpected):,}",
            "" if stock else f"{len(run.excused):,}",
            f"{len(run.with_outcome('skipped')):,}",
            "" if stock else f"{run.on_the_loop:,}",
            f"{run.seconds:.0f}",
        )
    return found


def remarks(run: Run) -> list[str]:
    """Everything about a run that is not simply a passed test."""
    stock = run.loop == "stock"
    lines = []
    for result in run.with_outcome("failed"):
        if result.reason:
            lines.append(f"expected to fail: {result.id}: {result.reason}")
        else:
            lines.append(f"{'failed' if stock else 'FAILED'}: {result.id}: {result.message}")
    lines += [f"PASSED, but listed to fail: {r.id}" for r in run.unexpectedly_passed]
    lines += [f"STALE, listed but there is no such test: {pattern}" for pattern in run.stale]
    lines += [
        f"passed only when run again: {result.id}: {result.message}"
        for result in run.with_outcome("passed")
        if result.attempts > 1
    ]
    lines += [
        f"SLOW: {test}: {ours:.2f} s, on stock asyncio {base:.2f} s"
        for test, (ours, base) in run.slow.items()
    ]
    return lines


def show(runs: list[Run]) -> None:
    # Wide enough for the whole table also where the output is a file.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for run in runs:
        lines = remarks(run)
        if lines:
            console.print(f"{run.suite}, Python {run.python}, {run.loop}", style="bold")
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(table(runs))


def closing_line(runs: list[Run]) -> str:
    """Of our runs; stock asyncio's failures are not ours."""
    ours = [run for run in runs if run.loop != "stock"]
    passed, skipped = (sum(len(r.with_outcome(o)) for r in ours) for o in ("passed", "skipped"))
    failed = sum(len(run.unexpected) for run in ours)
    excused = sum(len(run.excused) for run in ours)
    line = f"{passed} passed, {failed} failed, {skipped} skipped"
    return f"{line}, {excused} failed as expected" if excused else line


def markdown(runs: list[Run]) -> None:
    console = Console(width=WIDTH)
    found = table(runs)
    found.box = box.MARKDOWN
    with console.capture() as text:
        console.print(found)
    print(text.get().strip())
    for suite, entries in groupby(expected.load(), key=lambda entry: entry.suite):
        print(f"\n### {suite}\n")
        print("| tests | | reason |\n| --- | --- | --- |")
        for entry in entries:
            where = ", ".join([*entry.python, *entry.loop])
            how = "fails" if entry.run else "left out"
            tests = "<br>".join(f"`{test}`" for test in entry.tests)
            print(f"| {tests} | {how}{f' ({where})' if where else ''} | {entry.reason} |")


def write(runs: list[Run], path: Path) -> None:
    path.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


def read(path: Path) -> list[Run]:
    runs = [Run(**run) for run in json.loads(path.read_text())]
    for run in runs:
        run.results = [Result(**result) for result in run.results]
    return runs
