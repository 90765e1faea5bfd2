"""The queue of runs on a real Redis: one process at a time holds a run, and every run ends once. Every batch ends,
also after records are lost, and no batch is affected by another.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.run_harness import RunHarness, build_item, build_outcome
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.run_events import BatchNotice, FailureKind, RunEvent
from toolcrew.contract.run_spec import RunBody
from toolcrew.orchestrator.batches.row_files import RowFiles
from toolcrew.orchestrator.runs.follower import Follower
from toolcrew.store import batch_store
from toolcrew.store.batch_store import STEP_CHARS
from toolcrew.store.batches import RUN_TTL_S, BatchState
from toolcrew.store.run_events import BatchEventReader
from toolcrew.store.run_queue import RunQueue
from toolcrew.store.run_records import RunState
from toolcrew.store.stored_runs import AT_ONCE, BatchCancelled


@pytest.fixture
def harness(client: "redis.asyncio.Redis") -> RunHarness:
    return RunHarness(client)


async def test_runs_are_claimed_once_in_line_order(harness: RunHarness) -> None:
    await harness.submit(5)
    first, second = await harness.queue.claim(3), await harness.other.claim(9)
    assert [claim.run for claim in first] == ["b-1", "b-2", "b-3"]
    assert [claim.run for claim in second] == ["b-4", "b-5"]
    assert {claim.record.state for claim in first + second} == {RunState.RUNNING}
    assert first[0].record.item == build_item(1)
    assert await harness.queue.claim(9) == []


async def test_claims_alternate_between_batches_within_their_concurrency(harness: RunHarness) -> None:
    await harness.submit(9, batch="b", concurrency=3)
    await harness.submit(9, batch="c", tenant="other")
    claimed = [claim.run for claim in await harness.queue.claim(8)]
    assert sorted(claimed[:6]) == ["b-1", "b-2", "b-3", "c-1", "c-2", "c-3"]
    assert claimed[6:] == ["c-4", "c-5"]


async def test_claims_are_fair_between_tenants_with_many_and_few_batches(harness: RunHarness) -> None:
    for number in range(50):
        await harness.submit(2, batch=f"b{number}")
    await harness.queue.claim(20)
    await harness.submit(9, batch="c", tenant="other")
    claimed = [claim.tenant for _ in range(3) for claim in await harness.queue.claim(4)]
    assert claimed.count("other") == 6
    await harness.submit(1, batch="d", tenant="other")
    # Each of the other tenant's batches gets its turn, too.
    assert "d-1" in [claim.run for claim in await harness.queue.claim(6)]


async def test_claim_for_one_batch_returns_only_its_runs(harness: RunHarness) -> None:
    await harness.submit(3, batch="b")
    await harness.submit(2, batch="c", tenant="other")
    (lost_claim,) = await harness.queue.claim(1, ("acme", "b"))
    await harness.die(lost_claim)
    assert [claim.run for claim in await harness.other.claim(9, ("other", "c"))] == ["c-1", "c-2"]
    assert await harness.other.claim(9, ("other", "d")) == []
    assert [claim.run for claim in await harness.queue.claim(9, ("acme", "b"))] == ["b-1", "b-2", "b-3"]


async def test_run_of_a_dead_process_is_resumed_by_another(harness: RunHarness) -> None:
    await harness.submit(1)
    (lost_claim,) = await harness.queue.claim(1)
    await harness.die(lost_claim)
    (claim,) = await harness.other.claim(1)
    assert (claim.run, claim.is_resumed, claim.token != lost_claim.token) == ("b-1", True, True)
    assert claim.record.started_at == lost_claim.record.started_at
    assert await harness.queue.renew([lost_claim]) == ({("acme", "b-1")}, set())
    assert not await harness.queue.finish(lost_claim, build_outcome(lost_claim))
    assert not await harness.queue.give_back(lost_claim)
    assert await harness.other.finish(claim, build_outcome(claim))


async def test_claim_of_lost_runs_respects_the_requested_number(harness: RunHarness) -> None:
    await harness.submit(2)
    for lost_claim in await harness.queue.claim(2):
        await harness.die(lost_claim)
    assert [[claim.run for claim in await harness.other.claim(1)] for _ in range(2)] == [["b-1"], ["b-2"]]


async def test_renewed_lease_keeps_the_run(harness: RunHarness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.die(claim)
    assert await harness.queue.renew([claim]) == (set(), set())
    assert await harness.other.claim(1) == []


async def test_batch_completes_when_every_run_ended_and_retries_chosen_failures(
    harness: RunHarness,
) -> None:
    await harness.submit(3)
    kinds = (None, FailureKind.MODEL, FailureKind.INFRASTRUCTURE)
    for claim, kind in zip(await harness.queue.claim(3), kinds, strict=True):
        await harness.queue.finish(claim, build_outcome(claim, kind))
    record = await harness.queue.batches.get("acme", "b")
    assert (record.state, record.succeeded, record.failed[FailureKind.MODEL]) == (BatchState.COMPLETED, 1, 1)
    (status,) = await harness.queue.records([("acme", "b-3")])
    assert status.state == RunState.ENDED
    assert status.outcome.failure.kind == FailureKind.INFRASTRUCTURE
    assert await harness.queue.batches.retry("acme", "b", [FailureKind.INFRASTRUCTURE]) == 1
    assert (await harness.queue.batches.get("acme", "b")).state is BatchState.IN_PROGRESS
    (retried,) = await harness.queue.claim(9)
    assert (retried.run, retried.record.attempt, retried.is_resumed) == ("b-3", 2, False)
    assert await harness.queue.finish(retried, build_outcome(retried))
    record = await harness.queue.batches.get("acme", "b")
    assert (record.state, record.succeeded, record.failed[FailureKind.INFRASTRUCTURE]) == (BatchState.COMPLETED, 2, 0)
    assert [run for _, run in await harness.queue.batches.ended("acme", "b", 3)] == ["b-3"]
    assert not await harness.queue.batches.reopen("acme", "b")
    assert (await harness.queue.batches.get("acme", "b")).state is BatchState.COMPLETED


async def test_cancelled_batch_starts_nothing_and_ends_every_item(harness: RunHarness) -> None:
    await harness.submit(AT_ONCE + 50, concurrency=2)
    running = await harness.queue.claim(9)
    assert await harness.queue.batches.cancel("acme", "b") == AT_ONCE + 48
    assert await harness.queue.claim(9) == []
    assert await harness.queue.renew(running) == (set(), {("acme", "b-1"), ("acme", "b-2")})
    for claim in running:
        await harness.queue.finish(claim, build_outcome(claim, FailureKind.CANCELLED))
    record = await harness.queue.batches.get("acme", "b")
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLED, AT_ONCE + 50)


LEASES = "toolcrew:d:runs:leases"


async def delete_records(harness: RunHarness, *runs: str) -> None:
    """Delete the records."""
    await harness.client.delete(*(f"toolcrew:d:t:acme:run.{run}" for run in runs))


async def test_cancel_ends_runs_without_a_record(harness: RunHarness) -> None:
    await harness.submit(AT_ONCE + 3)
    # All that the first step looks at, and one of the second.
    await delete_records(harness, *(f"b-{line}" for line in range(1, AT_ONCE + 2)))
    assert await harness.queue.batches.cancel("acme", "b") == 2
    record = await harness.queue.batches.get("acme", "b")
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLED, 2)
    assert record.failed[FailureKind.INFRASTRUCTURE] == AT_ONCE + 1


async def test_cancel_ends_a_running_run_without_a_record(harness: RunHarness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await delete_records(harness, "b-1")
    await harness.die(claim)
    assert await harness.queue.batches.cancel("acme", "b") == 0
    assert (await harness.queue.batches.get("acme", "b")).state is BatchState.CANCELLED
    assert await harness.client.exists("toolcrew:d:t:acme:run.b-1") == 0


async def test_run_without_a_record_is_not_claimed(harness: RunHarness) -> None:
    await harness.submit(2, concurrency=1)
    await delete_records(harness, "b-1")
    (claim,) = await harness.queue.claim(9)
    assert claim.run == "b-2"
    await harness.queue.finish(claim, build_outcome(claim))
    record = await harness.queue.batches.get("acme", "b")
    assert (record.state, record.succeeded, record.failed[FailureKind.INFRASTRUCTURE]) == (BatchState.COMPLETED, 1, 1)
    assert await harness.client.exists("toolcrew:d:t:acme:run.b-1") == 0


async def test_follower_reports_lost_items_once(harness: RunHarness, tmp_path: Path) -> None:
    await harness.submit(3)
    await delete_records(harness, "b-1", "b-2")
    (claim,) = await harness.queue.claim(9)
    await harness.queue.finish(claim, build_outcome(claim))
    notices: list[RunEvent] = []
    reader = BatchEventReader(harness.client, "d", "acme", "b")
    with RowFiles.open(tmp_path / "o.jsonl", tmp_path / "e.jsonl", lambda _, run, /: run == "b-3") as rows:
        await Follower(harness.queue, reader, "acme", "b", rows=rows, show=notices.append, tick=lambda: None).run()
        assert list(rows.succeeded) == ["item-3"]
    (status,) = notices
    assert isinstance(status, BatchNotice)
    assert "Redis has lost 2 items" in status.message


async def test_batch_without_queued_lines_can_be_cancelled(harness: RunHarness) -> None:
    await harness.submit(0)
    await harness.client.hset("toolcrew:d:t:acme:batch.b", "total", "5")
    assert await harness.queue.batches.cancel("acme", "b") == 0
    assert (await harness.queue.batches.get("acme", "b")).state is BatchState.CANCELLED


async def test_cancelled_batch_accepts_no_items_until_reopened(harness: RunHarness) -> None:
    await harness.submit(1)
    await harness.client.hset("toolcrew:d:t:acme:batch.b", "total", "2")
    await harness.queue.batches.cancel("acme", "b")
    more = [("b-2", build_item(2))]
    with pytest.raises(BatchCancelled):
        await harness.queue.batches.add("acme", "b", more)
    assert await harness.queue.batches.reopen("acme", "b")
    assert await harness.queue.batches.add("acme", "b", more) == 1
    assert [claim.run for claim in await harness.queue.claim(9)] == ["b-2"]


async def test_large_items_are_added_in_several_steps(harness: RunHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.submit(0)
    step, sizes = harness.queue.batches.step, list[int]()

    async def step_and_measure(operation: str, *rest: Any, **arguments: Any) -> Any:
        sizes.append(sum(len(str(value)) for value in rest))
        return await step(operation, *rest, **arguments)

    monkeypatch.setattr(harness.queue.batches, "step", step_and_measure)
    large = RunBody(instruction="x" * (STEP_CHARS // 2))
    assert (
        await harness.queue.batches.add("acme", "b", [(f"b-{n}", build_item(n, work=large)) for n in range(1, 7)]) == 6
    )
    assert len(sizes) == 3
    assert max(sizes) < 2 * STEP_CHARS


async def test_next_claim_ends_lost_runs_of_a_cancelled_batch(harness: RunHarness) -> None:
    await harness.submit(2, is_detached=False)
    claims = await harness.queue.claim(9, ("acme", "b"))
    await harness.queue.batches.cancel("acme", "b")
    for claim in claims:
        await harness.die(claim)
    assert await harness.other.claim(9, ("other", "c")) == []
    record = await harness.queue.batches.get("acme", "b")
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLED, 2)
    assert await harness.client.zcard(LEASES) == 0


async def test_delayed_retries_are_counted_and_cancelled(harness: RunHarness) -> None:
    await harness.submit(1)
    await harness.submit(1, batch="c")
    await harness.submit(1, tenant="other")
    for claim in await harness.queue.claim(9):
        await harness.queue.give_back(claim, after_s=600.0, is_new=True)
    assert await harness.queue.batches.counts("acme", "b") == {"waiting": 1, "running": 0}
    assert await harness.queue.batches.cancel("acme", "b") == 1
    assert (await harness.queue.batches.get("acme", "b")).state is BatchState.CANCELLED
    assert await harness.queue.batches.counts("acme", "b") == {"waiting": 0, "running": 0}
    assert sorted(await harness.client.zrange("toolcrew:d:runs:delayed", 0, -1)) == [b"acme|c-1", b"other|b-1"]


async def test_run_record_of_another_release_is_refused(harness: RunHarness) -> None:
    await harness.submit(1)
    await harness.client.hset("toolcrew:d:t:acme:run.b-1", "colour", "red")
    with pytest.raises(ConfigError, match="the record of run b-1 of tenant acme cannot be read"):
        await harness.queue.batches.cancel("acme", "b")


async def test_tenant_named_runs_does_not_collide_with_the_queue_keys(harness: RunHarness) -> None:
    await harness.submit(1)
    await harness.submit(1, tenant="runs", batch="mine")
    assert list((await harness.queue.batches.list_batches("runs")).batches) == ["mine"]
    assert {claim.run for claim in await harness.queue.claim(9)} == {"b-1", "mine-1"}


async def test_many_empty_batches_do_not_hide_a_batch_with_runs(harness: RunHarness) -> None:
    await harness.submit(1)
    async with harness.client.pipeline() as pipe:
        for number in range(2500):
            pipe.zadd("toolcrew:d:runs:batches", {f"idle|{number}": 1.0})
            pipe.zadd(f"toolcrew:d:t:idle:batch.{number}:waiting", {"run": 1.0})
        await pipe.execute()
    counts = [len(await harness.queue.claim(1)) for _ in range(6)]
    assert sum(counts) == 1


async def test_every_key_of_a_batch_expires(harness: RunHarness) -> None:
    await harness.submit(4, concurrency=3)
    ended, delayed, _ = await harness.queue.claim(3)
    await harness.queue.finish(ended, build_outcome(ended))
    await harness.queue.give_back(delayed, after_s=60.0)
    keys = [key async for key in harness.client.scan_iter("toolcrew:d:t:acme:*")]
    assert len([key for key in keys if key.startswith(b"toolcrew:d:t:acme:batch.b")]) == 6
    assert {key: await harness.client.ttl(key) > RUN_TTL_S - 60 for key in keys} == dict.fromkeys(keys, True)


async def test_deleted_batch_leaves_no_key_and_no_stored_bytes(
    harness: RunHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the process died between two steps: no reader finds the batch, and a repeated delete ends it."""
    await harness.submit(1, batch="kept")
    (ended_claim,) = await harness.queue.claim(1)
    await harness.queue.finish(ended_claim, build_outcome(ended_claim))
    before = {key: await harness.client.dump(key) async for key in harness.client.scan_iter("*t:acme:*")}
    await harness.submit(3)
    first, second, third = await harness.queue.claim(3)
    for claim in (first, second):
        await harness.queue.finish(claim, build_outcome(claim, FailureKind.MODEL))
    assert await harness.queue.batches.retry("acme", "b", [FailureKind.MODEL]) == 2
    with pytest.raises(ToolFailure, match="has not ended"):
        await harness.queue.batches.delete("acme", "b")
    for claim in (third, *await harness.queue.claim(2)):
        await harness.queue.finish(claim, build_outcome(claim))
    monkeypatch.setattr(batch_store, "AT_ONCE", 1)
    step, replies = harness.queue.batches.step, []

    async def die_after_two(operation: str, **arguments: Any) -> Any:
        replies.append(await step(operation, **arguments))
        return replies[-1] if len(replies) < 2 else b"deleted"

    monkeypatch.setattr(harness.queue.batches, "step", die_after_two)
    await harness.queue.batches.delete("acme", "b")
    assert replies == [b"deleting", b"deleting"]
    # No notice of the end is sent any more.
    assert not await harness.client.hexists("toolcrew:d:t:acme:batch.b", "webhook")
    for work in (harness.other.batches.get, harness.other.batches.cancel):
        with pytest.raises(ToolFailure, match="not found"):
            await work("acme", "b")
    assert set((await harness.other.batches.list_batches("acme")).batches) == {"kept"}
    assert not await harness.other.batches.retry("acme", "b", [FailureKind.MODEL])
    assert not await harness.other.batches.reopen("acme", "b")
    with pytest.raises(BatchCancelled):
        await harness.other.batches.add("acme", "b", [("b-9", build_item(9))])
    await harness.other.batches.delete("acme", "b")
    await harness.other.batches.set_concurrency("acme", "b", 2)
    assert 0 < await harness.client.ttl("toolcrew:d:t:acme:batch.b") <= RUN_TTL_S
    await harness.client.delete("toolcrew:d:t:acme:batch.b")
    assert before == {key: await harness.client.dump(key) async for key in harness.client.scan_iter("*t:acme:*")}
    with pytest.raises(ToolFailure, match="not found"):
        await harness.other.batches.delete("acme", "b")


@pytest.mark.parametrize(
    ("used", "stored", "age_hours", "has_room"),
    [
        (0.50, 1.3, 0, True),
        (0.50, 1.5, 0, False),
        # A tenant may use four times the memory that is free: here a fifth of the whole.
        (0.80, 0.19, 0, True),
        (0.80, 0.21, 0, False),
        # These records have expired.
        (0.80, 0.8, 3, True),
        (0.90, 0.0, 0, False),
    ],
)
async def test_tenant_storage_is_limited_when_redis_is_nearly_full(
    harness: RunHarness, used: float, stored: float, age_hours: int, has_room: bool
) -> None:
    """`used`, `stored`: shares of the memory of Redis, in use and of the tenant."""
    await harness.submit(1)
    # With this, the memory of the test's own commands is a negligible share.
    await harness.client.setrange("ballast", 2**24, b"x")
    limit = int((await harness.client.info("memory"))["used_memory"] / used)
    hour, number = int(time.time() / 3600) + 2 - age_hours, int(stored * limit)
    await harness.client.hset("toolcrew:d:t:acme:memory", mapping={str(hour): number, "total": number, "hour": 0})
    await harness.client.config_set("maxmemory", limit)
    try:
        assert bool(await harness.queue.step("has_room", tenant="acme", batch="new")) is has_room
        assert await harness.queue.step("has_room", tenant="acme", batch="b")
        adding = harness.queue.batches.add("acme", "b", [("b-2", build_item(2))])
        if has_room:
            assert await adding == 1
        else:
            with pytest.raises(ToolFailure) as failure:
                await adding
            assert failure.value.code is ErrorCode.QUOTA_EXCEEDED
    finally:
        await harness.client.config_set("maxmemory", 0)


async def test_lease_is_renewed_while_the_record_of_the_run_is_parsed(
    harness: RunHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large item, or work of the tenant's other runs, may delay the parsing for longer than a lease."""
    await harness.submit(1)
    parse, is_parsing, may_parse = harness.queue.parse, asyncio.Event(), asyncio.Event()

    async def parse_late(*arguments: Any) -> Any:
        is_parsing.set()
        await may_parse.wait()
        return await parse(*arguments)

    monkeypatch.setattr(harness.queue, "parse", parse_late)
    claiming = asyncio.create_task(harness.queue.claim(1))
    await is_parsing.wait()
    leases = "toolcrew:d:runs:leases"
    await harness.client.zadd(leases, {"acme|b-1": time.time() + 1})
    assert await harness.queue.renew([]) == (set(), set())
    assert (await harness.client.zscore(leases, "acme|b-1") or 0) > time.time() + 10
    may_parse.set()
    (claim,) = await claiming
    await harness.die(claim)
    assert await harness.queue.renew([]) == (set(), set())
    (other,) = await harness.other.claim(1)
    assert await harness.queue.renew([claim]) == ({("acme", "b-1")}, set())
    assert other.run == claim.run


async def test_batch_pages_stay_valid_while_batches_change(harness: RunHarness) -> None:
    for number in range(7):
        await harness.submit(1, batch=f"b{number}")
        await harness.client.zadd(
            "toolcrew:d:t:acme:batch-ids", {f"b{number}": 1000 + number // 2}
        )  # some in the same instant
    first = await harness.queue.batches.list_batches("acme", limit=3)
    assert (list(first.batches), first.older) == (["b6", "b5", "b4"], 4)
    await harness.submit(1, batch="newer")
    await harness.client.zadd("toolcrew:d:t:acme:batch-ids", {"newer": 2000})
    second = await harness.queue.batches.list_batches("acme", str(first.cursor), limit=2)
    assert (list(second.batches), second.older) == (["b3", "b2"], 2)
    await harness.client.delete("toolcrew:d:t:acme:batch.b1")
    third = await harness.queue.batches.list_batches("acme", str(second.cursor), limit=1)
    assert (list(third.batches), third.older) == ([], 1), "it is forgotten, and what follows is not lost"
    last = await harness.queue.batches.list_batches("acme", str(third.cursor), limit=5)
    assert (list(last.batches), last.cursor) == (["b0"], None)
    assert len((await harness.queue.batches.list_batches("acme")).batches) == 7, "b1 is gone, newer has come"


class ForgetfulRedis(redis.asyncio.Redis):
    """Forgets a batch after each of its commands."""

    forgets: tuple[str, ...] = ()

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        reply = await super().execute_command(*arguments, **options)
        if self.forgets:
            name, *self.forgets = self.forgets  # type: ignore[assignment]
            await super().execute_command("ZREM", "toolcrew:d:t:acme:batch-ids", name)
        return reply


async def test_batch_removed_between_pages_hides_no_other_batch(
    harness: RunHarness, redis_server: RedisProcess
) -> None:
    for number in range(5):
        await harness.submit(1, batch=f"b{number}")
        await harness.client.zadd("toolcrew:d:t:acme:batch-ids", {f"b{number}": 1000 + number})
    first = await harness.queue.batches.list_batches("acme", limit=2)
    assert list(first.batches) == ["b4", "b3"]
    async with ForgetfulRedis.from_url(redis_server.url, socket_timeout=5) as client:
        queue = RunQueue(client, "d", KEY)
        await queue.batches.list_batches("acme", limit=1)  # Redis knows the script from now
        client.forgets = ("b4", "b0")
        second = await queue.batches.list_batches("acme", str(first.cursor), limit=2)
    assert (list(second.batches), second.older) == (["b2", "b1"], 1)


@pytest.mark.parametrize("cursor", ["7", "1000/", "x/b1", "1000/b 1", "1e999/b1", "-1/b1"])
async def test_invalid_batch_cursor_is_refused(harness: RunHarness, cursor: str) -> None:
    with pytest.raises(ToolFailure, match="cursor belongs to another list"):
        await harness.queue.batches.list_batches("acme", cursor, limit=1)


BATCH = ("acme", "b")


async def test_cancel_ends_runs_of_a_dead_process(harness: RunHarness) -> None:
    await harness.submit(2)
    lost_claim, alive = await harness.queue.claim(2)
    await harness.die(lost_claim)
    await harness.queue.batches.cancel(*BATCH)
    record = await harness.queue.batches.get(*BATCH)
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLING, 1)
    assert not await harness.queue.finish(lost_claim, build_outcome(lost_claim))
    assert await harness.queue.finish(alive, build_outcome(alive))
    assert (await harness.queue.batches.get(*BATCH)).state is BatchState.CANCELLED


@pytest.mark.parametrize("is_new", [True, False])
async def test_run_of_a_cancelled_batch_cannot_be_given_back(harness: RunHarness, is_new: bool) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.queue.batches.cancel(*BATCH)
    with pytest.raises(BatchCancelled):
        await harness.queue.give_back(claim, is_new=is_new)
    assert await harness.queue.finish(claim, build_outcome(claim, FailureKind.CANCELLED))
    assert (await harness.queue.batches.get(*BATCH)).state is BatchState.CANCELLED


async def test_follower_sees_the_end_of_a_cancelled_batch(harness: RunHarness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.queue.batches.cancel(*BATCH)
    await harness.die(claim)
    reader = BatchEventReader(harness.client, "d", *BATCH)
    follower = Follower(harness.queue, reader, *BATCH, rows=None, show=lambda _: None, tick=lambda: None)
    assert (await follower.run()).state is BatchState.CANCELLED
