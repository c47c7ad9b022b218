"""Rows without a network: how fast a loop runs what was scheduled on it.

Each workload is one batch and gives the number of its operations; it fails if one of them did not
run, ran twice, or in the wrong order. Batches are repeated for the measured window. The dialogue
with harness/measure.py is the one of the C clients: see load.h.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

BATCH = 10_000  # callbacks; and 1,000 tasks
TASKS = 1_000
DELAY = 0.001  # of timers; scheduling a batch takes longer, so that no loop gets to idle
PATIENCE = 10.0  # seconds that a batch may take before the loop counts as hung


def expect(good: bool, what: str) -> None:
    if not good:
        raise RuntimeError(what)


async def call_soon() -> int:
    """Many callbacks, then one turn of the loop runs them."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    seen: list[int] = []
    for i in range(BATCH):
        loop.call_soon(seen.append, i)
    loop.call_soon(done.set_result, None)
    await done
    expect(seen == list(range(BATCH)), "callbacks were lost, doubled or out of order")
    return BATCH


async def call_soon_chain() -> int:
    """Each callback schedules the next: one turn for each."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    left = BATCH

    def step() -> None:
        nonlocal left
        left -= 1
        if left:
            loop.call_soon(step)
        else:
            done.set_result(None)

    loop.call_soon(step)
    await done
    return BATCH


async def timers() -> int:
    """Timers that fire."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    fired = [0] * BATCH
    left = BATCH

    def fire(i: int) -> None:
        nonlocal left
        fired[i] += 1
        left -= 1
        if not left:
            done.set_result(None)

    for i in range(BATCH):
        loop.call_later(DELAY, fire, i)
    await done
    expect(fired == [1] * BATCH, "timers did not fire once each")
    return BATCH


def must_not_fire() -> NoReturn:
    raise RuntimeError("a cancelled timer fired")


async def timer_cancel() -> int:
    """Timers that are cancelled, as time limits usually are; and the loop's cleaning up."""
    loop = asyncio.get_running_loop()
    for _ in range(BATCH // TASKS):
        handles = [loop.call_later(60.0, must_not_fire) for _ in range(TASKS)]
        for handle in handles:
            handle.cancel()
        expect(all(handle.cancelled() for handle in handles), "a timer cannot be cancelled")
        await asyncio.sleep(0)
    return BATCH


async def sleep_zero() -> int:
    """One task that gives way to nobody."""
    for _ in range(BATCH):
        await asyncio.sleep(0)
    return BATCH


async def value(i: int) -> int:
    return i


async def gather() -> int:
    """Tasks that end at once."""
    found = await asyncio.gather(*(value(i) for i in range(TASKS)))
    expect(found == list(range(TASKS)), "results were lost or out of order")
    return TASKS


async def threadsafe() -> int:
    """A thread schedules callbacks as fast as it can."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    seen: list[int] = []

    def post() -> None:
        for i in range(BATCH):
            loop.call_soon_threadsafe(seen.append, i)
        loop.call_soon_threadsafe(done.set_result, None)

    thread = threading.Thread(target=post)
    thread.start()
    await done
    thread.join()
    expect(seen == list(range(BATCH)), "callbacks were lost, doubled or out of order")
    return BATCH


async def threadsafe_wake() -> int:
    """A thread schedules a callback, waits until it has run, and so on: the loop sleeps each time."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    ran = threading.Semaphore(0)
    answered: list[bool] = []

    def post() -> None:
        for _ in range(TASKS):
            loop.call_soon_threadsafe(ran.release)
            answered.append(ran.acquire(timeout=PATIENCE))
        loop.call_soon_threadsafe(done.set_result, None)

    thread = threading.Thread(target=post)
    thread.start()
    await done
    thread.join()
    expect(all(answered), "a callback from a thread did not wake the loop")
    return TASKS


WORKLOADS: dict[str, Callable[[], Awaitable[int]]] = {
    "call-soon": call_soon,
    "call-soon-chain": call_soon_chain,
    "timers": timers,
    "timer-cancel": timer_cancel,
    "sleep-0": sleep_zero,
    "gather": gather,
    "threadsafe": threadsafe,
    "threadsafe-wake": threadsafe_wake,
}


async def repeat(workload: Callable[[], Awaitable[int]], seconds: float) -> tuple[int, int]:
    """Operations, and nanoseconds that they took."""
    began = time.monotonic_ns()
    count = elapsed = 0
    while elapsed < seconds * 1e9:
        count += await workload()
        elapsed = time.monotonic_ns() - began
    return count, elapsed


async def measure(name: str, seconds: float, warmup: float) -> None:
    # Reading blocks the loop, which has nothing to do then.
    await repeat(WORKLOADS[name], warmup)
    print("ready", flush=True)
    sys.stdin.readline()
    count, elapsed = await repeat(WORKLOADS[name], seconds)
    print(count, elapsed, 0, 0, flush=True)
    sys.stdin.readline()
