"""Changes that a worker may make to session locations: adopting, holding, and draining a host."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.sandboxd.fake_host import DEPLOYMENT, HostHarness, MemorySandboxd, build_report
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.names import host_key
from toolcrew.contract.session_locations import LocationState
from toolcrew.store.sessions import AdoptionResult
from toolcrew.workers import draining
from toolcrew.workers.checkpoints import AutomaticCheckpoints
from toolcrew.workers.draining import HostDrain
from toolcrew.workers.duties import Duty
from toolcrew.workers.host_duties import AdoptionMonitor

OWN_QUEUE = "host.a.b2"


@pytest.fixture
def harness(redis_server: RedisProcess) -> HostHarness:
    return HostHarness(redis_server)


def adopter(harness: HostHarness, sandboxd: MemorySandboxd, *ended: HostReport) -> AdoptionMonitor:
    return AdoptionMonitor(harness.sessions(OWN_QUEUE), harness.hosts(), ended)


def start_retries(adoption: AdoptionMonitor, sandboxd: MemorySandboxd) -> Duty:
    duty = Duty(
        "adoption",
        0.02,
        partial(adoption.retry, sandboxd.client()),
        "sessions_not_adopted",
        threading.Event(),
        is_first_at_once=True,
    )
    duty.start()
    return duty


def test_session_of_an_earlier_boot_is_adopted_with_a_new_fence(harness: HostHarness) -> None:
    harness.put_location("acme:s1", queue="host.a.b1", fence=3)
    assert harness.sessions(OWN_QUEUE).adopt(["acme:s1"]) == {"acme:s1": AdoptionResult.ADOPTED}
    location = harness.place("acme:s1")
    assert (location.queue, location.fence, location.state) == (OWN_QUEUE, 4, LocationState.OPEN)


def test_session_held_by_a_killed_worker_is_adopted(harness: HostHarness) -> None:
    harness.put_location("acme:s1", queue="host.a.b1")
    assert harness.sessions("host.a.b1").hold("acme:s1", 1, 60) == 2
    assert harness.sessions(OWN_QUEUE).adopt(["acme:s1"]) == {"acme:s1": AdoptionResult.ADOPTED}
    location = harness.place("acme:s1")
    assert (location.queue, location.fence, location.state, location.moving_until) == (
        OWN_QUEUE,
        3,
        LocationState.OPEN,
        0.0,
    )
    # A process that opens it elsewhere after a hold raises the fence, so this copy is older.
    harness.put_location("acme:s2", queue="host.a.b1")
    harness.sessions("host.a.b1").hold("acme:s2", 1, 60)
    harness.put_location("acme:s2", queue="host.a.b1", state="moving", fence=3, moving_until=9e9)
    assert harness.sessions(OWN_QUEUE).adopt(["acme:s2"]) == {"acme:s2": AdoptionResult.HELD}


@pytest.mark.parametrize("queue", ["host.b.b1", "host.ab.b1", "host.a", "pool.a.b1", ""])
def test_session_on_another_host_is_not_adopted(harness: HostHarness, queue: str) -> None:
    harness.put_location("acme:s1", queue=queue, fence=3)
    assert harness.sessions(OWN_QUEUE).adopt(["acme:s1"]) == {"acme:s1": AdoptionResult.ELSEWHERE}
    assert harness.place("acme:s1").queue == queue


def test_session_of_a_possibly_live_worker_is_neither_adopted_nor_closed(harness: HostHarness) -> None:
    harness.put_location("acme:s1", queue="host.a.b1")
    harness.put_location("acme:s2", queue="host.a.b1", state="moving", moving_until=9e9)
    harness.hosts().report(build_report("host.a.b1"))
    assert set(harness.sessions(OWN_QUEUE).adopt(["acme:s1", "acme:s2"]).values()) == {AdoptionResult.HELD}
    harness.redis.delete(host_key(DEPLOYMENT, "host.a.b1"))
    assert harness.sessions(OWN_QUEUE).adopt(["acme:s1", "acme:s2"]) == {
        "acme:s1": AdoptionResult.ADOPTED,
        "acme:s2": AdoptionResult.HELD,
    }


def test_session_closed_during_a_worker_outage_is_closed_at_startup(harness: HostHarness) -> None:
    harness.redis.hset("toolcrew:d:t:acme:session.s1:place", mapping={"state": "closed", "ttl_s": "60"})
    sandboxd = MemorySandboxd()
    sandboxd.add("acme:s1")
    adoption = adopter(harness, sandboxd)
    with capture_logs():
        assert adoption.begin(sandboxd.rows) == {AdoptionResult.CLOSED: 1}
        duty = start_retries(adoption, sandboxd)
        duty.join(20)
    assert sandboxd.closed == ["acme:s1"]


def test_invalid_session_location_is_ignored(harness: HostHarness) -> None:
    harness.put_location("acme:s1", state="elsewhere", fence="many")
    assert harness.sessions(OWN_QUEUE).find(["acme:s1"]) == {}


# --- starting ---------------------------------------------------------------------------------------------------------


def test_startup_adopts_own_sessions_and_closes_moved_ones(harness: HostHarness) -> None:
    sandboxd = MemorySandboxd()
    for number, queue in enumerate(["host.a.b1", OWN_QUEUE, "host.b.b9"]):
        sandboxd.add(f"acme:s{number}")
        harness.put_location(f"acme:s{number}", queue=queue)
    sandboxd.add("acme:direct")
    adoption = adopter(harness, sandboxd)

    with capture_logs():
        counts = adoption.begin(sandboxd.rows)
        duty = start_retries(adoption, sandboxd)
        duty.join(20)

    assert counts == {
        AdoptionResult.ADOPTED: 1,
        AdoptionResult.OURS: 1,
        AdoptionResult.ELSEWHERE: 1,
        AdoptionResult.NONE: 1,
    }
    assert sandboxd.closed == ["acme:s2"]


def test_sessions_of_a_dead_predecessor_are_adopted_immediately(
    harness: HostHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandboxd = MemorySandboxd()
    sandboxd.add("acme:s1")
    harness.put_location("acme:s1", queue="host.a.b1")
    hosts = harness.hosts()
    hosts.report(build_report("host.a.b1"))
    predecessor = hosts.find("host.a.b1")
    assert predecessor is not None
    adoption = adopter(harness, sandboxd, predecessor)
    reports_at_adoption: list[bool] = []
    adopt = adoption._sessions.adopt

    def adopt_and_record(*arguments: Any) -> Any:
        reports_at_adoption.append(hosts.find("host.a.b1") is not None)
        return adopt(*arguments)

    monkeypatch.setattr(adoption._sessions, "adopt", adopt_and_record)
    with capture_logs():
        assert adoption.begin(sandboxd.rows) == {AdoptionResult.ADOPTED: 1}
    assert (reports_at_adoption, hosts.find("host.a.b1")) == ([True], None), (
        "what waits in the earlier queue is looked after now"
    )


def test_undecided_sessions_are_retried_after_an_outage(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxd = MemorySandboxd()
    sandboxd.add("acme:s1")
    harness.put_location("acme:s1", queue="host.a.b1")
    harness.hosts().report(build_report("host.a.b1"))
    adoption = adopter(harness, sandboxd)
    adopt, outages = adoption._sessions.adopt, iter([True, True, False])

    def fail_then_adopt(*arguments: Any) -> Any:
        if next(outages, False):
            raise BrokerUnavailable("away")
        harness.redis.delete(host_key(DEPLOYMENT, "host.a.b1"))
        return adopt(*arguments)

    with capture_logs():
        assert adoption.begin(sandboxd.rows) == {AdoptionResult.HELD: 1}
        monkeypatch.setattr(adoption._sessions, "adopt", fail_then_adopt)
        duty = start_retries(adoption, sandboxd)
        duty.join(20)
    assert harness.place("acme:s1").queue == OWN_QUEUE


def test_stale_session_is_closed_after_a_sandboxd_outage(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxd = MemorySandboxd()
    sandboxd.add("acme:s1")
    harness.put_location("acme:s1", queue="host.b.b9")
    adoption = adopter(harness, sandboxd)
    sandboxd.silent = True
    with capture_logs() as logs:
        adoption.begin(sandboxd.rows)
        duty = start_retries(adoption, sandboxd)
        while not any(entry["event"] == "stale_session_not_closed" for entry in logs):
            assert duty._thread.is_alive()
        sandboxd.silent = False
        duty.join(20)
    assert sandboxd.closed == ["acme:s1"]


def test_adoption_fails_without_redis(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxd = MemorySandboxd()
    adoption = adopter(harness, sandboxd)

    def raise_unavailable(*_: object) -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(adoption._sessions, "adopt", raise_unavailable)
    with pytest.raises(BrokerUnavailable):
        adoption.begin(["acme:s1"])


# --- checkpoints and moves --------------------------------------------------------------------------------------------


def test_checkpoint_is_recorded_only_with_the_current_fence(harness: HostHarness) -> None:
    sessions = harness.sessions("host.a.b1")
    harness.put_location("acme:s1", fence=2)
    assert sessions.record_automatic("acme:s1", 1, "old", 10.0, 0) is None
    recorded = sessions.record_automatic("acme:s1", 2, "c1", 10.5, 0)
    assert recorded.previous is None
    location = harness.place("acme:s1")
    assert (location.checkpoint, location.checkpoint_at, location.automatic) == ("c1", 10.5, "c1")
    # A slow checkpoint that began before is older.
    assert sessions.record_requested("acme:s1", "c0", 9.5)
    assert harness.place("acme:s1").checkpoint == "c1"
    harness.put_location("acme:s1", queue="host.b.b1", fence=3)
    assert sessions.record_automatic("acme:s1", 3, "c2", 11.0, 0) is None
    assert not sessions.record_requested("acme:s1", "c2", 11.0)
    assert sessions.record_automatic("acme:gone", 1, "c2", 11.0, 0) is None
    assert not harness.redis.exists("toolcrew:d:t:acme:session.gone:place")


def test_checkpoint_recorded_twice_does_not_supersede_itself(harness: HostHarness) -> None:
    sessions = harness.sessions("host.a.b1")
    harness.put_location("acme:s1")
    sessions.record_automatic("acme:s1", 1, "c1", 1.0, 0)
    recorded = sessions.record_automatic("acme:s1", 1, "c1", 1.0, 0)
    assert recorded.previous is None


def test_held_session_is_exclusive_until_its_release(harness: HostHarness) -> None:
    sessions = harness.sessions("host.a.b1")
    harness.put_location("acme:s1", fence=5)
    assert sessions.hold("acme:s1", 4, 60) is None
    fence = sessions.hold("acme:s1", 5, 60)
    held_location = harness.place("acme:s1")
    assert fence == 6
    assert (held_location.state, held_location.queue, held_location.fence) == (LocationState.MOVING, "host.a.b1", 6)
    assert held_location.moving_until == pytest.approx(float(harness.redis.time()[0]) + 60, abs=5)  # type: ignore[index]
    assert sessions.hold("acme:s1", 6, 60) is None
    assert not sessions.release("acme:s1", 5)

    assert sessions.record_automatic("acme:s1", 6, "c1", 1.0, 0) is not None
    assert sessions.release("acme:s1", 6)

    moved = harness.place("acme:s1")
    assert moved.state == LocationState.MOVING
    assert moved.queue == ""
    assert moved.fence == 6
    assert moved.checkpoint == "c1"
    assert moved.moving_until == 0.0


class Host:
    """A host that drains. `at_work`: sessions with a call. `looks`: the number of checks so far."""

    def __init__(self, harness: HostHarness) -> None:
        self.harness = harness
        self.sandboxd = MemorySandboxd()
        self.at_work: set[str] = set()
        self.looks = threading.Semaphore(0)
        self.stop = threading.Event()
        self.sessions = harness.sessions()
        checkpoints = AutomaticCheckpoints(self.sessions, harness.clock, self.stop)
        self.drain = HostDrain(self.sandboxd.client, self.sessions, checkpoints, self.find_at_work, self.stop)
        self.ended: list[bool] = []

    def find_at_work(self) -> set[str]:
        self.looks.release()
        return self.at_work

    def add(self, name: str, **location: object) -> None:
        self.sandboxd.add(name)
        self.harness.put_location(name, **location)

    def begin(self, limit_s: float = 60.0, *, is_lossy: bool = False) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.ended.append(self.drain.run(limit_s, is_lossy=is_lossy)))
        thread.start()
        return thread

    def run(self, limit_s: float = 60.0, *, is_lossy: bool = False) -> None:
        thread = self.begin(limit_s, is_lossy=is_lossy)
        thread.join(20)
        assert self.ended == [True]


@pytest.fixture
def host(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    for name, value in {"CHECK_INTERVAL_S": 0.02, "RETRY_S": 0.02, "QUIET_WAIT_S": 0.2, "POLL_S": 0.01}.items():
        monkeypatch.setattr(draining, name, value)
    opened = Host(HostHarness(redis_server))
    with capture_logs():
        yield opened
    opened.stop.set()


def test_drain_saves_and_parks_every_session(host: Host) -> None:
    for number in range(9):
        host.add(f"acme:s{number}", fence=number + 1)

    host.run()

    assert len(host.sandboxd.closed) == 9
    assert not host.sandboxd.rows
    for number in range(9):
        location = host.harness.place(f"acme:s{number}")
        assert (location.state, location.queue, location.fence) == (LocationState.MOVING, "", number + 2)
        assert host.sandboxd.checkpointed[host.sandboxd.kept.index(location.checkpoint)] == f"acme:s{number}"


def test_drain_saves_changes_made_during_a_checkpoint(host: Host) -> None:
    host.add("acme:s1")
    hold = host.sessions.hold

    def hold_after_a_call(name: str, fence: int, seconds: float) -> int | None:
        host.sandboxd.rows[name]["changed"] = True
        return hold(name, fence, seconds)

    host.sessions.hold = hold_after_a_call  # type: ignore[method-assign]
    host.run()
    assert host.sandboxd.kept == ["c1", "c2"]
    assert host.harness.place("acme:s1").checkpoint == "c2"


def test_drain_waits_for_running_calls(host: Host) -> None:
    host.add("acme:busy")
    host.add("acme:idle")
    host.at_work.add("acme:busy")
    thread = host.begin()
    for _ in range(40):
        assert host.looks.acquire(timeout=20)
    location = host.harness.place("acme:busy")
    assert (location.state, location.fence) == (LocationState.OPEN, 1)
    assert host.sandboxd.closed == ["acme:idle"]

    host.at_work.clear()
    thread.join(20)
    assert host.ended == [True]
    assert set(host.sandboxd.closed) == {"acme:busy", "acme:idle"}


def test_drain_holds_a_busy_session_until_it_is_idle(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "BUSY_WAIT_S", 0.0)
    monkeypatch.setattr(draining, "QUIET_WAIT_S", 0.03)
    host.add("acme:busy")
    host.at_work.add("acme:busy")
    thread = host.begin()
    wait_until(lambda: host.harness.place("acme:busy").fence >= 3, SOON_S, "the session moves")
    assert host.sandboxd.closed == []
    host.at_work.clear()
    thread.join(20)
    assert host.ended == [True]
    assert host.sandboxd.closed == ["acme:busy"]


def test_drain_parks_an_unsaved_session_with_its_old_checkpoint_at_the_deadline(
    host: Host,
) -> None:
    host.add("acme:full", checkpoint="older")
    host.add("acme:fine")
    host.sandboxd.refuse["acme:full"] = ToolFailure(ErrorCode.NO_SPACE, "the store is full")
    thread = host.begin(limit_s=1.0)
    problem = "1 session left; 1 cannot be saved, for example full: the store is full"
    wait_until(lambda: problem in host.drain.problem or not thread.is_alive(), SOON_S, lambda: host.drain.problem)
    assert thread.is_alive()
    assert host.harness.place("acme:full").state is LocationState.OPEN, "until then it is served"
    thread.join(20)
    location = host.harness.place("acme:full")
    assert host.ended == [True]
    assert (location.state, location.queue, location.checkpoint) == (LocationState.MOVING, "", "older")
    assert sorted(host.sandboxd.closed) == ["acme:fine", "acme:full"]


def test_endless_call_delays_a_drain_only_until_the_deadline(host: Host) -> None:
    host.add("acme:busy")
    host.at_work.add("acme:busy")
    thread = host.begin(limit_s=0.1)
    wait_until(lambda: not host.sandboxd.rows, SOON_S, lambda: str(host.sandboxd.rows))
    host.at_work.clear()
    thread.join(20)
    assert host.ended == [True]
    assert host.harness.place("acme:busy").state is LocationState.MOVING


def test_lossy_drain_saves_nothing(host: Host) -> None:
    host.add("acme:s1")
    host.run(is_lossy=True)
    location = host.harness.place("acme:s1")
    assert host.sandboxd.kept == []
    assert (location.state, location.queue, location.checkpoint) == (LocationState.MOVING, "", "")


def test_drain_ignores_sessions_of_other_hosts(host: Host) -> None:
    host.add("acme:elsewhere", queue="host.b.b1")
    host.add("acme:opening", state="moving", moving_until=9e9)
    host.sandboxd.add("acme:direct")
    host.run()
    assert host.sandboxd.closed == []
    assert host.sandboxd.kept == []


def test_session_closed_during_its_checkpoint_leaves_no_checkpoint(host: Host) -> None:
    host.add("acme:s1")
    host.sandboxd.before_checkpoint = host.harness.delete_location
    host.run()
    assert host.sandboxd.kept == ["c1"]
    assert host.sandboxd.deleted == ["c1"]


def test_session_opened_at_the_end_of_a_drain_is_parked(host: Host) -> None:
    def leave() -> bool:
        # Calls left in the queue are served before the worker's report is removed.
        host.add("acme:late")
        return True

    assert host.drain.finish(60.0, leave, is_lossy=False)
    assert host.sandboxd.closed == ["acme:late"]
    assert (host.harness.place("acme:late").queue, host.harness.place("acme:late").checkpoint) == ("", "c1")


def test_drain_waits_for_a_running_open(host: Host) -> None:
    host.at_work.add("acme:new")
    thread = host.begin()
    for _ in range(5):
        assert host.looks.acquire(timeout=20)
    assert not host.ended
    host.add("acme:new")
    host.at_work.clear()
    thread.join(20)
    assert host.ended == [True]
    assert host.sandboxd.closed == ["acme:new"]


def test_stopped_drain_reports_that_it_is_incomplete(host: Host) -> None:
    host.add("acme:busy")
    host.at_work.add("acme:busy")
    thread = host.begin()
    host.stop.set()
    thread.join(20)
    assert host.ended == [False]


def test_silent_sandboxd_delays_a_drain_only_until_the_deadline(host: Host) -> None:
    host.add("acme:s1", checkpoint="older")
    host.sandboxd.silent = True
    host.run(limit_s=0.1)
    assert host.harness.place("acme:s1").checkpoint == "older", (
        "its next call finds the host gone, and goes on from there"
    )
