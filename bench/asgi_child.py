"""One run of an ASGI server's protocol in a namespace whose far end is a sink. Prints figures as JSON.

    LOOP BACKEND ROUTE SECONDS CORE HOST PORT

The sink (sink/) acknowledges and discards, so nobody there can ask. The connection is therefore made from here,
with uvicorn's own protocol on it, and the requests are handed to that protocol as if they had arrived; what
it answers is written to the transport as ever. So the figures are of parsing, the application, the
transport and the kernel's sending side, on a path that does not copy; not of receiving.

Used by workloads.py and by tests/frameworks. Imports aiozc only where it is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from serving_child import acked

WARMUP = 0.3
CONNECTIONS = 4


class Asked:
    """uvicorn's protocol, asked for `request` again whenever an answer was written."""

    def __init__(self, make: Any, request: bytes) -> None:
        self.protocol = make()
        self.request = request
        self.answers = 0
        self.going = True
        self.ended = asyncio.Event()
        # The protocol calls this after each answer.
        answered = self.protocol.on_response_complete

        def on_response_complete() -> None:
            answered()
            self.answers += 1
            if self.going:
                self.loop.call_soon(self.ask)
            else:
                self.ended.set()

        self.loop = asyncio.get_running_loop()
        self.protocol.on_response_complete = on_response_complete

    def ask(self) -> None:
        if self.protocol.transport.is_closing():
            self.ended.set()
        else:
            self.protocol.data_received(self.request)


async def main(route: str, seconds: float, host: str, port: int) -> dict[str, Any]:
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import ServerState

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "frameworks"))
    import starlette_app

    config = Config(starlette_app.app, log_level="warning", access_log=False, lifespan="off")
    config.load()
    state = ServerState()
    loop: Any = asyncio.get_running_loop()
    request = b"GET %b HTTP/1.1\r\nHost: sink\r\n\r\n" % route.encode()
    asked = []
    for _ in range(CONNECTIONS):
        one = Asked(lambda: HttpToolsProtocol(config, state, {}), request)
        await loop.create_connection(lambda protocol=one.protocol: protocol, host, port)
        asked.append(one)
    for one in asked:
        one.ask()
    await asyncio.sleep(WARMUP)
    socks = [one.protocol.transport.get_extra_info("socket") for one in asked]

    def count() -> tuple[int, int]:
        return sum(one.answers for one in asked), sum(map(acked, socks))

    before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    answers, went = count()
    await asyncio.sleep(seconds)
    took, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
    now = count()
    answers, went = now[0] - answers, now[1] - went
    for one in asked:
        one.going = False
    for one in asked:
        await asyncio.wait_for(one.ended.wait(), 10)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    figures: dict[str, Any] = {
        "requests_per_s": answers / took,
        "cpu_us": (user + system) / answers * 1e6,
        "user_us": user / answers * 1e6,
        "system_us": system / answers * 1e6,
        "gb_per_s": went / took / 1e9,
        "answers": answers,
    }
    if hasattr(loop, "zc_stats"):
        stats = loop.zc_stats()
        figures["zc"] = {
            name: getattr(stats, name)
            for name in (
                "requests",
                "zc_requests",
                "notifications",
                "copied_reports",
                "pinned_peak",
            )
        }
    for one in asked:
        one.protocol.transport.abort()
    return figures


def run() -> None:
    loop, backend, route, seconds, core, host, port = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    job = main(route, float(seconds), host, int(port))
    if loop == "uvloop":
        import uvloop

        figures = uvloop.run(job)
    elif loop == "aiozc":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        import aiozc

        figures = aiozc.run(job, backend=backend)
    else:
        figures = asyncio.run(job)
    print(json.dumps(figures))


if __name__ == "__main__":
    run()
