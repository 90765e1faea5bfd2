"""The memory of Redis that each tenant uses: everything that a tenant makes Redis hold counts, deleted and expired
records no longer count, and a tenant that fills Redis stops itself and no other tenant.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.run_harness import RunHarness, build_outcome
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import BrokerFull, ErrorCode, ToolFailure
from toolcrew.contract.run_events import CallFinished, Failure, FailureKind, RunRetried, SessionOpening
from toolcrew.store import run_log
from toolcrew.store.connection import broker_errors
from toolcrew.store.idempotency import IdempotencyStore
from toolcrew.store.memory import MEMORY_LUA, TenantMemoryUsed
from toolcrew.store.run_events import LEAST_STREAM_BYTES, EventBatch, RunEventStore
from toolcrew.store.run_log import RunLog
from toolcrew.store.run_queue import RunClaim
from toolcrew.store.tool_state import StateStore

ACCOUNT = "toolcrew:d:t:acme:memory"
FIELDS = ("run_bytes", "log_bytes", "artifact_bytes", "stream_bytes", "batch_bytes")


@pytest.fixture
def harness(client: "redis.asyncio.Redis") -> RunHarness:
    return RunHarness(client)


@pytest.fixture
async def limited(harness: RunHarness) -> AsyncIterator[RunHarness]:
    """A queue on a Redis whose limit a test sets with `set_free`."""
    yield harness
    await harness.client.config_set("maxmemory", 0)


async def set_free(harness: RunHarness, share: float) -> None:
    """Set the limit of Redis so that this share of it is in use."""
    used = (await harness.client.info("memory"))["used_memory"]
    await harness.client.config_set("maxmemory", int(used / share))


async def set_used(harness: RunHarness, share: float, hours: int = 24) -> None:
    """Count bytes for the tenant: a share of the limit of Redis that expires after some hours."""
    limit = int((await harness.client.config_get("maxmemory"))["maxmemory"])
    hour, number = int(time.time() // 3600), int(share * limit)
    await harness.client.hset(ACCOUNT, mapping={"total": number, "hour": hour - 1, str(hour + hours): number})


async def used_bytes(harness: RunHarness, tenant: str = "acme") -> int:
    script: Any = harness.client.eval(
        f"{MEMORY_LUA} return used_bytes(KEYS[1], read_time())", 1, f"toolcrew:d:t:{tenant}:memory"
    )
    return int(await script)


async def recorded_bytes(harness: RunHarness) -> int:
    """Return the sum of what the records of the tenant say about their size."""
    total = 0
    async for key in harness.client.scan_iter("toolcrew:d:t:acme:*"):
        if await harness.client.type(key) == b"hash" and key.decode() != ACCOUNT:
            values = await harness.client.hmget(key, *FIELDS)
            total += sum(int(value.split()[0]) for value in values if value)
    return total


async def load(harness: RunHarness, claim: RunClaim) -> RunLog:
    return await RunLog.load(harness.client, "d", KEY, claim.attempt)


def build_result(size: int) -> CallFinished:
    return CallFinished(run="b-1", result=ToolResult(call_id="c", name="bash_tool", success=True, output="x" * size))


async def test_log_artifacts_and_events_count_until_the_batch_is_deleted(harness: RunHarness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    before = await used_bytes(harness)
    log = await load(harness, claim)
    await log.append(SessionOpening(run="b-1", session="s"))
    await log.append(build_result(50_000))
    await log.keep_artifacts(b"a" * 30_000)
    events = RunEventStore(harness.client, "d")
    await events.append([EventBatch("acme", "b-1", claim.token, 0, ["e" * 20_000])])
    retried = RunRetried(
        run="b-1", item="i" * 10_000, attempt=2, failure=Failure(kind=FailureKind.MODEL, code="TIMEOUT", message="no")
    )
    await events.append([], [("acme", "b", retried)])
    used = await used_bytes(harness) - before
    assert 110_000 < used < 125_000
    assert await used_bytes(harness) == await recorded_bytes(harness)
    await log.drop_artifacts()
    assert 80_000 < await used_bytes(harness) - before < 95_000
    await harness.queue.finish(claim, build_outcome(claim))
    await harness.queue.batches.delete("acme", "b")
    assert await used_bytes(harness) == 0
    # Nothing else of the batch is left.
    assert [key async for key in harness.client.scan_iter("toolcrew:d:t:acme:*b*")] in (
        [],
        [b"toolcrew:d:t:acme:batch-ids"],
    )


async def test_log_of_an_ended_run_counts_for_an_hour_only(harness: RunHarness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await (await load(harness, claim)).append(build_result(50_000))
    await harness.queue.finish(claim, build_outcome(claim))
    now, hours = time.time(), await harness.client.hgetall(ACCOUNT)
    sizes = {int(hour): int(number) for hour, number in hours.items() if hour.isdigit()}
    soon = sum(number for hour, number in sizes.items() if hour <= now // 3600 + 2)
    assert 50_000 < soon < 55_000
    # The clock of Redis cannot be moved, so the test moves the counts into the past.
    await harness.client.delete(ACCOUNT)
    past = {str(hour - 3): number for hour, number in sizes.items()}
    await harness.client.hset(ACCOUNT, mapping={**past, "total": sum(sizes.values())})
    assert await used_bytes(harness) == sum(sizes.values()) - soon
    # A record whose hour is over is not taken back a second time.
    await harness.queue.batches.delete("acme", "b")
    assert await used_bytes(harness) >= 0


@pytest.mark.parametrize("way", ["retry", "give_back", "die"])
async def test_a_new_attempt_gives_the_bytes_of_the_old_log_back(harness: RunHarness, way: str) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    before = await used_bytes(harness)
    await (await load(harness, claim)).append(build_result(50_000))
    match way:
        case "retry":
            await harness.queue.finish(claim, build_outcome(claim, FailureKind.INFRASTRUCTURE))
            await harness.queue.batches.retry("acme", "b", [FailureKind.INFRASTRUCTURE])
        case "give_back":
            await harness.queue.give_back(claim, is_new=True)
        case "die":
            await harness.die(claim)
            (claim,) = await harness.other.claim(1)
            assert await used_bytes(harness) > before + 50_000
            await harness.other.give_back(claim, is_new=True)
    assert await used_bytes(harness) == await recorded_bytes(harness)
    assert await used_bytes(harness) <= before


@pytest.mark.parametrize(
    ("share", "may_start", "may_continue"), [(0.1, True, True), (0.5, False, True), (0.74, False, False)]
)
async def test_a_tenant_that_uses_its_part_ends_its_runs_and_starts_none(
    limited: RunHarness, share: float, may_start: bool, may_continue: bool
) -> None:
    await limited.submit(2)
    await limited.submit(1, tenant="rival", batch="r")
    (first, *_) = await limited.queue.claim(1, only=("acme", "b"))
    log = await load(limited, first)
    await set_free(limited, 0.76)
    await set_used(limited, share)
    appending = log.append(build_result(10))
    if may_continue:
        await appending
    else:
        with pytest.raises(TenantMemoryUsed, match="memory of Redis") as failure:
            await appending
        assert failure.value.code is ErrorCode.QUOTA_EXCEEDED
        with pytest.raises(TenantMemoryUsed):
            await log.keep_artifacts(b"a")
    claimed = {claim.run for claim in await limited.queue.claim(5)}
    assert claimed == ({"r-1", "b-2"} if may_start else {"r-1"})
    # The outcome is stored in any case, and a run that has begun continues.
    await limited.die(first)
    if may_continue:
        (first,) = await limited.queue.claim(5)
    assert await limited.queue.finish(first, build_outcome(first, FailureKind.INFRASTRUCTURE))
    # With memory, the runs that waited start.
    await limited.client.config_set("maxmemory", 0)
    assert {claim.run for claim in await limited.queue.claim(5)} == (set() if may_start else {"b-2"})


async def test_a_full_tenant_keeps_few_events_of_a_run(limited: RunHarness) -> None:
    await limited.submit(1)
    (claim,) = await limited.queue.claim(1)
    events = RunEventStore(limited.client, "d")
    await events.append([EventBatch("acme", "b-1", claim.token, 0, ["e" * 10_000] * 12)])
    assert int(await limited.client.hget("toolcrew:d:t:acme:run.b-1", "event_bytes") or 0) == 120_000
    await set_free(limited, 0.76)
    await set_used(limited, 0.74)
    await events.append([EventBatch("acme", "b-1", claim.token, 12, ["e" * 10_000] * 12)])
    assert int(await limited.client.hget("toolcrew:d:t:acme:run.b-1", "event_bytes") or 0) <= LEAST_STREAM_BYTES


async def test_stored_answers_count_and_are_refused_for_a_full_tenant(limited: RunHarness) -> None:
    slots = IdempotencyStore(limited.client, "d", KEY)
    claim = slots.name("key", "n1", "digest", "token", "acme")
    assert await slots.claim(claim) is None
    await slots.keep(claim, "{" + " " * 10_000 + "}")
    await slots.keep(claim, "{" + " " * 10_000 + "}")
    assert 10_000 < await used_bytes(limited) < 11_000
    await set_free(limited, 0.76)
    await set_used(limited, 0.74)
    with pytest.raises(ToolFailure) as failure:
        await slots.claim(slots.name("key", "n2", "digest", "token", "acme"))
    assert failure.value.code is ErrorCode.QUOTA_EXCEEDED
    assert await slots.claim(slots.name("key", "n3", "digest", "token", "rival")) is None


async def test_tool_state_counts_once_however_often_it_changes(limited: RunHarness, redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        state = StateStore(client, "d").open("acme", "s")
        for _ in range(3):
            await state.set("k", "v" * 10_000)
        await state.get("k")
        assert 10_000 < await used_bytes(limited) < 12_000
        await set_free(limited, 0.76)
        await set_used(limited, 0.74)
        with pytest.raises(ToolFailure) as failure:
            await state.set("k2", "v")
        assert failure.value.code is ErrorCode.QUOTA_EXCEEDED
        await state.set("k", "v")


async def test_full_redis_is_an_error_of_its_own(limited: RunHarness) -> None:
    await limited.submit(1)
    (claim,) = await limited.queue.claim(1)
    await limited.client.config_set("maxmemory", 1)
    with pytest.raises(BrokerFull, match="memory of Redis is full") as failure, broker_errors("it was not stored"):
        await limited.client.set("toolcrew:d:x", "y")
    assert failure.value.code is ErrorCode.BROKER_FULL
    with pytest.raises(BrokerFull, match="memory of Redis is full"):
        await limited.queue.finish(claim, build_outcome(claim))


async def test_a_log_without_memory_waits_for_a_limited_time(
    limited: RunHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limited.submit(1)
    (claim,) = await limited.queue.claim(1)
    log = await load(limited, claim)
    monkeypatch.setattr(run_log, "FULL_S", 0.0)
    monkeypatch.setattr(run_log, "RETRY_S", (0.01,))

    async def refuse(_: int) -> str:
        with broker_errors("the entry was not added"):
            await limited.client.set("toolcrew:d:x", "y")
        raise AssertionError("Redis took data")

    monkeypatch.setattr(log, "_add", refuse)
    await limited.client.config_set("maxmemory", 1)
    with pytest.raises(BrokerFull):
        await asyncio.wait_for(log.append(build_result(1)), 60)
