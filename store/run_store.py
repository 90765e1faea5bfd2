"""Durable runs in Redis: programs start, list, read and cancel them."""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.names import audit_key, run_key, tenant_key
from toolcrew.contract.run_events import RunEvent
from toolcrew.contract.run_views import DurableRunState
from toolcrew.contract.webhooks import Webhook
from toolcrew.store.batches import (
    NO_BATCH,
    RUN_TTL_S,
    BatchItem,
    open_outcome,
    seal_item,
)
from toolcrew.store.run_events import not_found
from toolcrew.store.run_log import (
    MAX_TRANSCRIPT_BYTES,
    PACKED_PIECE_BYTES,
    RunAttempt,
    read_entries,
    unpack_transcript,
)
from toolcrew.store.run_records import LISTED, DurableRun, RunRecord, build_end, parse_durable_run
from toolcrew.store.stored_runs import LEASE_S, StoredRuns, ask
from toolcrew.store.webhooks import seal_webhook

MAX_PENDING = 10_000
"""Limit of waiting durable runs of a tenant. Further runs are refused."""
MAX_LISTED = 100_000
"""Limit of listed durable runs of a tenant. Above the limit, the oldest runs that have ended are removed."""
MAX_BODY_BYTES = 1024 * 1024
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_TEXT = 16, 64, 512
SHOWN_INSTRUCTION = 300
MAX_LISTED_FORKS = 1000
"""Limit of the forks of one run that are read."""
RUNS_PER_STEP, MAX_STEPS = 2000, 10
"""Limits of the search for runs in a given state. RUNS_PER_STEP: number of runs that one step reads. MAX_STEPS:
number of steps for one page.
"""


class RunStore(StoredRuns):
    """Durable runs of one deployment, and the logs of all runs."""

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
        owner: str = "",
    ) -> list[str]:
        """Queue a durable run. `digest`: hash of the whole request. `about`: an About as JSON. `limits`: how many runs
        may wait, and how many are listed. `token`: if it is set, claim the run with this token for `owner` instead
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
            owner=owner,
            lease_s=LEASE_S,
            parent=item.forked_from.run if item.forked_from is not None else "",
            step=item.forked_from.step if item.forked_from is not None else 0,
        )
        return [part.decode() for part in reply]

    async def get(self, tenant: str, run: str) -> DurableRun:
        """Return a durable run with its whole answer. Raises ToolFailure(FILE_NOT_FOUND): no such run."""
        names = [*LISTED, "outcome"]
        values: Any = await ask(self._client.hmget(run_key(self._deployment, tenant, run), names))
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
        rows = await ask(pipe.execute()) if names else []
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
        return deque(piece for piece in await ask(pipe.execute()) if piece)

    async def packed_bytes(self, tenant: str, run: str) -> int:
        """Return the size of the compressed transcript, in bytes; 0 if there is none."""
        return min(int(await ask(self._client.strlen(self._transcript_key(tenant, run)))), MAX_TRANSCRIPT_BYTES + 1)

    def _transcript_key(self, tenant: str, run: str) -> str:
        return tenant_key(self._deployment, tenant, f"run.{run}:transcript")

    async def log_bytes(self, tenant: str, run: str) -> int:
        """Return the size of the log of a run, in bytes."""
        return (await self.read_sizes(tenant, [run], "log_bytes"))[0]

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
        (fields,) = await self.fields([(tenant, run)])
        if b"item" not in fields or (batch is not None and fields.get(b"batch") != batch.encode()):
            raise not_found(run)
        return await self.parse(tenant, run, fields)

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
        rows = [[entry.decode().partition("|") for entry in row] for row in await ask(pipe.execute())]
        return [[(int(step), name) for step, _, name in row] for row in rows]
