"""Which tests take over twice their time on stock asyncio. Called by conformance.py, with --stock.

One measurement decides nothing on a busy machine: what looks slow is run alone several times on both loops,
in turns, and the best times are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from .run import Orders, run_module
from .suites import BUILD, Suite
from .summary import Run

FACTOR = 2.0
FLOOR = 0.1  # seconds more than stock's: what is less is imports, the making of a loop, and noise
TURNS = 5


def look(runs: Iterable[Run], found: Iterable[Suite], args: argparse.Namespace) -> None:
    """Fill in `slow` of every run that is not stock's."""
    suites = {suite.name: suite for suite in found}
    stock = {run.suite: run for run in runs if run.loop == "stock"}
    for run in runs:
        if run.loop != "stock":
            base = {r.id: r.seconds for r in stock[run.suite].with_outcome("passed")}
            for result in run.with_outcome("passed"):
                if too_long(result.seconds, base.get(result.id)):
                    times = measured(suites[run.suite], run.loop, result.id, args)
                    if too_long(*times):
                        run.slow[result.id] = times


def too_long(ours: float, stock: float | None) -> bool:
    return stock is not None and ours > FACTOR * stock and ours > stock + FLOOR


def measured(suite: Suite, loop: str, test: str, args: argparse.Namespace) -> tuple[float, float]:
    best = {loop: float("inf"), "stock": float("inf")}
    module = test.partition(".")[0]
    for _ in range(TURNS):
        for name in best:
            orders = Orders(suite, name, args.timeout)
            for result in run_module(orders, module, BUILD / "logs" / "slow.log", only=[test]):
                best[name] = min(best[name], result.seconds)
    return best[loop], best["stock"]
