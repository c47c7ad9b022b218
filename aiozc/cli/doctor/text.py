"""The doctor's report for people: plain lines, coloured by ANSI codes on a terminal.

Called by doctor/__init__.py with the dictionary that --json would print. Needs nothing but the standard
library, for it must run in the smallest container.
Never: decides anything; every word about good and bad comes with the report.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

_CODES = {"green": 32, "yellow": 33, "red": 31, "dim": 2, "bold": 1}
_STATUS = {
    "zero-copy": ("green", "usable zero-copy"),
    "fall-back": ("yellow", "fall-back: everything works, "),
    "broken": ("red", "broken"),
}
_SEVERITY = {"error": "red", "warning": "yellow", "info": "dim"}
_SECCOMP = {0: "none", 1: "strict", 2: "a filter"}
_WIDTH = 100
_LABEL = 12


class _Paint:
    def __init__(self, coloured: bool) -> None:
        self._coloured = coloured

    def __call__(self, colour: str, text: str) -> str:
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._coloured else text


def render(report: Mapping[str, Any], coloured: bool) -> str:
    paint = _Paint(coloured)
    width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH)
    colour, words = _STATUS[report["status"]]
    if report["status"] == "fall-back":
        by = {"msg_zerocopy": "zero-copy goes by MSG_ZEROCOPY"}
        words += by.get(report["engine"], "sends are copied")
    lines = [f"{paint('bold', 'aiozc ' + report['version'])}: {paint(colour, words)}", ""]
    for label, value in _facts(report, paint):
        if "\x1b" in value:  # short, and its length is not its width
            lines.append(f"{label:<{_LABEL}}{value}")
            continue
        lines += textwrap.wrap(
            value,
            width,
            initial_indent=f"{label:<{_LABEL}}",
            subsequent_indent=" " * _LABEL,
        )
    lines.append("")
    if not report["findings"]:
        lines.append(paint("green", "nothing to do"))
    for finding in report["findings"]:
        severity = finding["severity"]
        head = f"{severity}: "
        what = textwrap.wrap(head + finding["what"], width, subsequent_indent=" " * len(head))
        what[0] = paint(_SEVERITY[severity], head) + what[0][len(head) :]
        lines += what
        lines += textwrap.wrap(
            finding["remedy"], width, initial_indent="  -> ", subsequent_indent="     "
        )
    return "\n".join(lines)


def _facts(report: Mapping[str, Any], paint: _Paint) -> Iterator[tuple[str, str]]:
    limits, test = report["limits"], report["selftest"]
    yield "kernel", f"{report['kernel']} ({report['arch']})"
    yield "python", report["python"]
    # Before 2.4 it does not tell its version.
    yield "liburing", report["liburing"].replace("running unknown", "running one before 2.4")
    yield "backend", f"{report['backend'] or 'none'}: {report['reason']}"
    yield "features", ", ".join(n for n, has in report["features"].items() if has) or "none"
    if missing := [n for n, has in report["features"].items() if has is False]:
        yield "  missing", paint("yellow", ", ".join(missing))
    if unknown := [n for n, has in report["features"].items() if has is None]:
        yield "  not tried", ", ".join(unknown)
    yield "seccomp", _SECCOMP.get(limits["seccomp"], "unknown")
    disabled = limits["io_uring_disabled"]
    yield "sysctl", f"kernel.io_uring_disabled={'absent' if disabled is None else disabled}"
    yield "memlock", _memlock(limits)
    optmem = limits["optmem_max"]
    yield (
        "optmem",
        f"{'unknown' if optmem is None else optmem} (for MSG_ZEROCOPY; not used by io_uring)",
    )
    yield "capture", ", ".join(limits["captures"]) or "none"
    if test["ok"]:
        went = f"{test['bytes']} bytes sent, overwritten and compared over loopback: equal"
        counts = (
            f"{test['zero_copy_requests']} zero-copy requests, "
            f"{test['registered_requests']} of them from registered memory"
        )
        yield "self-test", f"{paint('green', 'ok')}, {went}"
        yield "", counts
    elif report["backend"] is None:
        yield "self-test", paint("red", "not run")
    else:
        yield "self-test", paint("red", "failed")


def _memlock(limits: Mapping[str, Any]) -> str:
    if limits["connections"] is None:
        why = "CAP_IPC_LOCK" if limits["memlock_bytes"] is not None else "no limit"
        return f"unlimited ({why})"
    mib = limits["pinnable_mib"]
    return f"{mib:g} MiB can be pinned: {limits['connections']} connections of a full request in flight"
