"""A queue of runs on a real Redis, and items for the queue."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio

from tests.support.records.builders import KEY
from toolcrew.contract.run_events import Failure, FailureKind
from toolcrew.contract.run_spec import RunBody
from toolcrew.orchestrator.runs.run_slots import RunSlot
from toolcrew.store.batches import BatchDefaults, BatchItem, BatchRecord, BatchState, ItemOutcome
from toolcrew.store.run_queue import RunClaim, RunQueue


def build_item(number: int, **fields: Any) -> BatchItem:
    """Return the item of that line."""
    report: Mapping[str, Any] = {
        "custom_id": f"item-{number}",
        "line": number,
        "url": "/v1/agent/runs",
        "work": RunBody(instruction=f"do {number}"),
    }
    return BatchItem.model_validate({**report, **fields})


def build_outcome(claim: RunClaim, kind: FailureKind | None = None) -> ItemOutcome:
    """Return the outcome of a claimed run: a success, or a failure of that kind."""
    failure = Failure(kind=kind, code="TIMEOUT", message="no") if kind is not None else None
    return ItemOutcome(custom_id=claim.record.item.custom_id, run=claim.run, status_code=200, body={}, failure=failure)


class RunHarness:
    """Batches `b` of tenants. The tests submit the batches and process the runs directly."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.queue = RunQueue(client, "d", KEY)
        self.other = RunQueue(client, "d", KEY)

    async def submit(
        self,
        count: int,
        *,
        tenant: str = "acme",
        batch: str = "b",
        concurrency: int = 100,
        is_detached: bool = True,
        **fields: Any,
    ) -> None:
        record = BatchRecord(
            state=BatchState.IN_PROGRESS,
            total=count,
            sha256="0" * 64,
            concurrency=concurrency,
            defaults=BatchDefaults(),
            created_at=0.0,
            is_detached=is_detached,
        )
        await self.queue.batches.create(tenant, batch, record)
        items = [build_item(number, **fields) for number in range(1, count + 1)]
        await self.queue.batches.add(tenant, batch, [(f"{batch}-{item.line}", item) for item in items])

    async def die(self, claim: RunClaim) -> None:
        """Let the lease of the run's holder expire."""
        await self.client.zadd("toolcrew:d:runs:leases", {f"{claim.tenant}|{claim.run}": 1.0})


@asynccontextmanager
async def released_slot(slot: RunSlot, call: str) -> AsyncIterator[None]:
    """Release the slot around the wait of a call. The block ends after the run has a slot again."""
    slot.rest(call)
    yield
    await slot.wait(call)
