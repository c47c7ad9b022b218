"""Bytes whose value tells their place: what every stream carries, and how the receiver checks it.

Used by both sides of every connection, in different processes. A stream is named by a number; byte `pos`
of stream `s` is BASE[(s * STRIDE + pos) % PERIOD], of a fixed random text. A byte that is wrong, lost, doubled,
out of place, or of another connection is seen at once, and comparing costs one memcmp.
"""

from __future__ import annotations

import random

PERIOD = 1_048_573  # a prime: no size that programs like divides it
LONGEST = 1 << 21  # one piece
STRIDE = 15_485_863
_TEXT = random.Random("aiozc soak").randbytes(PERIOD)
BASE = (_TEXT * (LONGEST // PERIOD + 2))[: PERIOD + LONGEST]
POISON = b"\xee" * LONGEST


def piece(stream: int, pos: int, size: int) -> bytes:
    start = (stream * STRIDE + pos) % PERIOD
    return BASE[start : start + size]


def first_wrong(stream: int, pos: int, data: bytes | bytearray) -> int | None:
    """The position in the stream of the first byte that differs; None if all are right."""
    start = (stream * STRIDE + pos) % PERIOD
    if BASE.startswith(data, start):
        return None
    want = BASE[start : start + len(data)]
    return pos + next(i for i, (a, b) in enumerate(zip(want, data, strict=False)) if a != b)


def describe(stream: int, pos: int, data: bytes | bytearray) -> str:
    """What stands at the first wrong place, and where in the stream those bytes belong."""
    wrong = first_wrong(stream, pos, data)
    assert wrong is not None
    got = bytes(data[wrong - pos : wrong - pos + 24])
    says = f"byte {wrong}: {got[:12].hex(' ')} instead of {piece(stream, wrong, 12).hex(' ')}"
    if got == POISON[: len(got)]:
        return f"{says} (memory that was given back and overwritten)"
    if len(got) >= 8 and (place := BASE.find(got)) >= 0:
        back = (place - stream * STRIDE) % PERIOD
        return f"{says} (bytes of place {back} modulo {PERIOD} of this stream, or of another one)"
    return says
