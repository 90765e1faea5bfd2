"""Plays 10,000 sessions over 500 hosts through the real admission script and the real placement, with a clock of its own: shares, spread, recovery."""

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import redis

from benchmarks.fairness import open_server
from benchmarks.report import Report, percentile
from contract.hosts import HEARTBEAT_S, HOST_TTL_S, HostReport
from contract.names import POOL_WEB, slots_key
from contract.tenancy import TenantPolicy
from orchestrator.admission import SlotRequest
from orchestrator.admission.script import Operation, enqueue, load_script, parse_answer, release, script_arguments
from orchestrator.placement import Wanted, choose_host

SESSIONS = 10_000
HOSTS = 500
SLOTS = 8
MAX_SESSIONS = 40
SESSIONS_A_WEB_SLOT = 400
TENANTS = 12
ARRIVE_S = 40.0
PLAY_S = 120.0
LOST_AT_S = 70.0
LOST = 0.05
"""Of the hosts, all at once."""
THINK_S = 15.0
DEPLOYMENT = "sim"
_REPORT = {"kind": "sandbox", "classes": ("default",), "max_sessions": MAX_SESSIONS, "slots": SLOTS, "started_at": 0.0, "worker": "w"}


@dataclass
class Host:
    """`told`: its last report, by which sessions are placed."""

    queue: str
    told: HostReport
    sessions: int = 0
    running: int = 0
    granted: list[str] = field(default_factory=list)
    is_lost: bool = False


@dataclass
class Session:
    tenant: str
    host: Host
    call: str | None = None
    moved_at: float | None = None
    """When its host was lost, until its next call has ended elsewhere."""


@dataclass
class Call:
    session: Session
    queue: str
    seconds: float
    asked_at: float


class World:
    """The clock, what happens next, and who is where."""

    def __init__(self, client: "redis.Redis", sessions: int, hosts: int) -> None:
        self.client, self.now, self.steps = client, 1000.0, 0
        self.chance = random.Random(6)
        self.hosts = [Host(f"host.h{at}.1", self._report(f"host.h{at}.1", 0, 0)) for at in range(hosts)]
        self.by_queue = {host.queue: host for host in self.hosts}
        self.web = Host(POOL_WEB, self._report(POOL_WEB, 0, 0))
        self.count = sessions
        self.web_slots = max(4, sessions // SESSIONS_A_WEB_SLOT)
        self.sessions: list[Session] = []
        self.calls: dict[str, Call] = {}
        self.used: Counter[str] = Counter()
        self.waits: list[float] = []
        self.recovered: list[float] = []
        self.spread: tuple[int, float] = (0, 0.0)
        self._placed: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._script = client.register_script(load_script())

    def play(self) -> None:
        for host in self.hosts:
            self.client.set(slots_key(DEPLOYMENT, host.queue), SLOTS)
        self.client.set(slots_key(DEPLOYMENT, POOL_WEB), self.web_slots)
        for at in range(self.count):
            self.after(ARRIVE_S * at / self.count, lambda at=at: self._arrive(f"t{at % TENANTS}"))
        for number, host in enumerate(self.hosts):
            self.after(HEARTBEAT_S * number / len(self.hosts), lambda host=host: self._beat(host))
        self.after(ARRIVE_S, self._look)
        self.after(LOST_AT_S, self._lose)
        until = self.now + PLAY_S
        while self._events and self._events[0][0] < until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), happen))

    def _report(self, queue: str, sessions: int, busy: int) -> HostReport:
        terms = {"host": queue, "queue": queue, "sessions": sessions, "busy": busy, "memory_free_bytes": 2**33, "reported_at": self.now}
        return HostReport.model_validate({**_REPORT, **terms})

    def _beat(self, host: Host) -> None:
        if not host.is_lost:
            host.told = self._report(host.queue, host.sessions, host.running)
            self._placed.pop(host.queue, None)
            self.after(HEARTBEAT_S, lambda: self._beat(host))

    def _place(self) -> Host:
        alive = [host.told for host in self.hosts if host.told.reported_at > self.now - HOST_TTL_S]
        lost = {host.queue for host in self.hosts if host.is_lost}
        # Those that have just failed are known to be lost, as the publish step says.
        chosen = choose_host(alive, Wanted(), placed=self._placed, excluded=lost, chance=self.chance)
        self._placed[chosen.queue] += 1
        host = self.by_queue[chosen.queue]
        host.sessions += 1
        return host

    def _arrive(self, tenant: str) -> None:
        session = Session(tenant, self._place())
        self.sessions.append(session)
        self.after(self.chance.expovariate(1 / THINK_S), lambda: self._ask(session))

    def _ask(self, session: Session) -> None:
        """A third of the calls are for the shared web workers, which cannot keep up: shares are measured there."""
        is_web = session.moved_at is None and self.chance.random() < 1 / 3
        queue = POOL_WEB if is_web else session.host.queue
        session.call = f"o{self.chance.randrange(4)}.{next(self._numbers)}"
        seconds = 0.4 if is_web else self.chance.choice((0.02, 0.1, 0.5, 4.0))
        self.calls[session.call] = Call(session, queue, seconds, self.now)
        self._step(enqueue(session.call, _request(session.tenant, queue, "web" if is_web else "bash")))

    def _step(self, operation: Operation) -> None:
        """All orchestrators speak as one: what they tell one another is not what is looked at."""
        self.steps += 1
        arguments = script_arguments(DEPLOYMENT, "o", [_of_one(operation)], now=self.now, lease_s=1e6)
        for id in parse_answer(self._script(args=arguments)).granted:
            call = self.calls[id.removeprefix("o.")]
            place = self.by_queue.get(call.queue, self.web)
            if place is not self.web:
                self.waits.append(self.now - call.asked_at)
            place.granted.append(id.removeprefix("o."))
            self._work(place)

    def _work(self, place: Host) -> None:
        slots = self.web_slots if place is self.web else SLOTS
        while place.granted and place.running < slots and not place.is_lost:
            id = place.granted.pop(0)
            place.running += 1
            self.after(self.calls[id].seconds, lambda id=id: self._done(place, id))

    def _done(self, place: Host, id: str) -> None:
        if place.is_lost:
            return
        place.running -= 1
        call = self.calls.pop(id)
        if place is self.web and self.now > 1000 + ARRIVE_S:
            self.used[call.session.tenant] += call.seconds
        session = call.session
        if session.moved_at is not None:
            self.recovered.append(self.now - session.moved_at)
            session.moved_at = None
        self._step(release(id, call.seconds))
        self._work(place)
        session.call = None
        self.after(self.chance.expovariate(1 / THINK_S), lambda: self._ask(session))

    def _look(self) -> None:
        counts = [host.sessions for host in self.hosts]
        self.spread = max(counts), sum(counts) / len(counts)

    def _lose(self) -> None:
        for host in self.chance.sample(self.hosts, int(len(self.hosts) * LOST)):
            host.is_lost = True
            gone = HOST_TTL_S - (self.now - host.told.reported_at)
            self.after(gone, lambda host=host, lost_at=self.now: self._move(host, lost_at))

    def _move(self, host: Host, lost_at: float) -> None:
        """The host's liveness is gone: its calls are given back, its sessions opened elsewhere, and each asks for its call again."""
        for session in [session for session in self.sessions if session.host is host]:
            session.host, session.moved_at = self._place(), lost_at
            if session.call is not None and self.calls[session.call].queue == host.queue:
                self._step(release(session.call, 0.0))
                del self.calls[session.call]
                self._ask(session)
            else:
                session.moved_at = None


def run(sessions: int = SESSIONS, hosts: int = HOSTS) -> Report:
    with open_server() as url, redis.Redis.from_url(url, socket_timeout=10) as client:
        _until_it_answers(client)
        world = World(client, sessions, hosts)
        started = time.perf_counter()
        world.play()
        return _report(world, time.perf_counter() - started)


def _report(world: World, took_s: float) -> Report:
    report = Report(
        "simulator",
        notes=[f"{world.count} sessions of {TENANTS} tenants over {len(world.hosts)} hosts, {PLAY_S:g} s played in {took_s:.0f} s"],
    )
    shares = shares_by_weight(world.used)
    report.add(
        "share_worst_ratio",
        max(abs(share - 1) for share in shares.values()),
        "a tenant's share of the web slots off its weight's, worst",
        at_most=0.05,
    )
    most, mean = world.spread
    report.add("sessions_worst_ratio", most / mean, "sessions of the fullest host / mean", at_most=1.5)
    report.add("wait_p99_ms", percentile(world.waits, 0.99) * 1000, "wait for a slot of a session's own host, p99", at_most=1000)
    report.add(
        "recovered_p50_ms",
        percentile(world.recovered, 0.5) * 1000,
        f"calls on lost hosts ({LOST:.0%}): from the loss to the result elsewhere, p50",
    )
    report.add("recovered_last_ms", max(world.recovered) * 1000, "the last of them", at_most=(HOST_TTL_S + 10) * 1000)
    report.add("steps_per_s", world.steps / took_s, "steps of admission a second of this machine, placement and the play included")
    return report


def shares_by_weight(used: Mapping[str, float]) -> dict[str, float]:
    """What each tenant got / what its weight entitles it to."""
    whole, weights = sum(used.values()), sum(_weight(tenant) for tenant in used)
    return {tenant: (seconds / whole) / (_weight(tenant) / weights) for tenant, seconds in used.items()}


def _weight(tenant: str) -> float:
    return float(1 + int(tenant[1:]) % 3)


def _request(tenant: str, queue: str, tool: str) -> SlotRequest:
    policy = TenantPolicy(weight=_weight(tenant), in_flight=100_000)
    return SlotRequest(tenant, policy, queue, "c", tool, "interactive", 600.0, 30.0)


def _of_one(operation: Operation) -> Operation:
    """The same, said by the one orchestrator that hears all grants in its answers."""
    return (operation[0], f"o.{operation[1]}", *operation[2:])


def _until_it_answers(client: "redis.Redis") -> None:
    until = time.monotonic() + 20
    while True:
        try:
            client.ping()
        except redis.RedisError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return
