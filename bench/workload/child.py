"""The process that is measured: LOOP SERVICE WAY OPTIONS CORE [HOST PORT SECONDS].

OPTIONS: JSON. Without an address it listens, prints its port, serves until the end of its standard input, and
then prints what the kernel and the loop counted. With one it connects, pushes for SECONDS, and prints
figures of that window. LOOP: uvloop, asyncio, aiozc-uring, aiozc-epoll.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from workload.services import SERVICES

WARMUP = 0.3


def peaks() -> dict[str, Any]:
    """Resident memory is anonymous memory: the page cache of a mapping is nobody's growth."""
    status = Path("/proc/self/status").read_text()
    found = {"anonymous": int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024}  # type: ignore[index]
    loop: Any = asyncio.get_running_loop()
    if hasattr(loop, "zc_stats"):
        stats = loop.zc_stats()
        found["pinned"] = stats.pinned_peak
        found["zc_requests"] = stats.zc_requests
        found["requests"] = stats.requests
        found["copied_reports"] = stats.copied_reports
    return found


async def listen(service: Any) -> None:
    async def on_client(reader: Any, writer: Any) -> None:
        try:
            await service.on_client(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    if hasattr(service, "listen"):
        server = await service.listen()
    else:
        server = await asyncio.start_server(on_client, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    top = 0

    async def watch() -> None:
        nonlocal top
        while True:
            top = max(top, peaks()["anonymous"])
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    await loop.run_in_executor(None, sys.stdin.read)
    watching.cancel()
    told = service.told() if hasattr(service, "told") else {}
    print(json.dumps(peaks() | {"anonymous": top} | told), flush=True)
    os._exit(0)  # peers that never read would have it wait for them


async def push(service: Any, host: str, port: int, seconds: float) -> None:
    from serving_child import acked

    if hasattr(service, "connect"):
        writers = await service.connect(host, port)
    else:
        writers = [
            (await asyncio.open_connection(host, port))[1] for _ in range(service.connections)
        ]
    socks = [writer.get_extra_info("socket") for writer in writers]
    task = asyncio.create_task(service.push(writers))
    await asyncio.sleep(WARMUP)
    if hasattr(service, "times"):
        service.times.clear()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    went = sum(map(acked, socks))
    await asyncio.sleep(seconds)
    went = sum(map(acked, socks)) - went
    took, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
    if task.done():
        task.result()
    if hasattr(service, "end"):
        service.end()
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    gb = went / 1e9
    figures = {"cpu_s_per_gb": cpu / gb, "gb_per_s": gb / took, "busy": cpu / took, **peaks()}
    if hasattr(service, "told"):
        figures |= service.told()
    print(json.dumps(figures), flush=True)
    os._exit(0)


def main() -> None:
    name, service, way, options, core, *address = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    loop, _, backend = name.partition("-")

    async def run() -> None:
        made = SERVICES[service](way, json.loads(options))
        if address:
            await push(made, address[0], int(address[1]), float(address[2]))
        else:
            await listen(made)

    if loop == "uvloop":
        import uvloop

        uvloop.run(run())
    elif loop == "aiozc":
        import aiozc

        aiozc.run(run(), backend=backend)
    else:
        asyncio.run(run())


if __name__ == "__main__":
    main()
