"""Simulated hosts. Each host takes calls from its real queue through the real call store; the calls only take
simulated time.
"""

import asyncio
import base64
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import redis

from benchmarks.simulator_clock import JumpingLoop
from toolcrew.contract.calls import Clocks, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import decode_call, encode_result
from toolcrew.contract.hosts import HEARTBEAT_S, HOST_TTL_S, HostReport, holder_name
from toolcrew.contract.names import host_key, hosts_key, slots_key, tombstone_key
from toolcrew.contract.signing import ResultSeal, SigningKeys
from toolcrew.store.call_records import RESULT_TTL_S, CallClaim
from toolcrew.store.calls import FinishedCalls, WorkerCallStore
from toolcrew.store.clock import SharedClock
from toolcrew.store.usage import CallEnding

DEPLOYMENT = "simulator"
KEYS = SigningKeys.of("simulator")
SIZES = ((1, 20), (2, 32), (4, 64))
"""Slots and sessions of a small, a medium and a large host."""
SHARES = (6, 3, 1)
OPEN_S = 0.5
GIB = 1024**3
AT_ONCE = 10
"""Number of hosts that report at the same time."""
NEVER = 4_000_000_000
"""Deadline that no call reaches, as a Unix timestamp."""


@dataclass
class Host:
    """One incarnation of a host (its time under one queue name). `state` frozen: the host pauses, and completes its
    started calls when it resumes.
    """

    name: str
    boot: int
    slots: int
    max_sessions: int
    sessions: int = 0
    busy: int = 0
    state: str = "alive"
    is_expired: bool = False
    reported_at: float = 0.0
    late: list[tuple[ToolCall, ToolContext, str, float]] = field(default_factory=list)

    @property
    def queue(self) -> str:
        return f"host.{self.name}.{self.boot:04x}"


class World:
    """All hosts, their reports, and the effects of their calls. `reports` are as old as the interval between
    heartbeats.
    """

    def __init__(self, client: "redis.Redis", loop: JumpingLoop, chance: random.Random) -> None:
        self._client = client
        self.loop = loop
        self.chance = chance
        self._ledger = WorkerCallStore(client, DEPLOYMENT, SharedClock())
        self._finished = FinishedCalls(client)
        self.hosts: list[Host] = []
        self.by_queue: dict[str, Host] = {}
        self.reports: dict[str, HostReport] = {}
        self.starts: Counter[str] = Counter()
        """Call id -> number of times the call was started."""
        self.late = 0
        """Number of results that arrived after their call was abandoned or sent again."""
        self.runs: list[tuple[str, str, float, float]] = []
        """Queue, tenant, start and end of each execution."""
        self._running: dict[str, tuple[str, str, float]] = {}
        self.stopped_at: dict[str, float] = {}

    def add_hosts(self, number: int) -> None:
        sizes = [size for size, share in zip(SIZES, SHARES, strict=True) for _ in range(share)]
        for at in range(number):
            slots, most = sizes[at % len(sizes)]
            self._begin(Host(f"h{at}", 1, slots, most))

    def heartbeats(self) -> Iterator[float]:
        """Let the hosts report, a few at a time. Yield the seconds until the next hosts report."""
        while True:
            hosts = list(self.hosts)
            for at in range(0, len(hosts), AT_ONCE):
                yield HEARTBEAT_S * AT_ONCE / len(hosts)
                for host in hosts[at : at + AT_ONCE]:
                    self._report(host)

    def start_calls(self, queue: str) -> None:
        """Start calls after a call is queued or a slot becomes free."""
        host = self.by_queue.get(queue)
        if host is None or host.state != "alive":
            return
        while host.busy < host.slots and isinstance(message := self._client.rpop(queue), bytes):
            self._take(host, message)
        self.loop.selector.listen()

    def open_session(self, queue: str) -> bool | None:
        """Return whether the host had room for the session. Return None if the host does not answer."""
        host = self.by_queue.get(queue)
        if host is None or host.state != "alive":
            return None
        if host.sessions >= host.max_sessions:
            return False
        host.sessions += 1
        return True

    def stop(self, host: Host, state: str) -> None:
        """Set the state of a host to dead or frozen."""
        host.state = state
        self.stopped_at[host.queue] = self.loop.time()

    def wake(self, host: Host) -> None:
        """Resume a frozen host and end the calls that were in progress.

        A host that the pool has declared lost starts again as a new incarnation, without sessions.
        """
        host.state = "alive"
        late, host.late = host.late, []
        for call, context, task_id, began in late:
            self._end(host, call, context, task_id, began)
        if self._client.exists(tombstone_key(DEPLOYMENT, host.queue)):
            self.hosts.remove(host)
            self.by_queue.pop(host.queue, None)
            self._begin(Host(host.name, host.boot + 1, host.slots, host.max_sessions))
        else:
            host.is_expired = False
            self._announce(host)
            self.start_calls(host.queue)

    def running(self) -> list[tuple[str, str, float, float]]:
        """Return the executions in progress, as entries of `runs`."""
        return [(queue, tenant, began, self.loop.time()) for queue, tenant, began in self._running.values()]

    def is_reported(self, queue: str) -> bool:
        return queue in self.reports

    def _begin(self, host: Host) -> None:
        self.hosts.append(host)
        self.by_queue[host.queue] = host
        self._client.set(slots_key(DEPLOYMENT, host.queue), host.slots)
        self._announce(host)

    def _announce(self, host: Host) -> None:
        self._client.set(host_key(DEPLOYMENT, host.queue), self._build_report(host).model_dump_json())
        self._client.zadd(hosts_key(DEPLOYMENT), {host.queue: NEVER})
        self._report(host)

    def _report(self, host: Host) -> None:
        now = self.loop.time()
        if host.state == "alive":
            host.reported_at = now
            report = self.reports.get(host.queue) or self._build_report(host)
            changes = {"busy": host.busy, "sessions": host.sessions, "reported_at": now}
            self.reports[host.queue] = report.model_copy(update=changes)
        elif not host.is_expired and now - host.reported_at >= HOST_TTL_S:
            # Real Redis would expire the key by its own clock.
            host.is_expired = True
            self.reports.pop(host.queue, None)
            self._client.delete(host_key(DEPLOYMENT, host.queue), slots_key(DEPLOYMENT, host.queue))
            self._client.zadd(hosts_key(DEPLOYMENT), {host.queue: 0})

    def _build_report(self, host: Host) -> HostReport:
        return HostReport(
            host=host.name,
            queue=host.queue,
            worker="w",
            kind="sandbox",
            slots=host.slots,
            busy=host.busy,
            sessions=host.sessions,
            max_sessions=host.max_sessions,
            memory_free_bytes=8 * GIB,
            classes=("default",),
            images=("default",),
            started_at=0.0,
            reported_at=self.loop.time(),
        )

    def _take(self, host: Host, message: bytes) -> None:
        fields = json.loads(message)
        envelope = json.loads(base64.b64decode(fields["body"]))[1]["envelope"]
        call, context = decode_call(envelope, KEYS)
        if self._ledger.claim(call, context, holder_name(host.queue, "w")) is not CallClaim.GRANTED:
            return
        self.starts[call.id] += 1
        host.busy += 1
        self._running[call.id] = (host.queue, context.tenant, self.loop.time())
        seconds, began = float(str(call.arguments["seconds"])), self.loop.time()
        self.loop.call_later(seconds, self._end_call, host, call, context, fields["headers"]["id"], began)

    def _end_call(self, host: Host, call: ToolCall, context: ToolContext, task_id: str, began: float) -> None:
        if host.state == "frozen":
            host.late.append((call, context, task_id, began))
        elif host.state == "alive":
            self._end(host, call, context, task_id, began)
            self.start_calls(host.queue)

    def _end(self, host: Host, call: ToolCall, context: ToolContext, task_id: str, began: float) -> None:
        host.busy -= 1
        self._running.pop(call.id, None)
        now = self.loop.time()
        self.runs.append((host.queue, context.tenant, began, now))
        result = ToolResult(call_id=call.id, name=call.name, success=True, output="", clocks=Clocks(run_s=now - began))
        data: dict[str, Any] = {
            "status": "SUCCESS",
            "task_id": task_id,
            "result": encode_result(result, seal=ResultSeal(KEYS, context.tenant, context.attempt)),
        }
        ending = CallEnding(deployment=DEPLOYMENT, tenant=context.tenant, call=call.id, attempt=context.attempt)
        if not self._finished.store(task_id, json.dumps(data), RESULT_TTL_S, ending):
            self.late += 1
        self.loop.selector.listen()


async def run_heartbeats(world: World) -> None:
    """Send heartbeats until cancelled."""
    for pause_s in world.heartbeats():
        await asyncio.sleep(pause_s)
