"""The counters of `loop.zc_stats()` for monitoring systems: Prometheus text, and OpenTelemetry instruments.

Owns the names, kinds and help texts that they have there (METRICS); stats.py has the values. Called by users
and by `ZcStats.prometheus`. Nothing here is imported, and nothing runs, before one of them is called.
Never: reads the counters of a running loop from another thread than the loop's.

Names are stable: one may be added, none changes its meaning. The table in docs/operations.md is made from here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loop import EventLoop
    from .stats import ZcStats

Labels = Mapping[str, str]
_Values = Iterable[tuple[Labels, float]]
_WAIT = 1.0  # seconds that an exporter's thread waits for the loop's


@dataclass(frozen=True, slots=True)
class Metric:
    """name: without prefix, and for a counter without `_total`. kind: "counter" or "gauge". unit: of UCUM."""

    name: str
    kind: str
    unit: str
    help: str
    read: Callable[[ZcStats], _Values]


def _plain(field: str) -> Callable[[ZcStats], _Values]:
    return lambda stats: [({}, getattr(stats, field))]


def _counter(name: str, unit: str, help: str, field: str = "") -> Metric:
    return Metric(name, "counter", unit, help, _plain(field or name))


def _gauge(name: str, unit: str, help: str, field: str = "") -> Metric:
    return Metric(name, "gauge", unit, help, _plain(field or name))


def _fallbacks(stats: ZcStats) -> _Values:
    return [({"reason": reason}, count) for reason, count in stats.fallbacks.items()]


def _release(stats: ZcStats) -> _Values:
    named = {"0.5": stats.release_p50, "0.9": stats.release_p90, "0.99": stats.release_p99}
    return [({"quantile": q}, value) for q, value in {**named, "1": stats.release_max}.items()]


METRICS: tuple[Metric, ...] = (
    Metric(
        "info",
        "gauge",
        "1",
        "Always 1; the label says which backend the loop runs on.",
        lambda stats: [({"backend": stats.backend}, 1)],
    ),
    _gauge("connections", "{connection}", "Open connections and datagram sockets."),
    _counter("operations", "{operation}", "Zero-copy operations submitted."),
    _gauge("operations_live", "{operation}", "Zero-copy operations not yet released."),
    _counter("accepted_bytes", "By", "Bytes accepted from callers, by any method.", "bytes"),
    _gauge("queued_bytes", "By", "Bytes accepted and not sent."),
    _gauge("queued_peak_bytes", "By", "Most bytes that were queued at once.", "queued_peak"),
    _gauge("pinned_bytes", "By", "Bytes issued zero-copy and not released."),
    _gauge("pinned_peak_bytes", "By", "Most bytes that were pinned at once.", "pinned_peak"),
    _counter("requests", "{request}", "Send requests to the kernel."),
    _counter("zc_requests", "{request}", "Of the requests, those that asked for zero-copy."),
    _counter("fixed_requests", "{request}", "Of those, the ones out of registered memory."),
    _counter("parts", "{part}", "Buffers gathered into the requests."),
    Metric(
        "fallbacks",
        "counter",
        "{request}",
        "Requests that went by copying instead, by reason.",
        _fallbacks,
    ),
    _counter("notifications", "{notification}", "Releases told by the kernel."),
    _gauge(
        "notifications_outstanding",
        "{notification}",
        "Requests whose release the kernel still owes.",
    ),
    _counter("copied_reports", "{notification}", "Of the releases, those that told of a copy."),
    _counter("notification_turns", "{turn}", "Turns of the loop that brought a release."),
    _counter("stacks", "{request}", "Zero-copy requests that ended a stack."),
    Metric(
        "release_seconds",
        "gauge",
        "s",
        "Time from the issue of a zero-copy request to its release, since the loop was made; "
        "quantile 1 is the longest.",
        _release,
    ),
    _counter(
        "direct_receives",
        "{receive}",
        "Receives straight into what the protocol got.",
    ),
    _counter("timeouts", "{connection}", "Connections reset by zc_timeout."),
    _counter("enters", "{call}", "Calls of io_uring_enter, or epoll_wait."),
    _counter("cq_overflows", "{overflow}", "Times that the completion queue was full."),
    _counter("enobufs", "{receive}", "Receives that found no free buffer."),
)
# What METRICS puts into labels itself.
_RESERVED = {"backend", "reason", "quantile"}


# -- Prometheus --


def prometheus(loops: Iterable[tuple[ZcStats, Labels | None]], *, prefix: str = "aiozc") -> str:
    """The text format 0.0.4 (`Content-Type: text/plain; version=0.0.4`) of several loops' counters.

    loops: the counters, and the labels that tell them apart. ValueError: a prefix or label that Prometheus
    does not allow, or two loops with the same labels. For one loop: `loop.zc_stats().prometheus()`.
    """
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
        raise ValueError(f"prefix must match [a-zA-Z_:][a-zA-Z0-9_:]*, and {prefix!r} does not")
    given = [(stats, dict(labels or {})) for stats, labels in loops]
    seen: set[str] = set()
    for _, labels in given:
        _check(labels)
        if (written := _labels(labels)) in seen:
            raise ValueError(
                f"two loops have the labels {labels}; give each one that tells it apart"
            )
        seen.add(written)
    lines = []
    for metric in METRICS:
        # In this format a counter's suffix is part of the name that TYPE and HELP have.
        name = f"{prefix}_{metric.name}{'_total' if metric.kind == 'counter' else ''}"
        lines.append(f"# HELP {name} {metric.help}")
        lines.append(f"# TYPE {name} {metric.kind}")
        for stats, labels in given:
            for own, value in metric.read(stats):
                lines.append(f"{name}{_labels({**labels, **own})} {value}")
    return "\n".join(lines) + "\n"


def _check(labels: Labels) -> None:
    for name in labels:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
            raise ValueError(
                f"{name!r} is no name for a label: letters, digits and _, no digit first, not __ first"
            )
        if name in _RESERVED:
            raise ValueError(f"the label {name!r} is used by aiozc itself; choose another name")


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    escape = {"\\": r"\\", '"': r"\"", "\n": r"\n"}
    told = (
        f'{name}="{"".join(escape.get(c, c) for c in str(value))}"'
        for name, value in sorted(labels.items())
    )
    return "{" + ",".join(told) + "}"


# -- OpenTelemetry --


class Observation:
    """What `observe` gives back: `close()` ends it. The loop is not kept alive by it."""

    def __init__(self, loop: EventLoop, attributes: Labels) -> None:
        self._loop = weakref.ref(loop)
        self._attributes = dict(attributes)
        self._last = loop.zc_stats()
        self._told: set[str] = set()  # metrics that this reading was given for
        self._closed = False

    def close(self) -> None:
        """The loop is reported no more. Idempotent."""
        self._closed = True

    def _stats_for(self, metric: Metric) -> ZcStats | None:
        """One reading serves one export: it is taken anew when a metric comes again. None: it is over."""
        loop = None if self._closed else self._loop()
        if loop is None:
            return None
        if metric.name in self._told:
            self._told.clear()
        if not self._told:
            self._read(loop)
        self._told.add(metric.name)
        return self._last

    def _read(self, loop: EventLoop) -> None:
        if loop.is_closed() or _runs_here(loop):
            self._last = loop.zc_stats()
        elif loop.is_running():
            asked: concurrent.futures.Future[ZcStats] = concurrent.futures.Future()
            try:
                loop.call_soon_threadsafe(lambda: asked.set_result(loop.zc_stats()))
                self._last = asked.result(_WAIT)
            except (RuntimeError, TimeoutError):
                return  # it was closed meanwhile, or is busy: what it told last


def _runs_here(loop: EventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


_lock = threading.Lock()
# By meter and prefix: the instruments are made once, and report every loop that is observed with them.
_observed: weakref.WeakKeyDictionary[Any, dict[str, list[Observation]]] = (
    weakref.WeakKeyDictionary()
)


def observe(
    loop: EventLoop,
    meter: Any = None,
    *,
    prefix: str = "aiozc",
    attributes: Labels | None = None,
) -> Observation:
    """Report this loop's counters by OpenTelemetry: observable counters and gauges, read by each export.

    meter: an OpenTelemetry Meter; None: the global provider's, named "aiozc". attributes: to tell several loops
    of a process apart. Call it where the loop runs, or before it does. Between two exports it costs nothing; an
    exporter in another thread has the loop read the counters. ImportError: without opentelemetry-api
    (`pip install 'aiozc[otel]'`).
    """
    try:
        from opentelemetry import metrics as api
    except ImportError as error:
        raise ImportError(
            "opentelemetry-api is not installed; install it with: pip install 'aiozc[otel]'"
        ) from error
    told = dict(attributes or {})
    if taken := _RESERVED & told.keys():
        raise ValueError(
            f"the attributes {sorted(taken)} are used by aiozc itself; choose other names"
        )
    if meter is None:
        meter = api.get_meter("aiozc")
    seen = Observation(loop, told)
    with _lock:
        by_prefix = _observed.setdefault(meter, {})
        observations = by_prefix.get(prefix)
        if observations is None:
            observations = by_prefix[prefix] = []
            for metric in METRICS:
                make = (
                    meter.create_observable_counter
                    if metric.kind == "counter"
                    else meter.create_observable_gauge
                )
                make(
                    f"{prefix}.{metric.name}",
                    callbacks=[_callback(metric, observations, api)],
                    unit=metric.unit,
                    description=metric.help,
                )
        observations.append(seen)
    return seen


def _callback(
    metric: Metric, observations: list[Observation], api: Any
) -> Callable[[Any], Iterator[Any]]:
    def read(_options: Any) -> Iterator[Any]:
        for observation in list(observations):
            stats = observation._stats_for(metric)
            if stats is None:
                with _lock:
                    if observation in observations:
                        observations.remove(observation)
                continue
            for own, value in metric.read(stats):
                yield api.Observation(value, {**observation._attributes, **own})

    return read
