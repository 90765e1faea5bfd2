"""Checkpoints that workers take by themselves: only of changed sessions, at a time without calls, and never of
sessions on other hosts.
"""

import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.sandboxd.fake_host import DEPLOYMENT, HostHarness, MemorySandboxd
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.names import location_key
from toolcrew.workers import checkpoints as checkpoints_module
from toolcrew.workers.checkpoints import QUIET_S, AutomaticCheckpoints, CheckpointMonitor, WatchedSession
from toolcrew.workers.host_duties import SandboxdSession, parse_rows


class Host:
    """A host whose monitor checks the sessions one round at a time."""

    def __init__(self, harness: HostHarness, every_s: float = 60.0) -> None:
        self.harness = harness
        self.sandboxd = MemorySandboxd()
        self.stop = threading.Event()
        sessions = harness.sessions()
        self.checkpoints = AutomaticCheckpoints(sessions, harness.clock, self.stop)
        self.monitor = CheckpointMonitor(self.sandboxd.client, sessions, self.checkpoints, every_s, self.stop)

    def look(self) -> int:
        with self.sandboxd.client() as client:
            return self.monitor.run_round(client)

    def add(self, name: str, **row: object) -> None:
        self.sandboxd.add(name, **row)
        self.harness.put_location(name)

    def forget_superseded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Delete superseded checkpoints, as if their time had passed."""
        monkeypatch.setattr(checkpoints_module.time, "monotonic", lambda: float("inf"))
        self.checkpoints.forget_superseded(self.sandboxd.client())


@pytest.fixture
def host(redis_server: RedisProcess) -> Host:
    return Host(HostHarness(redis_server))


def test_changed_session_is_saved_once_and_recorded(host: Host) -> None:
    host.add("acme:s1")
    host.add("acme:unchanged", changed=False)
    assert (host.look(), host.look()) == (1, 0)
    location = host.harness.place("acme:s1")
    assert (location.checkpoint, location.automatic) == ("c1", "c1")
    assert location.checkpoint_at == pytest.approx(time.time(), abs=30)
    assert host.harness.place("acme:unchanged").checkpoint == ""


def test_session_is_not_saved_more_often_than_the_interval(host: Host) -> None:
    host.add("acme:s1")
    host.look()
    host.sandboxd.rows["acme:s1"]["changed"] = True
    assert (host.look(), host.sandboxd.kept) == (0, ["c1"])


def test_superseded_checkpoint_is_deleted(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(HostHarness(redis_server), every_s=0.001)
    host.add("acme:s1")
    host.look()
    host.harness.sessions().record_requested("acme:s1", "asked-for", 1.0)
    host.sandboxd.rows["acme:s1"]["changed"] = True
    time.sleep(0.01)
    assert host.look() == 1
    assert host.sandboxd.deleted == []

    host.forget_superseded(monkeypatch)

    assert host.sandboxd.deleted == ["c1"]
    assert host.harness.place("acme:s1").checkpoint == "c2"


def test_bytes_of_automatic_checkpoints_count_until_deleted(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = HostHarness(redis_server)
    host, tenant = Host(harness, every_s=0.001), "counted"
    host.add(f"{tenant}:s1")
    host.sandboxd.checkpoint_bytes = 1000
    host.look()
    assert harness.stored_bytes(tenant) == 1000
    host.sandboxd.checkpoint_bytes = 300
    host.sandboxd.rows[f"{tenant}:s1"]["changed"] = True
    time.sleep(0.01)
    host.look()
    assert harness.stored_bytes(tenant) == 1300
    host.sandboxd.checkpoint_bytes = 1000
    host.forget_superseded(monkeypatch)
    assert harness.stored_bytes(tenant) == 300


def test_checkpoint_of_a_moved_session_is_deleted_and_not_counted(host: Host) -> None:
    host.add("moved:s1")
    host.sandboxd.before_checkpoint = lambda name: host.harness.put_location(name, queue="host.b.b1", fence=2)
    host.look()
    assert (host.sandboxd.deleted, host.harness.stored_bytes("moved")) == (["c1"], 0)


def test_forged_checkpoint_name_is_not_deleted(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(HostHarness(redis_server), every_s=0.001)
    host.add("acme:s1")
    host.harness.redis.hset(location_key(DEPLOYMENT, "acme", "s1"), "automatic", "one-that-a-user-asked-for")
    assert host.look() == 1
    host.forget_superseded(monkeypatch)
    assert host.sandboxd.deleted == []


def test_only_checkpoints_of_ended_sessions_are_deleted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acme:closed", "acme:expired", "acme:moved", "acme:parked"):
        host.add(name)
    host.look()
    checkpoints = dict(zip(host.sandboxd.checkpointed, host.sandboxd.kept, strict=True))
    host.harness.delete_location("acme:closed")
    host.harness.put_location("acme:moved", queue="host.b.b1", fence=2)
    host.harness.put_location("acme:parked", queue="", state="moving", fence=2)
    host.sandboxd.rows.clear()
    host.look()

    host.forget_superseded(monkeypatch)

    assert sorted(host.sandboxd.deleted) == sorted([checkpoints["acme:closed"], checkpoints["acme:expired"]])


def test_failed_checkpoint_delays_no_other_session_and_backs_off(host: Host) -> None:
    host.add("acme:full")
    host.add("acme:fine")
    host.sandboxd.refuse["acme:full"] = ToolFailure(ErrorCode.NO_SPACE, "the store is full")
    with capture_logs() as logs:
        assert (host.look(), host.look()) == (1, 0)
    assert [entry["retry_in_s"] for entry in logs if entry["event"] == "session_checkpoint_failed"] == [120.0]


def test_concurrent_checkpoints_are_limited_to_two(host: Host) -> None:
    at_once, most, lock = [0], [0], threading.Lock()

    def count(_: str) -> None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.01)
        with lock:
            at_once[0] -= 1

    host.sandboxd.before_checkpoint = count
    for number in range(8):
        host.add(f"acme:s{number}")
    assert host.look() == 8
    assert most[0] == 2


def row(*, calls: int = 0, idle_s: float = 5.0) -> SandboxdSession:
    return SandboxdSession("acme:s1", calls, 0, idle_s, True)


@pytest.mark.parametrize(
    ("changed_since_s", "session_row", "is_due"),
    [
        (0.0, row(idle_s=QUIET_S), True),
        (0.0, row(idle_s=0.1), False),
        (60.0, row(idle_s=0.1), True),
        (60.0, row(calls=1, idle_s=0.0), False),
        (180.0, row(calls=1, idle_s=0.0), True),
    ],
)
def test_checkpoint_waits_for_running_calls_up_to_a_limit(
    changed_since_s: float, session_row: SandboxdSession, is_due: bool
) -> None:
    assert WatchedSession(changed_at=1000.0 - changed_since_s).is_due(session_row, 1000.0, 60.0) is is_due


@given(
    # Eighths of a second have exact sums.
    st.lists(
        st.tuples(st.integers(1, 240).map(lambda n: n / 8), st.booleans(), st.integers(0, 2), st.floats(0, 100)),
        max_size=60,
    ),
    st.integers(8, 800).map(lambda n: n / 8),
)
def test_changed_session_is_saved_within_one_to_three_intervals(
    looks: list[tuple[float, bool, int, float]], every_s: float
) -> None:
    watched, now, saved_at, changed_at = WatchedSession(), 0.0, None, None
    for step_s, changed, calls, idle_s in looks:
        now += step_s
        row = SandboxdSession("acme:s1", calls, 0, idle_s, changed)
        changed_at = (changed_at if changed_at is not None else now) if changed else None
        watched.changed_at = changed_at
        is_due = watched.is_due(row, now, every_s)
        if is_due:
            assert changed
            assert saved_at is None or now - saved_at >= every_s
            watched.saved_at = saved_at = now
            changed_at = None
        elif changed_at is not None and now - changed_at >= 3 * every_s:
            assert saved_at is not None
            assert now - saved_at < every_s


def test_row_without_a_changed_field_counts_as_changed() -> None:
    (parsed,) = parse_rows([{"name": "acme:s1"}])
    assert parsed == SandboxdSession("acme:s1", 0, 0, 0.0, True)
    assert (parsed.tenant, parsed.session) == ("acme", "s1")


def test_checkpoint_that_may_be_recorded_is_not_deleted(host: Host) -> None:
    """The session's record may refer to the checkpoint: the reply was lost, and the worker ends before Redis is back."""
    host.add("acme:s1")
    record_automatic = host.checkpoints._sessions.record_automatic

    def record_and_lose_the_reply(*args: Any) -> None:
        record_automatic(*args)
        host.stop.set()
        raise BrokerUnavailable("away")

    host.checkpoints._sessions.record_automatic = record_and_lose_the_reply  # type: ignore[method-assign,assignment]
    with capture_logs(), pytest.raises(BrokerUnavailable):
        host.look()
    assert (host.harness.place("acme:s1").checkpoint, host.sandboxd.deleted) == ("c1", [])


def test_stopped_saves_of_one_tenant_delay_no_other(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_module, "ROUND_S", 0.2)
    go_on, begun = threading.Event(), threading.Semaphore(0)
    real = host.checkpoints.take

    def take(client: Any, name: str, fence: int) -> str | None:
        if name.startswith("rival:"):
            begun.release()
            go_on.wait()
        return real(client, name, fence)

    monkeypatch.setattr(host.checkpoints, "take", take)
    for number in range(3):
        host.add(f"rival:s{number}")
    host.add("acme:s1")
    try:
        host.look()
        host.look()
        assert begun.acquire(timeout=30)
        assert host.sandboxd.kept == ["c1"]
        assert host.harness.place("acme:s1").checkpoint == "c1"
        assert not begun.acquire(timeout=0)
    finally:
        go_on.set()
    while host.look():
        pass
    assert len(host.sandboxd.kept) == 4
