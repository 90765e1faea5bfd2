"""Workers' reports in a real Redis: the right to report under a name, the number of slots of a queue, and the
departure of a worker.
"""

import subprocess
import sys
import threading
import time

import pytest
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.sandboxd.fake_host import DEPLOYMENT, HostHarness, build_report
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import BrokerUnavailable, ConfigError
from toolcrew.contract.hosts import HOST_TTL_S, RESTART_GRACE_S
from toolcrew.contract.names import POOL_WEB, host_key, hosts_key, slots_key, tombstone_key
from toolcrew.store.clock import SKEW_WARNING_S, SharedClock
from toolcrew.store.hosts import Departure, ReportResult, worker_slots_key
from toolcrew.workers import reports
from toolcrew.workers.duties import Duty
from toolcrew.workers.reports import Heartbeat, TakenQueueName, describe_process, has_surely_ended, take_queue_name

QUEUE = "host.a.b1"


@pytest.fixture
def harness(redis_server: RedisProcess) -> HostHarness:
    return HostHarness(redis_server)


def slots(harness: HostHarness, queue: str) -> int | None:
    stored = harness.redis.get(slots_key(DEPLOYMENT, queue))
    return int(stored) if stored is not None else None  # type: ignore[arg-type]


def test_report_expires_and_is_listed_by_the_redis_clock(harness: HostHarness) -> None:
    hosts = harness.hosts()

    assert hosts.report(build_report()) is ReportResult.ACCEPTED

    stored = harness.redis.get(host_key(DEPLOYMENT, QUEUE))
    assert 0 < harness.redis.ttl(host_key(DEPLOYMENT, QUEUE)) <= HOST_TTL_S  # type: ignore[operator]
    listed = harness.redis.zscore(hosts_key(DEPLOYMENT), QUEUE)
    assert stored is not None
    assert listed == pytest.approx(harness.redis.time()[0], abs=5)


def test_report_of_a_second_worker_with_the_same_name_is_refused(harness: HostHarness) -> None:
    harness.hosts().report(build_report(worker="w1"))
    assert harness.hosts().report(build_report(worker="w2")) is ReportResult.REPLACED
    report = harness.hosts().find(QUEUE)
    assert report.worker == "w1"


def test_name_with_an_invalid_report_belongs_to_another_process(harness: HostHarness) -> None:
    for invalid_report in ("{", "[]", '"text"', "null", '{"worker": 7}', "\xff"):
        harness.redis.set(host_key(DEPLOYMENT, QUEUE), invalid_report)
        assert harness.hosts().report(build_report()) is ReportResult.REPLACED
        assert harness.hosts().find(QUEUE) is None


def test_slots_of_a_shared_queue_are_the_sum_of_its_live_workers(harness: HostHarness) -> None:
    for queue, count in (("pool.a.1", 4), ("pool.b.2", 6)):
        harness.hosts().report(build_report(queue, queue, kind="web", slots=count, pools=(POOL_WEB,)))
    harness.redis.hset(
        worker_slots_key(DEPLOYMENT, POOL_WEB), mapping={"pool.c.3": f"9 {int(time.time()) - 1}", "pool.d.4": "many"}
    )

    harness.hosts().report(build_report("pool.a.1", "pool.a.1", kind="web", pools=(POOL_WEB,)))

    assert slots(harness, POOL_WEB) == 10
    assert slots(harness, "pool.a.1") is None  # no calls come to a web worker's own queue
    assert harness.redis.hkeys(worker_slots_key(DEPLOYMENT, POOL_WEB)) == [b"pool.a.1", b"pool.b.2"]


def test_draining_worker_offers_only_slots_of_its_own_queue(harness: HostHarness) -> None:
    hosts = harness.hosts()
    hosts.report(build_report(pools=(POOL_WEB,)))
    assert (slots(harness, QUEUE), slots(harness, POOL_WEB)) == (4, 4)
    hosts.report(build_report(draining=True, pools=(POOL_WEB,)))
    assert (slots(harness, QUEUE), slots(harness, POOL_WEB)) == (4, None)


def test_drained_worker_stays_while_a_call_waits_in_its_queue(harness: HostHarness) -> None:
    hosts = harness.hosts()
    hosts.report(build_report())
    harness.redis.lpush(QUEUE, "a call")

    assert not hosts.leave("drained", build_report())
    assert hosts.find(QUEUE) is not None
    harness.redis.delete(QUEUE)
    assert hosts.leave("drained", build_report())

    assert hosts.find(QUEUE) is None
    assert (slots(harness, QUEUE), harness.redis.zscore(hosts_key(DEPLOYMENT), QUEUE)) == (None, None)


def test_restarting_worker_keeps_its_report_for_a_grace_period(harness: HostHarness) -> None:
    hosts = harness.hosts()
    hosts.report(build_report())

    assert hosts.leave("restarting", build_report())

    remaining = hosts.find(QUEUE)
    assert (remaining.worker, remaining.draining) == ("", True)
    assert HOST_TTL_S < harness.redis.ttl(host_key(DEPLOYMENT, QUEUE)) <= RESTART_GRACE_S  # type: ignore[operator]
    assert slots(harness, QUEUE) is None
    assert hosts.leave("stopped", build_report(worker="w2"))
    assert hosts.find(QUEUE) is not None, "a process removes only its own record"


# --- taking a name ----------------------------------------------------------------------------------------------------


def take(harness: HostHarness, worker: str = "w2", boot: str = "b1") -> TakenQueueName:
    return take_queue_name("a", boot, harness.hosts(), lambda queue: build_report(queue, worker))


@pytest.mark.parametrize(
    ("queue", "process", "advice"),
    [
        (QUEUE, {}, "another worker already serves this sandboxd"),
        ("host.a.b0", {"process": "another/1/2/3"}, "TOOLCREW_HOST"),
    ],
    ids=["another worker", "another machine"],
)
def test_worker_does_not_start_while_another_reports_under_its_name(
    harness: HostHarness,
    redis_server: RedisProcess,
    monkeypatch: pytest.MonkeyPatch,
    queue: str,
    process: dict[str, str],
    advice: str,
) -> None:
    monkeypatch.setattr(reports, "CHECK_INTERVAL_S", 0.01)
    stop, other = threading.Event(), HostHarness(redis_server).hosts()
    other.report(build_report(queue, "w1", **process))

    def report_on() -> None:
        while not stop.wait(0.05):
            other.report(build_report(queue, "w1", **process))

    reporting = threading.Thread(target=report_on)
    reporting.start()
    try:
        with capture_logs(), pytest.raises(ConfigError, match=advice):
            take(harness)
    finally:
        stop.set()
        reporting.join()
    assert [report.queue for report in harness.hosts().reports("a")] == [queue]


def test_restarted_machine_keeps_its_name(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "REPORT_TIMEOUT_S", 0.05)
    harness.hosts().report(build_report("host.a.b0", "w1", process="before-its-restart/1/2/3"))
    with capture_logs():
        assert take(harness).queue == "host.a.b1"


def test_later_of_two_concurrent_workers_refuses_to_start(
    harness: HostHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both processes have read the name before either reports.
    monkeypatch.setattr(reports, "_find_ended", lambda *_: ())
    monkeypatch.setattr(reports, "_has_fallen_silent", lambda *_: False)
    assert take(harness, "w1").queue == "host.a.b1"
    with pytest.raises(ConfigError, match="another worker already serves this sandboxd"):
        take(harness, "w2")
    assert [report.worker for report in harness.hosts().reports("a")] == ["w1"]


def test_worker_without_recent_reports_counts_as_ended(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "REPORT_TIMEOUT_S", 0.05)
    take(harness, "w1")
    with capture_logs():
        queue_name = take(harness, "w2")
    assert (queue_name.queue, [report.worker for report in queue_name.ended]) == ("host.a.b1.2", ["w1"])


def test_dead_process_counts_as_ended_immediately(harness: HostHarness) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        description = describe_process(process.pid)
        assert not has_surely_ended(description)
    harness.hosts().report(build_report(worker="w1", process=description))

    began = time.monotonic()
    assert [report.worker for report in take(harness).ended] == ["w1"]
    assert time.monotonic() - began < reports.REPORT_TIMEOUT_S


def test_worker_of_another_boot_is_neither_ended_nor_blocking(harness: HostHarness) -> None:
    take(harness, "w1", "b1")
    queue_name = take(harness, "w2", "b2")
    assert (queue_name.queue, queue_name.ended) == ("host.a.b2", ())


@pytest.mark.parametrize("process", ["", "x", "a/b/c/d", "a/1/2/3/4", "boot/1/999999999999999999999/1"])
def test_process_of_another_machine_is_not_known_to_have_ended(process: str) -> None:
    assert not has_surely_ended(process)


# --- the heartbeat ----------------------------------------------------------------------------------------------------


class HeartbeatHarness:
    """A heartbeat over a real Redis, and the data that it received."""

    def __init__(self, harness: HostHarness) -> None:
        self.lost = threading.Event()
        self.reasons: list[str] = []
        self.hosts = harness.hosts()
        self.heart = Heartbeat(self.hosts, build_report, harness.clock, self.note)
        self._stop = threading.Event()
        self.duty = Duty(
            "heartbeat", 0.05, self.heart.beat, "worker_not_reported", self._stop, retry_s=0.02, is_first_at_once=True
        )

    def end(self, departure: Departure) -> None:
        self._stop.set()
        self.heart.leave(departure)

    def note(self, reason: str) -> None:
        self.reasons.append(reason)
        self.lost.set()


@pytest.fixture
def short_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "LEAVE_POLL_S", 0.02)


@pytest.mark.usefixtures("short_poll")
def test_worker_with_a_tombstone_stops_reporting(harness: HostHarness) -> None:
    heartbeat = HeartbeatHarness(harness)
    with capture_logs():
        heartbeat.duty.start()
        wait_until(lambda: heartbeat.hosts.find(QUEUE) is not None, SOON_S, "the host reports")
        # As the reaper: the report has expired, then the name is given up.
        harness.redis.set(tombstone_key(DEPLOYMENT, QUEUE), "1")
        harness.redis.delete(host_key(DEPLOYMENT, QUEUE))
        assert heartbeat.lost.wait(20)
        heartbeat.end("restarting")

    assert heartbeat.reasons == ["host.a.b1 was declared lost"]
    assert heartbeat.hosts.find(QUEUE) is None


@pytest.mark.usefixtures("short_poll")
def test_replaced_worker_stops_reporting(harness: HostHarness) -> None:
    heartbeat = HeartbeatHarness(harness)
    harness.hosts().report(build_report(worker="w2"))
    with capture_logs():
        heartbeat.duty.start()
        assert heartbeat.lost.wait(20)
        heartbeat.end("stopped")
    report = heartbeat.hosts.find(QUEUE)
    assert heartbeat.reasons == ["host.a.b1 now belongs to another worker"]
    assert report.worker == "w2"


@pytest.mark.usefixtures("short_poll")
def test_heartbeat_continues_after_a_redis_outage(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = HeartbeatHarness(harness)
    failures = threading.Semaphore(0)
    report = heartbeat.hosts.report

    def raise_unavailable(*_: object, **__: object) -> ReportResult:
        failures.release()
        raise BrokerUnavailable("away")

    with capture_logs() as logs:
        monkeypatch.setattr(heartbeat.hosts, "report", raise_unavailable)
        heartbeat.duty.start()
        assert failures.acquire(timeout=20)
        assert failures.acquire(timeout=20)
        monkeypatch.setattr(heartbeat.hosts, "report", report)
        wait_until(lambda: heartbeat.hosts.find(QUEUE) is not None, SOON_S, "the host reports")
        heartbeat.end("stopped")
    assert {entry["event"] for entry in logs} == {"worker_not_reported"}
    assert not heartbeat.reasons


@pytest.mark.usefixtures("short_poll")
def test_late_heartbeat_does_not_report_a_drained_worker_again(harness: HostHarness) -> None:
    heartbeat = HeartbeatHarness(harness)
    heartbeat.duty.start()
    harness.redis.lpush(QUEUE, "a call")
    results: list[bool] = []
    leaving = threading.Thread(target=lambda: results.append(heartbeat.heart.leave_drained(lambda: False)))
    leaving.start()
    wait_until(lambda: heartbeat.hosts.find(QUEUE) is not None, SOON_S, "the host reports")
    assert not results
    harness.redis.delete(QUEUE)
    leaving.join(20)
    heartbeat.duty.run_soon()
    heartbeat.end("restarting")
    assert results == [True]
    assert heartbeat.hosts.find(QUEUE) is None


def test_worker_with_queued_calls_does_not_leave(harness: HostHarness) -> None:
    heartbeat = HeartbeatHarness(harness)
    heartbeat.heart.beat()
    harness.redis.lpush(QUEUE, "a call")
    ending = iter([False, True])
    assert not heartbeat.heart.leave_drained(lambda: next(ending))
    assert heartbeat.hosts.find(QUEUE) is not None


def test_wrong_clock_is_reported_once(harness: HostHarness) -> None:
    harness.clock = SharedClock(lambda: time.time() - SKEW_WARNING_S - 30)
    heartbeat = HeartbeatHarness(harness)
    with capture_logs() as logs:
        for _ in range(3):
            heartbeat.heart.beat()
    assert [entry["event"] for entry in logs] == ["clock_is_wrong"]
    assert logs[0]["behind_s"] == pytest.approx(35, abs=5)
