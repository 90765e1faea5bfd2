"""A deployment at a glance: its hosts, queues, tenants and batches at one moment. `toolcrew top` and the pages show
it.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from pydantic import Field

from contract.calls import Record
from contract.clock import format_instant
from contract.errors import ConfigError
from contract.hosts import HostReport
from contract.names import POOL_QUEUES, admission_prefix, deployment_key, runs_prefix, slots_key
from contract.signing import SigningKeys
from contract.tenancy import TenantPolicy
from store.connection import RedisClient, broker_errors, read_clock
from store.hosts import HostStore
from store.slots import count_slots_in_use
from store.tenants import RedisTenants

MOST_BATCHES = 50
"""Batches that are listed; the others are counted."""
_TAIL_BYTES = 4096
"""The end of a message, which contains its headers."""
_CALL_KEY = re.compile(rb'"call_key": ?"([^"\\]+)"')
_WHAT = "the state of the deployment was not read"


class QueueLook(Record):
    """A queue. `length`: messages that no worker has taken; `slots`: calls at a time of all its workers together, 0
    when none lives; `held`: calls in flight, which run or are on their way; `waiting`: calls that wait for their turn,
    one of them for `oldest_s` seconds: the longest, unless hundreds of tenants wait; None: no call waits for this queue
    alone."""

    queue: str
    length: int = Field(ge=0)
    slots: int = Field(ge=0)
    held: int = Field(ge=0)
    waiting: int = Field(ge=0)
    oldest_s: float | None = None

    @property
    def slots_in_use(self) -> int:
        return count_slots_in_use(self.held, self.slots)


class TenantLook(Record):
    """A tenant that is registered, or has calls. `share`: the part that its calls have of all that hold a slot;
    `fair_share`: what its weight gives it beside the others that have calls, 0 when it has none. `trouble`: why its
    policy cannot be read, so that nothing is served for it."""

    tenant: str
    is_registered: bool
    weight: float
    in_flight: int
    """How many calls at a time it may have."""
    held: int = Field(ge=0)
    waiting: int = Field(ge=0)
    share: float = Field(ge=0, le=1)
    fair_share: float = Field(ge=0, le=1)
    is_paused: bool
    trouble: str = ""


class BatchLook(Record):
    """A batch that has something to do. `waiting`: also what is tried again later; `created_at`: Unix seconds."""

    tenant: str
    batch: str
    name: str
    state: str
    created_at: float
    total: int
    succeeded: int
    failed: int
    running: int
    waiting: int


class Overview(Record):
    """`at`: Unix seconds of Redis's clock. `queues`, `tenants`, `batches`: those that are busiest first. `batch_count`:
    with those that are not told one by one. `running`: runs that are being worked; `approvals`: questions that wait for
    a person."""

    at: float
    deployment: str
    hosts: tuple[HostReport, ...]
    queues: tuple[QueueLook, ...]
    tenants: tuple[TenantLook, ...]
    batches: tuple[BatchLook, ...]
    batch_count: int
    running: int
    approvals: int

    @property
    def slots(self) -> int:
        """Calls at a time of all workers."""
        return sum(report.slots for report in self.hosts)

    @property
    def slots_in_use(self) -> int:
        """Slots in use in all queues. Workers that serve several queues have their slots counted once."""
        return min(self.slots, sum(queue.slots_in_use for queue in self.queues))

    @property
    def sessions(self) -> int:
        return sum(report.sessions for report in self.hosts)

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return sum(tenant.waiting for tenant in self.tenants)

    def to_json(self) -> dict[str, Any]:
        """For programs: instants in ISO 8601, sizes in bytes."""
        told = self.model_dump(mode="json", exclude={"hosts"})
        told["at"] = format_instant(self.at)
        told |= {"slots": self.slots, "slots_in_use": self.slots_in_use, "waiting": self.waiting}
        for queue, look in zip(told["queues"], self.queues, strict=True):
            queue["slots_in_use"] = look.slots_in_use
        for batch in told["batches"]:
            batch["created_at"] = format_instant(batch["created_at"])
        return told | {"hosts": [_host_json(report) for report in self.hosts]}


class OverviewReader:
    """Reads it in few round trips, however many tenants there are; what it needs of Redis is closed by whoever opened
    it.
    """

    def __init__(self, client: RedisClient, deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._hosts = HostStore(client, deployment)
        self._tenants = RedisTenants(client, deployment, keys)
        self._script = client.register_script(
            resources.files("store").joinpath("overview.lua").read_text(encoding="utf-8")
        )

    async def read(self) -> Overview:
        """As of now. Raises BrokerUnavailable."""
        hosts, policies = await asyncio.gather(self._hosts.read(), self._tenants.all())
        queues = sorted(
            {queue for report in hosts for queue in (report.queue, *report.pools)} | set(POOL_QUEUES.values())
        )
        told = await self._look(
            [queue for queue in queues if not queue.startswith("pool.") or queue in POOL_QUEUES.values()],
            list(policies),
        )
        return Overview(
            at=told["now"],
            deployment=self._deployment,
            hosts=tuple(hosts),
            queues=_queues(told["queues"]),
            tenants=_tenants(told["tenants"], policies),
            batches=_batches(told["batches"]),
            batch_count=told["batch_count"],
            running=told["running"],
            approvals=told["approvals"],
        )

    async def oldest_message_s(self, queue: str) -> float | None:
        """Return the age of the oldest message of a queue, by the record of its call. None if the queue is empty, or
        the age is unknown.
        """
        with broker_errors(_WHAT):
            message: Any = await self._client.lindex(queue, -1)
            found = _CALL_KEY.search(bytes(message or b"")[-_TAIL_BYTES:])
            key = found[1].decode(errors="replace") if found else ""
            if not key.startswith(deployment_key(self._deployment, "")):
                return None
            queued_at: Any = await self._client.hget(key, "queued_at")
        try:
            return await read_clock(self._client) - float(queued_at) if queued_at else None
        except ValueError:
            return None

    async def _look(self, queues: Sequence[str], tenants: Sequence[str]) -> dict[str, Any]:
        prefix = deployment_key(self._deployment, "")
        places = [
            prefix,
            admission_prefix(self._deployment),
            slots_key(self._deployment, ""),
            runs_prefix(self._deployment),
        ]
        with broker_errors(_WHAT):
            text: Any = await self._script(args=[*places, json.dumps(queues), json.dumps(tenants), MOST_BATCHES])
        return dict(json.loads(text))


def _host_json(report: HostReport) -> dict[str, Any]:
    instants = {"started_at": format_instant(report.started_at), "reported_at": format_instant(report.reported_at)}
    return report.model_dump(mode="json", exclude={"process"}) | {"state": report.state} | instants


def _queues(told: Mapping[str, Mapping[str, Any]]) -> tuple[QueueLook, ...]:
    found = [QueueLook.model_validate({"queue": queue, **fields}) for queue, fields in told.items()]
    return tuple(sorted(found, key=lambda one: (-one.waiting - one.length, -one.held, one.queue)))


def _tenants(
    told: Mapping[str, Sequence[int]], policies: Mapping[str, TenantPolicy | ConfigError]
) -> tuple[TenantLook, ...]:
    known = {name: policy if isinstance(policy, TenantPolicy) else TenantPolicy() for name, policy in policies.items()}
    anybodys = known.get("default", TenantPolicy())
    all_held = sum(held for held, _ in told.values())
    all_weight = sum(known.get(name, anybodys).weight for name in told)
    found = []
    for name in sorted({*policies, *told}):
        policy, (held, waiting), kept = known.get(name, anybodys), told.get(name, (0, 0)), policies.get(name)
        look = TenantLook(
            tenant=name,
            is_registered=name in policies,
            weight=policy.weight,
            in_flight=policy.in_flight,
            held=held,
            waiting=waiting,
            share=held / all_held if all_held else 0.0,
            fair_share=policy.weight / all_weight if name in told else 0.0,
            is_paused=policy.is_paused,
            trouble=str(kept) if isinstance(kept, ConfigError) else "",
        )
        found.append(look)
    return tuple(sorted(found, key=lambda one: (-one.waiting, -one.held, one.tenant)))


def _batches(told: Iterable[Any]) -> tuple[BatchLook, ...]:
    """Newest first. Lua knows no list that is empty: then it is an object."""
    found = []
    for tenant, batch, name, state, created_at, total, succeeded, ended, running, waiting in told:
        look = BatchLook(
            tenant=tenant,
            batch=batch,
            name=name,
            state=state,
            created_at=float(created_at),
            total=total,
            succeeded=succeeded,
            failed=max(0, ended - succeeded),
            running=running,
            waiting=waiting,
        )
        found.append(look)
    return tuple(sorted(found, key=lambda one: (-one.created_at, one.tenant, one.batch)))
