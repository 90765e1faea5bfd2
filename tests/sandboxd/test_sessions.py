"""Sessions and their sandboxes: lost and rebuilt, full, closed, with overlapping starts and removals, and counted."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from tests.cli.test_metric_page import report
from tests.conftest import RedisProcess
from tests.support.sandboxd.fake_engine import Behaviour, FakeEngine, FakeGuest, echoing
from tests.support.sandboxd.fake_hosts import build_report
from tests.support.sandboxd.fake_sandboxd import PLAN, FakeHost, open_host, running_sandboxd, sandbox_of
from tests.support.stack.metric_harness import Key, key, nonzero_samples, read_page
from tests.support.stack.waiting import SOON_S
from tests.unit.workers.sandboxd.test_hostile_guest import build_answering_guest, call
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.orchestrator.metrics.page import MetricsPage
from toolcrew.store.metrics import WorkerMetricsStore
from toolcrew.workers.host_duties import SandboxdMetrics
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.sandboxd.daemon import cancelled_by_signals
from toolcrew.workers.sandboxd.factory import count_states
from toolcrew.workers.sandboxd.sessions import SessionParameters, Sessions
from toolcrew.workers.unix_listening import socket_mode

EXEC = {"op": "exec", "argv": ["true"], "timeout_s": 5}


@asynccontextmanager
async def open_sessions(
    folder: Path, *behaviours: Behaviour, **options: Any
) -> AsyncIterator[tuple[Sessions, FakeEngine]]:
    async with open_host(folder, *behaviours, **options) as host:
        yield host.sessions, host.engine


async def lose(sessions: Sessions, session: str = "s") -> None:
    """Kill the session's container, and wait until sandboxd has detected the loss."""
    entry = sessions.find(session)
    assert entry is not None
    sandbox = sandbox_of(entry)
    noticing = sandbox.begin("", EXEC, 0, lambda _: None)
    sandbox.runtime._engine.alive[sandbox.container].die()  # type: ignore[attr-defined]
    await asyncio.wait_for(noticing.done, SOON_S)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[FakeHost]:
    async with open_host(tmp_path) as opened:
        yield opened


@pytest.fixture
def sessions(host: FakeHost) -> Sessions:
    return host.sessions


@pytest.fixture
def engine(host: FakeHost) -> FakeEngine:
    return host.engine


# Loss


async def test_concurrent_calls_after_a_loss_rebuild_the_sandbox_once(sessions: Sessions, engine: FakeEngine) -> None:
    await sessions.open("s", SessionParameters(PLAN, 60))
    await lose(sessions)
    with pytest.raises(SandboxUnavailable):
        await sessions.use("s", "c")
    entries = await asyncio.gather(*(sessions.use("s", "c") for _ in range(5)))
    assert {sandbox.generation for _, sandbox in entries} == {2}
    assert len(engine.guests) == 2


async def test_failed_rebuild_is_repeated_by_the_next_call(tmp_path: Path) -> None:
    async def die_at_start(guest: FakeGuest) -> None:
        guest.die()

    async with open_sessions(tmp_path, echoing, die_at_start, echoing) as (sessions, engine):
        await sessions.open("s", SessionParameters(PLAN, 60))
        await lose(sessions)
        for _ in range(2):
            with pytest.raises(SandboxUnavailable):
                await sessions.use("s", "c")
        assert (await sessions.use("s", "c"))[1].generation == 2
        assert len(engine.alive) == 1


async def test_failed_removal_is_repeated_by_the_next_call(sessions: Sessions, engine: FakeEngine) -> None:
    await sessions.open("s", SessionParameters(PLAN, 60))
    engine.refuse_removals = 2
    await lose(sessions)
    with pytest.raises(SandboxUnavailable, match="files are lost"):
        await sessions.use("s", "c")
    with pytest.raises(SandboxUnavailable, match="device busy"):
        await sessions.use("s", "c")
    assert (await sessions.use("s", "c"))[1].generation == 2


# Opening


async def test_full_host_refuses_and_says_what_to_do(tmp_path: Path) -> None:
    async with open_sessions(tmp_path, limit=1) as (sessions, engine):
        await sessions.open("a", SessionParameters(PLAN, 60))
        with pytest.raises(SandboxUnavailable, match="TOOLCREW_MAX_SANDBOXES"):
            await sessions.open("b", SessionParameters(PLAN, 60))
        await sessions.close("a")
        await sessions.open("b", SessionParameters(PLAN, 60))
        assert len(engine.alive) == 1


async def test_starting_sandboxes_count_toward_the_limit(tmp_path: Path) -> None:
    async with open_sessions(tmp_path, limit=1) as (sessions, engine):
        engine.start_gate.clear()
        first = asyncio.create_task(sessions.open("a", SessionParameters(PLAN, 60)))
        await engine.starting.wait()
        with pytest.raises(SandboxUnavailable):
            await sessions.open("b", SessionParameters(PLAN, 60))
        engine.start_gate.set()
        await first


async def test_session_opened_twice_concurrently_has_one_sandbox(sessions: Sessions, engine: FakeEngine) -> None:
    first, two = await asyncio.gather(
        sessions.open("s", SessionParameters(PLAN, 60)), sessions.open("s", SessionParameters(PLAN, 60))
    )
    assert first is two
    assert len(engine.alive) == 1


# Closing


async def test_close_returns_after_the_container_is_removed(sessions: Sessions, engine: FakeEngine) -> None:
    await sessions.open("s", SessionParameters(PLAN, 60))
    engine.remove_gate.clear()
    closing = asyncio.create_task(sessions.close("s"))
    await engine.removing.wait()
    assert not closing.done()
    engine.remove_gate.set()
    assert await closing is True


async def test_close_cancels_running_calls(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def never_finish(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.request()
        started.set()
        await guest.gone.wait()

    async with running_sandboxd(tmp_path, never_finish) as daemon:
        client, name = await daemon.open()
        running = asyncio.create_task(asyncio.to_thread(client.call, name, EXEC))
        await started.wait()
        await asyncio.to_thread(daemon.client().close, name)
        done = (await running).done
        assert (done["error"]["code"], "sandbox_lost" in done) == ("CANCELLED", False)


async def test_session_closed_during_a_rebuild_leaves_no_container(sessions: Sessions, engine: FakeEngine) -> None:
    await sessions.open("s", SessionParameters(PLAN, 60))
    await lose(sessions)
    with pytest.raises(SandboxUnavailable):
        await sessions.use("s", "c")
    engine.starting.clear()
    engine.start_gate.clear()
    rebuilding = asyncio.create_task(sessions.use("s", "c"))
    await engine.starting.wait()
    closing = asyncio.create_task(sessions.close("s"))
    engine.start_gate.set()
    await asyncio.gather(rebuilding, closing, return_exceptions=True)
    assert engine.alive == {}


async def test_failed_removal_does_not_block_other_removals(sessions: Sessions, engine: FakeEngine) -> None:
    for name in ("a", "b", "c"):
        await sessions.open(name, SessionParameters(PLAN, 60))
    engine.refuse_removals = 1
    await sessions.close_all()
    assert len(engine.alive) == 1


async def die_at_start(guest: FakeGuest) -> None:
    guest.die()


# Removals that failed


async def test_container_of_a_lost_sandbox_is_removed_later_by_the_sweep(
    sessions: Sessions, engine: FakeEngine, host: FakeHost
) -> None:
    await sessions.open("s", SessionParameters(PLAN, 60))
    engine.refuse_removals = 3
    await lose(sessions)
    for _ in range(3):
        await host.monitor.expire()
    assert host.alive == []
    assert sessions.find("s") is not None


async def test_container_of_a_failed_start_is_removed_later_by_the_sweep(tmp_path: Path) -> None:
    async with open_host(tmp_path, die_at_start, echoing, limit=1) as host:
        sessions, engine = host.sessions, host.engine
        engine.refuse_removals = 2
        with pytest.raises(SandboxUnavailable, match="did not start"):
            await sessions.open("s", SessionParameters(PLAN, 60))
        with pytest.raises(SandboxUnavailable, match="already holds"):
            await sessions.open("s", SessionParameters(PLAN, 60))
        for _ in range(3):
            await host.monitor.expire()
        assert host.alive == []
        await sessions.open("s", SessionParameters(PLAN, 60))


async def test_session_that_failed_to_close_is_removed_by_the_sweep(
    sessions: Sessions, engine: FakeEngine, host: FakeHost
) -> None:
    await sessions.open("s", SessionParameters(PLAN, 60))
    engine.refuse_removals = 2
    with pytest.raises(SandboxUnavailable):
        await sessions.close("s")
    with pytest.raises(ToolFailure) as refused:
        await sessions.use("s", "c")
    assert refused.value.code is ErrorCode.SESSION_NOT_FOUND
    for _ in range(3):
        await host.monitor.expire()
    assert host.alive == []


async def test_reopening_a_half_closed_session_removes_its_old_container(
    sessions: Sessions, engine: FakeEngine
) -> None:
    old = await sessions.open("s", SessionParameters(PLAN, 60))
    engine.refuse_removals = 1
    with pytest.raises(SandboxUnavailable):
        await sessions.close("s")
    new = await sessions.open("s", SessionParameters(PLAN, 60))
    assert new is not old
    assert list(engine.alive) == [sandbox_of(new).container]


async def test_session_closed_twice_concurrently_is_removed_once(sessions: Sessions, engine: FakeEngine) -> None:
    await sessions.open("s", SessionParameters(PLAN, 60))
    assert await asyncio.gather(sessions.close("s"), sessions.close("s")) == [True, True]
    assert len(engine.removed) == 1


# A start under way


async def test_close_waits_for_a_running_start(sessions: Sessions, engine: FakeEngine) -> None:
    engine.start_gate.clear()
    opening = asyncio.create_task(sessions.open("s", SessionParameters(PLAN, 60)))
    await engine.starting.wait()
    closing = asyncio.create_task(sessions.close("s"))
    await asyncio.sleep(0)
    engine.start_gate.set()
    await opening
    assert await closing is True
    assert engine.alive == {}


async def test_container_is_kept_when_the_opening_client_disconnects(sessions: Sessions, engine: FakeEngine) -> None:
    engine.start_gate.clear()
    opening = asyncio.create_task(sessions.open("s", SessionParameters(PLAN, 60)))
    await engine.starting.wait()
    opening.cancel()
    engine.start_gate.set()
    entry = await sessions.open("s", SessionParameters(PLAN, 60))
    assert list(engine.alive) == [sandbox_of(entry).container]


async def test_shutdown_removes_starting_containers_and_refuses_new_ones(
    sessions: Sessions, engine: FakeEngine
) -> None:
    engine.start_gate.clear()
    opening = asyncio.create_task(sessions.open("s", SessionParameters(PLAN, 60)))
    await engine.starting.wait()
    ending = asyncio.create_task(sessions.close_all())
    await asyncio.sleep(0)
    engine.start_gate.set()
    await asyncio.gather(opening, ending)
    assert engine.alive == {}
    with pytest.raises(SandboxUnavailable, match="stopping"):
        await sessions.open("t", SessionParameters(PLAN, 60))


async def test_repeated_signal_cancels_once_and_allows_cleanup() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        with cancelled_by_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(SOON_S)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.01)
                cleaned.append("all")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert cleaned == ["all"]


# Connections and settings


async def test_connection_with_an_unrequested_reply_is_not_reused(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        client_socket, peer = socket.socketpair()
        client = SandboxClient(daemon.path)
        client._sock = client_socket
        peer.send(b"an unrequested answer")
        assert (await asyncio.to_thread(client.status))["ok"] is True
        assert client._sock is not client_socket
        client.disconnect()
        peer.close()


def test_socket_mode_allows_other_users_only_if_listed() -> None:
    own = os.geteuid()
    assert socket_mode({own}) == 0o600
    assert socket_mode({own, own + 1}) == 0o666


QUEUE = "host.h1.b00t"


@pytest.fixture
def client(redis_server: RedisProcess) -> Iterator["redis.Redis"]:
    with redis_server.client() as opened:
        yield opened


async def read(server: RedisProcess) -> dict[Key, float]:
    async with redis.asyncio.Redis.from_url(server.url) as opened:
        return dict(read_page(await MetricsPage(opened, "d").render()))


def build_status(boot: str = "b00t", **counts: Any) -> dict[str, Any]:
    pool = {"ready": 2, "target": 3, "handed_out": 4, "turned_away": 0}
    return {
        "boot": boot,
        "counts": {"starts": {}, "failed_starts": 0, "oom": 0, "kills": {}, "lost": {}, **counts},
        "pool": pool,
        "states": {"warm": 2},
    }


def build_taker(client: "redis.Redis", *events: dict[str, Any]) -> tuple[SandboxdMetrics, list[dict[str, Any]]]:
    """Return a worker's collector and the list whose last element is sandboxd's report."""
    statuses = list(events)
    return SandboxdMetrics(WorkerMetricsStore(client, "d"), "h1", QUEUE, lambda: statuses[-1]), statuses


async def test_starts_failed_starts_and_losses_are_counted(tmp_path: Path) -> None:
    async with open_host(tmp_path, echoing, die_at_start, echoing) as host:
        await host.sessions.open("s", SessionParameters(PLAN, 60))
        with pytest.raises(SandboxUnavailable):
            await host.sessions.open("t", SessionParameters(PLAN, 60))
        await lose(host.sessions)
        counts = host.factory.counts.describe()
    assert (counts["starts"]["count"], counts["failed_starts"]) == (1, 1)
    assert counts["starts"]["sum"] > 0
    # The stillborn one was lost before it was anybody's.
    assert counts["lost"] == {"ended": 2}


@pytest.mark.parametrize(
    ("survivors", "oom", "kills"), [(0, True, {"tree": 1}), (1, False, {"container": 1})], ids=["memory", "survivors"]
)
async def test_kills_are_counted_once_per_call(
    tmp_path: Path, survivors: int, oom: bool, kills: dict[str, int]
) -> None:
    kill = {"signalled": 2, "survivors": survivors, "method": "tree", "ms": 3.0}
    async with running_sandboxd(tmp_path, build_answering_guest({"ev": "done", "oom": oom, "kill": kill})) as daemon:
        client, name = await daemon.open()
        await call(client, name)
        counts = daemon.host.factory.counts.describe()
    assert (counts["oom"], counts["kills"]) == (int(oom), kills)


async def test_repeated_counts_of_sandboxd_are_added_once(redis_server: RedisProcess, client: "redis.Redis") -> None:
    report(client, build_report("h1"))
    starts = {"count": 2.0, "sum": 1.5, "le:1": 2.0}
    first, statuses = build_taker(
        client, build_status(oom=2, starts=starts, kills={"tree": 1}, lost={"ended": 1, "invented": 9})
    )
    first.send()
    first.send()
    statuses.append(build_status(oom=5, starts=starts, failed_starts=1))
    second, _ = build_taker(client, statuses[-1])
    second.send()
    counts = await read(redis_server)
    assert counts[key("toolcrew_sandbox_oom_total")] == 5
    assert counts[key("toolcrew_sandbox_start_seconds_count")] == 2
    assert counts[key("toolcrew_sandbox_start_seconds_bucket", le="1.0")] == 2
    assert counts[key("toolcrew_sandbox_start_failures_total")] == 1
    assert nonzero_samples(counts, "toolcrew_sandbox_kills_total") == {("tree",): 1}
    assert nonzero_samples(counts, "toolcrew_sandbox_lost_total") == {("ended",): 1}
    assert nonzero_samples(counts, "toolcrew_warm_sandboxes_total") == {("handed_out",): 4}
    assert nonzero_samples(counts, "toolcrew_sandbox_active") == {("h1", "warm"): 2}
    assert counts[key("toolcrew_warm_pool_target", host="h1")] == 3


@pytest.mark.parametrize(
    "status",
    [
        {"boot": "b"},
        {"boot": "b", "counts": 3},
        {"boot": "b", "counts": {"oom": "x", "starts": [], "kills": {"tree": -1}}},
    ],
)
async def test_invalid_status_of_sandboxd_is_tolerated(
    redis_server: RedisProcess, client: "redis.Redis", status: dict[str, Any]
) -> None:
    build_taker(client, status)[0].send()
    assert (await read(redis_server))[key("toolcrew_sandbox_oom_total")] == 0


async def test_states_of_existing_containers_are_counted(host: FakeHost) -> None:
    await host.sessions.open("s", SessionParameters(PLAN, 60))
    await host.sessions.open("t", SessionParameters(PLAN, 60))
    assert count_states(host.sessions.all(), 3) == {"busy": 0, "idle": 2, "paused": 0, "lost": 0, "warm": 3}
    await lose(host.sessions, "t")
    assert count_states(host.sessions.all(), 0) == {"busy": 0, "idle": 1, "paused": 0, "lost": 1, "warm": 0}
    assert [row["state"] for row in host.sessions.describe()] == ["ready", "lost"]


async def test_a_changed_lifetime_is_in_the_record_and_begins_again(sessions: Sessions) -> None:
    session = await sessions.open("acme:s1", SessionParameters(PLAN, 60))
    session.used_at -= 1000
    sessions.set_ttl("acme:s1", 900)
    assert (session.ttl_s, session.record().ttl_s) == (900, 900)
    assert session.idle_s() < 900
    with pytest.raises(ToolFailure) as unknown:
        sessions.set_ttl("acme:s2", 900)
    assert unknown.value.code is ErrorCode.SESSION_NOT_FOUND
