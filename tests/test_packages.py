"""What a package must have, as far as that is seen without building one: `make wheel-check` does the rest."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import aiozc

ROOT = Path(__file__).resolve().parent.parent
# Of the repository, and of no use to who builds from the sdist.
NOT_SHIPPED = {".gitignore", ".ci/run"}

RELATIVE = re.compile(r"\]\((?![a-z]+:|#)")

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="not a source tree")


def setup_py(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *args],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_version_is_in_one_place() -> None:
    assert importlib.metadata.version("aiozc") == aiozc.__version__


def test_the_sdist_has_every_file_of_the_repository(tmp_path: Path) -> None:
    # Fails when: a kind of file, or a folder, is added and MANIFEST.in does not know it.
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if listed.returncode != 0:
        pytest.skip("not a clone")
    done = setup_py(
        "egg_info", "--egg-base", str(tmp_path), "sdist", "-d", str(tmp_path), AIOZC_NO_EXT="1"
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        has = {name.partition("/")[2] for name in sdist.getnames()}
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    assert not tracked - has - NOT_SHIPPED
    assert not [name for name in has if name.endswith((".so", ".o", ".pyc"))]


def test_what_an_index_shows_has_no_link_into_the_tree(tmp_path: Path) -> None:
    done = setup_py("egg_info", "--egg-base", str(tmp_path), AIOZC_NO_EXT="1")
    assert done.returncode == 0, done.stderr
    shown = next(tmp_path.glob("*/PKG-INFO")).read_text()
    assert "uvicorn app:app" in shown
    assert RELATIVE.search((ROOT / "README.md").read_text())  # else nothing is tested
    assert not RELATIVE.search(shown)


def test_links_of_the_readme_lead_to_the_source_once_it_has_an_address() -> None:
    rendered = runpy.run_path(str(ROOT / "scripts/index_readme.py"))["rendered"]
    text = "![a](p/a.svg) [b](docs/b.md#c) [d](https://e.org/f) [g](#h) [i/](i)"
    home = "https://forge.example/o/n"
    assert rendered(text, home, "v1") == (
        f"![a]({home}/raw/v1/p/a.svg) [b]({home}/blob/v1/docs/b.md#c) [d](https://e.org/f) [g](#h) "
        f"[i/]({home}/blob/v1/i)"
    )
    assert rendered(text, "", "v1") == " b (`docs/b.md`) [d](https://e.org/f) [g](#h) i/"


def test_liburing_is_not_linked_in_without_its_licence(tmp_path: Path) -> None:
    # Fails when: a wheel can be built with liburing inside and without the terms that go with it.
    other = tmp_path / "other.txt"
    other.write_text("All rights reserved.\n")
    for named in (tmp_path / "none.txt", other):
        done = setup_py("--version", AIOZC_STATIC_LIBURING="1", AIOZC_LIBURING_LICENSE=str(named))
        if "there is no" in done.stderr and "liburing.a" in done.stderr:
            pytest.skip("no static liburing here")
        assert done.returncode != 0
        assert "AIOZC_LIBURING_LICENSE=FILE" in done.stderr and str(named) in done.stderr
