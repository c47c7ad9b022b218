"""The table of docs/cases.md: every case has its row, and every test that it names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "cases.md").read_text()
NAMED = re.compile(r"`([\w/]+\.(?:py|c))::(\w+)`")


@functools.cache
def functions(file: str) -> set[str]:
    text = (TESTS / file).read_text()
    if file.endswith(".c"):
        return set(re.findall(r"^static void (\w+)\(void\)", text, re.MULTILINE))
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def rows() -> dict[int, str]:
    found = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", TABLE, re.MULTILINE)
    assert len(found) == len({number for number, _ in found})
    return {int(number): cell for number, cell in found}


def test_every_case_has_a_row_with_a_test() -> None:
    assert sorted(rows()) == list(range(1, 46))
    for number, cell in rows().items():
        # What remains beside the names is commas, or a reason why there is nothing to test.
        rest = NAMED.sub("", cell).strip(" ,")
        assert NAMED.search(cell) or rest.startswith("does not arise: "), (number, cell)
        assert not NAMED.search(cell) or not rest, (number, rest)


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall(TABLE)
    assert len(named) > 60
    missing = [f"{file}::{name}" for file, name in named if name not in functions(file)]
    assert not missing
