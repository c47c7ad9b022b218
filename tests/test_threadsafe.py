"""call_soon_threadsafe: wake-ups are coalesced, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any


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
