"""The present hosts, queues, tenants and batches of a deployment, for the pages and `toolcrew doctor`."""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.names import POOL_QUEUES, admission_prefix, deployment_key, runs_prefix, slots_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.clock import read_clock
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.hosts import HostStore
from toolcrew.store.scripts import Script
from toolcrew.store.slots import count_slots_in_use
from toolcrew.store.tenants import RedisTenants

MAX_BATCHES = 50
"""Limit of the batches that an overview lists."""
_TAIL_BYTES = 4096
"""Size of the end of a message, which contains its headers, in bytes."""
_CALL_KEY = re.compile(rb'"call_key": ?"([^"\\]+)"')
_WHAT = "the state of the deployment was not read"


class QueueSummary(Record):
    """The state of a queue. `length`: messages that no worker has taken. `slots`: how many calls all its workers can
    run at the same time, 0 if no worker lives. `held`: calls that have a slot: they run, or their messages are in the
    queue. `waiting`: calls that wait for a slot. `oldest_s`: longest wait in seconds, possibly underestimated if
    hundreds of tenants wait; None: no call waits for this queue alone.
    """

    queue: str
    length: int = Field(ge=0)
    slots: int = Field(ge=0)
    held: int = Field(ge=0)
    waiting: int = Field(ge=0)
    oldest_s: float | None = None

    @property
    def slots_in_use(self) -> int:
        return count_slots_in_use(self.held, self.slots)


class TenantSummary(Record):
    """A tenant that is served or has calls. `is_registered`: it has a policy; the default tenant always has one.
    `share`: the part of all used slots that its calls use, 0 to 1. `fair_share`: the part that its weight entitles it
    to, among the tenants that have calls; 0 without calls. `problem`: why its policy cannot be read; the tenant is then
    not served.
    """

    tenant: str
    is_registered: bool
    weight: float
    in_flight: int
    """Limit of the tenant's calls that may run at the same time."""
    held: int = Field(ge=0)
    waiting: int = Field(ge=0)
    share: float = Field(ge=0, le=1)
    fair_share: float = Field(ge=0, le=1)
    is_paused: bool
    problem: str = ""


class BatchSummary(Record):
    """A batch with unfinished work. `waiting`: includes runs that are retried later. `created_at`: Unix seconds."""

    tenant: str
    batch: str
    created_at: float
    total: int
    succeeded: int
    failed: int
    running: int
    waiting: int


class Overview(Record):
    """The state of a deployment. `queues`, `tenants`: the busiest first. `batches`: at most MAX_BATCHES, including
    the hidden ones of runs. `runs`: number of runs that an orchestrator executes now, without items of batches.
    `items`: number of items of batches that an orchestrator executes now. `approvals`: number of questions that wait
    for a person.
    """

    hosts: tuple[HostReport, ...]
    queues: tuple[QueueSummary, ...]
    tenants: tuple[TenantSummary, ...]
    batches: tuple[BatchSummary, ...]
    runs: int
    items: int
    approvals: int

    @property
    def slots(self) -> int:
        """Return how many calls all workers can run at the same time."""
        return sum(report.slots for report in self.hosts)

    @property
    def slots_in_use(self) -> int:
        """Return the slots in use in all queues. The slots of a worker that serves several queues count once."""
        return min(self.slots, sum(queue.slots_in_use for queue in self.queues))

    @property
    def sessions(self) -> int:
        return sum(report.sessions for report in self.hosts)

    @property
    def waiting(self) -> int:
        """Return how many calls wait for a slot."""
        return sum(tenant.waiting for tenant in self.tenants)


class OverviewReader:
    """Reads an overview in few round trips, independent of the number of tenants. The caller owns the client and
    closes it.
    """

    def __init__(self, client: RedisClient, deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._hosts = HostStore(client, deployment)
        self._tenants = RedisTenants(client, deployment, keys)
        names = ("deployment", "admission", "slots", "runs", "queues_json", "tenants_json", "batch_limit")
        self._script = Script.load("overview.lua", args=names)

    async def read(self) -> Overview:
        """Return the present state. Raises BrokerUnavailable when Redis does not answer."""
        hosts, (policies, names) = await asyncio.gather(self._hosts.read(), self._tenants.all_with_active())
        queues = sorted(
            {queue for report in hosts for queue in (report.queue, *report.pools)} | set(POOL_QUEUES.values())
        )
        data = await self._read_state(
            [queue for queue in queues if not queue.startswith("pool.") or queue in POOL_QUEUES.values()],
            names,
        )
        return Overview(
            hosts=tuple(hosts),
            queues=_queues(data["queues"]),
            tenants=_tenants(data["tenants"], policies, names),
            batches=_batches(data["batches"]),
            runs=data["runs"],
            items=data["items"],
            approvals=data["approvals"],
        )

    async def oldest_message_s(self, queue: str) -> float | None:
        """Return the age of the oldest message of a queue in seconds, from the record of its call. None: the queue is
        empty, or the age is unknown.
        """
        with broker_errors(_WHAT):
            message: Any = await self._client.lindex(queue, -1)
            match = _CALL_KEY.search(bytes(message or b"")[-_TAIL_BYTES:])
            key = match[1].decode(errors="replace") if match else ""
            # This process does not verify the message, so it reads only keys of this deployment.
            if not key.startswith(deployment_key(self._deployment, "")):
                return None
            queued_at: Any = await self._client.hget(key, "queued_at")
        try:
            return await read_clock(self._client) - float(queued_at) if queued_at else None
        except ValueError:
            return None

    async def _read_state(self, queues: Sequence[str], tenants: Sequence[str]) -> dict[str, Any]:
        with broker_errors(_WHAT):
            text = await self._script.run(
                self._client,
                deployment=deployment_key(self._deployment, ""),
                admission=admission_prefix(self._deployment),
                slots=slots_key(self._deployment, ""),
                runs=runs_prefix(self._deployment),
                queues_json=json.dumps(queues),
                tenants_json=json.dumps(tenants),
                batch_limit=MAX_BATCHES,
            )
        return dict(json.loads(text))


def _queues(data: Mapping[str, Mapping[str, Any]]) -> tuple[QueueSummary, ...]:
    queues = [QueueSummary.model_validate({"queue": queue, **fields}) for queue, fields in data.items()]
    return tuple(sorted(queues, key=lambda queue: (-queue.waiting - queue.length, -queue.held, queue.queue)))


def _tenants(
    data: Mapping[str, Sequence[int]], policies: Mapping[str, TenantPolicy | ConfigError], names: Sequence[str]
) -> tuple[TenantSummary, ...]:
    policy_by_name = {
        name: policy if isinstance(policy, TenantPolicy) else TenantPolicy() for name, policy in policies.items()
    }
    default = policy_by_name.get("default", TenantPolicy())
    total_running = sum(running for running, _ in data.values())
    all_weight = sum(policy_by_name.get(name, default).weight for name in data)
    tenants = []
    for name in sorted({*names, *data}):
        policy, (running, waiting), stored = (
            policy_by_name.get(name, default),
            data.get(name, (0, 0)),
            policies.get(name),
        )
        summary = TenantSummary(
            tenant=name,
            is_registered=name in policies,
            weight=policy.weight,
            in_flight=policy.in_flight,
            held=running,
            waiting=waiting,
            share=running / total_running if total_running else 0.0,
            fair_share=policy.weight / all_weight if name in data else 0.0,
            is_paused=policy.is_paused,
            problem=str(stored) if isinstance(stored, ConfigError) else "",
        )
        tenants.append(summary)
    return tuple(sorted(tenants, key=lambda tenant: (-tenant.waiting, -tenant.held, tenant.tenant)))


def _batches(data: Iterable[Any]) -> tuple[BatchSummary, ...]:
    """Return batches, the newest first. Lua encodes an empty list as an object, which also works here."""
    batches = []
    for tenant, batch, created_at, total, succeeded, ended, running, waiting in data:
        summary = BatchSummary(
            tenant=tenant,
            batch=batch,
            created_at=float(created_at),
            total=total,
            succeeded=succeeded,
            failed=max(0, ended - succeeded),
            running=running,
            waiting=waiting,
        )
        batches.append(summary)
    return tuple(sorted(batches, key=lambda batch: (-batch.created_at, batch.tenant, batch.batch)))
