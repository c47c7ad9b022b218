"""Stands in for uvloop: in uvloop's own tests, and in the interpreters that these start.

Names the loop under test by what uvloop's tests ask for. Their helpers (`uvloop._testbase`) come from the
sdist, by the path below; what only uvloop has (`uvloop.loop`) is not there. Found because ../../run.py
puts the folder above first on PYTHONPATH; the two variables are its too.
"""

import os

__path__.append(os.environ["CONFORMANCE_UVLOOP"])

if os.environ["CONFORMANCE_LOOP"] == "stock":
    import asyncio
    from asyncio import DefaultEventLoopPolicy as EventLoopPolicy
    from asyncio import SelectorEventLoop as Loop
    from asyncio import run

    def new_event_loop() -> asyncio.AbstractEventLoop:
        return Loop()

    def install() -> None:
        asyncio.set_event_loop_policy(EventLoopPolicy())
else:
    from aiozc import EventLoop as Loop
    from aiozc import EventLoopPolicy, install, new_event_loop, run

__all__ = ["EventLoopPolicy", "Loop", "install", "new_event_loop", "run"]
