"""A Starlette application as its users write one, and `/loop`, which tells what the loop below it did.

Served by uvicorn in tests/frameworks and by bench/workloads.py, which asks `/served` how many of the requests
that it measures were handled. Nothing here but `/loop` knows of aiozc.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

MIB = 1 << 20
BLOB = hashlib.shake_128(b"frameworks").digest(MIB)
SMALL = {
    "id": 7,
    "name": "item",
    "tags": ["a", "b", "c"],
    "values": list(range(80)),
}  # some 300 bytes
LARGE = {"rows": [hashlib.sha256(b"%d" % i).hexdigest() for i in range(15420)]}  # about 1 MiB


class Served:
    count = 0


async def small_json(request: Request) -> Response:
    Served.count += 1
    return JSONResponse(SMALL)


async def large_json(request: Request) -> Response:
    Served.count += 1
    return JSONResponse(LARGE)


async def blob(request: Request) -> Response:
    return Response(BLOB)


async def view(request: Request) -> Response:
    Served.count += 1
    return Response(memoryview(BLOB))


async def in_chunks(size: int) -> AsyncIterator[bytes]:
    for start in range(0, MIB, size):
        yield BLOB[start : start + size]


async def chunked(request: Request) -> Response:
    Served.count += 1
    return StreamingResponse(in_chunks(MIB // 8))


async def halves(request: Request) -> Response:
    return StreamingResponse(in_chunks(MIB // 2))


async def upload(request: Request) -> Response:
    digest = hashlib.sha256()
    async for part in request.stream():
        digest.update(part)
    return Response(digest.hexdigest())


async def served(request: Request) -> Response:
    return Response(b"%d" % Served.count)


async def loop_below(request: Request) -> Response:
    loop: Any = asyncio.get_running_loop()
    stats = loop.zc_stats()
    names = (
        "backend",
        "bytes",
        "requests",
        "zc_requests",
        "operations",
        "copied_reports",
        "pinned_bytes",
    )
    return JSONResponse(
        {"loop": f"{type(loop).__module__}.{type(loop).__name__}"}
        | {name: getattr(stats, name) for name in names}
    )


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    try:
        while True:
            await socket.send_bytes(await socket.receive_bytes())
    except WebSocketDisconnect:
        return


app = Starlette(
    routes=[
        Route("/json", small_json),
        Route("/large", large_json),
        Route("/blob", blob),
        Route("/view", view),
        Route("/chunked", chunked),
        Route("/halves", halves),
        Route("/upload", upload, methods=["POST"]),
        Route("/loop", loop_below),
        Route("/served", served),
        WebSocketRoute("/echo", echo),
    ]
)
