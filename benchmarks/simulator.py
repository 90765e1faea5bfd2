"""Simulate 10,000 sessions of 1,000 tenants on 500 hosts with the product's admission, placement and recovery on a
real Redis.

The hosts and the time are simulated (benchmarks/simulator_clock.py). A simulated minute of the pool takes only the
time of its decisions.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass

import redis
import redis.asyncio

from benchmarks.fairness import open_server
from benchmarks.report import Report, median, percentile
from benchmarks.simulator_clock import CountingScripts, JumpingLoop, open_counting_pool, run_jumping
from benchmarks.simulator_hosts import DEPLOYMENT, World, run_heartbeats
from benchmarks.simulator_orchestrators import (
    FUTURE_AT,
    CallResults,
    Orchestrator,
    Pace,
    Session,
    open_orchestrators,
    play_agent,
)
from benchmarks.simulator_shares import misgiven, share_out
from benchmarks.sizes import size
from toolcrew.contract.names import POOL_WEB, slots_key
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.admission import SharedAdmission
from toolcrew.orchestrator.dispatch.placement import HostRequirements, choose_host
from toolcrew.store.slots import SlotRequest

SEED = 6
HOSTS, SESSIONS, TENANTS, ORCHESTRATORS = size((500, 10_000, 1_000, 2), (60, 300, 30, 2))
WEIGHTS = (1.0, 1.0, 3.0)
"""Weights of the tenants, in turn."""
STEADY_S = size(60.0, 10.0)
"""Period in which the sessions are opened, in seconds."""
BURST = size(2_000, 40)
"""Number of sessions that are opened within one second. The reports of the hosts are up to four seconds old."""
SHARED_HOSTS, SHORT, SETTLE_S, SHARE_S = size(
    (16, Pace(think_s=12.0, call_s=3.0), 90.0, 120.0), (4, Pace(think_s=12.0, call_s=3.0), 10.0, 20.0)
)
LONG, FILL_S, LOSS_S, AFTER_S = Pace(think_s=180.0, call_s=30.0), 40.0, 15.0, 20.0
DEAD, FROZEN = size((25, 15), (5, 3))
POOL_SLOTS, POOL_CALLS, POOL_CALL_S, POOL_SHARE_S = size((100, 10_000, 0.5, 20.0), (10, 200, 0.5, 5.0))
CONNECTIONS = 64


@dataclass
class Simulation:
    """State that all parts of the simulation share."""

    world: World
    orchestrators: Sequence[Orchestrator]
    results: CallResults
    chance: random.Random
    weights: dict[str, float]


def run() -> Report:
    # The simulation stops hosts on purpose, so suppress the log.
    logging.getLogger("toolcrew").setLevel(logging.ERROR)
    report = Report("simulator")
    began, worked = time.perf_counter(), time.process_time()
    with open_server() as url:
        _await_server(url)
        run_jumping(lambda: _play(url, report))
    report.notes.append(
        f"{SESSIONS} sessions, {TENANTS} tenants of Zipf's demand, {HOSTS} hosts of 1, 2 and 4 slots, {ORCHESTRATORS} "
        f"orchestrators; {time.perf_counter() - began:.0f} s, of which {time.process_time() - worked:.0f} s of one "
        f"processor, for {STEADY_S + SETTLE_S + SHARE_S + FILL_S + LOSS_S + AFTER_S + POOL_SHARE_S:.0f} s of the pool; "
        "times are the pool's"
    )
    return report


def _await_server(url: str) -> None:
    with redis.Redis.from_url(
        url, socket_timeout=10, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200)
    ) as client:
        client.ping()


async def _play(url: str, report: Report) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    pool = open_counting_pool(url, CONNECTIONS)
    chance, results = random.Random(SEED), CallResults()
    with redis.Redis.from_url(url, socket_timeout=10) as workers:
        async with redis.asyncio.Redis(connection_pool=pool) as client:
            world = World(workers, loop, chance)
            world.add_hosts(HOSTS)
            weights = {f"t{at}": WEIGHTS[at % len(WEIGHTS)] for at in range(TENANTS)}
            async with open_orchestrators(world, client, ORCHESTRATORS, results) as orchestrators:
                simulation = Simulation(world, orchestrators, results, chance, weights)
                beats = asyncio.create_task(run_heartbeats(world))
                await asyncio.sleep(12)  # wait until the monitors trust the reports
                sessions = await _place(simulation, report)
                await _share_hosts(simulation, sessions, report)
                await _recover(simulation, sessions, report)
                beats.cancel()
            await _share_pool(client, loop, weights, report)
    await pool.disconnect()


async def _place(simulation: Simulation, report: Report) -> list[Session]:
    """Open sessions at a steady rate, then open a burst and close the burst again."""
    sessions = _make_sessions(simulation, SESSIONS)
    await asyncio.gather(
        *(_open(simulation, at, session, simulation.chance.uniform(0, STEADY_S)) for at, session in enumerate(sessions))
    )
    report.add(
        "placed_max_ratio",
        _fullest(simulation.world),
        "fullest host / mean, by sessions of their most, after opening them in a minute",
        at_most=1.5,
    )
    report.add(
        "placed_refused_number", simulation.results.refused_openings, "openings refused while there was room", at_most=0
    )
    refused = simulation.results.refused_openings
    burst = _make_sessions(simulation, BURST)
    await asyncio.gather(
        *(_open(simulation, at, session, simulation.chance.random()) for at, session in enumerate(burst))
    )
    report.add("burst_max_ratio", _fullest(simulation.world), f"the same after {BURST} more in one second")
    report.add(
        "burst_refused_number", simulation.results.refused_openings - refused, "of those, refused while there was room"
    )
    report.add("burst_used_ratio", _compute_used_ratio(simulation.world), "of all places then taken")
    for session in burst:
        queue = simulation.results.lived.pop(session.name, None)
        if queue is not None:
            simulation.world.by_queue[queue].sessions -= 1
    reports, began = list(simulation.world.reports.values()), time.process_time()
    for _ in range(200):
        choose_host(reports, HostRequirements())
    report.add(
        "choose_ms", (time.process_time() - began) / 200 * 1000, f"of a real processor, to choose one of {HOSTS} hosts"
    )
    return [session for session in sessions if session.name in simulation.results.lived]


def _make_sessions(simulation: Simulation, number: int) -> list[Session]:
    """Create the sessions. The tenant of rank r has 1/r of the sessions of the first tenant."""
    names = list(simulation.weights)
    drawn = simulation.chance.choices(names, weights=[1 / (at + 1) for at in range(TENANTS)], k=number)
    return [
        Session(tenant, secrets.token_hex(8), TenantPolicy(weight=simulation.weights[tenant], sandboxes=100_000))
        for tenant in drawn
    ]


async def _open(simulation: Simulation, at: int, session: Session, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await simulation.orchestrators[at % ORCHESTRATORS].open(session)


def _fullest(world: World) -> float:
    loads = [host.sessions / host.max_sessions for host in world.hosts]
    return max(loads) / _compute_used_ratio(world)


def _compute_used_ratio(world: World) -> float:
    return sum(host.sessions for host in world.hosts) / sum(host.max_sessions for host in world.hosts)


@contextlib.asynccontextmanager
async def _at_work(simulation: Simulation, sessions: Sequence[Session], pace: Pace) -> AsyncIterator[None]:
    """Let all sessions think and call while the block runs. At the end, wait for the calls in progress."""
    over = asyncio.Event()
    agents = [
        asyncio.create_task(
            play_agent(simulation.orchestrators[at % ORCHESTRATORS], session, random.Random(SEED + at), pace, over)
        )
        for at, session in enumerate(sessions)
    ]
    yield
    over.set()
    await asyncio.gather(*agents)


async def _share_hosts(simulation: Simulation, sessions: Sequence[Session], report: Report) -> None:
    """Run some hosts until each of their tenants has had many turns for a slot, and report the shares."""
    hosts = {host.queue for host in simulation.chance.sample(simulation.world.hosts, SHARED_HOSTS)}
    at_work = [session for session in sessions if simulation.results.lived[session.name] in hosts]
    async with _at_work(simulation, at_work, SHORT):
        await asyncio.sleep(SETTLE_S)
        begins = simulation.world.loop.time()
        await asyncio.sleep(SHARE_S)
        _report_shares(simulation, hosts, at_work, begins, report)


async def _recover(simulation: Simulation, sessions: Sequence[Session], report: Report) -> None:
    """Run all sessions while hosts are lost, and report the recovery."""
    before = CallResults(calls=simulation.results.calls, codes=Counter(simulation.results.codes))
    async with _at_work(simulation, sessions, LONG):
        await asyncio.sleep(FILL_S)
        await _lose_hosts(simulation)
        await asyncio.sleep(AFTER_S)
    _report_recovery(simulation, before, report)


def _report_shares(
    simulation: Simulation, hosts: Collection[str], sessions: Sequence[Session], begins: float, report: Report
) -> None:
    ends = simulation.world.loop.time()
    used: dict[tuple[str, str], float] = defaultdict(float)
    for queue, tenant, began, ended in [*simulation.world.runs, *simulation.world.running()]:
        used[queue, tenant] += max(0.0, min(ended, ends) - max(began, begins))
    living = Counter((simulation.results.lived[session.name], session.tenant) for session in sessions)
    by_host: dict[str, dict[str, float]] = defaultdict(dict)
    for (queue, tenant), number in living.items():
        by_host[queue][tenant] = number * SHORT.demand
    fair: dict[tuple[str, str], float] = {}
    for host in (simulation.world.by_queue[queue] for queue in hosts):
        # No tenant gets all slots for calls of this length (docs/design.md).
        most = max(1, host.slots * 9 // 10)
        wishes = {tenant: min(most, demand) for tenant, demand in by_host[host.queue].items()}
        for tenant, slots in share_out(host.slots, wishes, simulation.weights).items():
            fair[host.queue, tenant] = slots * (ends - begins)
    slots_s = sum(simulation.world.by_queue[queue].slots for queue in hosts) * (ends - begins)
    wanted = sum(demand for wishes in by_host.values() for demand in wishes.values()) * (ends - begins) / slots_s
    report.add(
        "used_slots_ratio",
        sum(used.values()) / slots_s,
        f"of the slots of {len(hosts)} hosts used, with {wanted:.1f} times as many wanted",
        at_least=0.95,
    )
    kinds = (
        ("one", "the one session of a tenant on a host", 1, 1),
        ("many", "three sessions or more of a tenant on a host", 3, SESSIONS),
    )
    for kind, label, least, most in kinds:
        for weight in sorted(set(WEIGHTS)):
            pairs = [
                pair
                for pair, number in living.items()
                if least <= number <= most and simulation.weights[pair[1]] == weight
            ]
            if pairs:
                got = sum(used[pair] for pair in pairs) / sum(fair[pair] for pair in pairs)
                report.add(f"{kind}_weight_{weight:g}_ratio", got, f"{label}, weight {weight:g}: seconds got / fair")


async def _lose_hosts(simulation: Simulation) -> None:
    """Stop hosts one after the other within LOSS_S. Frozen hosts resume after 5 to 40 s."""
    hosts = simulation.chance.sample(simulation.world.hosts, DEAD + FROZEN)
    for at, host in enumerate(hosts):
        await asyncio.sleep(LOSS_S / len(hosts))
        if at % len(hosts) < DEAD:
            simulation.world.stop(host, "dead")
        else:
            simulation.world.stop(host, "frozen")
            asyncio.get_running_loop().call_later(simulation.chance.uniform(5, 40), simulation.world.wake, host)


def _report_recovery(simulation: Simulation, before: CallResults, report: Report) -> None:
    results, starts = simulation.results, simulation.world.starts
    codes = results.codes - before.codes
    resent = sum(number - 1 for call, number in starts.items() if results.idempotent[call])
    doubled = sum(number - 1 for call, number in starts.items() if not results.idempotent[call])
    report.add(
        "calls_number",
        results.calls - before.calls,
        f"calls made; meanwhile {DEAD} hosts die and {FROZEN} freeze within {LOSS_S:g} s",
    )
    report.add("unanswered_number", len(results.idempotent) - results.calls, "of them without a result", at_most=0)
    report.add("doubled_number", doubled, "not idempotent, and begun twice", at_most=0)
    report.add("again_number", resent, "idempotent, and begun again")
    labels = {
        "OUTCOME_UNKNOWN": "ended as OUTCOME_UNKNOWN: not idempotent, begun, and their host was lost",
        "HOST_LOST": "ended as HOST_LOST: never begun",
        "RATE_LIMITED": "got no slot within five minutes",
    }
    for code, label in labels.items():
        report.add(f"{code.lower()}_number", codes[code], label)
    others = {code: number for code, number in codes.items() if code and code not in labels}
    report.add("other_number", sum(others.values()), "ended with any other error", at_most=0)
    report.add(
        "late_number",
        simulation.world.late,
        "results of frozen hosts that came after their call was given up, and were dropped",
    )
    report.add("moved_number", len(results.moved_s), "sessions opened on another host")
    report.add(
        "moved_half_ms",
        median(results.moved_s) * 1000,
        "from a host's end until a session of it is open elsewhere, at its next call; median",
    )
    report.add("moved_p99_ms", percentile(results.moved_s, 0.99) * 1000, "the same, 99th percentile")
    if others:
        report.notes.append(f"other errors: {others}")


async def _share_pool(
    client: "redis.asyncio.Redis", loop: JumpingLoop, weights: dict[str, float], report: Report
) -> None:
    """Share one queue between all tenants, as the web tools do, and report the shares."""
    await client.set(slots_key(DEPLOYMENT, POOL_WEB), POOL_SLOTS)
    scripts = [CountingScripts(client) for _ in range(ORCHESTRATORS)]
    admissions = [
        SharedAdmission(client, DEPLOYMENT, clock=lambda: FUTURE_AT + loop.time(), scripts=one) for one in scripts
    ]
    workers, used, waited = (
        asyncio.Semaphore(POOL_SLOTS),
        defaultdict[str, float](float),
        defaultdict[str, list[float]](list),
    )

    async def call(at: int, tenant: str) -> None:
        request = SlotRequest(
            tenant=tenant,
            policy=TenantPolicy(weight=weights[tenant], queued=1_000_000),
            queue=POOL_WEB,
            call_id="c",
            tool="webfetch_tool",
            priority="interactive",
            wait_s=10_000,
            limit_s=30,
        )
        began = loop.time()
        async with admissions[at % ORCHESTRATORS].slot(request) as slot, workers:
            waited[tenant].append(loop.time() - began)
            await asyncio.sleep(POOL_CALL_S)
            slot.used_s = POOL_CALL_S
            used[tenant] += POOL_CALL_S

    demand = {tenant: max(1, round(POOL_CALLS / 7.5 / (at + 1))) for at, tenant in enumerate(weights)}
    calls = [asyncio.create_task(call(at, tenant)) for tenant, number in demand.items() for at in range(number)]
    await asyncio.sleep(POOL_SHARE_S)
    fair = share_out(
        POOL_SLOTS * POOL_SHARE_S, {tenant: number * POOL_CALL_S for tenant, number in demand.items()}, weights
    )
    small = sorted(wait for tenant, number in demand.items() if number <= 3 for wait in waited[tenant])
    report.add(
        "pool_misgiven_ratio",
        misgiven(used, fair),
        f"one queue of {POOL_SLOTS} slots, {len(calls)} calls at once: given to another than is fair",
        at_most=0.1,
    )
    report.add(
        "pool_small_wait_ms",
        percentile(small, 0.99) * 1000,
        "in it, tenants with three calls or fewer wait for a slot; 99th percentile",
    )
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for admission, one in zip(admissions, scripts, strict=True):
        await admission.aclose()
        await one.aclose()
