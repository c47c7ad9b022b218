"""One benchmark at a time on a machine: the lock that bench/harness takes too, by the same file.

Called by options.py. Written twice on purpose: an installed package has no bench/, and bench/ runs on
interpreters without this package.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def only_benchmark() -> Iterator[None]:
    """Waits until no other benchmark runs on this machine, and keeps others waiting."""
    path = os.path.join(tempfile.gettempdir(), "aiozc-bench.lock")
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # O_CREAT is refused for another user's file in /tmp
        fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another benchmark ({path})", file=sys.stderr)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
