"""The queue of runs in Redis: added by whoever submits a batch, claimed under a lease by whoever works them, ended once."""

import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ToolFailure
from contract.names import audit_key, deployment_key
from contract.signing import UNSEAL_LUA, SigningKeys
from store.audit import AUDIT_LUA
from store.batch_items import BatchItem, Failure, FailureKind, Outcome
from store.hosted_records import STANDING, pack_end
from store.left_sessions import close_left_sessions
from store.outages import outlast
from store.run_keys import RUN_TTL_S, batch_key, batches_key, member, run_key, runs_prefix, split_member
from store.run_records import (
    BatchDefaults,
    BatchRecord,
    BatchState,
    RowPlace,
    RunRecord,
    open_item,
    parse_batch,
    parse_run,
    seal_defaults,
    seal_item,
    seal_outcome,
    seal_rows,
)
from telemetry.logs import get_logger

log = get_logger(__name__)

Thing = TypeVar("Thing")
LEASE_S = 20.0
AT_ONCE = 200
"""Runs in one step: so long Redis does nothing else."""
_PLACE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)/([A-Za-z0-9_-]{1,64})")
"""The instant at which a batch was made, and its id."""
_SCRIPT = "\n".join(
    [
        AUDIT_LUA,
        UNSEAL_LUA,
        *(Path(__file__).with_name(name).read_text() for name in ("run_queue.lua", "hosted.lua")),
        "return steps[operation]()",
    ]
)


@dataclass(frozen=True)
class Claim:
    """A run that is ours until its lease ends. `is_resumed`: its log says how far it has come."""

    tenant: str
    run: str
    word: str
    is_resumed: bool
    record: RunRecord


@dataclass(frozen=True)
class KnownBatches:
    """Batches by their ids, the newest first. `older`: how many come after them. `place`: where to go on, None when that was all."""

    batches: Mapping[str, BatchRecord]
    older: int
    place: str | None


class BatchCancelled(Exception):
    """Nobody goes on with a run of that batch any more: who has it ends it."""


class RunQueue:
    """Runs and batches of one deployment. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, owner: str = "") -> None:
        self._client, self.keys = client, keys
        self._deployment = deployment
        self.owner = owner or secrets.token_hex(6)
        self._script = client.register_script(_SCRIPT)
        self._prefixes = [deployment_key(deployment, ""), runs_prefix(deployment)]

    async def create(self, tenant: str, batch: str, record: BatchRecord) -> bool:
        """Note a batch; its runs are added afterwards. False when there is one of that id."""
        key, known = batch_key(self._deployment, tenant, batch), batches_key(self._deployment, tenant)
        fields: dict[Any, Any] = {
            "total": record.total,
            "sha256": record.sha256,
            "concurrency": record.concurrency,
            "defaults": seal_defaults(self.keys, tenant, batch, record.defaults),
            "created_at": record.created_at,
            "name": record.name,
            "is_detached": int(record.is_detached),
            "ttl_s": RUN_TTL_S,
        }

        async def write() -> bool:
            # All or nothing: half of a batch would keep its id from everybody.
            async with self._client.pipeline(transaction=True) as pipe:
                for name, value in {"state": record.state.value, **fields}.items():
                    pipe.hsetnx(key, name, value)
                pipe.expire(key, RUN_TTL_S)
                pipe.zadd(known, {batch: record.created_at}, nx=True)
                pipe.expire(known, RUN_TTL_S)
                return bool((await pipe.execute())[0])

        return bool(await _told(write))

    async def change(self, tenant: str, batch: str, *, concurrency: int, defaults: BatchDefaults, is_detached: bool) -> None:
        """How a batch goes on from now."""
        key = batch_key(self._deployment, tenant, batch)
        sealed = seal_defaults(self.keys, tenant, batch, defaults)
        mapping: dict[Any, Any] = {"concurrency": concurrency, "defaults": sealed, "is_detached": int(is_detached)}
        await _told(lambda: self._client.hset(key, mapping=mapping))

    async def add(self, tenant: str, batch: str, runs: Iterable[tuple[str, BatchItem]]) -> int:
        """Add runs that are not there yet, which may be claimed at once; how many those were. Raises BatchCancelled, and adds nothing any more, to a batch
        that is."""
        added = 0
        for some in _in_steps(runs):
            sealed = [(run, seal_item(self.keys, tenant, run, batch, item), item.priority, item.line) for run, item in some]
            arguments = [word for one in sealed for word in one]
            told = int(await self.step("add", tenant, batch, *arguments))
            if told < 0:
                raise BatchCancelled(batch)
            added += told
        return added

    async def reopen(self, tenant: str, batch: str) -> bool:
        """Go on with a batch that was cancelled, or seemed complete, if something of it waits or is still to be added; whether that was so."""
        return bool(await self.step("reopen", tenant, batch))

    async def claim(self, most: int, only: tuple[str, str] | None = None, tenants: Collection[str] = ()) -> list[Claim]:
        """Up to so many runs: those of processes that died first, then the next of each batch in turn. `only`: of that tenant's batch; None: of all
        detached ones, of those `tenants` if there are some. A run that this process cannot verify or read is given back."""
        most = min(most, AT_ONCE)
        wanted = (member(*only) if only is not None else "", f",{','.join(tenants)}," if tenants else "")
        told, left = await self.step("claim", self.owner, most, LEASE_S, *wanted, *(secrets.token_hex(8) for _ in range(most)))
        await self._end_left([tuple(part.decode() for part in one) for one in left])
        given = [tuple(part.decode() for part in one) for one in told]
        claims: list[Claim] = []
        for (tenant, run, word, how), fields in zip(given, await self._fields([one[:2] for one in given]), strict=True):
            if b"item" not in fields:
                continue
            try:
                claims.append(Claim(tenant, run, word, how == "resumed", parse_run(self.keys, tenant, run, fields)))
            except ConfigError as error:
                log.error("run_not_readable", tenant=tenant, run=run, error=str(error))
                await self.step("give_back", tenant, run, word, LEASE_S, "")
        return claims

    async def renew(self, claims: Sequence[Claim]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """Keep runs; gives those that are ours no more, and those whose batch is being cancelled, as (tenant, run)."""
        lost: set[tuple[str, str]] = set()
        cancelled: set[tuple[str, str]] = set()
        for some in _in_steps(claims):
            words = [word for claim in some for word in (member(claim.tenant, claim.run), claim.word)]
            gone, ended = await self.step("renew", LEASE_S, *words)
            lost |= {split_member(one.decode()) for one in gone}
            cancelled |= {split_member(one.decode()) for one in ended}
        return lost, cancelled

    async def cancels(self) -> set[tuple[str, str]]:
        """The programs' runs that are to be ended by whoever works them, as (tenant, run)."""
        told: Any = await _told(lambda: self._client.zrange(self._prefixes[1] + "cancels", 0, AT_ONCE))
        return {split_member(one.decode()) for one in told}

    async def finish(self, claim: Claim, outcome: Outcome) -> bool:
        """Note how a run ended. False when another process has it."""
        kind = outcome.failure.kind.value if outcome.failure is not None else ""
        rest: tuple[str | bytes, ...] = ()
        if claim.record.batch == STANDING:
            outcome, end, transcript = pack_end(outcome)
            rest = (end, transcript)
        sealed = seal_outcome(self.keys, claim.tenant, claim.run, outcome)
        return bool(await self.step("finish", claim.tenant, claim.run, claim.word, sealed, kind, *rest))

    async def give_back(self, claim: Claim, *, after_s: float = 0.0, anew: bool = False) -> bool:
        """Let another process go on with a run, or begin it `anew`, as one more attempt, after so many seconds. False when another process has it. Raises
        BatchCancelled."""
        told = int(await self.step("give_back", claim.tenant, claim.run, claim.word, after_s, "1" if anew else "0"))
        if told == 2:
            raise BatchCancelled(claim.record.batch)
        return bool(told)

    async def _end_left(self, left: Sequence[tuple[str, ...]]) -> None:
        """End runs of cancelled batches whose holder died: nobody may follow those batches. One that was cancelled by itself has ended."""
        for tenant, _, run in (one for one in left if one[1] == STANDING):
            await self.close_sessions(tenant, [run])
        left = [one for one in left if one[1] != STANDING]
        records = await self._fields([(tenant, run) for tenant, _, run in left])
        for (tenant, batch, run), fields in zip(left, records, strict=True):
            try:
                await self.settle(tenant, batch, [_cancelled(run, parse_run(self.keys, tenant, run, fields))])
            except ConfigError as error:
                log.error("run_not_readable", tenant=tenant, run=run, error=str(error))

    async def cancel(self, tenant: str, batch: str) -> int:
        """Begin nothing of a batch any more: what waits ends as cancelled, what runs is ended by who works it. How many waited."""
        record, dropped = await self.batch(tenant, batch), 0
        while waiting := await self.step("cancel", tenant, batch, AT_ONCE):
            names = [run.decode() for run in waiting]
            records = await self.runs([(tenant, name) for name in names])
            outcomes = [_cancelled(name, told) for name, told in zip(names, records, strict=True) if told is not None]
            dropped += len(await self.settle(tenant, batch, outcomes))
        return dropped if record.state in (BatchState.IN_PROGRESS, BatchState.CANCELLING) else 0

    async def settle(self, tenant: str, batch: str, outcomes: Iterable[Outcome]) -> set[str]:
        """End runs that wait, without working them; gives those that did."""
        settled: set[str] = set()
        for some in _in_steps(outcomes):
            sealed = [
                (one.run, seal_outcome(self.keys, tenant, one.run, one), one.failure.kind.value if one.failure else "") for one in some
            ]
            words = [word for one in sealed for word in one]
            ended = {run.decode() for run in await self.step("settle", tenant, batch, *words)}
            await self.close_sessions(tenant, ended)
            settled |= ended
        return settled

    async def close_sessions(self, tenant: str, runs: Collection[str]) -> None:
        """Close the sessions of runs that nobody goes on with: held, given back or left by the dead, they may have some. Waits while Redis is away."""
        await outlast(lambda: close_left_sessions(self._client, self._deployment, self.keys, tenant, runs))

    async def retry(self, tenant: str, batch: str, kinds: Iterable[FailureKind], entry: str = "") -> int:
        """Queue items again that failed so; how many. `entry`: of the audit, written with the first of them; "" for none."""
        wanted, again = [kind.value for kind in kinds], 0
        ended = await self.ended(tenant, batch, 0)
        for some in _in_steps(run for _, run in ended):
            told = entry if not again else ""
            again += len(await self.step("retry", tenant, batch, audit_key(self._deployment), told, len(wanted), *wanted, *some))
        return again

    async def batch(self, tenant: str, batch: str) -> BatchRecord:
        """Return a batch's record. Raises ToolFailure(INVALID_ARGUMENTS) for an unknown id, ConfigError for a record that cannot be verified or read."""
        fields: Any = await _told(lambda: self._client.hgetall(batch_key(self._deployment, tenant, batch)))
        if b"total" not in fields:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"nothing is known of batch {batch} of tenant {tenant}: look at the id and --tenant; batches are remembered for 30 days",
            )
        return parse_batch(self.keys, tenant, batch, fields)

    async def note_rows(self, tenant: str, batch: str, place: RowPlace) -> None:
        """Keep where the rows of a batch go."""
        key, sealed = batch_key(self._deployment, tenant, batch), seal_rows(self.keys, tenant, batch, place)
        await _told(lambda: self._client.hset(key, "rows", sealed))

    async def set_concurrency(self, tenant: str, batch: str, concurrency: int) -> None:
        """So many items of a batch at a time, over all orchestrators, from now."""
        await _told(lambda: self._client.hset(batch_key(self._deployment, tenant, batch), "concurrency", str(concurrency)))

    async def known(self, tenant: str, place: str = "", most: int | None = None) -> KnownBatches:
        """The batches of a tenant that are remembered, `most` of them (None: all) from `place` on, which stays good while batches come and go.
        Raises ToolFailure(INVALID_ARGUMENTS) for a place that none is."""
        after = _PLACE.fullmatch(place)
        if place and after is None:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "this is a cursor of another list: give the one of this list")
        instant, last = after.groups() if after is not None else ("", "")
        older, told = await self.step("known", tenant, instant, last, -1 if most is None else most)
        names, found, gone = [name.decode(errors="replace") for name in told[::2]], dict[str, BatchRecord](), list[str]()
        for some in _in_steps(names):
            for name, fields in zip(some, await self._batch_fields(tenant, some), strict=True):
                try:
                    if b"total" in fields:
                        found[name] = parse_batch(self.keys, tenant, name, fields)
                    else:
                        gone.append(name)
                except ConfigError as error:
                    log.error("batch_not_readable", tenant=tenant, batch=name, error=str(error))
        if gone:
            await _told(lambda: self._client.zrem(batches_key(self._deployment, tenant), *gone))
        return KnownBatches(found, older, f"{float(told[-1]):.9f}/{names[-1]}" if older and names else None)

    async def _batch_fields(self, tenant: str, batches: Sequence[str]) -> list[Any]:
        async def read() -> list[Any]:
            async with self._client.pipeline(transaction=False) as pipe:
                for batch in batches:
                    pipe.hgetall(batch_key(self._deployment, tenant, batch))
                return list(await pipe.execute())

        return list(await _told(read))

    async def waiting(self, tenant: str, batch: str) -> set[str]:
        """The runs that wait."""
        told: Any = await _told(lambda: self._client.zrange(batch_key(self._deployment, tenant, batch) + ":waiting", 0, -1))
        return {run.decode() for run in told}

    async def ended(self, tenant: str, batch: str, after: int, most: int = -1) -> list[tuple[int, str]]:
        """The runs that have ended after the one of that number, with their numbers, in order; no more than `most` (-1: all)."""
        key = batch_key(self._deployment, tenant, batch) + ":ended"
        told: Any = await _told(lambda: self._client.zrangebyscore(key, f"({after}", "+inf", start=0, num=most, withscores=True))
        return [(int(number), run.decode()) for run, number in told]

    async def items(self, tenant: str, batch: str) -> list[str]:
        """The ids of all runs, in the order in which they were added."""
        told: Any = await _told(lambda: self._client.lrange(batch_key(self._deployment, tenant, batch) + ":items", 0, -1))
        return [run.decode() for run in told]

    async def count_items(self, tenant: str, batch: str) -> int:
        """How many have been added."""
        return int(await _told(lambda: self._client.llen(batch_key(self._deployment, tenant, batch) + ":items")))

    async def counts(self, tenant: str, batch: str) -> Mapping[str, int]:
        """How many of a batch wait and run."""
        key = batch_key(self._deployment, tenant, batch)

        async def read() -> list[int]:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.zcard(f"{key}:waiting")
                pipe.scard(f"{key}:delayed")
                pipe.scard(f"{key}:running")
                return list(await pipe.execute())

        waiting, delayed, running = await _told(read)
        return {"waiting": waiting + delayed, "running": running}

    async def runs(self, names: Sequence[tuple[str, str]]) -> list[RunRecord | None]:
        """Return records by (tenant, run); None for one that was removed. Raises ConfigError for one that cannot be verified or read."""
        answers = zip(names, await self._fields(names), strict=True)
        return [parse_run(self.keys, tenant, run, fields) if b"item" in fields else None for (tenant, run), fields in answers]

    async def custom_ids(self, tenant: str, batch: str, runs: Sequence[str]) -> list[str | None]:
        """Return the custom_ids of a batch's runs; None for one that was removed. Raises ConfigError for one that cannot be verified or read."""

        async def read() -> list[Any]:
            async with self._client.pipeline(transaction=False) as pipe:
                for run in runs:
                    pipe.hget(run_key(self._deployment, tenant, run), "item")
                return list(await pipe.execute())

        answers = zip(runs, await _told(read), strict=True)
        return [open_item(self.keys, tenant, run, batch, sealed).custom_id if sealed is not None else None for run, sealed in answers]

    async def _fields(self, names: Sequence[tuple[str, ...]]) -> list[Any]:
        """The hashes of runs by (tenant, run)."""

        async def read() -> list[Any]:
            async with self._client.pipeline(transaction=False) as pipe:
                for tenant, run in names:
                    pipe.hgetall(run_key(self._deployment, tenant, run))
                return list(await pipe.execute())

        return list(await _told(read)) if names else []

    async def step(self, operation: str, *arguments: Any) -> Any:
        """What a step of the queue gives (run_queue.lua, hosted.lua)."""

        async def say() -> Any:
            try:
                return await self._script(args=[*self._prefixes, operation, *arguments])
            except LostConnection:
                # A pooled connection of before Redis's restart. Every step may be said twice.
                return await self._script(args=[*self._prefixes, operation, *arguments])

        return await _told(say)


def _in_steps(things: Iterable[Thing]) -> Iterator[list[Thing]]:
    """As many at a time as go into one step."""
    left = iter(things)
    while some := list(islice(left, AT_ONCE)):
        yield some


def _cancelled(run: str, record: RunRecord) -> Outcome:
    failure = Failure(
        kind=FailureKind.CANCELLED, code=ErrorCode.CANCELLED.value, message="the batch was cancelled before this item was begun"
    )
    return Outcome(custom_id=record.item.custom_id, run=run, status_code=499, failure=failure, attempt=record.attempt)


async def _told(work: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await work()
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(f"Redis does not answer for the batch ({error})") from error
