"""call_soon, timers, waking: the native scheduler beside asyncio's own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import random
import signal
import socket
import sys
import threading
import time
import weakref
from asyncio import events

import pytest

import aiozc

BACKENDS = ["uring", "epoll"]


@pytest.fixture(params=BACKENDS)
def loop(request):
    made = aiozc.new_event_loop(backend=request.param)
    yield made
    if not made.is_closed():
        made.close()


@pytest.fixture
def pair(loop):
    stock = asyncio.SelectorEventLoop()
    yield loop, stock
    stock.close()


def turns(loop, n=1):
    async def some():
        for _ in range(n):
            await asyncio.sleep(0)

    loop.run_until_complete(some())


# -- handles --


def test_handles_are_asyncios_and_look_like_them(pair):
    for make in (
        lambda on: on.call_soon(print),
        lambda on: on.call_soon(print, 1),
        lambda on: on.call_soon(print, 1, 2, 3),
        lambda on: on.call_soon_threadsafe(print, 1),
        lambda on: on.call_at(5, print, 1),
        lambda on: on.call_at(7.5, print, 1, 2),
    ):
        ours, theirs = (make(on) for on in pair)
        assert isinstance(ours, type(theirs))
        assert repr(ours) == repr(theirs)
        assert ours._args == theirs._args
        assert ours._args is ours._args
        if isinstance(theirs, events.TimerHandle):
            assert ours.when() == theirs.when() and type(ours.when()) is type(theirs.when())
            assert ours == theirs and hash(ours) == hash(theirs) and ours <= theirs
            assert not ours < theirs
        ours.cancel(), theirs.cancel()
        assert ours.cancelled() is theirs.cancelled() is True
        assert (ours._callback, ours._args) == (theirs._callback, theirs._args) == (None, None)
        assert repr(ours) == repr(theirs)


def test_a_single_argument_is_kept_as_it_was_and_can_be_replaced(loop):
    seen = []
    argument = (1, 2)
    first, second = loop.call_soon(seen.append, argument), loop.call_soon(seen.append, 1)
    assert first._args == (argument,)
    second._args = ("other",)
    turns(loop)
    assert seen[0] is argument and seen[1] == "other"


def test_a_cancelled_handle_lets_its_callback_and_arguments_go(loop):
    class Thing:
        pass

    later = functools.partial(loop.call_later, 100)
    for schedule in (loop.call_soon, loop.call_soon_threadsafe, later):
        for n in (1, 2):
            things = [Thing() for _ in range(n)]
            gone = [weakref.ref(thing) for thing in things]
            handle = schedule(print, *things)
            del things
            handle.cancel()
            handle.cancel()
            assert [ref() for ref in gone] == [None] * n
    assert loop._timer_cancelled_count == 2


def test_a_cancelled_handle_keeps_its_repr_in_debug_mode(loop):
    handle = loop.call_soon(print, "what")
    loop.set_debug(True)
    handle.cancel()
    assert "print" in repr(handle)


@pytest.mark.skipif(not hasattr(events, "_ThreadSafeHandle"), reason="new in 3.14")
def test_cancelling_in_another_thread_waits_for_a_callback_that_runs(loop):
    # Fails when: the callback of call_soon_threadsafe() runs without its handle's lock.
    begun, ended, seen = threading.Event(), threading.Event(), []

    def callback(fails):
        begun.set()
        time.sleep(0.1)
        ended.set()
        if fails:
            raise ZeroDivisionError

    def other():
        begun.wait()
        handle.cancel()
        seen.append(ended.is_set())

    loop.set_exception_handler(lambda _, context: seen.append(type(context["exception"])))
    for fails in (False, True):  # the lock is free again in both cases
        begun.clear(), ended.clear()
        thread = threading.Thread(target=other)
        handle = loop.call_soon_threadsafe(callback, fails)
        thread.start()
        turns(loop, 2)
        thread.join(10)
        assert not thread.is_alive()
        assert handle.cancelled()
    assert sorted(map(str, seen)) == sorted(map(str, [True, True, ZeroDivisionError]))


@pytest.mark.skipif(not hasattr(events, "_ThreadSafeHandle"), reason="new in 3.14")
def test_a_callback_cancelled_while_its_lock_is_waited_for_does_not_run(loop):
    # Fails when: it is not asked once more whether the handle is cancelled, with the lock held.
    seen, locked = [], threading.Event()

    def other():
        with handle._lock:
            locked.set()
            time.sleep(0.1)  # meanwhile the loop waits for the lock
            handle.cancel()

    loop.set_exception_handler(lambda _, context: seen.append(context))  # None was called
    handle = loop.call_soon_threadsafe(seen.append, 1)
    thread = threading.Thread(target=other)
    thread.start()
    locked.wait()
    turns(loop, 2)
    thread.join(10)
    assert seen == []


@pytest.mark.skipif(not hasattr(events, "_ThreadSafeHandle"), reason="new in 3.14")
def test_a_replaced_run_of_thread_safe_handles_is_called(loop, monkeypatch):
    # Fails when: only Handle._run is looked at.
    seen = []
    original = events._ThreadSafeHandle._run

    def traced(handle):
        seen.append("traced")
        original(handle)

    loop.call_soon_threadsafe(seen.append, 1)
    turns(loop)
    monkeypatch.setattr(events._ThreadSafeHandle, "_run", traced)
    loop.call_soon_threadsafe(seen.append, 2)
    turns(loop)
    monkeypatch.undo()
    loop.call_soon_threadsafe(seen.append, 3)
    turns(loop)
    assert seen == [1, "traced", 2, 3]


@pytest.mark.parametrize("name", ["call_soon", "call_soon_threadsafe"])
def test_handles_can_be_referred_to_weakly_and_are_used_again(loop, name):
    # Fails when: a handle's memory is used again with its weak references in place.
    schedule = getattr(loop, name)
    for _ in range(3):
        handle = schedule(print)
        handle.cancel()
        ref = weakref.ref(handle)
        del handle
        turns(loop)
        again = [schedule(print) for _ in range(8)]  # in the memory of the dead ones
        assert ref() is None
        for handle in again:
            handle.cancel()


@pytest.mark.parametrize("name", ["call_soon", "call_soon_threadsafe", "call_later"])
def test_a_cycle_through_a_handle_that_ran_is_collected(loop, name):
    # Fails when: the turn does not tell the collector of a handle that somebody still holds.
    class Owner:
        def ran(self):
            pass

    async def main():
        owner = Owner()
        delay = [0] if name == "call_later" else []
        owner.handle = getattr(loop, name)(*delay, owner.ran)
        await asyncio.sleep(0.001)
        gone = weakref.ref(owner)
        del owner
        gc.collect()
        assert gone() is None

    loop.run_until_complete(main())


@pytest.mark.parametrize("how", ["head", "many"])
def test_a_cycle_through_a_cancelled_timer_is_collected(loop, how):
    # Fails when: a timer that leaves the heap cancelled, and is still held, is not the collector's.
    class Owner:
        pass

    async def main():
        gone = []
        for _ in range(1 if how == "head" else 200):
            owner = Owner()
            owner.handle = loop.call_later(10 if how == "head" else random.random() + 10, print)
            owner.handle.cancel()
            owner.handle._callback = owner  # None by now: a cycle that asyncio could have, too
            gone.append(weakref.ref(owner))
        del owner
        await asyncio.sleep(0)
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)

    loop.run_until_complete(main())


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("timer", [False, True])
@pytest.mark.filterwarnings("ignore:unclosed")
def test_a_dropped_loop_with_callbacks_that_wait_is_collected(when, timer):
    # Fails when: the end of a run does not tell the collector of what waits.
    def dropped():
        loop = aiozc.new_event_loop()
        held = [loop]

        def schedule():
            if timer:
                held.append(loop.call_later(100, held.append, held))
            else:
                held.append(loop.call_soon(held.append, held))

        if when == "before":
            schedule()
        else:
            loop.call_soon(loop.stop)
            loop.call_soon(schedule)
            loop.run_forever()
        return weakref.ref(loop)

    gone = dropped()
    gc.collect()
    assert gone() is None


def test_a_long_row_of_handles_dies_without_recursion(loop):
    handle = None
    for _ in range(200_000):
        handle = loop.call_soon(print, handle)
    loop._ready.clear()
    del handle


def test_the_ready_queue_is_what_asyncio_uses_it_as(loop):
    ready = loop._ready
    assert not ready and len(ready) == 0
    handles = [loop.call_soon(print, i) for i in range(200)]
    assert list(ready) == handles and ready[0] is handles[0] and handles[7] in ready
    assert ready.popleft() is handles[0]
    ready.appendleft(handles[0])
    ready.remove(handles[1])
    with pytest.raises(ValueError):
        ready.remove(handles[1])
    ready.extend(ready)
    assert len(ready) == 2 * 199
    ready.clear()
    with pytest.raises(IndexError):
        ready.popleft()
    with pytest.raises(IndexError):
        ready[0]
    loop._ready = handles[:3]
    assert list(loop._ready) == handles[:3]
    loop._ready.clear()
    references = [sys.getrefcount(handle) for handle in handles]
    assert len(set(references)) == 1


# -- timers --


@pytest.mark.parametrize("seed", range(20))
def test_timers_fire_in_asyncios_order_whatever_their_deadlines(pair, seed):
    # Fails when: the heap is not heapq's step by step. Equal deadlines show it.
    orders = []
    for on in pair:
        rng = random.Random(seed)
        order: list[int] = []
        now = on.time() - 10

        def more(on=on, rng=rng, order=order, now=now):
            handles = [on.call_at(now + rng.randrange(8), order.append, i) for i in range(400)]
            for handle in rng.sample(handles, rng.choice([5, 150, 350])):
                handle.cancel()

        more()
        on.call_soon(more)
        turns(on, 3)
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) > 50


def test_timers_of_asyncio_and_ours_share_one_heap(pair):
    orders = []
    for on in pair:
        rng = random.Random(1)
        order: list[int] = []
        now = on.time() - 10
        for i in range(300):
            on.set_debug(i % 3 == 0)  # asyncio's own call_at makes its own handle then
            on.call_at(now + rng.randrange(8), order.append, i)
        on.set_debug(False)
        turns(on, 2)
        orders.append(order)
    assert orders[0] == orders[1] and len(orders[0]) == 300


def test_debug_mode_goes_on_with_what_native_turns_left(loop):
    order: list[int] = []
    now = loop.time() - 1
    for i in (3, 1, 2):
        loop.call_at(now + i / 100, order.append, i)
    cancelled = loop.call_at(now, order.append, 0)
    cancelled.cancel()
    loop.set_debug(True)
    turns(loop, 2)
    assert order == [1, 2, 3]
    assert loop._timer_cancelled_count == 0 and not loop._scheduled


def test_wrong_calls_of_timers_are_told_as_asyncio_tells_them(pair):
    for name, args in (
        ("call_later", ()),
        ("call_later", (1,)),
        ("call_later", (None, print)),
        ("call_at", (None, print)),
        ("call_at", ()),
    ):
        told = []
        for on in pair:
            with pytest.raises(TypeError) as info:
                getattr(on, name)(*args)
            told.append(str(info.value))
        assert told[0] == told[1], name
        assert not pair[0]._scheduled


def test_other_numbers_are_deadlines_too(loop):
    from fractions import Fraction

    order = []
    now = loop.time()
    loop.call_at(int(now) - 1, order.append, 1)
    loop.call_at(Fraction(int(now) - 2), order.append, 0)
    loop.call_at(True, order.append, -1)
    loop.call_later(0, order.append, 2)
    loop.run_until_complete(asyncio.sleep(0.002))
    assert order == [-1, 0, 1, 2]


def test_what_a_derived_loop_replaces_is_used(request):
    asked = []

    class Mine(aiozc.EventLoop):
        def call_at(self, when, callback, *args, context=None):
            asked.append(when)
            return super().call_at(when, callback, *args, context=context)

        def time(self):
            return super().time() + 1000

    loop = Mine()
    try:
        began = time.monotonic()
        loop.run_until_complete(asyncio.sleep(0.01))
        assert asked[0] > began + 1000
        loop.time = lambda: 5.0
        assert loop.call_later(1, print).when() == 6.0
    finally:
        loop.close()


def test_a_timer_has_the_context_and_arguments_it_was_given(loop):
    import contextvars

    variable = contextvars.ContextVar("variable", default=0)
    context = contextvars.Context()
    context.run(variable.set, 1)
    seen = []
    loop.call_later(0, lambda *args: seen.append((variable.get(), args)), 1, 2, context=context)
    loop.call_later(0, lambda *args: seen.append((variable.get(), args)))
    loop.run_until_complete(asyncio.sleep(0.002))
    assert sorted(seen) == [(0, ()), (1, (1, 2))]


def test_a_hundred_thousand_timers_leave_no_reference(loop):
    token = object()

    async def main():
        before = sys.getrefcount(token)
        for _ in range(10):
            handles = [loop.call_later(0.0001, id, token) for _ in range(10_000)]
            for handle in handles[::3]:
                handle.cancel()
            del handles, handle
            await asyncio.sleep(0.001)
        assert not loop._scheduled
        await asyncio.sleep(0)
        assert sys.getrefcount(token) == before

    loop.run_until_complete(main())


# -- tasks and futures --


def test_tasks_are_made_as_asyncio_makes_them(pair):
    async def nothing():
        return asyncio.current_task().get_name()

    for on in pair:
        named = on.create_task(nothing(), name="mine")
        plain = on.create_task(nothing())
        assert type(named) is asyncio.Task
        assert on.run_until_complete(named) == "mine"
        assert on.run_until_complete(plain).startswith("Task-")
        made = []

        def factory(on, coro, made=made, **kwargs):
            made.append(coro)
            return asyncio.Task(coro, loop=on)

        on.set_task_factory(factory)
        on.run_until_complete(on.create_task(nothing()))
        assert len(made) == 1
        on.set_task_factory(None)
        coro = nothing()
        with pytest.raises(TypeError):
            on.create_task(coro, wrong=1)
        coro.close()
    coro = nothing()
    pair[0].close()
    with pytest.raises(RuntimeError, match="closed"):
        pair[0].create_task(coro)
    coro.close()


def test_futures_know_their_loop(loop):
    future = loop.create_future()
    assert type(future) is asyncio.Future and future.get_loop() is loop


# -- waking --


def test_threads_and_signals_wake_the_loop_at_once(loop):
    """Both write into one socket: neither is lost, whichever byte comes first."""
    signals, calls = [], []

    async def main():
        loop.add_signal_handler(signal.SIGUSR1, signals.append, 1)
        done = asyncio.Event()

        def post():
            for _ in range(200):
                loop.call_soon_threadsafe(calls.append, 1)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                time.sleep(0.0005)
            loop.call_soon_threadsafe(done.set)

        thread = threading.Thread(target=post)
        thread.start()
        async with asyncio.timeout(20):
            await done.wait()
        thread.join()
        await asyncio.sleep(0.01)
        loop.remove_signal_handler(signal.SIGUSR1)

    loop.run_until_complete(main())
    assert len(calls) == 200
    assert len(signals) > 20  # signals of one kind are not counted while one is pending


def test_a_thread_that_schedules_after_the_end_of_the_loop_is_told(loop):
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(print)


def test_a_chain_of_callbacks_does_not_keep_the_network_waiting(loop):
    # Fails when: the epoll backend counts turns, and not time, before it looks again.
    a, b = socket.socketpair()
    b.setblocking(False)
    pause = 0.0

    def chain():
        if pause >= 0:
            time.sleep(pause)
            loop.call_soon(chain)

    async def main():
        nonlocal pause
        late = []
        loop.call_soon(chain)
        for _ in range(5):
            read = asyncio.ensure_future(loop.sock_recv(b, 10))
            pause = 0.0
            await asyncio.sleep(0.02)  # hundreds of turns that find nothing
            pause = 0.01
            sent = time.monotonic()
            a.send(b"x")
            assert await read == b"x"
            late.append(time.monotonic() - sent)
        pause = -1
        assert sorted(late)[2] < 0.08

    with contextlib.closing(a), contextlib.closing(b):
        loop.run_until_complete(main())


def test_native_callbacks_alone_let_other_threads_run(loop):
    # Fails when: turns without a system call keep the GIL for ever.
    again = functools.partial(loop.call_soon)
    again.__setstate__((loop.call_soon, (again,), {}, {}))  # no Python code in it

    def too_late(*_):
        raise TimeoutError

    def end():
        time.sleep(0.01)
        loop.call_soon_threadsafe(loop.stop)

    thread = threading.Thread(target=end)
    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, 10)
    try:
        loop.call_soon(again)
        thread.start()
        loop.run_forever()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    thread.join()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_scheduled_in_whatever_order_is_collected_in_the_end(loop, seed):
    """Handles in cycles with their owners, kept, cancelled and dropped, in and out of debug mode, from two
    threads, while the collector runs all the time."""
    rng = random.Random(seed)
    kept: list[asyncio.Handle] = []
    owners = []

    class Owner:
        def run(self, *args):
            pass

    def schedule(owner):
        args = range(rng.randrange(4))
        kind = rng.randrange(3)
        if kind == 0:
            return loop.call_soon(owner.run, *args)
        if kind == 1:
            return loop.call_later(rng.random() * 0.002, owner.run, *args)
        return loop.call_at(loop.time() + rng.choice([0, 0.001, 100]), owner.run, *args)

    async def step():
        what = rng.randrange(8)
        if what == 0:
            await asyncio.sleep(0)
        elif what == 1 and kept:
            rng.choice(kept).cancel()
        elif what == 2 and kept:
            kept.pop(rng.randrange(len(kept)))
        elif what == 3:
            loop.set_debug(rng.random() < 0.3)
        elif what == 4:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random() / 1000):
                    await asyncio.sleep(rng.random() / 1000)
        else:
            owner = Owner()
            owner.handle = schedule(owner)
            owners.append(weakref.ref(owner))
            if rng.random() < 0.5:
                kept.append(owner.handle)

    async def main():
        over = threading.Event()

        def post():
            while not over.is_set():
                loop.call_soon_threadsafe(Owner().run, 1)
                time.sleep(0)

        thread = threading.Thread(target=post)
        thread.start()
        for _ in range(1000):
            await step()
        over.set()
        thread.join()
        loop.set_debug(False)

    threshold = gc.get_threshold()
    gc.set_threshold(50, 3, 3)
    try:
        loop.run_until_complete(main())
    finally:
        gc.set_threshold(*threshold)
    kept.clear()
    loop.close()
    gc.collect()
    assert len(owners) > 200
    assert not [ref for ref in owners if ref() is not None]
