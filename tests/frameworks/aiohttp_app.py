"""An aiohttp application; run by itself it is served as its users do: `web.run_app(..., loop=...)` on PORT."""

from __future__ import annotations

import asyncio
import hashlib
import sys

from aiohttp import WSMsgType, web

import aiozc


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def digest(request: web.Request) -> web.Response:
    found = hashlib.sha256()
    async for piece in request.content.iter_any():
        found.update(piece)
    return web.Response(text=found.hexdigest())


async def json(request: web.Request) -> web.Response:
    return web.json_response({"loop": type(asyncio.get_running_loop()).__name__})


async def websocket(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(max_msg_size=0)
    await socket.prepare(request)
    async for message in socket:
        if message.type is WSMsgType.BINARY:
            await socket.send_bytes(message.data)
    return socket


def make() -> web.Application:
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(
        [
            web.post("/echo", echo),
            web.post("/digest", digest),
            web.get("/json", json),
            web.get("/ws", websocket),
        ]
    )
    return app


if __name__ == "__main__":
    web.run_app(make(), host="127.0.0.1", port=int(sys.argv[1]), loop=aiozc.new_event_loop())
