"""Hypercorn on an aiozc loop, as its users start it in a program of their own: APP PORT."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys

from hypercorn.asyncio import serve
from hypercorn.config import Config

import aiozc


async def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    config = Config()
    config.bind = [f"127.0.0.1:{sys.argv[2]}"]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    app = getattr(importlib.import_module(module), name)
    await serve(app, config, shutdown_trigger=stop.wait)


aiozc.run(main())
