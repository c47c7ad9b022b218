"""The counters of one loop, as `loop.zc_stats()` gives them. A copy: it does not change afterwards.

Owns the fields and what they mean; metrics.py has their names in monitoring systems. Read by reactor.py.
Never: loses or renames a field; new ones are added at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FALLBACKS = ("ENOMEM", "ENOBUFS", "EOPNOTSUPP", "cap", "path")


@dataclass(frozen=True, slots=True)
class ZcStats:
    """Counters since the loop was made, and levels now. Bytes, unless named otherwise.

    Fields are stable: later versions may add some, and none changes its meaning. `dataclasses.asdict` gives
    them for JSON, `prometheus` as text for a scrape.

    backend: "uring" or "epoll".
    operations: zero-copy operations submitted; operations_live: not yet released.
    bytes: accepted from callers, by any method. requests: to the kernel, of which zc_requests asked
    for zero-copy, fixed_requests of them out of registered memory; parts: buffers gathered into them.
    notifications: releases told by the kernel, of which copied_reports said that it had copied (true
    for the first of a stack only).
    fallbacks: requests that went by copying, by reason: ENOMEM (RLIMIT_MEMLOCK), ENOBUFS
    (MSG_ZEROCOPY: net.core.optmem_max, or RLIMIT_MEMLOCK), EOPNOTSUPP (the socket cannot, or its
    error queue is somebody's), cap (over zc_transport_cap, or zc_loop_cap, which ENOMEM lowers for a
    while), path (adaptive: this connection's path copies anyway).
    queued_bytes: accepted and not sent. pinned_bytes: issued zero-copy and not released.
    stacks: zero-copy requests that ended a stack (see zc_eor_bytes in Settings).
    notification_turns: times that the completion queue was read and held at least one notification.
    direct_receives: receives straight into what the protocol got, not out of a buffer of the loop.
    timeouts: connections reset by zc_timeout.
    release_p50, release_p90, release_p99, release_max: seconds from the issue of a zero-copy request
    to its notification, of those that sent anything; 0.0 before the first one. The percentiles are
    upper bounds, at most an eighth too high.
    cq_overflows: times that the completion queue was full. connections: open, datagram sockets too.
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
    stacks: int
    notification_turns: int
    direct_receives: int
    timeouts: int
    release_p50: float
    release_p90: float
    release_p99: float
    release_max: float

    @property
    def parts_per_request(self) -> float:
        return self.parts / self.requests if self.requests else 0.0

    def prometheus(self, prefix: str = "aiozc", labels: Mapping[str, str] | None = None) -> str:
        """These counters in Prometheus' text format, for `Content-Type: text/plain; version=0.0.4`.

        labels: added to every line. ValueError: a name that Prometheus does not allow. Several loops of one
        process go into one text by `aiozc.metrics.prometheus`.
        """
        from .metrics import prometheus

        return prometheus([(self, labels)], prefix=prefix)

    @property
    def notifications_per_turn(self) -> float:
        """Of the turns that brought any."""
        return self.notifications / self.notification_turns if self.notification_turns else 0.0


def _end_us(bucket: int) -> int:
    """The first microsecond behind a bucket of azc_stats.release (aiozc.h has the rule)."""
    bucket += 1
    return bucket if bucket < 8 else (8 + bucket % 8) << (bucket // 8 - 1)


def percentiles(counts: Sequence[int], longest: float, shares: Sequence[float]) -> list[float]:
    """Seconds below which these shares of the releases lie; `counts` as in azc_stats.release."""
    total, seen, bucket = sum(counts), 0, 0
    found = []
    for share in shares:
        while seen < total * share:
            seen += counts[bucket]
            bucket += 1
        found.append(min(_end_us(bucket - 1) / 1e6, longest) if total else 0.0)
    return found


def read(native: Any, backend: str) -> ZcStats:
    """From the native `azc_stats`."""
    plain = {
        name: int(getattr(native, name))
        for name in ZcStats.__slots__
        if name not in ("backend", "fallbacks") and not name.startswith("release_")
    }
    fallbacks = {name: int(native.fallbacks[i]) for i, name in enumerate(_FALLBACKS)}
    longest = native.release_max_ns / 1e9
    p50, p90, p99 = percentiles(list(native.release), longest, (0.5, 0.9, 0.99))
    return ZcStats(
        backend=backend,
        fallbacks=fallbacks,
        release_p50=p50,
        release_p90=p90,
        release_p99=p99,
        release_max=longest,
        **plain,
    )
