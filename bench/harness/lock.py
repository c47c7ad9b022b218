"""One benchmark at a time on a machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def only_benchmark() -> Iterator[None]:
    """Waits until no other benchmark runs on this machine, and keeps others waiting."""
    path = Path(tempfile.gettempdir()) / "aiozc-bench.lock"
    # Without O_CREAT where it exists: another user's file in /tmp may refuse that flag.
    fd = os.open(path, os.O_RDONLY if path.exists() else os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another benchmark ({path})", file=sys.stderr)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
