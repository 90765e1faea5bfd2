"""The queue of runs. An orchestrator claims a run under a lease, and the run ends once."""

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import redis.asyncio

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.names import runs_prefix
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.batch_store import BatchStore
from toolcrew.store.batches import (
    NO_BATCH,
    ItemOutcome,
    member,
    seal_outcome,
    split_member,
)
from toolcrew.store.run_log import RunAttempt
from toolcrew.store.run_records import RunRecord, build_cancelled_outcome, pack_end
from toolcrew.store.run_store import RunStore
from toolcrew.store.stored_runs import AT_ONCE, LEASE_S, BatchCancelled, StoredRuns, ask, in_steps
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


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


class RunQueue(StoredRuns):
    """Runs that wait for orchestrators. `batches`, `runs`: what programs do with batches and durable runs. `owner`:
    names this process as the holder of its runs.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        super().__init__(client, deployment, keys)
        self.batches = BatchStore(client, deployment, keys)
        self.runs = RunStore(client, deployment, keys)
        self.owner = secrets.token_hex(6)
        self._full_tenants: set[str] = set()
        self._parsing: dict[tuple[str, str], str] = {}
        """The claims whose records are being read: (tenant, run) -> token. Their leases are renewed, too."""

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
        records = await self.fields([row[:2] for row in rows])
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
            return RunClaim(tenant, run, token, kind == "resumed", await self.parse(tenant, run, fields))
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
        for some in in_steps(tokens.items()):
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
            for name in await ask(self._client.zrange(runs_prefix(self._deployment) + "cancels", 0, AT_ONCE))
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
        records = await self.fields([(tenant, run) for tenant, _, run in abandoned])
        for (tenant, batch, run), fields in zip(abandoned, records, strict=True):
            try:
                await self.settle(tenant, batch, [build_cancelled_outcome(run, await self.parse(tenant, run, fields))])
            except ConfigError as error:
                log.error("run_not_readable", tenant=tenant, run=run, error=str(error))

    async def started_claim(self, tenant: str, run: str, token: str) -> RunClaim:
        """Return the claim of a run that `start_run` has claimed with `token`. Raises ConfigError."""
        (fields,) = await self.fields([(tenant, run)])
        return RunClaim(tenant, run, token, False, await self.parse(tenant, run, fields))
