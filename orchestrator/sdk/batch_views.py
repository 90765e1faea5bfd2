"""The stored batches of a client of a pool, as commands show them (sdk/tenant_client.py: TenantBatches)."""

from collections.abc import AsyncIterator, Sequence

from toolcrew.contract.run_views import BatchStatus
from toolcrew.orchestrator.batches.rows import build_row, build_row_line
from toolcrew.orchestrator.runs.batch_status import build_status
from toolcrew.orchestrator.runs.client_batches import ClientBatches
from toolcrew.store.batches import RowLocation


class BatchViews:
    """The batches of a client."""

    def __init__(self, runs: ClientBatches) -> None:
        self._runs = runs
        self._store = runs.queue.batches

    async def list(self, tenant: str) -> Sequence[BatchStatus]:
        found = (await self._store.list_batches(tenant)).batches
        return [build_status(batch, record, await self._store.counts(tenant, batch)) for batch, record in found.items()]

    async def get(self, batch: str) -> tuple[BatchStatus, RowLocation | None]:
        record = await self._runs.batches.status(batch)
        return build_status(batch, record, await self._store.counts(self._runs.tenant, batch)), record.rows

    async def cancel(self, batch: str) -> int:
        return await self._runs.batches.cancel(batch)

    async def delete(self, batch: str) -> None:
        await self._runs.batches.delete(batch)

    async def lines(self, batch: str) -> AsyncIterator[str]:
        await self._runs.batches.status(batch)
        async for outcome in self._runs.outcomes(batch):
            yield build_row_line(build_row(outcome)).decode()
