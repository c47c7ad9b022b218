"""What can go wrong in a benchmark. Raised by its parts; options.py puts them into words."""

from __future__ import annotations


class BenchError(Exception):
    """The whole run cannot go on; the message says why, and the remedy."""


class WrongData(BenchError):
    """The receiver got a byte that was never sent there: no figure of this run is worth anything."""


class RowFailed(Exception):
    """This row counts for nothing; the others go on."""
