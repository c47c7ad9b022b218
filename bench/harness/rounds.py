"""The rounds: every contestant in every row, one at a time, interleaved; and a progress bar.

A contestant that fails in a row is not asked again in that row: what hangs would hang again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from .about import About
from .contestants import Contestant
from .counters import Figures, medians
from .errors import Failed
from .measure import Bench, measure
from .rows import Row


@dataclass
class Outcome:
    """What one contestant did in one row."""

    rounds: list[Figures] = field(default_factory=list)
    failure: Failed | None = None
    flaw: Failed | None = None  # of a measurement that stands: see measure.py

    @property
    def median(self) -> Figures | None:
        """None where it failed, and where nothing was measured yet."""
        return medians(self.rounds) if self.rounds and self.failure is None else None


@dataclass
class Results:
    about: About
    rows: Sequence[Row]
    contestants: Sequence[Contestant]
    missing: dict[str, str]
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)  # by row and contestant
    interrupted: bool = False

    def of(self, row: Row) -> list[tuple[Contestant, Outcome]]:
        """Those who took part in a row, in the order of the contestants."""
        found = [(c, self.outcomes.get((row.name, c.name))) for c in self.contestants]
        return [(c, outcome) for c, outcome in found if outcome is not None]

    def median(self, row: Row, name: str) -> Figures | None:
        outcome = self.outcomes.get((row.name, name))
        return outcome.median if outcome else None

    def complaints(self) -> list[tuple[Row, Contestant, Outcome]]:
        """Everything that went wrong."""
        return [
            (row, contestant, outcome)
            for row in self.rows
            for contestant, outcome in self.of(row)
            if outcome.failure or outcome.flaw
        ]


def run_rounds(bench: Bench, results: Results) -> None:
    """Fills `results`; what was measured until an interrupt stays in it."""
    rounds = results.about.rounds
    for row in results.rows:
        for contestant in results.contestants:
            if contestant.takes_part(row):
                results.outcomes[row.name, contestant.name] = Outcome()
    with progress_bar() as bar:
        task = bar.add_task("", total=rounds * len(results.outcomes))
        try:
            for number in range(rounds):
                for row in results.rows:
                    one_round(bench, row, results, number, bar, task)
                if not bar.console.is_terminal:
                    bar.console.print(f"round {number + 1} of {rounds} done")
        except KeyboardInterrupt:
            results.interrupted = True


def progress_bar() -> Progress:
    return Progress(
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
    )


def one_round(
    bench: Bench, row: Row, results: Results, number: int, bar: Progress, task: TaskID
) -> None:
    takers = results.of(row)
    # Another one goes first in each round: none profits from its place.
    shift = number % len(takers) if takers else 0
    for contestant, outcome in takers[shift:] + takers[:shift]:
        bar.update(task, description=f"{row.name}  {contestant.name}")
        if outcome.failure is None:
            try:
                measurement = measure(bench, row, contestant)
                outcome.rounds.append(measurement.figures)
                outcome.flaw = outcome.flaw or measurement.flaw
            except Failed as failure:
                outcome.failure = failure
                text = f"{row.name}, {contestant.name}: {failure}"
                bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        bar.advance(task)
