"""A connection that runs scripts: order, errors, a lost and a silent Redis. Real servers; a relay stands for a bad network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from tests.conftest import RedisProcess
from tests.support.stack.waiting import SOON_S
from toolcrew.store import connection
from toolcrew.store.scripts import ReplyMissing, Script, ScriptConnection

ECHO = Script("return text", args=("text",))
PUSH = Script("return redis.call('RPUSH', list, text)", keys=("list",), args=("text",))
FAIL = Script("return redis.error_reply('WRONG it fails')")


class Relay:
    """Forwards bytes in both directions. `is_silent`: drops Redis's bytes. `cut`: closes every connection."""

    def __init__(self, server: RedisProcess) -> None:
        self._server = server
        self._writers: list[asyncio.StreamWriter] = []
        self.is_silent = False
        self.sent = asyncio.Event()
        """Something was sent to Redis since this was cleared."""
        self.url = ""

    async def start(self) -> None:
        self._relay = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._relay.sockets[0].getsockname()[1]
        self.url = f"redis://:{self._server.password}@127.0.0.1:{port}/0"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def stop(self) -> None:
        self._relay.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._writers += [writer, redis_writer]
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._pass(reader, redis_writer, is_answer=False), self._pass(redis_reader, writer, is_answer=True)
            )

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool) -> None:
        while data := await source.read(65536):
            if not (is_answer and self.is_silent):
                sink.write(data)
            if not is_answer:
                self.sent.set()


@pytest.fixture
async def relay(redis_server: RedisProcess) -> AsyncIterator[Relay]:
    opened = Relay(redis_server)
    await opened.start()
    yield opened
    opened.stop()


@pytest.fixture
async def scripts(relay: Relay) -> AsyncIterator[ScriptConnection]:
    async with redis.asyncio.Redis.from_url(relay.url, socket_timeout=5) as client:
        opened = ScriptConnection(client)
        yield opened
        await opened.aclose()


async def test_concurrent_scripts_keep_their_order(scripts: ScriptConnection, redis_server: RedisProcess) -> None:
    await scripts.run(PUSH, list="list", text="first")
    sizes = await asyncio.gather(*(scripts.run(PUSH, list="list", text=number) for number in range(500)))
    assert sizes == list(range(2, 502))
    with redis_server.client() as client:
        assert client.lrange("list", 1, -1) == [str(number).encode() for number in range(500)]


async def test_error_of_one_script_does_not_affect_others(scripts: ScriptConnection) -> None:
    answers = await asyncio.gather(
        scripts.run(ECHO, text="a"), scripts.run(FAIL), scripts.run(ECHO, text="é"), return_exceptions=True
    )
    assert (answers[0], answers[2]) == (b"a", "é".encode())
    assert isinstance(answers[1], ResponseError)


async def test_cancelled_script_is_not_run(scripts: ScriptConnection, redis_server: RedisProcess) -> None:
    cancelled = scripts.run(PUSH, list="list", text="a")
    cancelled.cancel()
    assert await scripts.run(PUSH, list="list", text="b") == 1


async def test_large_script_argument_is_sent_completely(scripts: ScriptConnection) -> None:
    large = "x" * (8 * 1024 * 1024)
    answers = await asyncio.gather(scripts.run(ECHO, text=large), scripts.run(ECHO, text="after"))
    assert (len(answers[0]), answers[1]) == (len(large), b"after")


async def test_lost_connection_is_replaced(scripts: ScriptConnection, relay: Relay) -> None:
    await scripts.run(ECHO, text="a")
    relay.is_silent = True
    relay.sent.clear()
    answer = scripts.run(PUSH, list="list", text="a")
    await asyncio.wait_for(relay.sent.wait(), SOON_S)
    relay.cut()
    with pytest.raises(ReplyMissing) as lost:
        await answer
    assert lost.value.may_have_run
    relay.is_silent = False
    assert await asyncio.wait_for(scripts.run(ECHO, text="b"), SOON_S) == b"b"


async def test_script_times_out_when_redis_does_not_reply(
    scripts: ScriptConnection, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scripts.run(ECHO, text="a")
    monkeypatch.setattr(connection, "TIMEOUT_S", 0.2)
    relay.is_silent = True
    # The timer of the first script still has the old limit.
    if scripts._timer is not None:
        scripts._timer.cancel()
        scripts._timer = None
    with pytest.raises(ReplyMissing) as silent:
        await asyncio.wait_for(scripts.run(ECHO, text="b"), SOON_S)
    assert silent.value.may_have_run


async def test_connection_to_a_replica_is_dropped(scripts: ScriptConnection, redis_server: RedisProcess) -> None:
    await scripts.run(ECHO, text="a")
    with redis_server.client() as client:
        client.replicaof("127.0.0.1", "1")
        try:
            answers = [scripts.run(PUSH, list="list", text=number) for number in range(2)]
            refused = await asyncio.gather(*answers, return_exceptions=True)
            assert all(isinstance(error, ResponseError) for error in refused)
            assert scripts._transport is None
        finally:
            client.replicaof("NO", "ONE")
    assert await scripts.run(PUSH, list="list", text="b") == 1


async def test_refused_connection_reports_that_nothing_ran(scripts: ScriptConnection, relay: Relay) -> None:
    relay.stop()
    with pytest.raises(ReplyMissing) as refused:
        await asyncio.wait_for(scripts.run(ECHO, text="a"), SOON_S)
    assert not refused.value.may_have_run


async def test_closed_script_connection_runs_nothing(scripts: ScriptConnection) -> None:
    await scripts.run(ECHO, text="a")
    await scripts.aclose()
    with pytest.raises(ReplyMissing) as closed:
        await scripts.run(ECHO, text="b")
    assert not closed.value.may_have_run
