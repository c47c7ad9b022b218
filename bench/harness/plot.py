"""A picture of all rows: rate and CPU time relative to the baseline, one mark for each loop.

The only file that needs matplotlib. Never: a figure that the tables do not have.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .contestants import BASELINE
from .rounds import Results

MARKERS = "os^vD<>PX*hd"
OURS = "aiozc"


def write_plot(results: Results, path: Path) -> None:
    height = 2.0 + 0.32 * len(results.rows)
    figure = Figure(figsize=(13, height))  # not pyplot: no display is needed
    rate, cpu = figure.subplots(1, 2, sharey=True)
    draw(rate, results, "rate")
    draw(cpu, results, "cpu")
    rate.set_title(f"rate / {BASELINE} (right is better)", fontsize=10)
    cpu.set_title(f"CPU time / {BASELINE} (left is better)", fontsize=10)
    rate.set_yticks(range(len(results.rows)), [row.name for row in results.rows])
    rate.invert_yaxis()
    handles, labels = rate.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=6, frameon=False)
    figure.tight_layout(rect=(0, 0.9 / height, 1, 1))
    figure.savefig(path, dpi=130)


def draw(axes: Axes, results: Results, what: str) -> None:
    for index, contestant in enumerate(results.contestants):
        points = []
        for place, row in enumerate(results.rows):
            figures, base = results.median(row, contestant.name), results.median(row, BASELINE)
            if figures is None or base is None or not base.cpu_us:
                continue
            if what == "rate":
                points.append((figures.requests_per_s / base.requests_per_s, place))
            else:
                points.append((figures.cpu_us / base.cpu_us, place))
        ours = contestant.name.startswith(OURS)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            markersize=8 if ours else 5,
            alpha=1.0 if ours else 0.65,
            zorder=3 if ours else 2,
            label=contestant.name,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axvline(1.0, color="gray", linewidth=1, zorder=1)
    axes.grid(axis="both", linewidth=0.3)
