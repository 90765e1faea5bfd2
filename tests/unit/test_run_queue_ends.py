"""The queue of runs after its records are lost: every batch still ends, and no batch is affected by another."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from contract.errors import ConfigError, ToolFailure
from contract.run_events import BatchNotice, FailureKind, RunEvent
from orchestrator.batches.row_files import RowFiles
from orchestrator.runs.follower import Follower
from store.batches import RUN_TTL_S, BatchState, RunBody
from store.run_events import BatchEventReader
from store.runs import AT_ONCE, STEP_CHARS, BatchCancelled, RunQueue
from tests.builders import KEY
from tests.conftest import RedisProcess
from tests.run_harness import RunHarness, build_item, build_outcome

LEASES = "toolcrew:d:runs:leases"


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[RunHarness]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        yield RunHarness(client)


async def lose(harness: RunHarness, *runs: str) -> None:
    """Delete the records."""
    await harness.client.delete(*(f"toolcrew:d:t:acme:run.{run}" for run in runs))


async def test_a_lost_record_does_not_delay_a_cancel(harness: RunHarness) -> None:
    await harness.submit(AT_ONCE + 3)
    # All that the first step looks at, and one of the second.
    await lose(harness, *(f"b-{line}" for line in range(1, AT_ONCE + 2)))
    assert await harness.queue.cancel("acme", "b") == 2
    record = await harness.queue.batch("acme", "b")
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLED, 2)
    assert record.failed[FailureKind.INFRASTRUCTURE] == AT_ONCE + 1


async def test_a_run_whose_record_went_while_it_ran_ends_when_its_batch_is_cancelled(harness: RunHarness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await lose(harness, "b-1")
    await harness.die(claim)
    assert await harness.queue.cancel("acme", "b") == 0
    assert (await harness.queue.batch("acme", "b")).state is BatchState.CANCELLED
    assert await harness.client.exists("toolcrew:d:t:acme:run.b-1") == 0


async def test_a_run_without_a_record_is_not_claimed(harness: RunHarness) -> None:
    await harness.submit(2, concurrency=1)
    await lose(harness, "b-1")
    (claim,) = await harness.queue.claim(9)
    assert claim.run == "b-2"
    await harness.queue.finish(claim, build_outcome(claim))
    record = await harness.queue.batch("acme", "b")
    assert (record.state, record.succeeded, record.failed[FailureKind.INFRASTRUCTURE]) == (BatchState.COMPLETED, 1, 1)
    assert await harness.client.exists("toolcrew:d:t:acme:run.b-1") == 0


async def test_a_watcher_sees_items_without_a_row_once(harness: RunHarness, tmp_path: Path) -> None:
    await harness.submit(3)
    await lose(harness, "b-1", "b-2")
    (claim,) = await harness.queue.claim(9)
    await harness.queue.finish(claim, build_outcome(claim))
    shown: list[RunEvent] = []
    reader = BatchEventReader(harness.client, "d", "acme", "b")
    with RowFiles.open(tmp_path / "o.jsonl", tmp_path / "e.jsonl", lambda _, run, /: run == "b-3") as rows:
        await Follower(harness.queue, reader, "acme", "b", rows=rows, show=shown.append, tick=lambda: None).run()
        assert list(rows.succeeded) == ["item-3"]
    (status,) = shown
    assert isinstance(status, BatchNotice)
    assert "Redis has lost 2 items" in status.message


async def test_a_batch_that_is_cancelled_before_any_line_was_queued_is_cancelled(harness: RunHarness) -> None:
    await harness.submit(0)
    await harness.client.hset("toolcrew:d:t:acme:batch.b", "total", "5")
    assert await harness.queue.cancel("acme", "b") == 0
    assert (await harness.queue.batch("acme", "b")).state is BatchState.CANCELLED


async def test_a_cancelled_batch_takes_no_items_until_it_is_reopened(harness: RunHarness) -> None:
    await harness.submit(1)
    await harness.client.hset("toolcrew:d:t:acme:batch.b", "total", "2")
    await harness.queue.cancel("acme", "b")
    more = [("b-2", build_item(2))]
    with pytest.raises(BatchCancelled):
        await harness.queue.add("acme", "b", more)
    assert await harness.queue.reopen("acme", "b")
    assert await harness.queue.add("acme", "b", more) == 1
    assert [claim.run for claim in await harness.queue.claim(9)] == ["b-2"]


async def test_large_items_are_added_in_several_steps(harness: RunHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.submit(0)
    step, sizes = harness.queue.step, list[int]()

    async def measured(operation: str, *arguments: Any) -> Any:
        sizes.append(sum(len(str(argument)) for argument in arguments))
        return await step(operation, *arguments)

    monkeypatch.setattr(harness.queue, "step", measured)
    large = RunBody(instruction="x" * (STEP_CHARS // 2))
    assert await harness.queue.add("acme", "b", [(f"b-{n}", build_item(n, work=large)) for n in range(1, 7)]) == 6
    assert len(sizes) == 3
    assert max(sizes) < 2 * STEP_CHARS


async def test_a_batch_that_is_complete_is_not_opened_again_for_nothing(harness: RunHarness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.queue.finish(claim, build_outcome(claim))
    assert not await harness.queue.reopen("acme", "b")
    assert (await harness.queue.batch("acme", "b")).state is BatchState.COMPLETED


async def test_the_next_claim_ends_the_runs_of_a_dead_process_in_a_cancelled_batch(harness: RunHarness) -> None:
    await harness.submit(2, is_detached=False)
    claims = await harness.queue.claim(9, ("acme", "b"))
    await harness.queue.cancel("acme", "b")
    for claim in claims:
        await harness.die(claim)
    assert await harness.other.claim(9, ("other", "c")) == []
    record = await harness.queue.batch("acme", "b")
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLED, 2)
    assert await harness.client.zcard(LEASES) == 0


async def test_waiting_retries_are_counted_and_cancelled(harness: RunHarness) -> None:
    await harness.submit(1)
    await harness.submit(1, tenant="other")
    for claim in await harness.queue.claim(9):
        await harness.queue.give_back(claim, after_s=600.0, is_new=True)
    assert await harness.queue.counts("acme", "b") == {"waiting": 1, "running": 0}
    assert await harness.queue.cancel("acme", "b") == 1
    assert (await harness.queue.batch("acme", "b")).state is BatchState.CANCELLED
    assert await harness.queue.counts("acme", "b") == {"waiting": 0, "running": 0}
    assert await harness.client.zrange("toolcrew:d:runs:delayed", 0, -1) == [b"other|b-1"]


async def test_a_record_of_another_release_ends_as_such(harness: RunHarness) -> None:
    await harness.submit(1)
    await harness.client.hset("toolcrew:d:t:acme:run.b-1", "colour", "red")
    with pytest.raises(ConfigError, match="the record of run b-1 of tenant acme cannot be read"):
        await harness.queue.cancel("acme", "b")


async def test_a_tenant_that_is_called_as_the_queue_is_reads_and_breaks_nothing_of_it(harness: RunHarness) -> None:
    await harness.submit(1)
    await harness.submit(1, tenant="runs", batch="mine")
    assert list((await harness.queue.list_batches("runs")).batches) == ["mine"]
    assert {claim.run for claim in await harness.queue.claim(9)} == {"b-1", "mine-1"}


async def test_very_many_batches_that_have_nothing_to_give_hide_none_that_has(harness: RunHarness) -> None:
    await harness.submit(1)
    async with harness.client.pipeline() as pipe:
        for number in range(2500):
            pipe.zadd("toolcrew:d:runs:batches", {f"idle|{number}": 1.0})
            pipe.zadd(f"toolcrew:d:t:idle:batch.{number}:waiting", {"run": 1.0})
        await pipe.execute()
    counts = [len(await harness.queue.claim(1)) for _ in range(6)]
    assert sum(counts) == 1


async def test_every_key_of_a_batch_is_forgotten_some_day(harness: RunHarness) -> None:
    await harness.submit(4, concurrency=3)
    ended, delayed, _ = await harness.queue.claim(3)
    await harness.queue.finish(ended, build_outcome(ended))
    await harness.queue.give_back(delayed, after_s=60.0)
    keys = [key async for key in harness.client.scan_iter("toolcrew:d:t:acme:*")]
    assert len([key for key in keys if key.startswith(b"toolcrew:d:t:acme:batch.b")]) == 6
    assert {key: await harness.client.ttl(key) > RUN_TTL_S - 60 for key in keys} == dict.fromkeys(keys, True)


async def test_batches_are_listed_in_pages_that_stay_good_while_batches_come_and_go(harness: RunHarness) -> None:
    for number in range(7):
        await harness.submit(1, batch=f"b{number}")
        await harness.client.zadd(
            "toolcrew:d:t:acme:batch-ids", {f"b{number}": 1000 + number // 2}
        )  # some in the same instant
    first = await harness.queue.list_batches("acme", limit=3)
    assert (list(first.batches), first.older) == (["b6", "b5", "b4"], 4)
    await harness.submit(1, batch="newer")
    await harness.client.zadd("toolcrew:d:t:acme:batch-ids", {"newer": 2000})
    second = await harness.queue.list_batches("acme", str(first.cursor), limit=2)
    assert (list(second.batches), second.older) == (["b3", "b2"], 2)
    await harness.client.delete("toolcrew:d:t:acme:batch.b1")
    third = await harness.queue.list_batches("acme", str(second.cursor), limit=1)
    assert (list(third.batches), third.older) == ([], 1), "it is forgotten, and what follows is not lost"
    last = await harness.queue.list_batches("acme", str(third.cursor), limit=5)
    assert (list(last.batches), last.cursor) == (["b0"], None)
    assert len((await harness.queue.list_batches("acme")).batches) == 7, "b1 is gone, newer has come"


class Forgetful(redis.asyncio.Redis):
    """Forgets a batch after each of its commands."""

    forgets: tuple[str, ...] = ()

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        reply = await super().execute_command(*arguments, **options)
        if self.forgets:
            name, *self.forgets = self.forgets  # type: ignore[assignment]
            await super().execute_command("ZREM", "toolcrew:d:t:acme:batch-ids", name)
        return reply


async def test_a_removed_batch_hides_no_other_batch(harness: RunHarness, redis_server: RedisProcess) -> None:
    for number in range(5):
        await harness.submit(1, batch=f"b{number}")
        await harness.client.zadd("toolcrew:d:t:acme:batch-ids", {f"b{number}": 1000 + number})
    first = await harness.queue.list_batches("acme", limit=2)
    assert list(first.batches) == ["b4", "b3"]
    async with Forgetful.from_url(redis_server.url, socket_timeout=5) as client:
        queue = RunQueue(client, "d", KEY)
        await queue.list_batches("acme", limit=1)  # Redis knows the script from now
        client.forgets = ("b4", "b0")
        second = await queue.list_batches("acme", str(first.cursor), limit=2)
    assert (list(second.batches), second.older) == (["b2", "b1"], 1)


@pytest.mark.parametrize("place", ["7", "1000/", "x/b1", "1000/b 1", "1e999/b1", "-1/b1"])
async def test_a_place_of_another_list_is_refused(harness: RunHarness, place: str) -> None:
    with pytest.raises(ToolFailure, match="cursor belongs to another list"):
        await harness.queue.list_batches("acme", place, limit=1)
