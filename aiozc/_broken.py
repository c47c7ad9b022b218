"""What `import aiozc` says when the native modules cannot be loaded; `python -m aiozc doctor` says it too.

Called by `aiozc/__init__.py` alone. The command line is a module of the package, so it never runs when
the package cannot be imported: the doctor's answer for that case is given here, exit code 2.
Never: imports anything of this package.
"""

from __future__ import annotations

import json
import platform
import sys

_REMEDY = (
    "build it for this Python: `make build` in a clone, or `pip install --force-reinstall aiozc`; "
    "it needs gcc, liburing-dev and Python's headers to build, and then liburing.so.2 to run "
    "(a binary wheel of aiozc needs neither)"
)


def explain(error: ImportError) -> ImportError:
    """The error to raise. SystemExit instead, where the doctor was asked for."""
    # runpy imports the package with "-m" as the program's name, before it looks for __main__.
    if sys.argv[:2] == ["-m", "doctor"] and "aiozc" in sys.orig_argv:
        _say(error)
        raise SystemExit(2)
    return ImportError(f"aiozc's native modules cannot be loaded ({error}): {_REMEDY}")


def _say(error: ImportError) -> None:
    what = f"the native modules cannot be loaded: {error}"
    finding = {"id": "native", "severity": "error", "what": what, "remedy": _REMEDY}
    if "--json" in sys.argv:
        answer: dict[str, object] = {
            "status": "broken",
            "backend": None,
            "zerocopy": False,
            "reason": what,
            "kernel": platform.release(),
            "features": {},
            "limits": {},
            "findings": [finding],
        }
        print(json.dumps(answer, indent=2))
    else:
        print(f"broken: {what}\n  -> {_REMEDY}")
