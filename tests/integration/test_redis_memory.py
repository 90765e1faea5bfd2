"""A tenant that fills a small Redis with what its runs store. The tenant's own runs end with an error that names the
memory, and another tenant works as before.
"""

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.run_harness import RunHarness, build_outcome
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.run_events import CallFinished, Failure, FailureKind
from toolcrew.store.idempotency import IdempotencyStore
from toolcrew.store.memory import TenantMemoryUsed
from toolcrew.store.run_events import EventBatch, RunEventStore
from toolcrew.store.run_log import RunLog
from toolcrew.store.run_queue import RunClaim

MAX_BYTES = 64 * 1024 * 1024


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[RunHarness]:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.config_set("maxmemory", MAX_BYTES)
    try:
        yield RunHarness(client)
    finally:
        await client.config_set("maxmemory", 0)
        await client.aclose()


async def used_share(harness: RunHarness) -> float:
    return float((await harness.client.info("memory"))["used_memory"]) / MAX_BYTES


async def run_calls(harness: RunHarness, claim: RunClaim, count: int) -> Failure | None:
    """Log `count` calls that printed 32 KiB of control characters each, store their events, and end the run."""
    log, failure = await RunLog.load(harness.client, "d", KEY, claim.attempt), None
    events = RunEventStore(harness.client, "d")
    for number in range(count):
        result = ToolResult(call_id=f"c{number}", name="bash_tool", success=True, output="\x01" * 32 * 1024)
        try:
            await log.append(CallFinished(run=claim.run, result=result))
        except TenantMemoryUsed as error:
            failure = Failure(kind=FailureKind.INFRASTRUCTURE, code=error.code.value, message=str(error))
            break
        await events.append([EventBatch(claim.tenant, claim.run, claim.token, number, ["e" * 10_000])])
    outcome = build_outcome(claim).model_copy(update={"failure": failure})
    assert await harness.queue.finish(claim, outcome)
    return failure


async def fill(harness: RunHarness) -> list[Failure]:
    """Run batches of one tenant until nothing of them starts. Return the failures of their runs."""
    failures = []
    for number in range(20):
        with suppress(ToolFailure):
            await harness.submit(10, tenant="filler", batch=f"f{number}")
    while claims := [claim for claim in await harness.queue.claim(4) if claim.tenant == "filler"]:
        failures += [failure for claim in claims if (failure := await run_calls(harness, claim, 60)) is not None]
    return failures


async def test_a_tenant_that_fills_redis_stops_no_other_tenant(harness: RunHarness) -> None:
    failures = await fill(harness)
    assert failures, "the tenant never reached its limit, so the test shows nothing"
    assert {failure.code for failure in failures} == {ErrorCode.QUOTA_EXCEEDED.value}
    assert await used_share(harness) < 0.85
    with pytest.raises(ToolFailure) as refused:
        await harness.submit(1, tenant="filler", batch="more")
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED
    # The other tenant starts, logs and ends runs, and its requests are stored.
    for number in range(4):
        await harness.submit(1, tenant="other", batch=f"o{number}")
        (claim,) = await harness.queue.claim(4)
        assert claim.tenant == "other"
        assert await run_calls(harness, claim, 5) is None
    slots = IdempotencyStore(harness.client, "d", KEY)
    slot = slots.name("key", "n", "digest", "token", "other")
    assert await slots.claim(slot) is None
    await slots.keep(slot, "{}")
    # After a delete, the waiting runs of the first tenant start.
    for batch in list((await harness.queue.batches.list_batches("filler")).batches)[1:]:
        await harness.queue.batches.cancel("filler", batch)
        await harness.queue.batches.delete("filler", batch)
    assert [claim.tenant for claim in await harness.queue.claim(1)] == ["filler"]
