"""Streams over TLS, with the zero-copy calls on them: the same contract, and no gain.

What it shows: encryption makes new bytes, so over TLS every send copies; `zc_submit` and `zc_send` work all
the same, their `path` says "copied", and code that serves both kinds of connections needs no second branch.
The certificate is made on first use, by the program `openssl`, and trusted by the client as it is.

    python examples/echo_tls.py serve --port 8010
    python examples/echo_tls.py client --port 8010 --bytes 10000000
"""

from __future__ import annotations

import argparse
import asyncio
import random
import ssl
import subprocess
import tempfile
from pathlib import Path

import aiozc

CHUNK = 64 * 1024
CERTIFICATE = Path(tempfile.gettempdir()) / "aiozc-echo-tls.pem"  # with its key


def certificate(path: Path) -> Path:
    if not path.exists():
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30"
        )
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        files = ["-keyout", str(path), "-out", f"{path}.crt"]
        subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
        crt = Path(f"{path}.crt")
        path.write_text(path.read_text() + crt.read_text())
        crt.unlink()
    return path


async def serve(args: argparse.Namespace) -> None:
    served = 0
    enough = asyncio.Event()

    async def on_client(reader: asyncio.StreamReader, writer: aiozc.StreamWriter) -> None:
        nonlocal served
        try:
            while data := await reader.read(CHUNK):
                writer.zc_submit(data)
                await writer.zc_drain()  # encrypted, and accepted by the kernel
            writer.close()
            await writer.wait_closed()
        except (ConnectionError, ssl.SSLError):
            pass  # the client went away, or does not trust us
        finally:
            writer.close()
            served += 1
            if served == args.connections:
                enough.set()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate(args.cert))
    server = await aiozc.start_server(on_client, args.host, args.port, ssl=context)
    host, port = server.sockets[0].getsockname()[:2]
    print(f"listening on {host}:{port}", flush=True)
    async with server:
        await enough.wait()  # without --connections: until interrupted


async def client(args: argparse.Namespace) -> None:
    data = random.Random(args.bytes).randbytes(args.bytes)
    if not args.cert.exists():
        raise ValueError(f"no certificate {args.cert}: the server makes it, start that first")
    context = ssl.create_default_context(cafile=str(args.cert))
    reader, writer = await aiozc.open_connection(args.host, args.port, ssl=context)

    async def send() -> str:
        result = await writer.zc_send(data)
        return result.path

    async def check() -> None:
        for start in range(0, len(data), CHUNK):
            wanted = data[start : start + CHUNK]
            if await reader.readexactly(len(wanted)) != wanted:
                raise ValueError(f"wrong data within {len(wanted)} bytes from offset {start}")

    sending = asyncio.create_task(send())
    try:
        await check()
        path = await sending
    finally:
        sending.cancel()
        writer.close()
    print(f"ok: {len(data)} bytes echoed, every byte checked, path {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["serve", "client"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (serve only)")
    parser.add_argument("--backend", choices=["auto", "uring", "epoll"], default="auto")
    parser.add_argument("--connections", type=int, default=0, help="serve: end after so many")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="client: how much to send")
    parser.add_argument(
        "--cert", type=Path, default=CERTIFICATE, help="certificate and key, one file"
    )
    args = parser.parse_args()
    backend = None if args.backend == "auto" else args.backend
    try:
        aiozc.run(serve(args) if args.mode == "serve" else client(args), backend=backend)
    except (OSError, EOFError, ValueError) as exc:
        raise SystemExit(f"error: {exc}") from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
