"""The queue of runs in Redis: added by whoever submits a batch, claimed under a lease by whoever works them, ended once."""

import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from orchestrator.batches.items import BatchItem, Failure, FailureKind, Outcome
from orchestrator.runs.keys import RUN_TTL_S, batch_key, member, run_key, runs_prefix, split_member
from orchestrator.runs.records import BatchDefaults, BatchRecord, BatchState, RunRecord, parse_batch, parse_run

Thing = TypeVar("Thing")
LEASE_S = 20.0
AT_ONCE = 200
"""Runs in one step: so long Redis does nothing else."""
_SCRIPT = Path(__file__).with_name("queue.lua").read_text()


@dataclass(frozen=True)
class Claim:
    """A run that is ours until its lease ends. `is_resumed`: its log says how far it has come."""

    tenant: str
    run: str
    word: str
    is_resumed: bool
    record: RunRecord


class RunQueue:
    """Runs and batches of one deployment. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, owner: str = "") -> None:
        self._client = client
        self._deployment = deployment
        self.owner = owner or secrets.token_hex(6)
        self._script = client.register_script(_SCRIPT)
        self._prefixes = [f"toolcrew:{deployment}:", runs_prefix(deployment)]

    async def create(self, tenant: str, batch: str, record: BatchRecord) -> bool:
        """Note a batch; its runs are added afterwards. False when there is one of that id."""
        key = batch_key(self._deployment, tenant, batch)
        fields: dict[Any, Any] = {
            "total": record.total,
            "sha256": record.sha256,
            "concurrency": record.concurrency,
            "defaults": record.defaults.model_dump_json(),
            "created_at": record.created_at,
            "name": record.name,
            "ttl_s": RUN_TTL_S,
        }

        async def write() -> bool:
            if not await self._client.hsetnx(key, "state", record.state.value):
                return False
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hset(key, mapping=fields)
                pipe.expire(key, RUN_TTL_S)
                await pipe.execute()
            return True

        return bool(await _told(write))

    async def change(self, tenant: str, batch: str, *, concurrency: int, defaults: BatchDefaults) -> None:
        """How a batch goes on from now."""
        key = batch_key(self._deployment, tenant, batch)
        mapping: dict[Any, Any] = {"concurrency": concurrency, "defaults": defaults.model_dump_json()}
        await _told(lambda: self._client.hset(key, mapping=mapping))

    async def add(self, tenant: str, batch: str, runs: Iterable[tuple[str, BatchItem]]) -> int:
        """Add runs that are not there yet, which may be claimed at once; how many those were."""
        added = 0
        for some in _in_steps(runs):
            arguments = [word for run, item in some for word in (run, item.model_dump_json(), item.priority, item.line)]
            added += int(await self._step("add", tenant, batch, *arguments))
        return added

    async def claim(self, most: int, only: tuple[str, str] | None = None) -> list[Claim]:
        """Up to so many runs: those of processes that died first, then the next of each batch in turn. `only`: of that tenant's batch."""
        most = min(most, AT_ONCE)
        told = await self._step(
            "claim", self.owner, most, LEASE_S, member(*only) if only is not None else "", *(secrets.token_hex(8) for _ in range(most))
        )
        given = [tuple(part.decode() for part in one) for one in told]
        records = await self.runs([(tenant, run) for tenant, run, _, _ in given])
        return [
            Claim(tenant, run, word, how == "resumed", record)
            for (tenant, run, word, how), record in zip(given, records, strict=True)
            if record is not None
        ]

    async def renew(self, claims: Sequence[Claim]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """Keep runs; gives those that are ours no more, and those whose batch is being cancelled, as (tenant, run)."""
        lost: set[tuple[str, str]] = set()
        cancelled: set[tuple[str, str]] = set()
        for some in _in_steps(claims):
            words = [word for claim in some for word in (member(claim.tenant, claim.run), claim.word)]
            gone, ended = await self._step("renew", LEASE_S, *words)
            lost |= {split_member(one.decode()) for one in gone}
            cancelled |= {split_member(one.decode()) for one in ended}
        return lost, cancelled

    async def finish(self, claim: Claim, outcome: Outcome) -> bool:
        """Note how a run ended. False when another process has it."""
        kind = outcome.failure.kind.value if outcome.failure is not None else ""
        return bool(await self._step("finish", claim.tenant, claim.run, claim.word, outcome.model_dump_json(), kind))

    async def give_back(self, claim: Claim, *, after_s: float = 0.0, anew: bool = False) -> bool:
        """Let another process go on with a run, or begin it `anew`, as one more attempt, after so many seconds."""
        return bool(await self._step("give_back", claim.tenant, claim.run, claim.word, after_s, "1" if anew else "0"))

    async def cancel(self, tenant: str, batch: str) -> int:
        """Begin nothing of a batch any more: what waits ends as cancelled, what runs is ended by who works it. How many waited."""
        record, dropped = await self.batch(tenant, batch), 0
        while waiting := await self._step("cancel", tenant, batch, AT_ONCE):
            names = [run.decode() for run in waiting]
            records = await self.runs([(tenant, name) for name in names])
            outcomes = [_cancelled(name, told).model_dump_json() for name, told in zip(names, records, strict=True) if told is not None]
            dropped += int(await self._step("drop", tenant, batch, *(word for pair in zip(names, outcomes, strict=True) for word in pair)))
        return dropped if record.state in (BatchState.IN_PROGRESS, BatchState.CANCELLING) else 0

    async def retry(self, tenant: str, batch: str, kinds: Iterable[FailureKind]) -> int:
        """Queue items again that failed so; how many."""
        wanted, again = [kind.value for kind in kinds], 0
        ended = await self.ended(tenant, batch, 0)
        for some in _in_steps(run for _, run in ended):
            again += len(await self._step("retry", tenant, batch, len(wanted), *wanted, *some))
        return again

    async def batch(self, tenant: str, batch: str) -> BatchRecord:
        """What is known of a batch. Raises ToolFailure(INVALID_ARGUMENTS) for an id that there is not."""
        fields: Any = await _told(lambda: self._client.hgetall(batch_key(self._deployment, tenant, batch)))
        if b"total" not in fields:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"nothing is known of batch {batch} of tenant {tenant}: look at the id and --tenant; batches are remembered for 30 days",
            )
        return parse_batch(fields)

    async def ended(self, tenant: str, batch: str, after: int) -> list[tuple[int, str]]:
        """The runs that have ended after the one of that number, with their numbers, in order."""
        key = batch_key(self._deployment, tenant, batch) + ":ended"
        told: Any = await _told(lambda: self._client.zrangebyscore(key, f"({after}", "+inf", withscores=True))
        return [(int(number), run.decode()) for run, number in told]

    async def items(self, tenant: str, batch: str) -> list[str]:
        """The ids of all runs, in the order in which they were added."""
        told: Any = await _told(lambda: self._client.lrange(batch_key(self._deployment, tenant, batch) + ":items", 0, -1))
        return [run.decode() for run in told]

    async def counts(self, tenant: str, batch: str) -> Mapping[str, int]:
        """How many of a batch wait and run."""
        key = batch_key(self._deployment, tenant, batch)

        async def read() -> list[int]:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.zcard(f"{key}:waiting")
                pipe.scard(f"{key}:running")
                return list(await pipe.execute())

        waiting, running = await _told(read)
        return {"waiting": waiting, "running": running}

    async def runs(self, names: Sequence[tuple[str, str]]) -> list[RunRecord | None]:
        """Records by (tenant, run); None for one that is gone."""

        async def read() -> list[Any]:
            async with self._client.pipeline(transaction=False) as pipe:
                for tenant, run in names:
                    pipe.hgetall(run_key(self._deployment, tenant, run))
                return list(await pipe.execute())

        told = await _told(read) if names else []
        return [parse_run(fields) if b"item" in fields else None for fields in told]

    async def _step(self, operation: str, *arguments: Any) -> Any:
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
