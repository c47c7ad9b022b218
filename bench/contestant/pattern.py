"""The bytes that a pushing service sends: the pattern of load.c, so that its client can check them."""

from __future__ import annotations

PERIOD = 65521


def one_period() -> bytes:
    state = 2463534242
    period = bytearray(PERIOD)
    for i in range(PERIOD):
        state ^= state << 13 & 0xFFFFFFFF
        state ^= state >> 17
        state ^= state << 5 & 0xFFFFFFFF
        period[i] = state >> 24
    return bytes(period)


def pattern(size: int) -> bytes:
    return (one_period() * (size // PERIOD + 1))[:size]
