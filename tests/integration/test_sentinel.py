"""Redis behind a sentinel. Calls work, and continue when the master dies and its replica takes over."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from tests.support.redis.redis_harness import (
    SECRET,
    CountingPool,
    Server,
    open_counting_pool,
    open_sentinel,
    open_server,
)
from tests.support.stack.waiting import SOON_S, wait_until, wait_until_async
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.names import POOL_WEB
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.pool_connection import open_pool
from toolcrew.orchestrator.dispatch.request import Request

NAME, PASSWORD = "calls", "a-password-of-both"
RECOVERY_S = 60.0


@dataclass(frozen=True)
class Harness:
    master: Server
    replica: Server
    broker: BrokerSettings
    pool: CountingPool


@pytest.fixture
def harness() -> Iterator[Harness]:
    with open_server(f"masterauth {PASSWORD}", password=PASSWORD) as master:
        follow = (f"replicaof 127.0.0.1 {master.port}", f"masterauth {PASSWORD}", "repl-diskless-load on-empty-db")
        with (
            open_server(*follow, password=PASSWORD) as replica,
            open_sentinel(master, NAME) as port,
            master.client() as watch,
        ):
            wait_until(lambda: watch.info("replication")["connected_slaves"] == 1, SOON_S, "the replica follows")
            url = f"sentinel://:{PASSWORD}@127.0.0.1:{port}/0;sentinel://127.0.0.1:1"
            broker = BrokerSettings.model_validate({"redis_url": url, "secret": SECRET, "redis_sentinel_master": NAME})
            variables = {"TOOLCREW_REDIS_SENTINEL_MASTER": NAME}
            with open_counting_pool(broker, url, watch, environment=variables) as pool:
                yield Harness(master, replica, broker, pool)


async def call_once(dispatcher: Dispatcher, pool: CountingPool) -> tuple[str, ToolResult]:
    call = ToolCall(id=secrets.token_hex(8), name="append_tool", arguments={"path": str(pool.marks)})
    return call.id, await dispatcher.dispatch(Request(call, "acme", None, POOL_WEB))


def is_master(server: "redis.Redis") -> bool:
    try:
        return server.info("replication")["role"] == "master"
    except redis.ConnectionError:
        # The sentinel closes every connection to the server that becomes the master.
        return False


async def test_calls_continue_when_the_master_dies(harness: Harness) -> None:
    async with open_pool(harness.broker, queue_wait_s=10) as opened:
        call_id, result = await call_once(opened.dispatcher, harness.pool)
        assert result.success, result
        with harness.replica.client() as replica:
            harness.master.kill()
            await wait_until_async(lambda: is_master(replica), RECOVERY_S, "the sentinel chose the replica")
        answered: list[tuple[str, ToolResult]] = []
        while not answered or not answered[-1][1].success:
            answered.append(await call_once(opened.dispatcher, harness.pool))
            assert len(answered) < 30, answered[-1]
    for call_id, result in answered:
        assert harness.pool.acted(call_id) <= 1
        assert not result.success or harness.pool.acted(call_id) == 1
