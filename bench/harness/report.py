"""What people read: a table for each row, then all rows at a glance, then what failed and why.

The same tables go to the terminal and, with --markdown, to a file.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from .contestants import BASELINE, FLOOR
from .counters import Figures
from .rounds import Outcome, Results
from .rows import Row

WIDTH = 150  # where the output is a file


def number(value: float) -> str:
    """Three digits that matter, or all that are before the point."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{1 if value >= 100 else 2 if value >= 1 else 3}f}"


def ratio(value: float, base: float | None) -> str:
    return f"{value / base:.2f}" if base else "-"


def row_table(results: Results, row: Row) -> Table:
    table = Table()
    per = f"/{BASELINE}"
    table.add_column("loop")
    for heading in (row.rate_unit, per, row.cpu_unit, per, "user", "system"):
        table.add_column(heading, justify="right")
    if row.client is not None:
        table.add_column("p50 us", justify="right")
        table.add_column("p99 us", justify="right")
    table.add_column("faults", justify="right")
    base = results.median(row, BASELINE)
    for contestant, outcome in results.of(row):
        mark = " !" if outcome.flaw else ""
        table.add_row(contestant.name + mark, *cells(row, outcome, base))
    return table


def cells(row: Row, outcome: Outcome, base: Figures | None) -> list[str]:
    figures = outcome.median
    if figures is None:
        return ["failed" if outcome.failure else "-"]
    cpu = figures.cpu_us or 1.0
    shares = (row.cpu(figures) * part / cpu for part in (figures.user_us, figures.system_us))
    found = [
        number(row.rate(figures)),
        ratio(figures.requests_per_s, base.requests_per_s if base else None),
        number(row.cpu(figures)),
        ratio(figures.cpu_us, base.cpu_us if base else None),
        *map(number, shares),
    ]
    if row.client is not None:
        found += [f"{figures.p50_us:,.0f}", f"{figures.p99_us:,.0f}"]
    return [*found, f"{figures.minor_faults:.3f}"]


def overview(results: Results, what: str) -> Table:
    """All rows: CPU time, or the rate, as a ratio to the baseline."""
    table = Table()
    table.add_column("row")
    for contestant in results.contestants:
        table.add_column(contestant.name, justify="right")
    for row in results.rows:
        base = results.median(row, BASELINE)
        table.add_row(
            row.name, *(at_a_glance(results, row, c.name, base, what) for c in results.contestants)
        )
    return table


def at_a_glance(results: Results, row: Row, name: str, base: Figures | None, what: str) -> str:
    outcome = results.outcomes.get((row.name, name))
    if outcome is None or outcome.median is None:
        return "failed" if outcome and outcome.failure else "-"
    if what == "cpu":
        return ratio(outcome.median.cpu_us, base.cpu_us if base else None)
    return ratio(outcome.median.requests_per_s, base.requests_per_s if base else None)


def notes(results: Results) -> list[str]:
    found = [
        str(results.about),
        "CPU time and minor page faults are the server's, for each request; where the server pushes, a "
        "request is one of its answers (bulk and sendfile: 64 MiB).",
    ]
    found.append(", ".join(f"{c.name} {c.version}" for c in results.contestants if c.name != FLOOR))
    if results.interrupted:
        found.append("interrupted: medians of the rounds until then")
    found += [f"left out: {name} ({why})" for name, why in results.missing.items()]
    for row, contestant, outcome in results.complaints():
        if outcome.failure:
            found.append(f"failed: {row.name}, {contestant.name}: {outcome.failure}")
        else:
            found.append(f"!: {row.name}, {contestant.name}: {outcome.flaw}")
    return found


def tables(results: Results) -> list[tuple[str, Table]]:
    """With their titles; the row by row ones first, since a terminal shows the end."""
    return [(row.title, row_table(results, row)) for row in results.rows] + overviews(results)


def overviews(results: Results) -> list[tuple[str, Table]]:
    if len(results.rows) < 2 or not any(results.median(row, BASELINE) for row in results.rows):
        return []
    return [
        (f"Rate relative to {BASELINE}: above 1 is better", overview(results, "rate")),
        (f"CPU time relative to {BASELINE}: below 1 is better", overview(results, "cpu")),
    ]


def show(results: Results) -> None:
    # Wide enough for the whole table also where the output is a file.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for title, table in tables(results):
        console.print(title, style="bold", highlight=False)
        console.print(table)
    for note in notes(results):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def write_markdown(results: Results, path: Path) -> None:
    """A page of its own: what was run, all rows at a glance, each row."""
    text = io.StringIO()
    console = Console(file=text, width=WIDTH)
    print("# Loops side by side", file=text)
    for note in notes(results):
        print(f"\n{note}", file=text)
    glance = overviews(results)[::-1]
    for title, table in [*glance, *tables(results)[: len(results.rows)]]:
        table.box = box.MARKDOWN
        print(f"\n## {title}", file=text)
        console.print(table)
    # rich fills lines with spaces.
    path.write_text("".join(line.rstrip() + "\n" for line in text.getvalue().splitlines()))
