"""For the API page: "name: what it is" at the start of a docstring's line becomes an item of a list.

Called by mkdocstrings (mkdocs.yml), which reads docstrings as Markdown; in the source they are prose.
Never: changes a word.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*|[A-Z]\w*(?:Error|Exhausted)): ")


def listed(text: str) -> str:
    out: list[str] = []
    for line in text.splitlines():
        item = ITEM.match(line)
        ended = not out or not out[-1].strip() or out[-1].rstrip().endswith((".", ")", ":"))
        if item and ended:
            if out and out[-1].strip() and not out[-1].startswith(("- ", "    ")):
                out.append("")
            names = ", ".join(f"`{name}`" for name in item["names"].split(", "))
            out.append(f"- {names}: {line[item.end() :]}")
        else:
            out.append(line)
    return "\n".join(out)


class Lists(griffe.Extension):
    """Loaded by its name's file."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
