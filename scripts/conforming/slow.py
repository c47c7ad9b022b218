"""Which tests take over twice their time on stock asyncio. Called by conformance.py, with --stock or --against.

One measurement decides nothing on a busy machine: what looks slow is run alone several times on both loops,
in turns, and the best times are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from .expected import PYTHON
from .run import Orders, run_module
from .suites import BUILD, Suite
from .summary import Run

FACTOR = 2.0
SHORT = 0.05  # seconds; what takes less on stock counts as this: it is imports, the making of a loop, noise
TURNS = 5


def look(
    runs: Iterable[Run],
    measured_on: Iterable[Run],
    found: Iterable[Suite],
    args: argparse.Namespace,
) -> None:
    """Fill in `slow` of every run that is not stock's; stock's times are among `measured_on`."""
    suites = {suite.name: suite for suite in found}
    here = [run for run in measured_on if run.loop == "stock" and run.python == PYTHON]
    stock = {run.suite: {r.id: r.seconds for r in run.with_outcome("passed")} for run in here}
    for run in runs:
        if run.loop != "stock":
            base = stock.get(run.suite, {})
            for result in run.with_outcome("passed"):
                if too_long(result.seconds, base.get(result.id)):
                    times = measured(suites[run.suite], run.loop, result.id, args)
                    if too_long(*times):
                        run.slow[result.id] = times


def too_long(ours: float, stock: float | None) -> bool:
    return stock is not None and ours > FACTOR * max(stock, SHORT)


def measured(suite: Suite, loop: str, test: str, args: argparse.Namespace) -> tuple[float, float]:
    log = BUILD / "logs" / "slow.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    best = {loop: float("inf"), "stock": float("inf")}
    module = test.partition(".")[0]
    for _ in range(TURNS):
        for name in best:
            orders = Orders(suite, name, args.timeout)
            for result in run_module(orders, module, log, only=[test]):
                best[name] = min(best[name], result.seconds)
    return best[loop], best["stock"]
