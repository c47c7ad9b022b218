"""The JSON document: every round of everything, and where and how it was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .contestants import BASELINE
from .counters import Figures
from .rounds import Outcome, Results
from .rows import Row


def document(results: Results) -> dict[str, Any]:
    return asdict(results.about) | {
        "interrupted": results.interrupted,
        "baseline": BASELINE,
        "loops": {c.name: {"version": c.version} for c in results.contestants}
        | {name: {"left_out": why} for name, why in results.missing.items()},
        "rows": [row_document(results, row) for row in results.rows],
    }


def row_document(results: Results, row: Row) -> dict[str, Any]:
    base = results.median(row, BASELINE)
    return asdict(row) | {
        "rate_unit": row.rate_unit,
        "cpu_unit": row.cpu_unit,
        "results": {c.name: outcome_document(row, o, base) for c, o in results.of(row)},
    }


def outcome_document(row: Row, outcome: Outcome, base: Figures | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    median = outcome.median
    if outcome.failure is not None:
        found |= {"failed": str(outcome.failure), "said": outcome.failure.said}
    elif outcome.flaw is not None:
        found |= {"flaw": str(outcome.flaw), "said": outcome.flaw.said}
    if median is not None:
        found |= {"rate": row.rate(median), "cpu": row.cpu(median), "median": asdict(median)}
    if median is not None and base is not None:
        found["rate_ratio"] = median.requests_per_s / base.requests_per_s
        found["cpu_ratio"] = median.cpu_us / base.cpu_us if base.cpu_us else None
    return found | {"rounds": [asdict(figures) for figures in outcome.rounds]}


def write_json(results: Results, path: Path) -> None:
    path.write_text(json.dumps(document(results), indent=2) + "\n")
