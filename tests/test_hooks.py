"""Each private part of asyncio that aiozc touches, against the Python that runs: a name that moved fails
here, by its name, and not in somebody's server."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
import weakref
from asyncio import base_events, constants, sslproto, transports
from typing import Any

import pytest

from aiozc import hooks


@pytest.mark.parametrize(
    "name",
    [
        "_accept_connection2",
        "_close_self_pipe",
        "_ensure_fd_no_transport",
        "_make_socket_transport",
        "_make_ssl_transport",
        "_process_events",
        "_run_once",
        "_sock_connect",
        "_start_serving",
        "_stop_serving",
    ],
)
def test_the_loop_methods_that_are_overridden_or_called_exist(name: str) -> None:
    assert callable(getattr(asyncio.SelectorEventLoop, name))


@pytest.mark.parametrize(
    "name", ["_make_socket_transport", "_make_ssl_transport", "_sock_connect", "_start_serving"]
)
def test_overridden_methods_take_what_asyncio_passes(name: str) -> None:
    import aiozc

    ours = inspect.signature(getattr(aiozc.EventLoop, name)).parameters
    theirs = inspect.signature(getattr(asyncio.SelectorEventLoop, name)).parameters
    assert set(theirs) <= set(ours), "asyncio passes something new"


def test_a_loop_has_the_attributes_that_transports_use() -> None:
    loop = asyncio.SelectorEventLoop()
    try:
        assert hasattr(loop, "_ready")
        assert hasattr(loop, "_transports")
        assert loop._ssock.fileno() >= 0  # type: ignore[attr-defined]
    finally:
        loop.close()


def test_the_flow_control_mixin_pauses_and_resumes() -> None:
    calls: list[str] = []

    class Protocol(asyncio.Protocol):
        def pause_writing(self) -> None:
            calls.append("pause")

        def resume_writing(self) -> None:
            calls.append("resume")

    class Transport(hooks.FlowControlMixin, asyncio.Transport):  # type: ignore[misc]
        size = 0

        def get_write_buffer_size(self) -> int:
            return self.size

    loop = asyncio.new_event_loop()
    try:
        transport: Any = Transport(None, loop)
        # Ours do not call this __init__: what it sets is what they start with.
        assert (transport._high_water, transport._low_water) == (hooks.HIGH_WATER, hooks.LOW_WATER)
        assert transport._protocol_paused is False
        assert transport.get_write_buffer_limits() == (hooks.LOW_WATER, hooks.HIGH_WATER)
        transport._protocol = Protocol()
        transport._set_write_buffer_limits(high=10, low=5)
        assert (transport._high_water, transport._low_water) == (10, 5)
        transport.size = 11
        transport._maybe_pause_protocol()
        assert transport._protocol_paused
        transport.size = 5
        transport._maybe_resume_protocol()
        assert calls == ["pause", "resume"]
    finally:
        loop.close()


def test_servers_count_their_transports() -> None:
    parameters = inspect.signature(base_events.Server._attach).parameters  # type: ignore[attr-defined]
    assert len(parameters) in (1, 2)
    assert (sys.version_info >= (3, 13)) == hooks._ATTACH_TAKES_TRANSPORT


def test_a_server_does_with_its_transports_what_a_plain_set_does_too() -> None:
    source = inspect.getsource(base_events.Server)
    used = set(re.findall(r"self\._clients\.(\w+)", source))
    assert used <= {"add", "discard", "copy"}, used
    assert ("self._clients = weakref.WeakSet()" in source) == hooks._ATTACH_TAKES_TRANSPORT

    class Server:
        _clients: Any = weakref.WeakSet()

    held = Server()
    hooks.keep_clients(held)
    assert type(held._clients) is set
    hooks.keep_clients(None)  # a listening socket without a Server

    other = Server()
    other._clients = weakref.WeakSet([held])
    hooks.keep_clients(other)
    assert set(other._clients) == {held} and type(other._clients) is weakref.WeakSet


def test_tls_has_the_parts_that_zero_copy_on_it_reads() -> None:
    source = inspect.getsource(sslproto.SSLProtocol)
    assert "self._transport" in source
    assert "self._write_buffer_size" in source
    held_back = inspect.getsource(sslproto.SSLProtocol._get_write_buffer_size)  # type: ignore[attr-defined]
    assert "self._outgoing.pending + self._write_buffer_size" in held_back
    assert "_ssl_protocol" in inspect.getsource(sslproto._SSLProtocolTransport)


def test_the_constants_are_there() -> None:
    assert constants.ACCEPT_RETRY_DELAY > 0
    assert constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES > 0
    assert constants._SendfileMode.TRY_NATIVE
    assert transports._FlowControlMixin is hooks.FlowControlMixin


def test_stream_writer_gets_the_methods_once_and_keeps_its_own() -> None:
    script = (
        "import asyncio\n"
        "before = set(vars(asyncio.StreamWriter))\n"
        "import aiozc\n"
        "assert set(vars(asyncio.StreamWriter)) == before, 'importing must change nothing'\n"
        "aiozc.new_event_loop().close()\n"
        "added = set(vars(asyncio.StreamWriter)) - before\n"
        "assert added == {'zc_send', 'zc_submit', 'zc_drain'}, added\n"
        "first = asyncio.StreamWriter.zc_send\n"
        "aiozc.new_event_loop().close()\n"
        "assert asyncio.StreamWriter.zc_send is first\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_loop_s_own_wake_up_is_the_one_that_is_overridden() -> None:
    for name in ("_write_to_self", "_read_from_self", "_make_self_pipe", "_close_self_pipe"):
        assert callable(getattr(asyncio.SelectorEventLoop, name))
        assert not inspect.signature(getattr(asyncio.SelectorEventLoop, name)).parameters.keys() - {
            "self"
        }


def test_datagram_endpoints_are_made_as_asyncio_makes_them() -> None:
    import aiozc

    ours = inspect.signature(aiozc.EventLoop._make_datagram_transport).parameters
    theirs = inspect.signature(asyncio.SelectorEventLoop._make_datagram_transport).parameters  # type: ignore[attr-defined]
    assert list(ours) == list(theirs)


def test_a_context_is_passed_where_asyncio_takes_one() -> None:
    assert hooks.context_keyword("it") == ({"context": "it"} if sys.version_info >= (3, 15) else {})
    accept = inspect.signature(asyncio.SelectorEventLoop._accept_connection2).parameters  # type: ignore[attr-defined]
    assert ("context" in accept) == bool(hooks.context_keyword("it"))


def test_a_stream_reader_has_the_parts_that_read_into_uses() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        for name in (
            "_buffer",
            "_eof",
            "_exception",
            "_transport",
            "_waiter",
            "_maybe_resume_transport",
        ):
            assert hasattr(reader, name), name

    asyncio.run(main())


def test_the_loop_has_what_a_turn_reads_and_few_attributes_of_its_own() -> None:
    # From the 31st on CPython 3.13 reaches all attributes of an object more slowly.
    import aiozc

    stock, ours = asyncio.SelectorEventLoop(), aiozc.new_event_loop()
    try:
        for name in (
            "_scheduled",
            "_ready",
            "_timer_cancelled_count",
            "_debug",
            "_stopping",
            "_closed",
        ):
            assert hasattr(stock, name), name
            assert name not in vars(ours), name  # it is a field
        assert stock._task_factory is None  # type: ignore[attr-defined]
        assert callable(stock._process_self_data)  # type: ignore[attr-defined]
        assert stock._csock.fileno() != stock._ssock.fileno()  # type: ignore[attr-defined]
        assert stock._clock_resolution > 0  # type: ignore[attr-defined]
        assert callable(stock._run_once)  # type: ignore[attr-defined]
        assert hooks.MIN_SCHEDULED > 0
        assert set(vars(ours)) - set(vars(stock)) == {"_reactor"}
    finally:
        stock.close()
        ours.close()
