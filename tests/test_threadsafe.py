"""call_soon_threadsafe: wake-ups are coalesced, and none is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest


def test_a_hundred_thousand_calls_from_four_threads_all_arrive(run: Any) -> None:
    # Fails when: the flag that coalesces wake-ups stays set with an empty wake-up socket. The threads
    # pause in between, so the loop falls asleep again and again.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        each, arrived, began = 25_000, 0, loop.time()
        done = loop.create_future()

        def count() -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 4 * each:
                done.set_result(None)

        def call(seed: int) -> None:
            pause = threading.Event()
            for i in range(each):
                loop.call_soon_threadsafe(count)
                if i % (7 + seed) == 0:
                    pause.wait(0.00001)

        threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(done, 50)
        assert loop.time() - began < 30, "only the time limit woke the loop"
        for thread in threads:
            thread.join()

    run(main())


def test_each_wake_up_of_a_sleeping_loop_is_answered(run: Any) -> None:
    async def main() -> None:
        for _ in range(2000):
            await asyncio.wait_for(asyncio.to_thread(lambda: None), 5)

    run(main())


def test_a_signal_is_told_that_came_together_with_a_call_of_a_thread(run: Any) -> None:
    # Fails when: to have heard the bell is taken for having read the wake-up socket, too.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(50):
            signalled, called = loop.create_future(), loop.create_future()
            loop.add_signal_handler(signal.SIGUSR1, signalled.set_result, None)
            os.kill(os.getpid(), signal.SIGUSR1)
            loop.call_soon_threadsafe(called.set_result, None)
            await asyncio.wait_for(asyncio.gather(signalled, called), 5)
        loop.remove_signal_handler(signal.SIGUSR1)

    run(main())


def test_wake_ups_go_on_when_debug_mode_comes_and_goes(run: Any) -> None:
    # Fails when: a ring of before stays unheard in debug mode, or a byte of it afterwards: the flag
    # stays set then, and the next thread wakes nobody.
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for debug in (True, False, True, False):
            loop.call_soon_threadsafe(lambda: None)
            loop.set_debug(debug)
            for _ in range(3):
                await asyncio.sleep(0.01)
                await asyncio.wait_for(asyncio.to_thread(lambda: None), 5)

    run(main())


@pytest.mark.parametrize("debug", [False, True])
def test_a_loop_that_was_rung_sleeps_again(run: Any, debug: bool) -> None:
    # Fails when: the bell is not read, in debug mode by what asyncio calls.
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: None)
        loop.set_debug(debug)
        await asyncio.sleep(0.01)
        before = loop.zc_stats().enters
        await asyncio.sleep(0.1)
        assert loop.zc_stats().enters - before < 20

    run(main())
