"""os.execve for a process whose loop may have memory pinned.

Owns: nothing. Called by users who replace their program (a re-exec on upgrade).
Never: calls execve in a thread that ran a loop. There the kernel waits in execve, deaf to every signal,
until each notification has come: until each peer has acknowledged, or was reset; `loop.close()` before does
not help if it had to leave memory pinned. A thread that ends waits for nothing, and execve ends all threads
but the one that calls it. (Measured on Linux 6.18: tests/test_process_life.py.)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


def execve(
    path: str | bytes | os.PathLike[Any],
    args: Sequence[str | bytes],
    env: Mapping[str, str] | None = None,
) -> NoReturn:
    """Replace this process's program, as os.execve, at once even while the kernel reads pinned memory.

    env: None is os.environ. What the kernel accepted still reaches the peers, from the old pages. What was
    only queued is lost, as with os.execve: await `op.sent` before, or let `loop.close()` flush. OSError,
    TypeError, ValueError: os.execve's; then the program goes on.
    """
    failed: list[BaseException] = []

    def replace() -> None:
        try:
            os.execve(path, tuple(args), os.environ if env is None else env)
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=replace, name="aiozc-execve", daemon=True)
    thread.start()
    thread.join()
    raise failed[0]
