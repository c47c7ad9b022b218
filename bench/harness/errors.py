"""What can go wrong: with the whole benchmark, or with one contestant in one row."""

from __future__ import annotations


class BenchmarkError(Exception):
    """Nothing can be measured; the message says why."""


class Failed(Exception):
    """A contestant failed in a row: no figure is given for it. The message is one line."""

    def __init__(self, reason: str, said: str = "") -> None:
        super().__init__(reason)
        self.said = said  # the end of what its processes wrote to their standard error
