"""The living workers, and the orders to them. Each worker writes a report under the name of its host instance (the
worker of a host since its last boot). The report expires if the worker does not renew it.

Invariant: no worker continues under the name of a lost instance. The list of instances outlives the reports. A listed
instance without a report is lost. The reaper then answers the calls in its queue and writes a tombstone. After that,
no worker may report under that name.
"""

import asyncio
import difflib
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

from pydantic import ValidationError

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.hosts import HOST_TTL_S, RESTART_GRACE_S, HostReport
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.names import (
    control_queue,
    deployment_key,
    host_key,
    host_prefix,
    hosts_key,
    slots_key,
    tombstone_key,
)
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.audit import NewAuditEntry, add_entry
from toolcrew.store.clock import SharedClock, read_clock
from toolcrew.store.connection import RedisClient, SyncRedis, broker_errors
from toolcrew.store.scripts import Script
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

FRESH_S = 1.0
ORDER_TTL_S = 60
"""Lifetime of an order in a worker's control list, in seconds."""
_WAKE = b"stop"
_WHAT = "the workers' reports were not read or changed"

Departure = Literal["drained", "restarting", "stopped"]
"""The reason why a worker ends. "drained": its queue is empty. "restarting": its next process is expected. "stopped":
the reaper, which cleans up after lost workers, must answer the calls that are left in its queue.
"""


def worker_slots_key(deployment: str, queue: str) -> str:
    """Return the key of the hash of a queue's workers: host instance -> `<slots> <expires at>`."""
    return deployment_key(deployment, f"slots:{queue}:workers")


# --- Scripts ----------------------------------------------------------------------------------------------------------

_LUA = """
local function worker_of(report)
  local is_json, fields = pcall(cjson.decode, report)
  return is_json and type(fields) == 'table' and type(fields['worker']) == 'string' and fields['worker'] or ''
end
-- Sets or removes (slots nil) the slots of `worker` in a queue, and adds up the slots of all live workers of the
-- queue.
local function count(workers, total, worker, slots, now, ttl)
  if slots then
    redis.call('HSET', workers, worker, slots .. ' ' .. (now + ttl))
  else
    redis.call('HDEL', workers, worker)
  end
  local sum, entries = 0, redis.call('HGETALL', workers)
  for i = 1, #entries, 2 do
    local serves, until_ = string.match(entries[i + 1], '^(%d+) (%d+)$')
    if serves and tonumber(until_) > now then
      sum = sum + tonumber(serves)
    else
      redis.call('HDEL', workers, entries[i])
    end
  end
  if sum > 0 then redis.call('SET', total, sum, 'EX', ttl) else redis.call('DEL', total) end
  redis.call('EXPIRE', workers, ttl)
end
"""

# `slot_keys`, here and below: the keys of the workers and of the total of each queue. `slots`: of each queue, or '' for
# a queue that is no longer served.
_REPORT = Script(
    _LUA
    + """
local time = redis.call('TIME')
if redis.call('EXISTS', tombstone) == 1 then return {'given_up', time[1], time[2]} end
local last = redis.call('GET', report)
if last and worker_of(last) ~= worker or is_first == '1' and redis.call('ZSCORE', hosts, queue) then
  return {'replaced', time[1], time[2]}
end
redis.call('SET', report, text, 'EX', ttl_s)
redis.call('ZADD', hosts, time[1], queue)
for i, served in ipairs(slots) do
  local workers, total = slot_keys[2 * i - 1], slot_keys[2 * i]
  count(workers, total, queue, served ~= '' and served or nil, tonumber(time[1]), tonumber(ttl_s))
end
return {'accepted', time[1], time[2]}
""",
    keys=("report", "hosts", "tombstone", "slot_keys..."),
    args=("text", "queue", "worker", "ttl_s", "is_first", "slots..."),
)

_LEAVE = Script(
    _LUA
    + """
local last = redis.call('GET', report)
if last and worker_of(last) ~= worker then return 'replaced' end
if departure == 'drained' and redis.call('LLEN', messages) > 0 then return 'busy' end
local now = tonumber(redis.call('TIME')[1])
for i = 1, #slot_keys, 2 do count(slot_keys[i], slot_keys[i + 1], queue, nil, now, tonumber(slots_ttl_s)) end
if departure == 'restarting' then
  redis.call('SET', report, last_report, 'EX', report_ttl_s)
else
  redis.call('DEL', report)
end
if departure == 'drained' then redis.call('ZREM', hosts, queue) end
-- The worker now counts as lost, so that the reaper empties its queue.
if departure == 'stopped' then redis.call('ZADD', hosts, now - slots_ttl_s - 1, queue) end
return 'left'
""",
    keys=("report", "hosts", "messages", "slot_keys..."),
    args=("queue", "worker", "departure", "last_report", "report_ttl_s", "slots_ttl_s"),
)

# Removes the report of a worker that has certainly ended, unless another worker reports.
_DISMISS = Script(
    _LUA
    + """
local last = redis.call('GET', report)
if not last or worker_of(last) ~= worker then return 0 end
redis.call('ZADD', hosts, redis.call('TIME')[1] - ttl_s - 1, queue)
return redis.call('DEL', report)
""",
    keys=("report", "hosts"),
    args=("worker", "queue", "ttl_s"),
)

# --- Orchestrators ----------------------------------------------------------------------------------------------------


class HostStore:
    """Reads the reports of workers, for orchestrators. Every method raises BrokerUnavailable when Redis does not
    answer.
    """

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._cached: list[HostReport] = []
        self._silent: list[str] = []
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()
        self._unreadable: set[str] = set()

    async def reports(self) -> list[HostReport]:
        """Return the last report of each living worker, sorted by queue. Reports are up to FRESH_S seconds old."""
        await self._refresh()
        return self._cached

    async def silent(self) -> list[str]:
        """Return the listed instances that do not report and were not declared lost. They may report again: after an
        outage of Redis, or when their machine is busy. The answer is up to FRESH_S seconds old.
        """
        await self._refresh()
        return self._silent

    async def _refresh(self) -> None:
        async with self._lock:
            if time.monotonic() - self._read_at < FRESH_S:
                return
            texts = await self._texts(await self._listed())
            missing = [queue for queue, text in texts.items() if text is None]
            self._silent = await self._without_lost(missing)
            self._cached = [report for queue, text in texts.items() if (report := self._parse(queue, text)) is not None]
            self._read_at = time.monotonic()

    async def _without_lost(self, queues: Sequence[str]) -> list[str]:
        """Return those of the instances that were not declared lost."""
        keys = [tombstone_key(self._deployment, queue) for queue in queues]
        with broker_errors(_WHAT):
            tombstones: Any = await self._client.mget(keys) if keys else []
        return [queue for queue, tombstone in zip(queues, tombstones, strict=True) if tombstone is None]

    async def read(self) -> list[HostReport]:
        """Return the reports as they are in Redis now, without the cache of `reports`."""
        found = await self.find_all(await self._listed())
        return [report for report in found.values() if report is not None]

    async def find(self, queue: str) -> HostReport | None:
        """Return the last report of a listed instance; None if it has no report, or if this release cannot read the
        report.
        """
        return next((report for report in await self.read() if report.queue == queue), None)

    async def find_all(self, queues: Sequence[str]) -> dict[str, HostReport | None]:
        """Return the last reports of these instances; None for an instance that does not report."""
        return {queue: self._parse(queue, text) for queue, text in (await self._texts(queues)).items()}

    async def queued(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many calls wait in each queue."""
        with broker_errors(_WHAT):
            async with self._client.pipeline(transaction=False) as pipe:
                for queue in queues:
                    pipe.llen(queue)
                return dict(zip(queues, await pipe.execute(), strict=True))

    async def dead_queues(self) -> dict[str, int]:
        """Return the queues of listed instances without a report, each with the number of its waiting calls."""
        listed = set(await self._listed())
        # The list was read before the reports. In the other order, a host that starts in between would appear dead.
        return await self.queued(sorted(listed - {report.queue for report in await self.read()}))

    async def find_unreadable(self) -> set[str]:
        """Return the instances whose reports this release cannot read."""
        texts = await self._texts(await self._listed())
        return {queue for queue, text in texts.items() if text is not None and _parse_readable(text) is None}

    async def send_drain(self, queue: str, envelope: str, entry: NewAuditEntry) -> None:
        """Add a drain order to a worker's control list, and the entry to the audit log, in one step."""
        with broker_errors("the order to drain was not sent"):
            async with self._client.pipeline(transaction=True) as pipe:
                add_entry(pipe, self._deployment, entry)
                pipe.lpush(control_queue(queue), envelope)
                pipe.expire(control_queue(queue), ORDER_TTL_S)
                await pipe.execute()

    async def is_listed(self, queue: str) -> bool:
        """Return whether an instance is listed. An instance that ended normally is not listed."""
        with broker_errors(_WHAT):
            return await self._client.zscore(hosts_key(self._deployment), queue) is not None

    async def now(self) -> float:
        """Return Redis's time, which all workers use."""
        return await read_clock(self._client)

    async def _listed(self) -> list[str]:
        """Return the listed instances, sorted."""
        with broker_errors(_WHAT):
            names: Any = await self._client.zrange(hosts_key(self._deployment), 0, -1)
        return sorted(name.decode(errors="replace") for name in names)

    async def _texts(self, queues: Sequence[str]) -> dict[str, bytes | None]:
        """Return the stored text of each instance's report."""
        with broker_errors(_WHAT):
            texts: Any = (
                await self._client.mget([host_key(self._deployment, queue) for queue in queues]) if queues else []
            )
        return dict(zip(queues, texts, strict=True))

    def _parse(self, queue: str, text: bytes | None) -> HostReport | None:
        try:
            return HostReport.model_validate_json(text) if text is not None else None
        except ValidationError as error:
            if queue not in self._unreadable:
                self._unreadable.add(queue)
                log.error(
                    "host_report_unreadable",
                    queue=queue,
                    error=describe_invalid(error),
                )
            return None


# --- Workers ----------------------------------------------------------------------------------------------------------


async def check_tenant_class(client: RedisClient, deployment: str, tenant_class: str) -> list[str]:
    """Check that a host with the tenant class exists. Return a warning if no sandbox host reports, because the classes
    are then unknown.

    Raises ToolFailure(INVALID_ARGUMENTS) with the known classes: no host has the class. Raises BrokerUnavailable when
    Redis does not answer.
    """
    if tenant_class == TenantPolicy().sandbox.tenant_class:
        return []
    hosts = [report for report in await HostStore(client, deployment).read() if report.kind == "sandbox"]
    classes = sorted({name for host in hosts for name in host.classes})
    if not classes:
        return [
            f"the tenant class {tenant_class} was not checked, because no sandbox host reports: check that "
            "TOOLCREW_TENANT_CLASSES of the hosts has the class"
        ]
    if tenant_class not in classes:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"no host has the tenant class {tenant_class}: use one of {', '.join(classes)}, or first add the "
            "class to TOOLCREW_TENANT_CLASSES of a host and restart its sandboxd",
            nearest=difflib.get_close_matches(tenant_class, classes, n=3),
        )
    return []


class ReportResult(StrEnum):
    """The reply to a report of a worker."""

    ACCEPTED = "accepted"
    GIVEN_UP = "given_up"
    """The instance was considered lost, and its calls were answered. The worker must not continue under its name."""
    REPLACED = "replaced"
    """Another worker uses the name of this host instance."""


class WorkerHostStore:
    """Writes the reports of workers, for the workers themselves. A report names its host instance (`queue`) and its
    process (`worker`).

    Every method raises BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: SyncRedis, deployment: str, clock: SharedClock) -> None:
        """Create a store. `client` must send every command once, because a repeated report would be out of date."""
        self._client = client
        self._deployment = deployment
        self._clock = clock

    def report(self, report: HostReport, *, is_first: bool = False, ttl_s: int = HOST_TTL_S) -> ReportResult:
        """Report that the worker lives, and update the clock with Redis's time. `is_first`: accept the host instance's
        name only if no worker has used it.
        """
        report = report.model_copy(update={"reported_at": self._clock()})
        own = report.slots if report.kind == "sandbox" else ""
        shared = report.slots if not report.draining else ""
        with broker_errors("the worker was not reported"):
            result = _REPORT.run_blocking(
                self._client,
                report=host_key(self._deployment, report.queue),
                hosts=hosts_key(self._deployment),
                tombstone=tombstone_key(self._deployment, report.queue),
                slot_keys=self._slot_keys(report),
                text=report.model_dump_json(),
                queue=report.queue,
                worker=report.worker,
                ttl_s=ttl_s,
                is_first=int(is_first),
                slots=[own, *(shared for _ in report.pools)],
            )
        self._clock.learn(int(result[1]) + int(result[2]) / 1_000_000)
        return ReportResult(result[0].decode())

    def leave(self, departure: Departure, last: HostReport) -> bool:
        """Remove the report. For the departure "restarting", keep the report for a while, until the next process
        starts. Return False if the departure is "drained" but the queue has calls.
        """
        parting = last.model_copy(update={"worker": "", "draining": True, "busy": 0, "reported_at": self._clock()})
        with broker_errors("the worker's report was not removed"):
            result = _LEAVE.run_blocking(
                self._client,
                report=host_key(self._deployment, last.queue),
                hosts=hosts_key(self._deployment),
                messages=last.queue,
                slot_keys=self._slot_keys(last),
                queue=last.queue,
                worker=last.worker,
                departure=departure,
                last_report=parting.model_dump_json(),
                report_ttl_s=RESTART_GRACE_S,
                slots_ttl_s=HOST_TTL_S,
            )
        return bool(result != b"busy")

    def find(self, queue: str) -> HostReport | None:
        """Return the last report of an instance; None if there is none, or if this release cannot read it."""
        with broker_errors(_WHAT):
            return _parse_readable(self._client.get(host_key(self._deployment, queue)))

    def reports(self, host: str) -> list[HostReport]:
        """Return the reports of all living instances of a host."""
        with broker_errors(_WHAT):
            names: Any = self._client.zrange(hosts_key(self._deployment), 0, -1)
        queues = [name for name in (item.decode() for item in names) if name.startswith(host_prefix(host))]
        reports = [self.find(queue) for queue in queues]
        return [report for report in reports if report is not None]

    def dismiss(self, report: HostReport) -> None:
        """Remove the report of a worker that has ended. The reaper then processes its queue."""
        with broker_errors(_WHAT):
            _DISMISS.run_blocking(
                self._client,
                report=host_key(self._deployment, report.queue),
                hosts=hosts_key(self._deployment),
                worker=report.worker,
                queue=report.queue,
                ttl_s=HOST_TTL_S,
            )

    def _slot_keys(self, report: HostReport) -> list[str]:
        queues = (report.queue, *report.pools)
        return [
            key
            for queue in queues
            for key in (worker_slots_key(self._deployment, queue), slots_key(self._deployment, queue))
        ]


def _parse_readable(data: Any) -> HostReport | None:
    try:
        return HostReport.model_validate_json(data) if data is not None else None
    except ValidationError:
        return None


# --- Orders to workers ------------------------------------------------------------------------------------------------

# A worker reads the orders in its control list at once, even if its pool is busy. An order is a signed envelope
# (workers/control.py).


async def send_order(client: RedisClient, queue: str, envelope: str) -> None:
    """Add an order to a worker's control list. Raises BrokerUnavailable when Redis does not answer."""
    with broker_errors(f"the order was not sent to {queue}"):
        async with client.pipeline(transaction=True) as pipe:
            pipe.lpush(control_queue(queue), envelope)
            pipe.expire(control_queue(queue), ORDER_TTL_S)
            await pipe.execute()


class WorkerControlStore:
    """Control lists of some queues, for workers. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: SyncRedis) -> None:
        self._client = client

    def take(self, queues: Sequence[str], wait_s: int) -> bytes | None:
        """Return the next order for one of these queues. Return None if no order arrives within `wait_s` seconds, or
        if `wake` is called.
        """
        with broker_errors("the control list was not read"):
            item: Any = self._client.brpop([control_queue(queue) for queue in queues], timeout=wait_s)
        if item is None:
            return None
        order = item[1] if isinstance(item[1], bytes) else item[1].encode()
        return order if order != _WAKE else None

    def wake(self, queue: str, ttl_s: int) -> None:
        """End a `take` that waits for orders of this queue."""
        self._push(queue, _WAKE, ttl_s)

    def push(self, queue: str, order: bytes) -> None:
        """Send an order to another worker. The order expires if that worker has ended."""
        self._push(queue, order, ORDER_TTL_S)

    def _push(self, queue: str, order: bytes, ttl_s: int) -> None:
        key = control_queue(queue)
        with broker_errors(f"the order was not sent to {queue}"), self._client.pipeline(transaction=True) as pipe:
            pipe.lpush(key, order)
            pipe.expire(key, ttl_s)
            pipe.execute()
