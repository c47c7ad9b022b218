"""README.md as a package index shows it, where a link to a file of the tree leads nowhere.

With `Source` in pyproject's [project.urls] such links lead there (its tag of this version); without, they
become plain words with the file's name, which the sdist has, and the pictures go. Called by setup.py; `python
scripts/index_readme.py` prints it. Never: changes README.md.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# [words](file), or a picture with a ! before it; not of what has a scheme, or is a place of the same page.
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def rendered(text: str, source: str, tag: str) -> str:
    def link(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        if source:
            return f"{picture}[{words}]({source}/{'raw' if picture else 'blob'}/{tag}/{path})"
        if picture:
            return ""
        name = path.partition("#")[0]
        return words if words.rstrip("/") == name.rstrip("/") else f"{words} (`{name}`)"

    return re.sub(r"\n{3,}", "\n\n", RELATIVE.sub(link, text))


def readme(root: Path = ROOT) -> str:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = re.search(r'"(.*)"', (root / "aiozc/_version.py").read_text())
    assert version
    source = project.get("urls", {}).get("Source", "").rstrip("/")
    return rendered((root / "README.md").read_text(), source, f"v{version[1]}")


if __name__ == "__main__":
    sys.stdout.write(readme())
