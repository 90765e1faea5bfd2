"""What all users of runs share: the records of runs, their ends without execution, and the steps of the script.

Invariant: a forged field can disturb or restart a run, but cannot change its task or its result. The item (what the
run does) and the outcome (its result) are therefore signed, for one tenant and one run id. Fields that scripts change
or compare (states, claims, counters) are not signed.

A run that was started without a batch is called durable run. It has no batch (NO_BATCH), and keys of its own.
"""

from collections.abc import Awaitable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import redis.asyncio

from toolcrew.concurrency.tasks import retry_until_available
from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.names import run_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.batches import ItemOutcome, seal_outcome
from toolcrew.store.connection import broker_errors
from toolcrew.store.memory import no_memory
from toolcrew.store.run_log import close_left_sessions
from toolcrew.store.run_records import RunRecord, parse_run
from toolcrew.store.run_script import RunScript

AT_ONCE = 200
"""Maximum number of runs in one step of the script. Redis is blocked during a step."""
LEASE_S = 20.0
"""Lifetime of a claim without a renewal, in seconds."""
T = TypeVar("T")
WHAT = "the runs were not read or changed"


class BatchCancelled(Exception):
    """The batch was cancelled. A process that executes one of its runs must end the run."""


class StoredRuns:
    """Runs of one deployment. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self.keys = keys
        self._script = RunScript(client, deployment)

    async def settle(self, tenant: str, batch: str, outcomes: Iterable[ItemOutcome]) -> set[str]:
        """End waiting runs with these outcomes without executing the runs. Return the ids of the runs that were
        waiting.
        """
        settled: set[str] = set()
        for some in in_steps(outcomes):
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

    async def records(self, names: Sequence[tuple[str, str]]) -> list[RunRecord | None]:
        """Return the records of runs by (tenant, run); None for a removed run. Raises ConfigError: a record cannot be
        verified or read.
        """
        rows = list(zip(names, await self.fields(names), strict=True))

        def parse() -> list[RunRecord | None]:
            return [
                parse_run(self.keys, tenant, run, fields) if b"item" in fields else None
                for (tenant, run), fields in rows
            ]

        return await in_tenant_thread(names[0][0], parse) if rows else []

    async def read_sizes(self, tenant: str, runs: Sequence[str], field: str) -> list[int]:
        pipe = self._client.pipeline(transaction=False)
        for run in runs:
            pipe.hget(run_key(self._deployment, tenant, run), field)
        values: Any = await ask(pipe.execute()) if runs else []
        return [int(value.split()[0]) if value else 0 for value in values]

    async def step(self, operation: str, /, *rest: Any, **arguments: Any) -> Any:
        """Execute one step of the script, as `RunScript.run` does."""
        with broker_errors(WHAT):
            return await self._script.run(operation, *rest, **arguments)

    async def parse(self, tenant: str, run: str, fields: Mapping[bytes, bytes]) -> RunRecord:
        # In a thread: an item has up to 16 MB, and its tenant decides how often it is read.
        return await in_tenant_thread(tenant, parse_run, self.keys, tenant, run, fields)

    async def fields(self, names: Sequence[tuple[str, ...]]) -> list[Any]:
        return await self.hashes([run_key(self._deployment, tenant, run) for tenant, run in names])

    async def hashes(self, keys: Sequence[str]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.hgetall(key)
        return list(await ask(pipe.execute())) if keys else []


async def ask(command: Awaitable[Any]) -> Any:
    with broker_errors(WHAT):
        return await command


def nearly_full() -> ToolFailure:
    """Return the error for work of a tenant that may store no more."""
    return no_memory("nothing was queued")


def in_steps(values: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists of at most AT_ONCE values, for one step each."""
    iterator = iter(values)
    while some := list(islice(iterator, AT_ONCE)):
        yield some
