"""The counters of one loop, as `loop.zc_stats()` gives them. A copy: it does not change afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_FALLBACKS = ("ENOMEM", "ENOBUFS", "EOPNOTSUPP", "cap", "path")


@dataclass(frozen=True, slots=True)
class ZcStats:
    """Counters since the loop was made, and levels now. Bytes, unless named otherwise.

    operations: zero-copy operations submitted; operations_live: not yet released.
    bytes: accepted from callers, by any method. requests: to the kernel, of which zc_requests asked
    for zero-copy, fixed_requests of them out of registered memory; parts: buffers gathered into them.
    notifications: releases told by the kernel, of which copied_reports said that it had copied (true
    for the first of a stack only).
    fallbacks: requests that went by copying, by reason: ENOMEM (RLIMIT_MEMLOCK), ENOBUFS,
    EOPNOTSUPP (the socket cannot), cap (over zc_transport_cap or zc_loop_cap), path (adaptive: this
    connection's path copies anyway).
    queued_bytes: accepted and not sent. pinned_bytes: issued zero-copy and not released.
    enters: calls into io_uring_enter, or epoll_wait. enobufs: receives that found no free buffer.
    """

    backend: str
    operations: int
    operations_live: int
    bytes: int
    requests: int
    zc_requests: int
    fixed_requests: int
    parts: int
    notifications: int
    notifications_outstanding: int
    copied_reports: int
    fallbacks: dict[str, int]
    queued_bytes: int
    queued_peak: int
    pinned_bytes: int
    pinned_peak: int
    cq_overflows: int
    enters: int
    connections: int
    enobufs: int

    @property
    def parts_per_request(self) -> float:
        return self.parts / self.requests if self.requests else 0.0


def read(native: Any, backend: str) -> ZcStats:
    """From the native `azc_stats`."""
    plain = {
        name: int(getattr(native, name))
        for name in ZcStats.__slots__
        if name not in ("backend", "fallbacks")
    }
    fallbacks = {name: int(native.fallbacks[i]) for i, name in enumerate(_FALLBACKS)}
    return ZcStats(backend=backend, fallbacks=fallbacks, **plain)
