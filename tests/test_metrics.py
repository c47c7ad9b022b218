"""The counters in monitoring systems: Prometheus' text as its own parser reads it, OpenTelemetry by its reader.

What the counters count is other files' business; here each is only found again under its name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
import threading
from typing import Any

import pytest
from support import in_thread, soon, stalled

import aiozc
from aiozc import metrics

RESERVED = ("reason", "quantile", "backend")


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation and family.type in ("counter", "gauge"), family
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


async def sent_something() -> aiozc.ZcStats:
    async with stalled() as (peer, writer):
        await soon(writer.zc_submit(b"m" * 100_000).sent)
        assert await peer.take(100_000) == b"m" * 100_000
        return asyncio.get_running_loop().zc_stats()  # type: ignore[attr-defined]


def distinct() -> aiozc.ZcStats:
    """Every number another one: a name that shows the wrong field is found."""
    numbers = {
        field.name: float(n) if field.type == "float" else n
        for n, field in enumerate(dataclasses.fields(aiozc.ZcStats), 1000)
    }
    fallbacks = {"ENOMEM": 1, "ENOBUFS": 2, "EOPNOTSUPP": 3, "cap": 4, "path": 5}
    return aiozc.ZcStats(**{**numbers, "backend": "uring", "fallbacks": fallbacks})


def test_every_counter_is_in_prometheus_text_under_its_name() -> None:
    # Fails when: a metric reads another field, or one of the fields is in none.
    stats = distinct()
    found = parsed(stats.prometheus())
    renamed = {
        "bytes": "accepted_bytes_total",
        "queued_peak": "queued_peak_bytes",
        "pinned_peak": "pinned_peak_bytes",
    }
    quantiles = {"release_p50": "0.5", "release_p90": "0.9", "release_p99": "0.99"}
    expected: dict[Any, float] = {("aiozc_info", (("backend", "uring"),)): 1.0}
    levels = {"operations_live", "notifications_outstanding", "queued_bytes", "pinned_bytes"}
    for name, value in dataclasses.asdict(stats).items():
        if name == "backend":
            continue
        if name == "fallbacks":
            for reason, count in value.items():
                expected["aiozc_fallbacks_total", (("reason", reason),)] = count
        elif name.startswith("release_"):
            key = (("quantile", quantiles.get(name, "1")),)
            expected["aiozc_release_seconds", key] = value
        elif name in levels or name == "connections":
            expected[f"aiozc_{name}", ()] = value
        else:
            expected[f"aiozc_{renamed.get(name, name + '_total')}", ()] = value
    assert found == expected


def test_a_live_loop_is_scraped(run: Any, backend: str) -> None:
    stats = run(sent_something())
    found = parsed(stats.prometheus(prefix="shop_zc", labels={"worker": "3"}))
    label = ("worker", "3")
    assert found["shop_zc_operations_total", (label,)] == 1
    assert found["shop_zc_accepted_bytes_total", (label,)] == 100_000
    assert found["shop_zc_info", (("backend", backend), label)] == 1


def test_several_loops_go_into_one_text() -> None:
    stats = distinct()
    pairs = [(stats, {"loop": name}) for name in ("a", "b")]
    text = metrics.prometheus(pairs)
    assert text.count("# TYPE aiozc_requests_total counter\n") == 1
    found = parsed(text)
    assert {key for key in found if key[0] == "aiozc_requests_total"} == {
        ("aiozc_requests_total", (("loop", name),)) for name in ("a", "b")
    }
    with pytest.raises(ValueError, match="two loops have the labels"):
        metrics.prometheus([pairs[0], pairs[0]])


def test_values_of_labels_are_escaped() -> None:
    # Fails when: quotes, backslashes or line ends go out as they are.
    value = 'a "quoted" \\ and\na second line'
    found = parsed(distinct().prometheus(labels={"path": value}))
    assert ("aiozc_requests_total", (("path", value),)) in found


@pytest.mark.parametrize("prefix", ["", "1st", "a-b", "a b", "ä"])
def test_a_prefix_that_prometheus_does_not_allow_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix must match"):
        distinct().prometheus(prefix=prefix)


@pytest.mark.parametrize("label", ["", "1st", "a-b", "__name__", "a:b", *RESERVED])
def test_a_label_that_prometheus_does_not_allow_or_that_is_taken_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="label"):
        distinct().prometheus(labels={label: "x"})


def test_counters_serve_as_json() -> None:
    stats = distinct()
    assert aiozc.ZcStats(**dataclasses.asdict(stats)) == stats


def test_metrics_that_nobody_asked_for_are_not_even_imported() -> None:
    # Fails when: aiozc/__init__.py or stats.py imports metrics, or that opentelemetry, at its head.
    code = (
        "import aiozc, sys\n"
        "async def main():\n"
        "    import asyncio; asyncio.get_running_loop().zc_stats()\n"
        "aiozc.run(main())\n"
        "assert 'aiozc.metrics' not in sys.modules\n"
        "import aiozc.metrics\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- OpenTelemetry --


@pytest.fixture
def reader() -> Any:
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    return export.InMemoryMetricReader()


@pytest.fixture
def meter(reader: Any) -> Any:
    from opentelemetry.sdk.metrics import MeterProvider

    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    yield provider.get_meter("test")
    provider.shutdown()


def collected(reader: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    data = reader.get_metrics_data()
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    found[metric.name, tuple(sorted(point.attributes.items()))] = point.value
    return found


def test_opentelemetry_reads_a_running_loop_from_another_thread(
    run: Any, backend: str, reader: Any, meter: Any
) -> None:
    async def main() -> None:
        metrics.observe(asyncio.get_running_loop(), meter, attributes={"loop": "main"})  # type: ignore[arg-type]
        for round in (1, 2):
            await sent_something()
            found = await in_thread(lambda: collected(reader))
            loop = ("loop", "main")
            assert found["aiozc.operations", (loop,)] == round
            assert found["aiozc.accepted_bytes", (loop,)] == round * 100_000
            assert found["aiozc.info", (("backend", backend), loop)] == 1
            assert found["aiozc.fallbacks", (loop, ("reason", "ENOMEM"))] == 0
            assert len({name for name, _ in found}) == len(metrics.METRICS)

    run(main())


def test_a_running_loops_counters_are_read_on_its_own_thread_once_an_export(
    run: Any, reader: Any, meter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fails when: the exporter's thread reads native memory itself, or each instrument asks the loop.
    readers: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        metrics.observe(loop, meter)  # type: ignore[arg-type]
        real = loop._reactor.zc_stats  # type: ignore[attr-defined]

        def counted() -> aiozc.ZcStats:
            readers.append(threading.get_ident())
            return real()

        monkeypatch.setattr(loop._reactor, "zc_stats", counted)  # type: ignore[attr-defined]
        await in_thread(lambda: collected(reader))
        assert readers == [threading.get_ident()]
        collected(reader)  # on the loop's own thread: it cannot be waited for
        assert readers == [threading.get_ident()] * 2

    run(main())


def test_a_loop_that_is_busy_reports_what_it_told_last(
    run: Any, reader: Any, meter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fails when: an export waits for a loop that does not answer.
    monkeypatch.setattr(metrics, "_WAIT", 0.1)

    async def main() -> None:
        metrics.observe(asyncio.get_running_loop(), meter)  # type: ignore[arg-type]
        box: list[Any] = []
        thread = threading.Thread(target=lambda: box.append(collected(reader)), daemon=True)
        thread.start()
        thread.join(20)  # the loop stands still meanwhile
        assert not thread.is_alive(), "the export still waits"
        assert box[0]["aiozc.operations", ()] == 0

    run(main())


def test_a_closed_loop_reports_its_last_counters_and_a_dropped_one_nothing(
    loop_factory: Any, reader: Any, meter: Any
) -> None:
    # Fails when: an observation keeps its loop alive.
    loop = loop_factory()
    try:
        metrics.observe(loop, meter)
        loop.run_until_complete(sent_something())
    finally:
        loop.close()
    assert collected(reader)["aiozc.operations", ()] == 1
    del loop
    gc.collect()
    assert collected(reader) == {}


def test_several_loops_share_a_meters_instruments_and_one_can_be_closed(
    loop_factory: Any, reader: Any, meter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Fails when: each loop makes instruments of its own (OpenTelemetry warns of the second).
    loops = {name: loop_factory() for name in ("a", "b")}
    try:
        seen = {
            name: metrics.observe(loop, meter, attributes={"loop": name})
            for name, loop in loops.items()
        }
        assert {at for name, at in collected(reader) if name == "aiozc.requests"} == {
            (("loop", "a"),),
            (("loop", "b"),),
        }
        seen["a"].close()
        seen["a"].close()
        assert {at for name, at in collected(reader) if name == "aiozc.requests"} == {
            (("loop", "b"),)
        }
        assert not caplog.records
    finally:
        for loop in loops.values():
            loop.close()


def test_attributes_that_aiozc_uses_itself_are_refused(loop_factory: Any, meter: Any) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        with pytest.raises(ValueError, match="used by aiozc itself"):
            metrics.observe(runner.get_loop(), meter, attributes={"reason": "x"})  # type: ignore[arg-type]


def test_without_opentelemetry_the_remedy_is_named(
    loop_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        with pytest.raises(ImportError, match=r"pip install 'aiozc\[otel\]'"):
            metrics.observe(runner.get_loop())  # type: ignore[arg-type]
