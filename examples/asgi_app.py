"""An ASGI application, with nothing of aiozc in it: what a server sends for it goes zero-copy by itself.

What it shows: uvicorn hands a body of `bytes`, or a read-only memoryview of bytes, to `transport.write()`
as it is. On an aiozc loop that is held by reference, and from 16 KiB on sent zero-copy where the path
does not copy. A body made anew for each request costs its making; one that is kept only its sending.

    uvicorn asgi_app:app --app-dir examples --loop aiozc:new_event_loop --port 8015
    hypercorn, gunicorn: see docs/compatibility.md

This file run by itself is the client, which checks every byte:

    python examples/asgi_app.py --port 8015 --rounds 10
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
from typing import Any

SIZE = 1 << 20
BLOB = hashlib.shake_128(b"blob").digest(SIZE)
QUARTERS = [BLOB[i : i + SIZE // 4] for i in range(0, SIZE, SIZE // 4)]
BODIES: dict[str, tuple[bytes, list[Any]]] = {
    "/json": (b"application/json", [json.dumps({"numbers": list(range(70))}).encode()]),
    "/blob": (b"application/octet-stream", [BLOB]),
    "/view": (b"application/octet-stream", [memoryview(BLOB)[SIZE // 2 :]]),
    "/parts": (b"application/octet-stream", QUARTERS),  # without a length: chunked
}


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "websocket":
        await echo(receive, send)
    elif scope["path"] in BODIES:
        kind, parts = BODIES[scope["path"]]
        headers = [(b"content-type", kind)]
        if len(parts) == 1:
            headers.append((b"content-length", b"%d" % len(parts[0])))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, part in enumerate(parts, start=1):
            more = number < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})
    else:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def echo(receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (event := await receive())["type"] == "websocket.receive":
        what = "bytes" if event.get("bytes") is not None else "text"
        await send({"type": "websocket.send", what: event[what]})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3, help="how often to get everything")
    args = parser.parse_args()
    received = 0
    try:
        connection = http.client.HTTPConnection(args.host, args.port, timeout=30)
        for path in [*BODIES] * args.rounds:
            connection.request("GET", path)
            got = connection.getresponse().read()
            if got != b"".join(BODIES[path][1]):
                raise ValueError(f"wrong data from {path}")
            received += len(got)
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise SystemExit(f"error: {exc}") from exc
    print(f"ok: {len(BODIES) * args.rounds} answers, {received} bytes, every byte checked")


if __name__ == "__main__":
    main()
