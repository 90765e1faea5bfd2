"""Effects of a Redis outage on a batch: a short outage loses no item, the loss of the last second loses no row, and
total data loss gives a clear error.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.runs.batch_rows import accept_any_row, read_ids
from tests.support.runs.item_harness import ItemHarness, build_run, echo_then
from tests.support.runs.run_harness import RunHarness, build_outcome
from toolcrew.concurrency.tasks import retry_until_available
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode
from toolcrew.contract.names import run_key
from toolcrew.orchestrator.batches.row_files import RowFiles
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.runs.follower import BatchLost, Follower
from toolcrew.store.batches import BatchState, batch_key
from toolcrew.store.run_events import BatchEventReader
from toolcrew.store.run_queue import RunClaim


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator["redis.asyncio.Redis"]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        with capture_logs():
            yield client


class FailingRedis:
    """A Redis client whose requests fail a given number of times and then succeed."""

    def __init__(self, times: int) -> None:
        self.remaining = times
        self.requests = 0

    async def ask(self) -> str:
        self.requests += 1
        if self.remaining > 0:
            self.remaining -= 1
            raise BrokerUnavailable("away")
        return "there"

    async def answer(self, call: ToolCall, _: ToolContext) -> ToolResult:
        await self.ask()
        return ToolResult(call_id=call.id, name=call.name, success=True, output="said")


async def test_work_is_retried_until_redis_replies_or_the_time_limit() -> None:
    failing = FailingRedis(3)
    assert await retry_until_available(failing.ask) == "there"
    assert failing.requests == 4
    failing = FailingRedis(1000)
    with pytest.raises(BrokerUnavailable, match="away"):
        await retry_until_available(failing.ask, limit_s=0.2)
    assert failing.requests > 1


async def test_call_is_repeated_after_a_redis_outage(client: "redis.asyncio.Redis") -> None:
    failing = FailingRedis(2)
    harness = ItemHarness(client, echo_then("done", "a"), answers={"echo": failing.answer})

    outcome = await harness.execute(await harness.put(build_run()))

    assert (outcome.failure, harness.count_model_requests(), failing.requests) == (None, 2, 3)
    # The request is one call: a worker that has its id runs it once.
    assert len({call.id for call in harness.transport.calls if call.name == "echo"}) == 1


async def test_sent_call_is_awaited_after_a_redis_outage(client: "redis.asyncio.Redis") -> None:
    was_sent: list[bool] = []
    harness = ItemHarness(client, echo_then("done", "a"), answers={"echo": FailingRedis(1).answer})
    calling = harness.pool.dispatcher.dispatch

    async def dispatch_and_record(request: Request) -> ToolResult:
        if request.call.name == "echo":
            was_sent.append(request.sent_since is not None)
        return await calling(request)

    harness.pool.dispatcher.dispatch = dispatch_and_record  # type: ignore[method-assign]
    await harness.execute(await harness.put(build_run()))

    assert was_sent == [False, True]


async def test_session_is_closed_after_a_redis_outage(client: "redis.asyncio.Redis") -> None:
    failing = FailingRedis(2)
    harness = ItemHarness(client, answers={"close": failing.answer})

    outcome = await harness.execute(await harness.put(build_run()))

    assert (outcome.failure, failing.requests) == (None, 3)


async def test_outage_during_session_open_does_not_restart_the_item(client: "redis.asyncio.Redis") -> None:
    failing = FailingRedis(1)
    harness = ItemHarness(client)

    async def answer(call: ToolCall, context: ToolContext) -> ToolResult:
        await failing.ask()
        del harness.answers["open"]
        return await harness._answer(call, context)

    harness.answers["open"] = answer
    outcome = await harness.execute(await harness.put(build_run()))

    assert (outcome.failure, outcome.attempt) == (None, 1)


class FollowedBatch(RunHarness):
    """A batch whose results are written to files."""

    def __init__(self, client: "redis.asyncio.Redis", folder: Path) -> None:
        super().__init__(client)
        self.output = folder / "out.jsonl"
        self.rows = RowFiles.open(self.output, folder / "errors.jsonl", accept_any_row)
        reader = BatchEventReader(client, "d", "acme", "b")
        self.follower = Follower(
            self.queue, reader, "acme", "b", rows=self.rows, show=lambda _: None, tick=lambda: None
        )

    async def end(self, claim: RunClaim) -> None:
        assert await self.queue.finish(claim, build_outcome(claim))

    async def forget_end(self, claim: RunClaim) -> None:
        """Restore Redis to its state before the first run of the batch ended."""
        key = batch_key("d", "acme", "b")
        await self.client.zrem(f"{key}:ended", claim.run)
        await self.client.hset(key, mapping={"ends": 0, "succeeded": 0})
        await self.client.hset(
            run_key("d", "acme", claim.run), mapping={"state": "running", "claim": claim.token, "outcome": ""}
        )


@pytest.fixture
def followed(client: "redis.asyncio.Redis", tmp_path: Path) -> Any:
    harness = FollowedBatch(client, tmp_path)
    with harness.rows:
        yield harness


async def test_no_row_is_lost_when_redis_loses_its_last_second(followed: FollowedBatch) -> None:
    await followed.submit(2)
    first, second = await followed.queue.claim(2)
    await followed.end(first)
    assert await followed.follower.write()
    await followed.forget_end(first)
    await followed.end(second)
    await followed.end(first)

    record = await followed.follower.run()

    assert record.state is BatchState.COMPLETED
    assert sorted(read_ids(followed.output)) == ["item-1", "item-2"]


async def test_batch_lost_by_redis_is_reported_and_its_rows_are_kept(followed: FollowedBatch) -> None:
    await followed.submit(2)
    (first,) = await followed.queue.claim(1)
    await followed.end(first)
    assert await followed.follower.write()
    await followed.client.flushall()

    with pytest.raises(BatchLost, match="submit the same file again with") as caught:
        await followed.follower.run()

    assert caught.value.code is ErrorCode.BROKER_UNAVAILABLE
    assert read_ids(followed.output) == ["item-1"]
