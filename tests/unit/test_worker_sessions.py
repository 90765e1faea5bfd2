"""Changes that a worker may make to session locations: only to its own sessions, and only if the record is still as
the worker read it.
"""

import threading
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from contract.errors import BrokerUnavailable
from contract.hosts import HostReport
from contract.names import host_key
from contract.session_locations import LocationState
from store.sessions import AdoptionResult
from tests.conftest import RedisProcess
from tests.fake_host import DEPLOYMENT, HostHarness, MemorySandboxd, build_report
from workers.duties import Duty
from workers.host_duties import AdoptionMonitor

OURS = "host.a.b2"


@pytest.fixture
def harness(redis_server: RedisProcess) -> HostHarness:
    return HostHarness(redis_server)


def adopter(harness: HostHarness, sandboxd: MemorySandboxd, *ended: HostReport) -> AdoptionMonitor:
    return AdoptionMonitor(harness.sessions(OURS), harness.hosts(), ended)


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


def test_a_session_of_an_earlier_boot_of_this_host_is_taken_over_under_a_new_fence(harness: HostHarness) -> None:
    harness.put_place("acme:s1", queue="host.a.b1", fence=3)
    assert harness.sessions(OURS).adopt(["acme:s1"]) == {"acme:s1": AdoptionResult.ADOPTED}
    place = harness.place("acme:s1")
    assert (place.queue, place.fence, place.state) == (OURS, 4, LocationState.OPEN)


def test_a_session_held_by_a_killed_worker_is_served_again(harness: HostHarness) -> None:
    harness.put_place("acme:s1", queue="host.a.b1")
    assert harness.sessions("host.a.b1").hold("acme:s1", 1, 60) == 2
    assert harness.sessions(OURS).adopt(["acme:s1"]) == {"acme:s1": AdoptionResult.ADOPTED}
    place = harness.place("acme:s1")
    assert (place.queue, place.fence, place.state, place.moving_until) == (OURS, 3, LocationState.OPEN, 0.0)
    # A process that opens it elsewhere after a hold raises the fence, so this copy is older.
    harness.put_place("acme:s2", queue="host.a.b1")
    harness.sessions("host.a.b1").hold("acme:s2", 1, 60)
    harness.put_place("acme:s2", queue="host.a.b1", state="moving", fence=3, moving_until=9e9)
    assert harness.sessions(OURS).adopt(["acme:s2"]) == {"acme:s2": AdoptionResult.HELD}


@pytest.mark.parametrize("queue", ["host.b.b1", "host.ab.b1", "host.a", "pool.a.b1", ""])
def test_a_session_that_lives_elsewhere_is_not_taken_back(harness: HostHarness, queue: str) -> None:
    harness.put_place("acme:s1", queue=queue, fence=3)
    assert harness.sessions(OURS).adopt(["acme:s1"]) == {"acme:s1": AdoptionResult.ELSEWHERE}
    assert harness.place("acme:s1").queue == queue


def test_a_session_of_an_incarnation_that_may_live_is_neither_taken_nor_closed(harness: HostHarness) -> None:
    harness.put_place("acme:s1", queue="host.a.b1")
    harness.put_place("acme:s2", queue="host.a.b1", state="moving", moving_until=9e9)
    harness.hosts().report(build_report("host.a.b1"))
    assert set(harness.sessions(OURS).adopt(["acme:s1", "acme:s2"]).values()) == {AdoptionResult.HELD}
    harness.redis.delete(host_key(DEPLOYMENT, "host.a.b1"))
    assert harness.sessions(OURS).adopt(["acme:s1", "acme:s2"]) == {
        "acme:s1": AdoptionResult.ADOPTED,
        "acme:s2": AdoptionResult.HELD,
    }


def test_a_session_that_was_closed_while_its_worker_was_gone_is_closed_here(harness: HostHarness) -> None:
    harness.redis.hset("toolcrew:d:t:acme:session.s1:place", mapping={"state": "closed", "ttl_s": "60"})
    sandboxd = MemorySandboxd()
    sandboxd.add("acme:s1")
    starting = adopter(harness, sandboxd)
    with capture_logs():
        assert starting.begin(sandboxd.rows) == {AdoptionResult.CLOSED: 1}
        duty = start_retries(starting, sandboxd)
        duty.join(20)
    assert sandboxd.closed == ["acme:s1"]


def test_a_place_that_is_none_of_ours_is_no_place(harness: HostHarness) -> None:
    harness.put_place("acme:s1", state="elsewhere", fence="many")
    assert harness.sessions(OURS).find(["acme:s1"]) == {}


# --- starting ---------------------------------------------------------------------------------------------------------


def test_at_its_start_a_worker_takes_over_what_is_its_own_and_closes_what_moved_away(harness: HostHarness) -> None:
    sandboxd = MemorySandboxd()
    for number, queue in enumerate(["host.a.b1", OURS, "host.b.b9"]):
        sandboxd.add(f"acme:s{number}")
        harness.put_place(f"acme:s{number}", queue=queue)
    sandboxd.add("acme:direct")
    starting = adopter(harness, sandboxd)

    with capture_logs():
        counts = starting.begin(sandboxd.rows)
        duty = start_retries(starting, sandboxd)
        duty.join(20)

    assert counts == {
        AdoptionResult.ADOPTED: 1,
        AdoptionResult.OURS: 1,
        AdoptionResult.ELSEWHERE: 1,
        AdoptionResult.NONE: 1,
    }
    assert sandboxd.closed == ["acme:s2"]


def test_a_dead_predecessor_gives_its_sessions_at_once(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxd = MemorySandboxd()
    sandboxd.add("acme:s1")
    harness.put_place("acme:s1", queue="host.a.b1")
    hosts = harness.hosts()
    hosts.report(build_report("host.a.b1"))
    dead = hosts.find("host.a.b1")
    assert dead is not None
    starting = adopter(harness, sandboxd, dead)
    seen_at_adoption: list[bool] = []
    adopt = starting._sessions.adopt

    def watched(*arguments: Any) -> Any:
        seen_at_adoption.append(hosts.find("host.a.b1") is not None)
        return adopt(*arguments)

    monkeypatch.setattr(starting._sessions, "adopt", watched)
    with capture_logs():
        assert starting.begin(sandboxd.rows) == {AdoptionResult.ADOPTED: 1}
    assert (seen_at_adoption, hosts.find("host.a.b1")) == ([True], None), (
        "what waits in the earlier queue is looked after now"
    )


def test_sessions_are_taken_over_after_their_worker_died(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxd = MemorySandboxd()
    sandboxd.add("acme:s1")
    harness.put_place("acme:s1", queue="host.a.b1")
    harness.hosts().report(build_report("host.a.b1"))
    starting = adopter(harness, sandboxd)
    with capture_logs():
        assert starting.begin(sandboxd.rows) == {AdoptionResult.HELD: 1}
        duty = start_retries(starting, sandboxd)
        harness.redis.delete(host_key(DEPLOYMENT, "host.a.b1"))
        duty.join(20)
    assert harness.place("acme:s1").queue == OURS
    assert not sandboxd.closed


def test_undecided_sessions_are_retried_after_an_outage(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxd = MemorySandboxd()
    sandboxd.add("acme:s1")
    harness.put_place("acme:s1", queue="host.a.b1")
    harness.hosts().report(build_report("host.a.b1"))
    starting = adopter(harness, sandboxd)
    adopt, outages = starting._sessions.adopt, iter([True, True, False])

    def away_at_first(*arguments: Any) -> Any:
        if next(outages, False):
            raise BrokerUnavailable("away")
        harness.redis.delete(host_key(DEPLOYMENT, "host.a.b1"))
        return adopt(*arguments)

    with capture_logs():
        assert starting.begin(sandboxd.rows) == {AdoptionResult.HELD: 1}
        monkeypatch.setattr(starting._sessions, "adopt", away_at_first)
        duty = start_retries(starting, sandboxd)
        duty.join(20)
    assert harness.place("acme:s1").queue == OURS


def test_a_stale_session_is_closed_after_an_outage(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxd = MemorySandboxd()
    sandboxd.add("acme:s1")
    harness.put_place("acme:s1", queue="host.b.b9")
    starting = adopter(harness, sandboxd)
    sandboxd.silent = True
    with capture_logs() as logs:
        starting.begin(sandboxd.rows)
        duty = start_retries(starting, sandboxd)
        while not any(entry["event"] == "stale_session_not_closed" for entry in logs):
            assert duty._thread.is_alive()
        sandboxd.silent = False
        duty.join(20)
    assert sandboxd.closed == ["acme:s1"]


def test_a_worker_does_not_start_without_redis(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxd = MemorySandboxd()
    starting = adopter(harness, sandboxd)

    def away(*_: object) -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(starting._sessions, "adopt", away)
    with pytest.raises(BrokerUnavailable):
        starting.begin(["acme:s1"])


# --- checkpoints and moves --------------------------------------------------------------------------------------------


def test_a_checkpoint_is_noted_only_while_the_session_is_as_it_was_seen(harness: HostHarness) -> None:
    sessions = harness.sessions("host.a.b1")
    harness.put_place("acme:s1", fence=2)
    assert sessions.record_automatic("acme:s1", 1, "old", 10.0, 0) is None
    recorded = sessions.record_automatic("acme:s1", 2, "c1", 10.5, 0)
    assert recorded is not None
    assert recorded.previous is None
    place = harness.place("acme:s1")
    assert (place.checkpoint, place.checkpoint_at, place.automatic) == ("c1", 10.5, "c1")
    harness.put_place("acme:s1", queue="host.b.b1", fence=3)
    assert sessions.record_automatic("acme:s1", 3, "c2", 11.0, 0) is None
    assert not sessions.record_requested("acme:s1", "c2", 11.0)
    assert sessions.record_automatic("acme:gone", 1, "c2", 11.0, 0) is None
    assert not harness.redis.exists("toolcrew:d:t:acme:session.gone:place")


def test_a_note_that_was_sent_twice_does_not_name_itself_as_superseded(harness: HostHarness) -> None:
    sessions = harness.sessions("host.a.b1")
    harness.put_place("acme:s1")
    sessions.record_automatic("acme:s1", 1, "c1", 1.0, 0)
    recorded = sessions.record_automatic("acme:s1", 1, "c1", 1.0, 0)
    assert recorded is not None
    assert recorded.previous is None


def test_a_held_session_is_exclusive_until_its_release(harness: HostHarness) -> None:
    sessions = harness.sessions("host.a.b1")
    harness.put_place("acme:s1", fence=5)
    assert sessions.hold("acme:s1", 4, 60) is None
    fence = sessions.hold("acme:s1", 5, 60)
    held = harness.place("acme:s1")
    assert fence == 6
    assert (held.state, held.queue, held.fence) == (LocationState.MOVING, "host.a.b1", 6)
    assert held.moving_until == pytest.approx(float(harness.redis.time()[0]) + 60, abs=5)  # type: ignore[index]
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
