"""Makes what the documentation shows and nobody writes: pictures and tables, from code and measured figures.

    python scripts/figures.py            write them
    python scripts/figures.py --check    exit 1 and name those that are not current (make docs, tests)

    docs/figures/states.svg      from the state table in aiozc/operation.py
    docs/operations.md           its table of metrics, from aiozc/metrics.py
    docs/figures/serving.svg     from docs/figures/serving.json, written by bench/serving.py
    docs/figures/crossover.svg   from docs/figures/crossover.json, written by `aiozc bench crossover`

The last two need matplotlib. They carry the checksum of their data: --check compares that, for no
two versions of matplotlib draw the same bytes. Never: a figure that is not in the data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"

# -- the state diagram --

WIDE, HIGH = 168, 62
PLACES = {  # centres
    "QUEUED": (100, 60),
    "ISSUED": (410, 60),
    "SENT": (720, 60),
    "RELEASED": (1030, 60),
    "WITHDRAWN": (100, 230),
    "FAILED": (565, 230),
}
COLOURS = {"RELEASED": "#c8e6c9", "WITHDRAWN": "#e0e0e0", "FAILED": "#ffcdd2"}


def state_rows() -> list[list[str]]:
    """state, entered when, sent, released: from the table at the head of operation.py."""
    from aiozc import operation

    lines = (operation.__doc__ or "").splitlines()
    found = [re.split(r"\s{2,}", line.strip()) for line in lines if re.match(r" {4}[A-Z]+ ", line)]
    if [row[0] for row in found] != list(PLACES):
        raise SystemExit(f"the state table has other states than this picture: {found}")
    return found


def edge(a: str, b: str, label: str) -> str:
    (x1, y1), (x2, y2) = PLACES[a], PLACES[b]
    back = (x2, y2) < (x1, y1) and y1 == y2  # under the way forth
    if y1 == y2:
        side = -1 if back else 1
        y = y1 + 20 if back else y1 - 8
        points = (x1 + side * WIDE / 2, y, x2 - side * WIDE / 2, y)
        at = ((points[0] + points[2]) / 2, y + 15 if back else y - 6)
    else:
        shift = 30 * (x1 - x2) / abs(x1 - x2) if x1 != x2 else 0
        points = (x1, y1 + HIGH / 2, x2 + shift, y2 - HIGH / 2)
        at = ((points[0] * 2 + points[2]) / 3, (points[1] * 2 + points[3]) / 3)
    line = 'x1="{}" y1="{}" x2="{}" y2="{}"'.format(*(f"{p:g}" for p in points))
    text = f'<text class="on" x="{at[0]:g}" y="{at[1]:g}">{escape(label)}</text>'
    return f'<line {line} marker-end="url(#tip)"/>{text}'


def states() -> str:
    from aiozc.operation import TRANSITIONS

    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1130 275" font-family="sans-serif" '
        'font-size="11" text-anchor="middle">',
        "<!-- from the state table in aiozc/operation.py, by scripts/figures.py -->",
        "<style>line{stroke:#455a64;stroke-width:1.5}.on{paint-order:stroke;stroke:#fff;"
        "stroke-width:4px;fill:#263238}.b{font-weight:bold;font-size:13px}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#455a64"/></marker></defs>',
        '<rect width="1130" height="275" fill="#fff"/>',
    ]
    # Labels over all lines, or a line would run through one.
    edges = [edge(a.name, b.name, label) for a, b, label in TRANSITIONS]
    out += [e.partition("<text")[0] for e in edges]
    out += ["<text" + e.partition("<text")[2] for e in edges]
    for name, _when, sent, released in state_rows():
        x, y = PLACES[name]
        out.append(
            f'<rect x="{x - WIDE / 2:g}" y="{y - HIGH / 2:g}" width="{WIDE}" height="{HIGH}" rx="8" '
            f'fill="{COLOURS.get(name, "#bbdefb")}" stroke="#455a64"/>'
            f'<text class="b" x="{x}" y="{y - 12}">{name}</text>'
            f'<text x="{x}" y="{y + 6}">sent: {escape(sent)}</text>'
            f'<text x="{x}" y="{y + 22}">released: {escape(short(released))}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def short(text: str) -> str:
    return text.replace("raises, once the pages are free", "raises, pages free")


# -- the table of metrics --

BEGIN, END = "<!-- metrics: made by scripts/figures.py -->\n", "<!-- metrics: end -->\n"


def operations() -> str:
    from aiozc.metrics import METRICS

    text = (DOCS / "operations.md").read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    rows = ["| name | kind | |", "|---|---|---|"]
    for m in METRICS:
        total = "_total" if m.kind == "counter" else ""
        rows.append(f"| `aiozc_{m.name}{total}` | {m.kind} | {m.help} |")
    return before + BEGIN + "\n" + "\n".join(rows) + "\n\n" + END + after


# -- measured figures --


def serving(data: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    ways = {
        "asyncio write": ("asyncio, write()", "#b0bec5"),
        "uvloop write": ("uvloop, write()", "#90a4ae"),
        "aiozc write": ("aiozc, the same write()", "#42a5f5"),
        "aiozc pool": ("aiozc, registered memory", "#1565c0"),
    }
    cost = {(row["way"], row["size"]): row["cpu_s_per_gb"] for row in data["rows"]}
    sizes = sorted({size for _, size in cost if size > 4096})
    figure = Figure(figsize=(7.6, 3.4))
    axes = figure.subplots()
    for i, (way, (name, colour)) in enumerate(ways.items()):
        at = [n + (i - 1.5) * 0.2 for n in range(len(sizes))]
        bars = axes.bar(at, [cost[way, size] for size in sizes], 0.19, label=name, color=colour)
        axes.bar_label(bars, fmt="%.3f", fontsize=7, padding=2)
    axes.set_xticks(range(len(sizes)), [f"{size >> 10} KiB a write" for size in sizes])
    axes.set_ylabel("CPU seconds a GB")
    axes.set_title("Sending from memory on a path that does not copy: less is better", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def crossover(data: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.4))
    axes = figure.subplots()
    for mode, name, colour in (
        ("gather-copy", "gathering copy", "#90a4ae"),
        ("zc", "zero-copy", "#1565c0"),
    ):
        rows = sorted((r["size"], r["cpu_s_per_gb"]) for r in data["rows"] if r["mode"] == mode)
        axes.plot(*zip(*rows, strict=True), "o-", color=colour, label=name)
    if found := data["crossover"]:
        axes.axvline(found, color="#ef6c00", linestyle=":", label=f"crossover: {found} bytes")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row["size"] for row in data["rows"]})
    axes.set_xticks(sizes, [f"{size >> 10} KiB" for size in sizes])
    axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1.0], ["0.05", "0.1", "0.2", "0.5", "1"])
    axes.minorticks_off()
    axes.set_xlabel("one request")
    axes.set_ylabel("CPU seconds a GB")
    axes.set_title("The same engine, copying and zero-copy: less is better", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def checksum(name: str) -> str:
    return hashlib.sha256((FIGURES / f"{name}.json").read_bytes()).hexdigest()[:16]


def plotted(name: str, draw: Callable[[dict[str, Any]], Any]) -> str:
    import io

    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = name
    data = json.loads((FIGURES / f"{name}.json").read_text())
    written = io.StringIO()
    draw(data).savefig(written, format="svg", metadata={"Date": None})
    text = "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"
    return text.replace("<svg ", f"<!-- data {checksum(name)} -->\n<svg ", 1)


# -- all of them --

EXACT: dict[Path, Callable[[], str]] = {
    FIGURES / "states.svg": states,
    DOCS / "operations.md": operations,
}
PLOTS = {"serving": serving, "crossover": crossover}


def stale() -> list[str]:
    found = [
        str(path)
        for path, make in EXACT.items()
        if not path.is_file() or path.read_text() != make()
    ]
    for name in PLOTS:
        path = FIGURES / f"{name}.svg"
        if not path.is_file() or f"<!-- data {checksum(name)} -->" not in path.read_text():
            found.append(str(path))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    if args.check:
        if old := stale():
            print("not current; run scripts/figures.py:", *old, file=sys.stderr)
        return 1 if old else 0
    for path, make in EXACT.items():
        path.write_text(make())
    for name, draw in PLOTS.items():
        (FIGURES / f"{name}.svg").write_text(plotted(name, draw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
