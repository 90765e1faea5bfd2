"""Submits, resumes, cancels and reads the batches of one tenant."""

import hashlib
import re
import secrets
import time
from collections.abc import Collection, Iterator, Sequence

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import BatchNotice, FailureKind
from toolcrew.contract.webhooks import Webhook
from toolcrew.orchestrator.batches.detached import check_detached
from toolcrew.orchestrator.batches.lines import BatchFile
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.webhooks import CheckWebhook, accept_webhook
from toolcrew.orchestrator.terminal.commands import build_resubmission
from toolcrew.store.batches import BatchDefaults, BatchItem, BatchRecord, BatchState
from toolcrew.store.run_queue import RunQueue
from toolcrew.store.stored_runs import AT_ONCE, BatchCancelled

DEFAULT_CONCURRENCY = 16
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def run_id(tenant: str, batch: str, custom_id: str) -> str:
    """Return the id of an item's run. The id depends only on the item, so a second submission of the batch addresses
    the same run.
    """
    return hashlib.sha256(f"{tenant}\0{batch}\0{custom_id}".encode()).hexdigest()[:24]


def new_batch_id() -> str:
    """Return a new random batch id."""
    return f"batch-{secrets.token_hex(6)}"


def check_batch_id(batch: str) -> None:
    """Raise ToolFailure(INVALID_ARGUMENTS) for an invalid id."""
    if not _ID.fullmatch(batch):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"'{batch[:80]}' is not a valid batch id: use 1 to 64 letters, digits, - and _"
        )


class Batches:
    """Batches of one tenant.

    Every method raises BrokerUnavailable when Redis does not answer. Every method raises
    ToolFailure(INVALID_ARGUMENTS) for an invalid request; the message says what to do.
    """

    def __init__(
        self,
        queue: RunQueue,
        publisher: RunEventPublisher,
        tenant: str,
        check_webhook: CheckWebhook = accept_webhook,
    ) -> None:
        self._queue = queue
        self._publisher = publisher
        self._check_webhook = check_webhook
        self.tenant = tenant

    async def submit(
        self,
        file: BatchFile,
        *,
        batch: str | None = None,
        concurrency: int | None = None,
        defaults: BatchDefaults | None = None,
        name: str = "",
        is_detached: bool = False,
        goes_on: bool = True,
        webhook: Webhook | None = None,
    ) -> str:
        """Queue the items of a file and return the batch's id.

        `batch`: id of an existing batch that was submitted with the same file. The method then continues that batch:
        missing items are added and infrastructure failures are queued again. `goes_on` False: the client repeats the
        same request, so only missing items are added, and failed items are not queued again.

        `is_detached`: orchestrators that serve all tenants execute the batch (batch_service.py). Raises BadBatch: the
        batch is detached and its lines name paths of this machine.
        """
        if is_detached:
            artifacts = defaults.artifacts if defaults is not None else None
            # In a thread of the tenant, because the pass parses large items again.
            await in_tenant_thread(self.tenant, check_detached, file, artifacts, name or "the batch")
        batch_id = batch or new_batch_id()
        check_batch_id(batch_id)
        if webhook is not None:
            await self._check_webhook(self.tenant, webhook)
        record = BatchRecord(
            state=BatchState.IN_PROGRESS,
            total=len(file.items),
            sha256=file.sha256,
            concurrency=concurrency or DEFAULT_CONCURRENCY,
            defaults=defaults or BatchDefaults(),
            created_at=time.time(),
            name=name,
            is_detached=is_detached,
        )
        is_new = await self._queue.batches.create(self.tenant, batch_id, record, webhook)
        if not is_new:
            await self._check_same(batch_id, file)
        if not is_new and not goes_on:
            return await self._complete(batch_id, file)
        if not is_new:
            await self._change(batch_id, concurrency, defaults, is_detached=is_detached)
            await self._queue.batches.reopen(self.tenant, batch_id)
        await self._add(batch_id, file)
        if is_new:
            await self._publish_notice(
                batch_id, f"submitted with {count(len(file.items), 'item')}", total=len(file.items)
            )
        else:
            await self.resume(batch_id)
        return batch_id

    async def _complete(self, batch: str, file: BatchFile) -> str:
        """Add the missing items of a batch after an interrupted submission."""
        record = await self._queue.batches.get(self.tenant, batch)
        is_missing_some = await self._queue.batches.count_items(self.tenant, batch) < record.total
        if record.state is BatchState.IN_PROGRESS and is_missing_some:
            await self._add(batch, file)
            await self._publish_notice(batch, f"submitted with {count(record.total, 'item')}", total=record.total)
        return batch

    async def resume(
        self,
        batch: str,
        kinds: Collection[FailureKind] = (FailureKind.INFRASTRUCTURE, FailureKind.CANCELLED),
        entry: str = "",
    ) -> int:
        """Queue items again that failed for one of these reasons. Return the number of queued items.

        Running, waiting and succeeded items do not change. `entry`: audit entry that is written if any item is
        queued; "" for none.
        """
        check_batch_id(batch)
        record, queued = (
            await self._queue.batches.get(self.tenant, batch),
            await self._queue.batches.count_items(self.tenant, batch),
        )
        if queued < record.total:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"only {queued} of the {record.total} lines of batch {batch} were queued before its submission was "
                f"interrupted: submit the same file again with `{build_resubmission(batch, self.tenant)}` to continue",
            )
        again = await self._queue.batches.retry(self.tenant, batch, kinds, entry)
        # Send no notice if nothing has changed: the rates of a batch are computed up to its last event.
        if await self._queue.batches.reopen(self.tenant, batch) or again:
            await self._publish_notice(batch, f"resumed, {count(again, 'item starts', 'items start')} again")
        return again

    async def status(self, batch: str) -> BatchRecord:
        """Return the record of a batch."""
        check_batch_id(batch)
        return await self._queue.batches.get(self.tenant, batch)

    async def cancel(self, batch: str) -> int:
        """Start no more items and end the running items. Return the number of items that had not started."""
        check_batch_id(batch)
        waited = await self._queue.batches.cancel(self.tenant, batch)
        await self._publish_notice(batch, "cancelled")
        return waited

    async def delete(self, batch: str, entry: str = "") -> None:
        """Delete an ended batch with its items and results. `entry`: audit entry, "" for none. Raises
        ToolFailure(INVALID_ARGUMENTS): no such batch, or one that has not ended.
        """
        check_batch_id(batch)
        await self._queue.batches.delete(self.tenant, batch, entry)

    async def custom_ids(self, batch: str) -> dict[str, str]:
        """Return the run of every submitted item, by custom_id."""
        check_batch_id(batch)
        runs, ids_by_run = await self._queue.batches.items(self.tenant, batch), dict[str, str]()
        for at in range(0, len(runs), AT_ONCE):
            # Read pages without outcomes: the outcomes of a large batch do not fit into memory.
            page = runs[at : at + AT_ONCE]
            ids = await self._queue.batches.custom_ids(self.tenant, batch, page)
            ids_by_run |= {custom_id: run for run, custom_id in zip(page, ids, strict=True) if custom_id is not None}
        return ids_by_run

    async def _add(self, batch: str, file: BatchFile) -> None:
        """Queue the items of the file. Items that are already queued do not change."""
        try:
            await self._queue.batches.add(self.tenant, batch, self._runs(batch, file.items))
        except BatchCancelled:
            raise ToolFailure(
                ErrorCode.CANCELLED,
                f"the batch {batch} was cancelled while its lines were queued, and the remaining lines were not "
                f"queued: submit the same file again with `{build_resubmission(batch, self.tenant)}` to "
                "continue",
            ) from None

    def _runs(self, batch: str, items: Sequence[BatchItem]) -> Iterator[tuple[str, BatchItem]]:
        """Yield the run id and the item for each item."""
        return ((run_id(self.tenant, batch, item.custom_id), item) for item in items)

    async def _check_same(self, batch: str, file: BatchFile) -> None:
        """Raise ToolFailure(INVALID_ARGUMENTS) if the batch was submitted with another file."""
        record = await self._queue.batches.get(self.tenant, batch)
        if record.sha256 != file.sha256:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"the batch {batch} was submitted with another file: submit this file with "
                "another id, or the other file to continue the batch",
            )

    async def _change(
        self, batch: str, concurrency: int | None, defaults: BatchDefaults | None, *, is_detached: bool
    ) -> None:
        """Change the settings of an existing batch. None keeps the current value."""
        record = await self._queue.batches.get(self.tenant, batch)
        await self._queue.batches.change(
            self.tenant,
            batch,
            concurrency=concurrency or record.concurrency,
            defaults=defaults or record.defaults,
            is_detached=is_detached,
        )

    async def _publish_notice(self, batch: str, message: str, total: int | None = None) -> None:
        """Publish a notice in the batch."""
        self._publisher.add(self.tenant, batch, BatchNotice(message=message, total=total))
        await self._publisher.flush()
