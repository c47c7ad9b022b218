"""Arrays and tables as payloads: memory of numpy and Arrow goes out as it lies, and comes in where it shall."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiozc

pyarrow = pytest.importorskip("pyarrow")


async def transfer(parts: list[Any], receive: Any) -> Any:
    """Sends parts by one operation on one connection; what `receive(reader)` made of them on the other end."""
    result = asyncio.get_running_loop().create_future()

    async def on_client(reader: asyncio.StreamReader, writer: aiozc.StreamWriter) -> None:
        try:
            result.set_result(await receive(reader))
        except Exception as exc:
            result.set_exception(exc)
        finally:
            writer.close()

    server = await aiozc.start_server(on_client, "127.0.0.1", 0)
    _, writer = await aiozc.open_connection(*server.sockets[0].getsockname())
    sent = await writer.zc_send(parts)
    assert sent.nbytes == sum(memoryview(part).nbytes for part in parts)
    writer.write_eof()
    try:
        return await result
    finally:
        writer.close()
        server.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex128", "int64", "bool"])
def test_a_numpy_array_is_received_into_another(
    run: Any, forced_loop_factory: Any, dtype: str
) -> None:
    array = np.random.default_rng(1).integers(0, 2, (1000, 1013)).astype(dtype)

    async def receive(reader: asyncio.StreamReader) -> Any:
        into = np.empty_like(array)
        assert await aiozc.read_into(reader, into) == into.nbytes
        return into

    async def main() -> None:
        assert np.array_equal(await transfer([array], receive), array)

    run(main(), forced_loop_factory)


def test_an_arrow_table_is_sent_from_its_own_buffers(run: Any, forced_loop_factory: Any) -> None:
    """One serialized buffer of Arrow, and the columns of a batch one by one."""
    rng = np.random.default_rng(2)
    table = pyarrow.table({"id": np.arange(200_000), "value": rng.random(200_000)})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    serialized = sink.getvalue()

    async def whole(reader: asyncio.StreamReader) -> Any:
        into = pyarrow.allocate_buffer(serialized.size)
        assert await aiozc.read_into(reader, into) == serialized.size
        return pyarrow.ipc.open_stream(into).read_all()

    async def column(reader: asyncio.StreamReader) -> Any:
        into = np.empty(200_000)
        await aiozc.read_into(reader, into)
        return into

    async def main() -> None:
        assert (await transfer([aiozc.as_buffer(serialized)], whole)).equals(table)
        values = table.column("value").chunk(0)
        data = values.buffers()[1]
        assert np.array_equal(await transfer([aiozc.as_buffer(data)], column), values.to_numpy())

    run(main(), forced_loop_factory)


def test_an_array_and_its_header_are_one_operation(run: Any, forced_loop_factory: Any) -> None:
    array = np.random.default_rng(3).random(300_000)
    header = b"%d %b\n" % (array.nbytes, array.dtype.str.encode())

    async def receive(reader: asyncio.StreamReader) -> Any:
        size, dtype = (await reader.readline()).split()
        into = np.empty(int(size) // 8, dtype.decode())
        await aiozc.read_into(reader, into)
        return into

    async def main() -> None:
        assert np.array_equal(await transfer([header, array], receive), array)

    run(main(), forced_loop_factory)
