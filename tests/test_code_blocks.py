"""Every Python block of README.md and docs/ runs: as it is, or, where it is a fragment, within a prelude.

Owns which files; code_blocks.py runs one. README's are part of `make test`, the others of `make docs` and
`make full`. A block that cannot run here says why in a comment above it: <!-- not run: reason -->.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from code_blocks import NOT_INSTALLED, Block, blocks

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNER = Path(__file__).with_name("code_blocks.py")
LIMIT = 60


def found() -> list[Any]:
    out = []
    for path in FILES:
        for block in blocks(path) if path.is_file() else ():
            marks = [] if path.name == "README.md" else [pytest.mark.slow]
            where = f"{path.relative_to(ROOT)}:{block.line}"
            out.append(pytest.param(block, id=where, marks=marks))
    return out


def run(block: Block) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(RUNNER), str(block.path), str(block.line)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode == NOT_INSTALLED:
        pytest.skip(done.stdout)
    assert done.returncode == 0, f"{block.path.name}:{block.line}\n{done.stdout}{done.stderr}"
    assert not done.stderr, f"{block.path.name}:{block.line}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("block", found())
def test_a_block_of_the_documentation_runs(block: Block) -> None:
    if block.not_run:
        compile(block.code, str(block.path), "exec")
        pytest.skip(block.not_run)
    run(block)


def test_the_quick_start_is_short_and_does_what_it_says() -> None:
    first = next(block for block in blocks(ROOT / "README.md") if block.is_program)
    assert len(first.code.splitlines()) <= 20
    out = run(first)
    assert re.fullmatch(
        r"sent 8388608 bytes: (zero-copy|copied|mixed|unknown)\nreceived: True\n", out
    ), out


def test_kernel_facts_name_tests_that_exist() -> None:
    # Fails when: a test that a fact rests on is renamed or goes.
    text = (ROOT / "docs" / "kernel.md").read_text()
    named = re.findall(r"`((?:tests|scripts)/[\w/.]+)[^`]*`(?:: ([a-z]\w+(?:, [a-z]\w+)*))?", text)
    assert len(named) > 15
    for file, tests in named:
        source = (ROOT / file).read_text()
        for test in filter(None, tests.split(", ")):
            assert re.search(rf"\b(test_)?{test}\(", source), f"{file}: {test}"


def test_a_block_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    # Fails when: what a block prints or raises is not looked at.
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nwriter.write(blob)\nawait writer.drian()\n```\n")
    (block,) = blocks(page)
    with pytest.raises(AssertionError, match=r'page.md", line 5(?s:.*)drian'):
        run(block)
