"""Demand for workers and hosts: for each pool, how many calls run and wait. Autoscalers read these numbers."""

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolcrew.contract.calls import Record
from toolcrew.contract.names import admission_prefix, slots_key
from toolcrew.store.clock import read_clock
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.hosts import HostStore

FRESH_S = 3.0
SCAN = 1000
FULL_SHARE = 0.7
"""Share of the hosts' session capacity in use, 0 to 1, above which more hosts are needed."""
BUSY_SHARE = 0.9
"""Share of the hosts' call slots in use, 0 to 1, above which more hosts are needed."""
_WHAT = "the waiting calls were not counted"


class QueuePressure(Record):
    """Demand of one shared queue. `held`: calls that have a slot. `waiting`: calls that would run with more slots; the
    oldest has waited for `oldest_s` seconds. `stopped`: calls that wait because of their own tenant (a limit or a
    pause); more workers would not help them. `demand`: `held` plus `waiting`.
    """

    slots: int
    held: int
    waiting: int
    stopped: int
    oldest_s: float
    demand: int


class HostsPressure(Record):
    """Demand of all sandbox hosts together. `wanted`: the number of hosts of average size that would be sufficient."""

    hosts: int
    sessions: int
    max_sessions: int
    busy: int
    slots: int
    wanted: int


class PoolPressure(Record):
    """Demand of a deployment for workers and hosts, for an autoscaler. `queues`: the demand of each shared queue, by
    the name of its pool.
    """

    queues: dict[str, QueuePressure]
    hosts: HostsPressure


@dataclass(frozen=True)
class _Scan:
    waiting: Counter[str]
    stopped: Counter[str]
    since: dict[str, float]


class Pressure:
    """Computes the demand of the pools. Reads Redis at most once every FRESH_S seconds. Every method raises
    BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: RedisClient, deployment: str, clock: Callable[[], float] | None = None) -> None:
        self._client = client
        self._deployment = deployment
        self._prefix = admission_prefix(deployment)
        self._hosts = HostStore(client, deployment)
        self._clock = clock
        self._turn = asyncio.Lock()
        self._scan: _Scan | None = None
        self._scanned_at = float("-inf")

    async def queue(self, name: str) -> QueuePressure:
        """Return the demand of one queue; zero for a queue without calls."""
        scan, now = await self._waiting(), await self._now()
        with broker_errors(_WHAT):
            running, slots = await self._numbers(name)
        since = scan.since.get(name)
        age_s = 0.0 if since is None else max(0.0, now - since)
        waiting = scan.waiting[name]
        return QueuePressure(
            slots=slots,
            held=running,
            waiting=waiting,
            stopped=scan.stopped[name],
            oldest_s=round(age_s, 3),
            demand=running + waiting,
        )

    async def hosts(self) -> HostsPressure:
        """Return the demand for hosts. The sessions of a draining host need another host, and its capacity does not
        count.
        """
        reports = [report for report in await self._hosts.reports() if report.kind == "sandbox"]
        open_ones = [report for report in reports if not report.draining and report.healthy]
        sessions, busy = sum(report.sessions for report in reports), sum(report.busy for report in reports)
        max_sessions, slots = (
            sum(report.max_sessions for report in open_ones),
            sum(report.slots for report in open_ones),
        )
        needed = max(
            sessions / (FULL_SHARE * max_sessions) if max_sessions else 0.0,
            busy / (BUSY_SHARE * slots) if slots else 0.0,
        )
        return HostsPressure(
            hosts=len(open_ones),
            sessions=sessions,
            max_sessions=max_sessions,
            busy=busy,
            slots=slots,
            wanted=max(1, math.ceil(needed * len(open_ones) - 1e-9)),
        )

    async def _waiting(self) -> _Scan:
        async with self._turn:
            loop_now = asyncio.get_running_loop().time()
            if self._scan is None or loop_now - self._scanned_at >= FRESH_S:
                with broker_errors(_WHAT):
                    self._scan, self._scanned_at = await self._run_scan(), loop_now
            return self._scan

    async def _run_scan(self) -> _Scan:
        """Read all waiting calls in steps. Redis serves other clients between two steps."""
        calls: dict[tuple[str, str], list[float]] = defaultdict(list)
        cursor, rows = 0, dict[bytes, bytes]()
        while True:
            answer: Any = await self._client.hscan(f"{self._prefix}waiting", cursor, count=SCAN)
            cursor, rows = answer
            for text in rows.values():
                call = json.loads(text)
                calls[call["queue"], call["tenant"]].append(float(call["since"]))
            if cursor == 0:
                break
        pairs = list(calls)
        blocked: list[Any] = []
        async with self._client.pipeline(transaction=False) as pipe:
            for queue, tenant in pairs:
                pipe.hget(f"{self._prefix}pair:{queue}|{tenant}", "blocked")
            blocked = await pipe.execute()
        scan = _Scan(Counter(), Counter(), {})
        for (queue, tenant), is_blocked in zip(pairs, blocked, strict=True):
            instants = calls[queue, tenant]
            if float(is_blocked or 0) > 0:
                scan.stopped[queue] += len(instants)
            else:
                scan.waiting[queue] += len(instants)
                scan.since[queue] = min(scan.since.get(queue, math.inf), *instants)
        return scan

    async def _numbers(self, queue: str) -> tuple[int, int]:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hget(f"{self._prefix}queue:{queue}", "held")
            pipe.get(slots_key(self._deployment, queue))
            running, slots = await pipe.execute()
        return int(float(running or 0)), int(float(slots or 0))

    async def _now(self) -> float:
        """Return the time of the clock that admission uses, in Unix seconds."""
        return self._clock() if self._clock is not None else await read_clock(self._client)
