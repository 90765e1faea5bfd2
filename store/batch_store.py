"""Batches in Redis: programs create, read, cancel, repeat and delete them, and add their runs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.names import audit_key, run_key
from toolcrew.contract.run_events import FailureKind
from toolcrew.contract.webhooks import Webhook
from toolcrew.store.batches import (
    RUN_TTL_S,
    BatchDefaults,
    BatchItem,
    BatchRecord,
    BatchState,
    RowLocation,
    batch_key,
    batches_key,
    open_item,
    parse_batch,
    seal_defaults,
    seal_item,
    seal_rows,
)
from toolcrew.store.run_records import build_cancelled_outcome
from toolcrew.store.stored_runs import AT_ONCE, BatchCancelled, StoredRuns, ask, in_steps, nearly_full
from toolcrew.store.webhooks import seal_webhook
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

STEP_CHARS = 4 * 1024 * 1024
"""Number of characters of signed items after which one step of the script adds no further item."""
PAGE_BYTES = 8 * 1024 * 1024
"""Size of the records of runs that are read together, in bytes. The record of a run has up to some 20 MB."""
_CURSOR = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)/([A-Za-z0-9_-]{1,64})")
"""Pattern of a cursor: the creation time of a batch and its id."""


@dataclass(frozen=True)
class BatchPage:
    """A page of batches by id, the newest first. `older`: the number of batches after this page. `cursor`: the start
    of the next page; None if there is none."""

    batches: Mapping[str, BatchRecord]
    older: int
    cursor: str | None


class BatchStore(StoredRuns):
    """Batches of one deployment."""

    async def create(self, tenant: str, batch: str, record: BatchRecord, webhook: Webhook | None = None) -> bool:
        """Create a batch without runs. Return False if a batch with that id exists. Raises
        ToolFailure(QUOTA_EXCEEDED): the tenant may store no more.
        """
        if not await self.step("has_room", tenant=tenant, batch=batch):
            raise nearly_full()
        key, index = self._batch_key(tenant, batch), batches_key(self._deployment, tenant)
        fields: dict[Any, Any] = {
            "state": record.state.value,
            "total": record.total,
            "sha256": record.sha256,
            "concurrency": record.concurrency,
            "defaults": seal_defaults(self.keys, tenant, batch, record.defaults),
            "created_at": record.created_at,
            "name": record.name,
            "is_detached": int(record.is_detached),
            "ttl_s": RUN_TTL_S,
            "webhook": seal_webhook(self.keys, tenant, "batch", batch, webhook),
            "webhook_state": "pending" if webhook is not None else "",
        }
        # A transaction, because an incomplete batch would block its id.
        pipe = self._client.pipeline(transaction=True)
        for name, value in fields.items():
            pipe.hsetnx(key, name, value)
        pipe.expire(key, RUN_TTL_S)
        pipe.zadd(index, {batch: record.created_at}, nx=True)
        pipe.expire(index, RUN_TTL_S)
        self._script.add_to(pipe, "count_batch", tenant=tenant, batch=batch)
        return bool((await ask(pipe.execute()))[0])

    async def change(
        self, tenant: str, batch: str, *, concurrency: int, defaults: BatchDefaults, is_detached: bool
    ) -> None:
        """Change the settings with which a batch continues: concurrency, defaults, and whether orchestrators of the
        service run it.
        """
        # Sealed: the defaults name the model and the tools of every run of the batch.
        sealed = seal_defaults(self.keys, tenant, batch, defaults)
        await self._set(tenant, batch, concurrency=concurrency, defaults=sealed, is_detached=int(is_detached))

    async def set_row_location(self, tenant: str, batch: str, position: RowLocation) -> None:
        """Store the location of the row files of a batch."""
        await self._set(tenant, batch, rows=seal_rows(self.keys, tenant, batch, position))

    async def set_concurrency(self, tenant: str, batch: str, concurrency: int) -> None:
        """Set how many items of a batch run at the same time, over all orchestrators."""
        await self._set(tenant, batch, concurrency=concurrency)

    async def _set(self, tenant: str, batch: str, **fields: Any) -> None:
        mapping: dict[Any, Any] = fields
        pipe = self._client.pipeline(transaction=True)
        pipe.hset(self._batch_key(tenant, batch), mapping=mapping)
        # The batch may have just been deleted. The hash that this command then creates expires, and no reader treats it
        # as a batch.
        pipe.expire(self._batch_key(tenant, batch), RUN_TTL_S)
        await ask(pipe.execute())

    async def get(self, tenant: str, batch: str) -> BatchRecord:
        """Return a batch's record. Raises ToolFailure(INVALID_ARGUMENTS): unknown id. Raises ConfigError: the record
        cannot be verified or read."""
        fields: Any = await ask(self._client.hgetall(self._batch_key(tenant, batch)))
        if b"total" not in fields or fields.get(b"state") == b"deleting":
            raise no_batch(tenant, batch)
        return parse_batch(self.keys, tenant, batch, fields)

    async def list_batches(self, tenant: str, cursor: str = "", limit: int | None = None) -> BatchPage:
        """Return at most `limit` batches of a tenant (None: all), from `cursor` on, which stays valid while batches are
        added and removed. Raises ToolFailure(INVALID_ARGUMENTS): invalid cursor."""
        after = _CURSOR.fullmatch(cursor)
        if cursor and after is None:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, "the cursor belongs to another list: use the cursor of a page of this list"
            )
        instant, last = after.groups() if after is not None else ("", "")
        older, reply = await self.step(
            "list_batches", tenant=tenant, last_at=instant, last_batch=last, max_count=-1 if limit is None else limit
        )
        names, batches, expired = (
            [name.decode(errors="replace") for name in reply[::2]],
            dict[str, BatchRecord](),
            list[str](),
        )
        for some in in_steps(names):
            for name, fields in zip(
                some, await self.hashes([self._batch_key(tenant, name) for name in some]), strict=True
            ):
                try:
                    if b"total" in fields:
                        batches[name] = parse_batch(self.keys, tenant, name, fields)
                    else:
                        expired.append(name)
                except ConfigError as error:
                    log.error("batch_not_readable", tenant=tenant, batch=name, error=str(error))
        # Records expire by themselves, and their names do not. The list is cleaned when it is read.
        if expired:
            await ask(self._client.zrem(batches_key(self._deployment, tenant), *expired))
        return BatchPage(batches, older, f"{float(reply[-1]):.9f}/{names[-1]}" if older and names else None)

    async def reopen(self, tenant: str, batch: str) -> bool:
        """Set a cancelled or ended batch to running again. Return whether the batch has runs that wait, or lacks runs
        of its file that must be added. If not, nothing changes.
        """
        return bool(await self.step("reopen", tenant=tenant, batch=batch))

    async def cancel(self, tenant: str, batch: str) -> int:
        """Stop starting runs of a batch. Waiting runs end as cancelled; the processes that execute the running runs end
        them. Return how many runs waited.
        """
        # In steps, because Redis is blocked during one. The first step stops new starts. If this process dies after it,
        # the batch stays `cancelling`, and a repeated cancel ends the rest.
        record, dropped = await self.get(tenant, batch), 0
        while waiting := await self.step("cancel", tenant=tenant, batch=batch, max_count=AT_ONCE):
            names = [run.decode() for run in waiting]
            records = await self.records([(tenant, name) for name in names])
            outcomes = [
                build_cancelled_outcome(name, record)
                for name, record in zip(names, records, strict=True)
                if record is not None
            ]
            dropped += len(await self.settle(tenant, batch, outcomes))
        return dropped if record.state in (BatchState.IN_PROGRESS, BatchState.CANCELLING) else 0

    async def delete(self, tenant: str, batch: str, entry: str = "") -> None:
        """Delete an ended batch and its runs. `entry`: the entry for the audit log, "" for none. Raises
        ToolFailure(INVALID_ARGUMENTS): no such batch, or one that has not ended.
        """
        # In steps, because Redis is blocked during one. If this process dies between two, no reader finds the batch,
        # and a repeated delete, or the time to live, removes the rest.
        reply = b"deleting"
        while reply == b"deleting":
            reply = await self.step(
                "delete_batch",
                tenant=tenant,
                batch=batch,
                audit_log=audit_key(self._deployment),
                audit_entry=entry,
                max_count=AT_ONCE,
            )
        if reply == b"unknown":
            raise no_batch(tenant, batch)
        if reply == b"open":
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"batch {batch} has not ended, and was not deleted: cancel it first"
            )

    async def retry(self, tenant: str, batch: str, kinds: Iterable[FailureKind], entry: str = "") -> int:
        """Queue the runs again that failed for one of these reasons. Return the number of these runs. `entry`: the
        entry for the audit log, written with the first of the runs; "" for none.
        """
        kind_names, count = f",{','.join(kind.value for kind in kinds)},", 0
        ended = await self.ended(tenant, batch, 0)
        for some in in_steps(run for _, run in ended):
            # Write the audit entry in the step that queues the first run, so that neither exists without the other.
            audited = entry if not count else ""
            count += len(
                await self.step(
                    "retry",
                    *some,
                    tenant=tenant,
                    batch=batch,
                    audit_log=audit_key(self._deployment),
                    audit_entry=audited,
                    kinds=kind_names,
                )
            )
        return count

    async def waiting(self, tenant: str, batch: str) -> set[str]:
        """Return the ids of the batch's runs that wait to be claimed."""
        return {
            run.decode() for run in await ask(self._client.zrange(self._batch_key(tenant, batch) + ":waiting", 0, -1))
        }

    async def ended(self, tenant: str, batch: str, after: int, limit: int = -1) -> list[tuple[int, str]]:
        """Return the runs that ended after the given sequence number, in order, at most `limit` (-1: all), each with
        its number.
        """
        key = self._batch_key(tenant, batch) + ":ended"
        rows = await ask(self._client.zrangebyscore(key, f"({after}", "+inf", start=0, num=limit, withscores=True))
        return [(int(number), run.decode()) for run, number in rows]

    async def items(self, tenant: str, batch: str, first: int = 0, last: int = -1) -> list[str]:
        """Return the ids of the runs from the first to the last position, both included, in the order in which they
        were added.
        """
        key = self._batch_key(tenant, batch) + ":items"
        return [run.decode() for run in await ask(self._client.lrange(key, first, last))]

    async def count_items(self, tenant: str, batch: str) -> int:
        """Return the number of runs that were added to the batch."""
        return int(await ask(self._client.llen(self._batch_key(tenant, batch) + ":items")))

    async def counts(self, tenant: str, batch: str) -> Mapping[str, int]:
        """Return how many runs of a batch are in each state (`waiting`, `running`)."""
        key, pipe = self._batch_key(tenant, batch), self._client.pipeline(transaction=False)
        pipe.zcard(f"{key}:waiting")
        pipe.scard(f"{key}:delayed")
        pipe.scard(f"{key}:running")
        waiting, delayed, running = await ask(pipe.execute())
        return {"waiting": waiting + delayed, "running": running}

    async def add(self, tenant: str, batch: str, runs: Iterable[tuple[str, BatchItem]]) -> int:
        """Add those of the runs that do not exist yet. The added runs can be claimed at once. Return how many were
        added. Raises BatchCancelled: the batch is cancelled; no more runs are added. Raises
        ToolFailure(QUOTA_EXCEEDED): the tenant may store no more; the next call continues.
        """
        added, waiting = 0, iter(runs)
        # The items are sealed in threads, because an item has up to 16 MB, and reading it may mean parsing it again.
        while values := await in_tenant_thread(tenant, self._seal_step, tenant, batch, waiting):
            count = int(await self.step("add", *values, tenant=tenant, batch=batch))
            # The batch was cancelled between two steps. The cancel also ends the runs that earlier steps have added.
            if count == -1:
                raise BatchCancelled(batch)
            if count == -2:
                raise nearly_full()
            added += count
        return added

    def _seal_step(self, tenant: str, batch: str, runs: Iterator[tuple[str, BatchItem]]) -> list[str | int]:
        """Return the arguments of one step for the next runs: at most AT_ONCE, and few of them if they are large."""
        values, size = list[str | int](), 0
        # Redis serves no other client during a step, so its time must not depend on the size of the items.
        for run, item in islice(runs, AT_ONCE):
            sealed = seal_item(self.keys, tenant, run, batch, item)
            values += (run, sealed, item.priority, item.line)
            size += len(sealed)
            if size > STEP_CHARS:
                break
        return values

    async def custom_ids(self, tenant: str, batch: str, runs: Sequence[str]) -> list[str | None]:
        """Return the custom_ids of a batch's runs; None for a removed run. Raises ConfigError: an item cannot be
        verified or read.
        """
        pipe = self._client.pipeline(transaction=False)
        for run in runs:
            pipe.hget(run_key(self._deployment, tenant, run), "item")
        rows = list(zip(runs, await ask(pipe.execute()), strict=True))

        def read_ids() -> list[str | None]:
            return [
                open_item(self.keys, tenant, run, batch, sealed).custom_id if sealed is not None else None
                for run, sealed in rows
            ]

        return await in_tenant_thread(tenant, read_ids)

    async def fit_page(self, tenant: str, runs: Sequence[str]) -> tuple[int, int]:
        """Return how many of these runs fit a page of PAGE_BYTES, at least one if there are any, and the bytes of their
        records.
        """
        sizes = list(accumulate(await self.read_sizes(tenant, runs, "run_bytes")))
        count = max(1, sum(size <= PAGE_BYTES for size in sizes)) if sizes else 0
        return count, sizes[count - 1] if count else 0

    def _batch_key(self, tenant: str, batch: str) -> str:
        return batch_key(self._deployment, tenant, batch)


def no_batch(tenant: str, batch: str) -> ToolFailure:
    return ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"batch {batch} of tenant {tenant} was not found: check the id and --tenant. Batches are stored for 30 days",
    )
