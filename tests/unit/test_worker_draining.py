"""Draining a host: every session is saved in its state after the last call, and continues on another host. No wait is
unlimited.
"""

import threading
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from contract.errors import ErrorCode, ToolFailure
from contract.session_locations import LocationState
from tests.conftest import RedisProcess
from tests.fake_host import HostHarness, MemorySandboxd
from tests.waiting import wait_until
from workers import draining
from workers.checkpoints import AutomaticCheckpoints
from workers.draining import HostDrain


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

    def add(self, name: str, **place: object) -> None:
        self.sandboxd.add(name)
        self.harness.put_place(name, **place)

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
    for name, value in {"LOOK_S": 0.02, "RETRY_S": 0.02, "QUIET_WAIT_S": 0.2, "POLL_S": 0.01}.items():
        monkeypatch.setattr(draining, name, value)
    opened = Host(HostHarness(redis_server))
    with capture_logs():
        yield opened
    opened.stop.set()


def test_every_session_is_kept_and_waits_for_its_next_home(host: Host) -> None:
    for number in range(9):
        host.add(f"acme:s{number}", fence=number + 1)

    host.run()

    assert len(host.sandboxd.closed) == 9
    assert not host.sandboxd.rows
    for number in range(9):
        place = host.harness.place(f"acme:s{number}")
        assert (place.state, place.queue, place.fence) == (LocationState.MOVING, "", number + 2)
        assert host.sandboxd.kept_of[host.sandboxd.kept.index(place.checkpoint)] == f"acme:s{number}"


def test_what_changed_while_a_session_was_kept_is_kept_too(host: Host) -> None:
    host.add("acme:s1")
    hold = host.sessions.hold

    def hold_after_a_call(name: str, fence: int, seconds: float) -> int | None:
        host.sandboxd.rows[name]["changed"] = True
        return hold(name, fence, seconds)

    host.sessions.hold = hold_after_a_call  # type: ignore[method-assign]
    host.run()
    assert host.sandboxd.kept == ["c1", "c2"]
    assert host.harness.place("acme:s1").checkpoint == "c2"


def test_a_session_whose_call_runs_is_served_until_it_has_ended(host: Host) -> None:
    host.add("acme:busy")
    host.add("acme:idle")
    host.at_work.add("acme:busy")
    thread = host.begin()
    for _ in range(40):
        assert host.looks.acquire(timeout=20)
    place = host.harness.place("acme:busy")
    assert (place.state, place.fence) == (LocationState.OPEN, 1)
    assert host.sandboxd.closed == ["acme:idle"]

    host.at_work.clear()
    thread.join(20)
    assert host.ended == [True]
    assert set(host.sandboxd.closed) == {"acme:busy", "acme:idle"}


def test_a_busy_session_is_held_until_it_is_idle(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "BUSY_WAIT_S", 0.0)
    monkeypatch.setattr(draining, "QUIET_WAIT_S", 0.03)
    host.add("acme:busy")
    host.at_work.add("acme:busy")
    thread = host.begin()
    wait_until(lambda: host.harness.place("acme:busy").fence >= 3, 20, "the session moves")
    assert host.sandboxd.closed == []
    host.at_work.clear()
    thread.join(20)
    assert host.ended == [True]
    assert host.sandboxd.closed == ["acme:busy"]


def test_a_session_that_cannot_be_kept_is_reported_and_goes_from_its_last_checkpoint_at_the_deadline(
    host: Host,
) -> None:
    host.add("acme:full", checkpoint="older")
    host.add("acme:fine")
    host.sandboxd.refuse["acme:full"] = ToolFailure(ErrorCode.NO_SPACE, "the store is full")
    thread = host.begin(limit_s=1.0)
    problem = "1 sessions left; 1 cannot be saved, for example full: the store is full"
    wait_until(lambda: problem in host.drain.problem or not thread.is_alive(), 20, lambda: host.drain.problem)
    assert thread.is_alive()
    assert host.harness.place("acme:full").state is LocationState.OPEN, "until then it is served"
    thread.join(20)
    place = host.harness.place("acme:full")
    assert host.ended == [True]
    assert (place.state, place.queue, place.checkpoint) == (LocationState.MOVING, "", "older")
    assert sorted(host.sandboxd.closed) == ["acme:fine", "acme:full"]


def test_a_call_that_does_not_end_holds_the_drain_up_until_its_deadline_only(host: Host) -> None:
    host.add("acme:busy")
    host.at_work.add("acme:busy")
    thread = host.begin(limit_s=0.1)
    wait_until(lambda: not host.sandboxd.rows, 20, lambda: str(host.sandboxd.rows))
    host.at_work.clear()
    thread.join(20)
    assert host.ended == [True]
    assert host.harness.place("acme:busy").state is LocationState.MOVING


def test_with_a_store_of_its_own_a_lossy_drain_keeps_nothing(host: Host) -> None:
    host.add("acme:s1")
    host.run(is_lossy=True)
    place = host.harness.place("acme:s1")
    assert host.sandboxd.kept == []
    assert (place.state, place.queue, place.checkpoint) == (LocationState.MOVING, "", "")


def test_sessions_of_others_are_left_alone(host: Host) -> None:
    host.add("acme:elsewhere", queue="host.b.b1")
    host.add("acme:opening", state="moving", moving_until=9e9)
    host.sandboxd.add("acme:direct")
    host.run()
    assert host.sandboxd.closed == []
    assert host.sandboxd.kept == []


def test_a_session_that_is_closed_while_it_is_kept_leaves_no_checkpoint(host: Host) -> None:
    host.add("acme:s1")
    host.sandboxd.before_checkpoint = host.harness.drop_place
    host.run()
    assert host.sandboxd.kept == ["c1"]
    assert host.sandboxd.deleted == ["c1"]


def test_a_session_that_was_opened_by_a_call_of_the_last_moment_goes_elsewhere_too(host: Host) -> None:
    def leave() -> bool:
        # Calls left in the queue are served before the worker's report is removed.
        host.add("acme:late")
        return True

    assert host.drain.finish(60.0, leave, is_lossy=False)
    assert host.sandboxd.closed == ["acme:late"]
    assert (host.harness.place("acme:late").queue, host.harness.place("acme:late").checkpoint) == ("", "c1")


def test_an_open_that_is_on_its_way_is_waited_for(host: Host) -> None:
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


def test_a_worker_that_is_stopped_in_the_midst_of_a_drain_says_so(host: Host) -> None:
    host.add("acme:busy")
    host.at_work.add("acme:busy")
    thread = host.begin()
    host.stop.set()
    thread.join(20)
    assert host.ended == [False]


def test_a_sandboxd_that_stays_silent_holds_a_drain_up_until_its_deadline_only(host: Host) -> None:
    host.add("acme:s1", checkpoint="older")
    host.sandboxd.silent = True
    host.run(limit_s=0.1)
    assert host.harness.place("acme:s1").checkpoint == "older", (
        "its next call finds the host gone, and goes on from there"
    )
