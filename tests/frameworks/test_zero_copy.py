"""On a path that does not copy, an unmodified application's bodies go zero-copy by themselves: the proof.

The path is the sink of bench/sink (two network namespaces, root); bench/asgi_child.py puts uvicorn's own
protocol on connections into it and hands it requests. Nothing is set: the loop is what
`--loop aiozc:new_event_loop` makes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiozc

pytest.importorskip("starlette", reason="needs the extra `frameworks`: make frameworks")
BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
from sink.sink import SinkError, missing, sink  # noqa: E402


@pytest.fixture(scope="module")
def path() -> Iterator[dict[str, Any]]:
    if wanted := missing():
        pytest.skip("the path `sink` needs: " + "; ".join(wanted))
    try:
        with sink() as given:
            yield given
    except SinkError as error:
        pytest.skip(str(error))


def serve(path: dict[str, Any], backend: str, route: str) -> dict[str, Any]:
    child = [sys.executable, str(BENCH / "asgi_child.py"), "aiozc", backend, route, "0.5", "0"]
    where = [path["tcp"]["4"], str(path["port"])]
    done = subprocess.run(
        ["ip", "netns", "exec", path["namespace"], *child, *where],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


# Fails when: OP_AUTO is not tried on new connections, or a memoryview body is copied first.
@pytest.mark.parametrize("route", ["/blob", "/view", "/large", "/halves"])
def test_bodies_go_zero_copy_by_themselves(path: Any, backend: str, route: str) -> None:
    figures = serve(path, backend, route)
    counted = figures["zc"]
    assert figures["answers"] > 20
    if backend == "epoll" and not aiozc.capabilities().features["msg_zerocopy"]:
        assert counted["zc_requests"] == 0
        return
    # A body of 1 MiB is at least one request, and the head before it goes with it or by copying.
    assert counted["zc_requests"] >= figures["answers"] * 0.9
    assert counted["copied_reports"] == 0, "the kernel copied after all"


# Chunks of 128 KiB: uvicorn joins each with its framing, and nobody else refers to what it writes. Such `bytes`
# are copied below 256 KiB (docs/architecture.md says why); `/halves` has chunks above it.
# Fails when: that rule goes.
@pytest.mark.parametrize("route", ["/json", "/chunked"])
def test_small_answers_and_small_chunks_are_copied(path: Any, backend: str, route: str) -> None:
    figures = serve(path, backend, route)
    assert figures["answers"] > 20
    assert figures["zc"]["zc_requests"] == 0
