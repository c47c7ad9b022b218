"""What a benchmark shows: a progress bar while it runs, then a table or one JSON object, and a picture.

Called by the subcommands. rich and matplotlib are imported here, when they are needed.

Never: says more than was measured; what has to be said of a path comes with it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiozc
from aiozc.cli.bench.errors import BenchError
from aiozc.cli.bench.path import Path
from aiozc.cli.bench.run import Row

Show = Callable[[str], contextlib.AbstractContextManager[Any]]
Column = tuple[str, Callable[[Row], str]]


@contextlib.contextmanager
def progress(total: int) -> Iterator[Show]:
    """A bar on standard error, only where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total)

        @contextlib.contextmanager
        def show(label: str) -> Iterator[None]:
            bar.update(task, description=label)
            yield
            bar.advance(task)

        yield show


def document(args: argparse.Namespace, command: str, path: Path, rows: list[Row]) -> dict[str, Any]:
    """The JSON object, to which a subcommand adds what is its own."""
    return {
        "benchmark": command,
        "path": path.name,
        "path_note": path.note,
        "aiozc": aiozc.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "sender_cpu": path.cpu if path.cpu >= 0 else None,
        "rounds": args.rounds,
        "seconds": args.seconds,
        "rows": rows,
        "left_out": [],
        "failed": [],
    }


def finish(
    args: argparse.Namespace,
    told: dict[str, Any],
    columns: Sequence[Column],
    remarks: Sequence[str] = (),
    *,
    draw: Callable[[Any, list[Row]], None],
) -> int:
    """Show it all; the exit code: 1 if a row failed, or there is none."""
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        _print(told, columns, remarks)
    if (
        args.plot and told["rows"]
    ):  # last: what was measured is shown even where no file can be written
        _plot(args.plot, told, draw)
    for row in told["failed"]:
        print(f"failed: {row['label']}: {row['reason']}", file=sys.stderr)
    if not told["rows"]:
        print("error: nothing was measured", file=sys.stderr)
    return 1 if told["failed"] or not told["rows"] else 0


def _print(told: dict[str, Any], columns: Sequence[Column], remarks: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=200)  # a file or a pipe: nothing has to be cut off
    title = (
        f"aiozc bench {told['benchmark']}, path {told['path']}, {told['rounds']} rounds of "
        f"{told['seconds']:g} s, CPython {told['python']}, Linux {told['kernel']}"
    )
    table = Table(title=title)
    rows = told["rows"]
    for name, text in columns:
        if rows:
            number = all(text(row)[:1].isdigit() or text(row) == "-" for row in rows)
            table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(text(row) for _, text in columns))
    if rows:
        console.print(table)
    for reason, count in _reasons(told["left_out"]).items():
        console.print(
            f"Left out, {count} rows: {reason}.", highlight=False, soft_wrap=True, markup=False
        )
    notes = dict.fromkeys(f"{row['mode']}: {row['note']}" for row in rows if row.get("note"))
    for line in [*notes, *remarks, *_copied_all_the_same(told), told["path_note"]]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _copied_all_the_same(told: dict[str, Any]) -> list[str]:
    """On the sink that should not be."""
    asked = ("msg-zerocopy", "zc", "zc-epoll", "zc-registered")
    labels = [
        row["label"]
        for row in told["rows"]
        if row["mode"] in asked and row["kernel_path"] in ("copied", "mixed")
    ]
    if told["path"] != "sink" or not labels:
        return []
    return [
        f"The kernel copied all the same in {len(labels)} rows ({labels[0]} the first of them): they "
        "say nothing about zero-copy. Does a packet capture run (tcpdump, a monitoring agent)?"
    ]


def _reasons(rows: Sequence[Row]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for row in rows:
        counted[row["reason"]] = counted.get(row["reason"], 0) + 1
    return counted


def _plot(file: str, told: dict[str, Any], draw: Callable[[Any, list[Row]], None]) -> None:
    # By name: type checkers need not have it.
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure = pyplot.figure(layout="constrained")
    draw(figure, told["rows"])
    figure.suptitle(
        f"aiozc bench {told['benchmark']}, path {told['path']}, Linux {told['kernel']}", fontsize=9
    )
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot {file}: {error}") from error
    finally:
        pyplot.close(figure)


# What is drawn of each row: the key, and its axis' name.
RATE_AND_COST = (("gb_per_s", "GB/s"), ("cpu_s_per_gb", "CPU s per GB"))


def bars(
    figure: Any, rows: list[Row], label: str, keys: Sequence[tuple[str, str]] = RATE_AND_COST
) -> None:
    """Rate and CPU time of each row, one below the other."""
    figure.set_size_inches(10, 1.5 + 0.3 * len(rows))
    labels = [row[label] for row in rows]
    for number, (key, name) in enumerate(keys):
        axes = figure.add_subplot(1, 2, number + 1)
        axes.barh(labels, [row[key] for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel(name)
        if number:
            axes.set_yticklabels([])


def lines(
    figure: Any, rows: list[Row], what: str = "size of a part (best number of parts)"
) -> None:
    """By size: a picture for each protocol and family, a line for each mode at its best number of parts."""
    groups = sorted({(row["protocol"], row["family"]) for row in rows})
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    colours = {
        mode: f"C{number % 10}" for number, mode in enumerate(modes)
    }  # alike in each picture
    figure.set_size_inches(11, 3.5 * len(groups))
    for place, group in enumerate(groups):
        mine = [row for row in rows if (row["protocol"], row["family"]) == group]
        sizes = sorted({row["size"] for row in mine})
        for number, (key, name) in enumerate(RATE_AND_COST):
            axes = figure.add_subplot(len(groups), 2, 2 * place + number + 1)
            for mode in modes:
                best: dict[int, float] = {}
                for row in mine:
                    if row["mode"] == mode:
                        value, count = row[key], row["size"]
                        choose = min if number else max
                        best[count] = choose(best.get(count, value), value)
                if best:
                    axes.plot(
                        sorted(best),
                        [best[count] for count in sorted(best)],
                        marker="o",
                        label=mode,
                        color=colours[mode],
                    )
            axes.set_xscale("log", base=2)
            named = [f"{count:,}" if count % 1024 else size(count) for count in sizes]
            axes.set_xticks(sizes, named, fontsize=8)
            axes.set_yscale("log")
            for plain in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                plain(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "1235" else "")
            axes.tick_params(axis="y", which="both", labelsize=8)
            axes.grid(axis="y", which="both", linewidth=0.3)
            axes.set_xlabel(f"{what}, {group[0].upper()} over IPv{group[1]}")
            axes.set_ylabel(name)
            axes.legend(fontsize=7)


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Three or four digits."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def size(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


FIGURES: tuple[Column, ...] = (
    ("sends/s", lambda row: rate(row["sends_per_s"])),
    ("GB/s", lambda row: short(row["gb_per_s"])),
    ("CPU s/GB", lambda row: short(row["cpu_s_per_gb"])),
    ("user us/part", lambda row: short(row["user_us_per_send"])),
    ("segments", lambda row: rate(row["segments"])),
    ("parts/req", lambda row: short(row["parts_per_request"])),
    ("notif.", lambda row: rate(row["notifications"])),
    ("peak pinned", lambda row: size(row["peak_pinned"])),
    ("kernel says", lambda row: row["kernel_path"]),
)
