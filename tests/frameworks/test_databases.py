"""redis-py and asyncpg on our loop, against the servers of Debian's packages, as child processes."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import LIMIT, Server

Serve = Callable[..., Server]
POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name))


# --- Redis ---


@pytest.fixture
def redis_port(serve: Serve, tmp_path: Path) -> int:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server: apt-get install redis-server")
    options = ["--port", "{port}", "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    return serve([program, *options]).port


def test_redis_values_of_all_sizes(redis_port: int, run: Any) -> None:
    redis = pytest.importorskip("redis.asyncio")

    async def main() -> None:
        async with redis.Redis(port=redis_port) as client:

            async def one(number: int) -> None:
                for size in (0, 1, 4096, 65536, 1 << 20):
                    value = os.urandom(size)
                    assert await client.set(f"{number}:{size}", value)
                    assert await client.get(f"{number}:{size}") == value

            await asyncio.gather(*map(one, range(16)))

    run(main())


def test_redis_pipelines_and_messages(redis_port: int, run: Any) -> None:
    redis = pytest.importorskip("redis.asyncio")

    async def main() -> None:
        async with redis.Redis(port=redis_port) as client:
            async with client.pipeline(transaction=True) as pipe:
                for number in range(1000):
                    pipe.set(f"key{number}", number)
                    pipe.incr(f"key{number}")
                answers = await pipe.execute()
            assert answers[1::2] == list(range(1, 1001))
            async with client.pubsub() as channel:
                await channel.subscribe("news")
                await channel.get_message(timeout=LIMIT)  # subscribed
                message = os.urandom(100_000)
                assert await client.publish("news", message) == 1
                told = await channel.get_message(ignore_subscribe_messages=True, timeout=LIMIT)
                assert told["data"] == message
            # A blocked call that is cancelled, and the client goes on.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.blpop(["nothing"]), 0.2)
            assert await client.get("key7") == b"8"

    run(main())


# --- PostgreSQL ---


@pytest.fixture
def postgres_port(serve: Serve) -> Iterator[int]:
    if not POSTGRES:
        pytest.skip("no PostgreSQL: apt-get install postgresql")
    given: dict[str, Any] = {}
    if os.geteuid() == 0:  # which it refuses to run as
        user = pwd.getpwnam("postgres")
        given = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    home = Path(
        subprocess.check_output(
            ["mktemp", "-d", "/tmp/aiozc-pg-XXXXXX"], text=True, **given
        ).strip()
    )
    data = home / "data"
    options = ["--auth=trust", "--username=postgres", "--no-sync", "-D", str(data)]
    subprocess.run(
        [str(POSTGRES[-1] / "initdb"), *options],
        check=True,
        capture_output=True,
        timeout=60,
        cwd="/",
        **given,
    )
    command = [
        str(POSTGRES[-1] / "postgres"),
        "-D",
        str(data),
        "-p",
        "{port}",
        "-k",
        str(home),
        "-F",
    ]
    server = serve([*command, "-h", "127.0.0.1"], stop=signal.SIGINT, cwd="/", **given)
    yield server.port
    server.stop(signal.SIGINT)
    shutil.rmtree(home)


async def connect(asyncpg: Any, port: int, **more: Any) -> Any:
    for _ in range(50):  # it listens before it answers
        try:
            return await asyncpg.connect(
                host="127.0.0.1", port=port, user="postgres", ssl=False, **more
            )
        except asyncpg.CannotConnectNowError:
            await asyncio.sleep(0.1)
    raise AssertionError("the database does not start up")


def test_postgresql_queries_copies_and_notifications(postgres_port: int, run: Any) -> None:
    asyncpg = pytest.importorskip("asyncpg")

    async def main() -> None:
        one = await connect(asyncpg, postgres_port)
        await one.execute("CREATE TABLE blobs (id int PRIMARY KEY, data bytea)")
        rows = [(number, os.urandom(1000 * number)) for number in range(100)]
        await one.executemany("INSERT INTO blobs VALUES ($1, $2)", rows)
        found = await one.fetch("SELECT id, data FROM blobs ORDER BY id")
        assert [tuple(row) for row in found] == rows
        big = os.urandom(8 << 20)
        assert await one.fetchval("SELECT $1::bytea", big) == big
        more = [(1000 + number, os.urandom(50_000)) for number in range(200)]
        await one.copy_records_to_table("blobs", records=more)
        assert (
            await one.fetchval("SELECT sum(length(data)) FROM blobs WHERE id >= 1000") == 10_000_000
        )
        heard: asyncio.Queue[str] = asyncio.Queue()
        await one.add_listener("news", lambda *said: heard.put_nowait(said[3]))
        two = await connect(asyncpg, postgres_port)
        await two.execute("SELECT pg_notify('news', 'hello')")
        assert await asyncio.wait_for(heard.get(), LIMIT) == "hello"
        with pytest.raises(TimeoutError):  # cancelled on the server as well
            await two.execute("SELECT pg_sleep(30)", timeout=0.3)
        assert await two.fetchval("SELECT 1") == 1
        await one.close()
        await two.close()

    run(main())


def test_postgresql_pool_of_connections(postgres_port: int, run: Any) -> None:
    asyncpg = pytest.importorskip("asyncpg")

    async def main() -> None:
        await (await connect(asyncpg, postgres_port)).close()
        options = {"host": "127.0.0.1", "port": postgres_port, "user": "postgres", "ssl": False}
        async with asyncpg.create_pool(**options, min_size=4, max_size=16) as pool:

            async def one(number: int) -> None:
                async with pool.acquire() as connection, connection.transaction():
                    data = os.urandom(10_000 * number)
                    assert await connection.fetchval("SELECT $1::bytea", data) == data

            await asyncio.gather(*map(one, range(64)))

    run(main())
