"""Runs in Redis. A batch or a program submits a run, an orchestrator claims it under a lease, and the run ends once.

Invariant: a forged field can disturb or restart a run, but cannot change its task or its result. The item (what the
run does) and the outcome (its result) are therefore signed, for one tenant and one run id. Fields that scripts change
or compare (states, claims, counters) are not signed.

A run that was started without a batch is called durable run. It has no batch (NO_BATCH), and keys of its own.
"""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, TypeVar

import redis.asyncio

from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.names import audit_key, run_key, runs_prefix, tenant_key
from toolcrew.contract.run_events import FailureKind, RunEvent
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.webhooks import Webhook
from toolcrew.store.batches import (
    NO_BATCH,
    RUN_TTL_S,
    BatchDefaults,
    BatchItem,
    BatchRecord,
    BatchState,
    ItemOutcome,
    RowLocation,
    batch_key,
    batches_key,
    member,
    open_item,
    open_outcome,
    parse_batch,
    seal_defaults,
    seal_item,
    seal_outcome,
    seal_rows,
    split_member,
)
from toolcrew.store.connection import broker_errors
from toolcrew.store.memory import no_memory
from toolcrew.store.run_events import not_found
from toolcrew.store.run_log import (
    MAX_TRANSCRIPT_BYTES,
    PACKED_PIECE_BYTES,
    RunAttempt,
    close_left_sessions,
    read_entries,
    unpack_transcript,
)
from toolcrew.store.run_records import (
    LISTED,
    DurableRun,
    DurableRunState,
    RunRecord,
    build_cancelled_outcome,
    build_end,
    pack_end,
    parse_durable_run,
    parse_run,
)
from toolcrew.store.run_script import RunScript
from toolcrew.store.tasks import retry_until_available
from toolcrew.store.tenant_threads import in_tenant_thread
from toolcrew.store.webhooks import seal_webhook
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_PENDING = 10_000
"""Limit of waiting durable runs of a tenant. Further runs are refused."""
MAX_LISTED = 100_000
"""Limit of listed durable runs of a tenant. Above the limit, the oldest runs that have ended are removed."""
MAX_BODY_BYTES = 1024 * 1024
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_TEXT = 16, 64, 512
SHOWN_INSTRUCTION = 300
MAX_LISTED_FORKS = 1000
"""Limit of the forks of one run that are read."""
LEASE_S = 20.0
AT_ONCE = 200
"""Maximum number of runs in one step of the script. Redis is blocked during a step."""
STEP_CHARS = 4 * 1024 * 1024
"""Number of characters of signed items after which one step of the script adds no further item."""
PAGE_BYTES = 8 * 1024 * 1024
"""Size of the records of runs that are read together, in bytes. The record of a run has up to some 20 MB."""
RUNS_PER_STEP, MAX_STEPS = 2000, 10
"""Limits of the search for runs in a given state. RUNS_PER_STEP: number of runs that one step reads. MAX_STEPS:
number of steps for one page.
"""
_CURSOR = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)/([A-Za-z0-9_-]{1,64})")
"""Pattern of a cursor: the creation time of a batch and its id."""
T = TypeVar("T")


@dataclass(frozen=True)
class RunClaim:
    """A run that this process holds until the lease ends. `is_resumed`: the run has a log to continue from."""

    tenant: str
    run: str
    token: str
    is_resumed: bool
    record: RunRecord

    @property
    def attempt(self) -> RunAttempt:
        """Return the attempt of the run that this process holds."""
        return RunAttempt(self.tenant, self.run, self.record.attempt, self.token)


@dataclass(frozen=True)
class BatchPage:
    """A page of batches by id, the newest first. `older`: the number of batches after this page. `cursor`: the start
    of the next page; None if there is none."""

    batches: Mapping[str, BatchRecord]
    older: int
    cursor: str | None


class BatchCancelled(Exception):
    """The batch was cancelled. A process that executes one of its runs must end the run."""


class RunQueue:
    """Runs and batches of one deployment. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self.keys = keys
        self.owner = secrets.token_hex(6)
        self._script = RunScript(client, deployment)
        self._full_tenants: set[str] = set()
        self._parsing: dict[tuple[str, str], str] = {}
        """The claims whose records are being read: (tenant, run) -> token. Their leases are renewed, too."""

    # --- Batches

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
        return bool((await _ask(pipe.execute()))[0])

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
        await _ask(pipe.execute())

    async def batch(self, tenant: str, batch: str) -> BatchRecord:
        """Return a batch's record. Raises ToolFailure(INVALID_ARGUMENTS): unknown id. Raises ConfigError: the record
        cannot be verified or read."""
        fields: Any = await _ask(self._client.hgetall(self._batch_key(tenant, batch)))
        if b"total" not in fields or fields.get(b"state") == b"deleting":
            raise _no_batch(tenant, batch)
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
        for some in _in_steps(names):
            for name, fields in zip(
                some, await self._hashes([self._batch_key(tenant, name) for name in some]), strict=True
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
            await _ask(self._client.zrem(batches_key(self._deployment, tenant), *expired))
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
        record, dropped = await self.batch(tenant, batch), 0
        while waiting := await self.step("cancel", tenant=tenant, batch=batch, max_count=AT_ONCE):
            names = [run.decode() for run in waiting]
            records = await self.runs([(tenant, name) for name in names])
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
            raise _no_batch(tenant, batch)
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
        for some in _in_steps(run for _, run in ended):
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
            run.decode() for run in await _ask(self._client.zrange(self._batch_key(tenant, batch) + ":waiting", 0, -1))
        }

    async def ended(self, tenant: str, batch: str, after: int, limit: int = -1) -> list[tuple[int, str]]:
        """Return the runs that ended after the given sequence number, in order, at most `limit` (-1: all), each with
        its number.
        """
        key = self._batch_key(tenant, batch) + ":ended"
        rows = await _ask(self._client.zrangebyscore(key, f"({after}", "+inf", start=0, num=limit, withscores=True))
        return [(int(number), run.decode()) for run, number in rows]

    async def items(self, tenant: str, batch: str, first: int = 0, last: int = -1) -> list[str]:
        """Return the ids of the runs from the first to the last position, both included, in the order in which they
        were added.
        """
        key = self._batch_key(tenant, batch) + ":items"
        return [run.decode() for run in await _ask(self._client.lrange(key, first, last))]

    async def count_items(self, tenant: str, batch: str) -> int:
        """Return the number of runs that were added to the batch."""
        return int(await _ask(self._client.llen(self._batch_key(tenant, batch) + ":items")))

    async def counts(self, tenant: str, batch: str) -> Mapping[str, int]:
        """Return how many runs of a batch are in each state (`waiting`, `running`)."""
        key, pipe = self._batch_key(tenant, batch), self._client.pipeline(transaction=False)
        pipe.zcard(f"{key}:waiting")
        pipe.scard(f"{key}:delayed")
        pipe.scard(f"{key}:running")
        waiting, delayed, running = await _ask(pipe.execute())
        return {"waiting": waiting + delayed, "running": running}

    # --- Runs

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

    async def claim(
        self, limit: int, only: tuple[str, str] | None = None, tenants: Collection[str] = ()
    ) -> list[RunClaim]:
        """Claim at most `limit` runs. Runs of dead processes come first, then the next run of each tenant in turn.
        `only`: a tenant and its batch, from which runs are claimed. None: claim from all detached batches (batches that
        services run), only of `tenants` if it is not empty. A run that this process cannot verify or read is given
        back.
        """
        limit = min(limit, AT_ONCE)
        # The tokens are made here, because a script of Redis has no secure random numbers. A token fences all later
        # writes.
        reply, abandoned, full_tenants = await self.step(
            "claim",
            *(secrets.token_hex(8) for _ in range(limit)),
            owner=self.owner,
            max_claims=limit,
            lease_s=LEASE_S,
            only_batch=member(*only) if only is not None else "",
            tenants=f",{','.join(tenants)}," if tenants else "",
        )
        self._report_full({tenant.decode() for tenant in full_tenants})
        rows = [tuple(part.decode() for part in row) for row in reply]
        parsing = {(tenant, run): token for tenant, run, token, _ in rows}
        self._parsing |= parsing
        try:
            await self._end_abandoned([tuple(part.decode() for part in row) for row in abandoned])
            return await self._parse_claims(rows)
        finally:
            for key in parsing:
                self._parsing.pop(key, None)

    async def _parse_claims(self, rows: Sequence[tuple[str, ...]]) -> list[RunClaim]:
        """Return the claims in these rows: tenant, run, token, kind. A large item of one tenant delays no claim of
        another.
        """
        records = await self._fields([row[:2] for row in rows])
        claims = await asyncio.gather(
            *(
                self._parse_claim(tenant, run, token, kind, fields)
                for (tenant, run, token, kind), fields in zip(rows, records, strict=True)
            )
        )
        return [claim for claim in claims if claim is not None]

    async def _parse_claim(
        self, tenant: str, run: str, token: str, kind: str, fields: Mapping[bytes, bytes]
    ) -> RunClaim | None:
        """Return a claim; None if its record is lost, or cannot be read and the run was given back."""
        # Redis lost the record after the step. The script removes the lease when it ends.
        if b"item" not in fields:
            return None
        try:
            return RunClaim(tenant, run, token, kind == "resumed", await self._parse(tenant, run, fields))
        except ConfigError as error:
            # A process of another release, or with other keys, may be able to read it. The delay keeps this process
            # from claiming it at once again.
            log.error("run_not_readable", tenant=tenant, run=run, error=str(error))
            await self.step("give_back", tenant=tenant, run=run, claim=token, after_s=LEASE_S, is_new="", is_denied="")
            return None

    def _report_full(self, tenants: set[str]) -> None:
        """Log the tenants whose new runs wait for memory, each once until its runs start again."""
        for tenant in sorted(tenants - self._full_tenants):
            log.warning("runs_wait_for_memory", tenant=tenant)
        self._full_tenants = tenants

    async def renew(self, claims: Sequence[RunClaim]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """Extend the leases. Return the runs that another process holds now, and the runs of cancelled batches, as
        (tenant, run).
        """
        lost: set[tuple[str, str]] = set()
        cancelled: set[tuple[str, str]] = set()
        tokens = self._parsing | {(claim.tenant, claim.run): claim.token for claim in claims}
        for some in _in_steps(tokens.items()):
            pairs = [part for key, token in some for part in (member(*key), token)]
            lost_members, cancelled_members = await self.step("renew", *pairs, lease_s=LEASE_S)
            lost |= {split_member(name.decode()) for name in lost_members}
            cancelled |= {split_member(name.decode()) for name in cancelled_members}
        held = {(claim.tenant, claim.run) for claim in claims}
        return lost & held, cancelled & held

    async def cancels(self) -> set[tuple[str, str]]:
        """Return the durable runs that their owners must end, as (tenant, run)."""
        return {
            split_member(name.decode())
            for name in await _ask(self._client.zrange(runs_prefix(self._deployment) + "cancels", 0, AT_ONCE))
        }

    async def finish(self, claim: RunClaim, outcome: ItemOutcome, *, calls: int = 0, seconds: float = 0.0) -> bool:
        """Store how a run ended. Return False if another process owns the run. `calls`, `seconds`: number of calls and
        duration, which the last event of a durable run contains.
        """
        kind = outcome.failure.kind.value if outcome.failure is not None else ""
        event, transcript = "", b""
        if claim.record.batch == NO_BATCH:
            # The last event is written in the same step as the outcome, so that a follower of the event finds the
            # outcome. A thread packs the transcript, because 64 MB take seconds to compress.
            outcome, event, transcript = await in_tenant_thread(claim.tenant, pack_end, outcome, calls, seconds)
        sealed = seal_outcome(self.keys, claim.tenant, claim.run, outcome)
        reply = await self.step(
            "finish",
            tenant=claim.tenant,
            run=claim.run,
            claim=claim.token,
            outcome=sealed,
            failure=kind,
            ended=event,
            transcript=transcript,
        )
        return bool(reply)

    async def give_back(
        self, claim: RunClaim, *, after_s: float = 0.0, is_new: bool = False, is_denied: bool = False
    ) -> bool:
        """Return a run to the queue, where it can be claimed after `after_s` seconds. Another process continues it, or
        starts a new attempt (`is_new`). `is_denied`: count it as a denial of the model. Return False if another process
        owns the run. Raises BatchCancelled: the batch was cancelled.
        """
        reply = int(
            await self.step(
                "give_back",
                tenant=claim.tenant,
                run=claim.run,
                claim=claim.token,
                after_s=after_s,
                is_new=int(is_new),
                is_denied=int(is_denied),
            )
        )
        if reply == 2:
            raise BatchCancelled(claim.record.batch)
        return bool(reply)

    async def _end_abandoned(self, abandoned: Sequence[tuple[str, ...]]) -> None:
        """End the runs of cancelled batches whose owner died, because no process may be following those batches. A
        cancelled durable run has already ended; only its sessions are closed.
        """
        for tenant, _, run in (row for row in abandoned if row[1] == NO_BATCH):
            await self.close_sessions(tenant, [run])
        abandoned = [row for row in abandoned if row[1] != NO_BATCH]
        records = await self._fields([(tenant, run) for tenant, _, run in abandoned])
        for (tenant, batch, run), fields in zip(abandoned, records, strict=True):
            try:
                await self.settle(tenant, batch, [build_cancelled_outcome(run, await self._parse(tenant, run, fields))])
            except ConfigError as error:
                log.error("run_not_readable", tenant=tenant, run=run, error=str(error))

    async def settle(self, tenant: str, batch: str, outcomes: Iterable[ItemOutcome]) -> set[str]:
        """End waiting runs with these outcomes without executing the runs. Return the ids of the runs that were
        waiting.
        """
        settled: set[str] = set()
        for some in _in_steps(outcomes):
            sealed = [
                (
                    outcome.run,
                    seal_outcome(self.keys, tenant, outcome.run, outcome),
                    outcome.failure.kind.value if outcome.failure else "",
                )
                for outcome in some
            ]
            values = (part for entry in sealed for part in entry)
            ended = {run.decode() for run in await self.step("settle", *values, tenant=tenant, batch=batch)}
            # Close the sessions only of the runs that this step has ended. A run that another process has just claimed
            # still needs its session.
            await self.close_sessions(tenant, ended)
            settled |= ended
        return settled

    async def close_sessions(self, tenant: str, runs: Collection[str]) -> None:
        """Close the sessions that earlier owners have opened for runs that no process continues. Wait while Redis does
        not answer.
        """
        await retry_until_available(
            lambda: close_left_sessions(self._client, self._deployment, self.keys, tenant, runs)
        )

    async def runs(self, names: Sequence[tuple[str, str]]) -> list[RunRecord | None]:
        """Return the records of runs by (tenant, run); None for a removed run. Raises ConfigError: a record cannot be
        verified or read.
        """
        rows = list(zip(names, await self._fields(names), strict=True))

        def parse() -> list[RunRecord | None]:
            return [
                parse_run(self.keys, tenant, run, fields) if b"item" in fields else None
                for (tenant, run), fields in rows
            ]

        return await in_tenant_thread(names[0][0], parse) if rows else []

    async def custom_ids(self, tenant: str, batch: str, runs: Sequence[str]) -> list[str | None]:
        """Return the custom_ids of a batch's runs; None for a removed run. Raises ConfigError: an item cannot be
        verified or read.
        """
        pipe = self._client.pipeline(transaction=False)
        for run in runs:
            pipe.hget(run_key(self._deployment, tenant, run), "item")
        rows = list(zip(runs, await _ask(pipe.execute()), strict=True))

        def read_ids() -> list[str | None]:
            return [
                open_item(self.keys, tenant, run, batch, sealed).custom_id if sealed is not None else None
                for run, sealed in rows
            ]

        return await in_tenant_thread(tenant, read_ids)

    # --- Durable runs

    async def start_run(
        self,
        tenant: str,
        run: str,
        item: BatchItem,
        digest: str,
        about: str,
        limits: tuple[int, int],
        webhook: Webhook | None = None,
        token: str = "",
    ) -> list[str]:
        """Queue a durable run. `digest`: hash of the whole request. `about`: an About as JSON. `limits`: how many runs
        may wait, and how many are listed. `token`: if it is set, claim the run with this token for this process instead
        of queueing the run. Return `started`; `known` (the same request has that id); `other` (another request has that
        id); `full`; `memory` (the tenant may store no more); or `busy` and the id of the run that uses the session.
        """
        reply = await self.step(
            "start_run",
            tenant=tenant,
            run=run,
            item=seal_item(self.keys, tenant, run, NO_BATCH, item),
            digest=digest,
            about=about,
            priority=item.priority,
            session=item.environment.session or "",
            max_waiting=limits[0],
            max_listed=limits[1],
            ttl_s=RUN_TTL_S,
            webhook=seal_webhook(self.keys, tenant, "run", run, webhook),
            token=token,
            owner=self.owner,
            lease_s=LEASE_S,
            parent=item.forked_from.run if item.forked_from is not None else "",
            step=item.forked_from.step if item.forked_from is not None else 0,
        )
        return [part.decode() for part in reply]

    async def started_claim(self, tenant: str, run: str, token: str) -> RunClaim:
        """Return the claim of a run that `start_run` has claimed with `token`. Raises ConfigError."""
        (fields,) = await self._fields([(tenant, run)])
        return RunClaim(tenant, run, token, False, await self._parse(tenant, run, fields))

    async def durable_run(self, tenant: str, run: str) -> DurableRun:
        """Return a durable run with its whole answer. Raises ToolFailure(FILE_NOT_FOUND): no such run."""
        names = [*LISTED, "outcome"]
        values: Any = await _ask(self._client.hmget(run_key(self._deployment, tenant, run), names))
        fields = dict(zip(names, values, strict=True))
        durable_run, sealed = parse_durable_run(tenant, run, fields), fields["outcome"]
        if durable_run is None:
            raise not_found(run)
        if durable_run.end is None or not sealed:
            return durable_run
        # The shortened end in the hash is for lists and is not signed. Only the outcome is signed.
        return durable_run.model_copy(update={"end": build_end(open_outcome(self.keys, tenant, run, sealed))})

    async def list_runs(
        self, tenant: str, before: int, limit: int, state: DurableRunState | None
    ) -> tuple[list[DurableRun], int]:
        """Return the newest durable runs before the position `before`, without removed ones. Also return the position
        of the next page, 0 if there is none.
        """
        runs: list[DurableRun] = []
        state_name, max_checked = (
            state.value if state is not None else "",
            RUNS_PER_STEP if state is not None and not state.is_final else limit,
        )
        # Runs in a rare state may be far apart. A page may then have few runs, and its cursor continues the search.
        for _ in range(MAX_STEPS):
            reply, names = await self.step(
                "list_runs",
                tenant=tenant,
                before=before,
                max_count=limit - len(runs),
                state=state_name,
                max_checked=max_checked,
            )
            before = int(reply)
            found = await self.find_runs(tenant, [name.decode() for name in names])
            runs += [run for run in found if run is not None]
            if not before or len(runs) >= limit:
                break
        return runs, before

    async def find_runs(self, tenant: str, names: Sequence[str]) -> list[DurableRun | None]:
        """Return these durable runs as lists show them; None for a removed run and for an item of a batch."""
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.hmget(run_key(self._deployment, tenant, name), *LISTED)
        rows = await _ask(pipe.execute()) if names else []
        return [
            parse_durable_run(tenant, name, dict(zip(LISTED, row, strict=True)))
            for name, row in zip(names, rows, strict=True)
        ]

    async def cancel_run(self, tenant: str, run: str, entry: str) -> None:
        """End a durable run. A waiting run ends at once; a running run is ended by the process that executes it.
        `entry`: the entry for the audit log, "" for none. Raises ToolFailure(FILE_NOT_FOUND): no such run.
        """
        audit_log = audit_key(self._deployment)
        state = await self.step("cancel_run", tenant=tenant, run=run, audit_log=audit_log, audit_entry=entry)
        reply = state.decode()
        if reply == "unknown":
            raise not_found(run)
        if reply == "cancelled":
            # A former owner may have opened a session.
            await self.close_sessions(tenant, [run])

    async def transcript(self, tenant: str, run: str) -> list[dict[str, Any]] | None:
        """Return the messages of a durable run that has ended. None: the run has not ended, is an item of a batch, or
        has a transcript that is too large to store; its log then contains the messages. Raises ConfigError: the
        transcript cannot be read.
        """
        packed = await self.packed_transcript(tenant, run)
        return await in_tenant_thread(tenant, unpack_transcript, run, b"".join(packed)) if packed else None

    async def packed_transcript(self, tenant: str, run: str) -> deque[bytes]:
        """Return the stored transcript in its compressed form, in pieces; none if there is no transcript."""
        # GETRANGE and not GET: any process that can write to Redis may have stored a value of any size.
        key, pipe = self._transcript_key(tenant, run), self._client.pipeline(transaction=True)
        for start in range(0, await self.packed_bytes(tenant, run), PACKED_PIECE_BYTES):
            pipe.getrange(key, start, min(start + PACKED_PIECE_BYTES - 1, MAX_TRANSCRIPT_BYTES))
        return deque(piece for piece in await _ask(pipe.execute()) if piece)

    async def packed_bytes(self, tenant: str, run: str) -> int:
        """Return the size of the compressed transcript, in bytes; 0 if there is none."""
        return min(int(await _ask(self._client.strlen(self._transcript_key(tenant, run)))), MAX_TRANSCRIPT_BYTES + 1)

    def _transcript_key(self, tenant: str, run: str) -> str:
        return tenant_key(self._deployment, tenant, f"run.{run}:transcript")

    async def log_bytes(self, tenant: str, run: str) -> int:
        """Return the size of the log of a run, in bytes."""
        return (await self._counted(tenant, [run], "log_bytes"))[0]

    async def fit_page(self, tenant: str, runs: Sequence[str]) -> tuple[int, int]:
        """Return how many of these runs fit a page of PAGE_BYTES, at least one if there are any, and the bytes of their
        records.
        """
        sizes = list(accumulate(await self._counted(tenant, runs, "run_bytes")))
        count = max(1, sum(size <= PAGE_BYTES for size in sizes)) if sizes else 0
        return count, sizes[count - 1] if count else 0

    async def _counted(self, tenant: str, runs: Sequence[str], field: str) -> list[int]:
        pipe = self._client.pipeline(transaction=False)
        for run in runs:
            pipe.hget(run_key(self._deployment, tenant, run), field)
        values: Any = await _ask(pipe.execute()) if runs else []
        return [int(value.split()[0]) if value else 0 for value in values]

    async def open_log(
        self, tenant: str, run: str, batch: str | None = NO_BATCH
    ) -> tuple[RunRecord, AsyncIterator[RunEvent]]:
        """Return the record of a run, and its log, of which only a page is in memory. Raises the errors of
        `read_log`; the log raises them while it is read.
        """
        record = await self._find(tenant, run, batch)
        attempt = RunAttempt(tenant, run, record.attempt)
        return record, read_entries(self._client, self._deployment, self.keys, attempt)

    async def _find(self, tenant: str, run: str, batch: str | None) -> RunRecord:
        (fields,) = await self._fields([(tenant, run)])
        if b"item" not in fields or (batch is not None and fields.get(b"batch") != batch.encode()):
            raise not_found(run)
        return await self._parse(tenant, run, fields)

    async def read_log(self, tenant: str, run: str, batch: str | None = NO_BATCH) -> tuple[RunRecord, list[RunEvent]]:
        """Return the record and the log of a run in `batch` (None: in any batch). The log of a batch's run is removed
        an hour after its end; with kept states, a day after its end. Raises ToolFailure(FILE_NOT_FOUND): no such run.
        Raises ConfigError: the run cannot be verified or read.
        """
        record, entries = await self.open_log(tenant, run, batch)
        return record, [entry async for entry in entries]

    async def forks(self, tenant: str, runs: Sequence[str]) -> list[list[tuple[int, str]]]:
        """Return the forks of each run as (step, run), in the order of their start."""
        pipe = self._client.pipeline(transaction=False)
        for run in runs:
            pipe.lrange(run_key(self._deployment, tenant, run) + ":forks", 0, MAX_LISTED_FORKS - 1)
        rows = [[entry.decode().partition("|") for entry in row] for row in await _ask(pipe.execute())]
        return [[(int(step), name) for step, _, name in row] for row in rows]

    async def step(self, operation: str, /, *rest: Any, **arguments: Any) -> Any:
        """Execute one step of the script, as `RunScript.run` does."""
        with broker_errors(_WHAT):
            return await self._script.run(operation, *rest, **arguments)

    def _batch_key(self, tenant: str, batch: str) -> str:
        return batch_key(self._deployment, tenant, batch)

    async def _parse(self, tenant: str, run: str, fields: Mapping[bytes, bytes]) -> RunRecord:
        # In a thread: an item has up to 16 MB, and its tenant decides how often it is read.
        return await in_tenant_thread(tenant, parse_run, self.keys, tenant, run, fields)

    async def _fields(self, names: Sequence[tuple[str, ...]]) -> list[Any]:
        return await self._hashes([run_key(self._deployment, tenant, run) for tenant, run in names])

    async def _hashes(self, keys: Sequence[str]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.hgetall(key)
        return list(await _ask(pipe.execute())) if keys else []


_WHAT = "the runs were not read or changed"


async def _ask(command: Awaitable[Any]) -> Any:
    with broker_errors(_WHAT):
        return await command


def nearly_full() -> ToolFailure:
    """Return the error for work of a tenant that may store no more."""
    return no_memory("nothing was queued")


def _no_batch(tenant: str, batch: str) -> ToolFailure:
    return ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"batch {batch} of tenant {tenant} was not found: check the id and --tenant. Batches are stored for 30 days",
    )


def _in_steps(values: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists of at most AT_ONCE values, for one step each."""
    iterator = iter(values)
    while some := list(islice(iterator, AT_ONCE)):
        yield some
