"""Workers' reports in a real Redis: the right to report under a name, the number of slots of a queue, and the
departure of a worker.
"""

import subprocess
import sys
import threading
import time

import pytest
from structlog.testing import capture_logs

from contract.errors import BrokerUnavailable, ConfigError
from contract.hosts import HOST_TTL_S, RESTART_GRACE_S
from contract.names import POOL_WEB, host_key, hosts_key, slots_key, tombstone_key
from store.connection import SKEW_WARNING_S, SharedClock
from store.hosts import Departure, ReportResult, worker_slots_key
from tests.conftest import RedisProcess
from tests.fake_host import DEPLOYMENT, HostHarness, build_report
from tests.waiting import wait_until
from workers import reports
from workers.duties import Duty
from workers.reports import Heartbeat, TakenQueueName, describe_process, has_surely_ended, take_queue_name

QUEUE = "host.a.b1"


@pytest.fixture
def harness(redis_server: RedisProcess) -> HostHarness:
    return HostHarness(redis_server)


def slots(harness: HostHarness, queue: str) -> int | None:
    stored = harness.redis.get(slots_key(DEPLOYMENT, queue))
    return int(stored) if stored is not None else None  # type: ignore[arg-type]


def test_a_report_is_there_while_its_worker_lives_and_is_listed_by_redis_s_clock(harness: HostHarness) -> None:
    hosts = harness.hosts()

    assert hosts.report(build_report()) is ReportResult.ACCEPTED

    stored = harness.redis.get(host_key(DEPLOYMENT, QUEUE))
    assert 0 < harness.redis.ttl(host_key(DEPLOYMENT, QUEUE)) <= HOST_TTL_S  # type: ignore[operator]
    listed = harness.redis.zscore(hosts_key(DEPLOYMENT), QUEUE)
    assert stored is not None
    assert listed == pytest.approx(harness.redis.time()[0], abs=5)


def test_of_two_workers_under_one_name_the_second_learns_that_the_first_reports(harness: HostHarness) -> None:
    harness.hosts().report(build_report(worker="w1"))
    assert harness.hosts().report(build_report(worker="w2")) is ReportResult.REPLACED
    report = harness.hosts().find(QUEUE)
    assert report is not None
    assert report.worker == "w1"


def test_a_name_with_a_report_that_is_no_json_belongs_to_another_process(harness: HostHarness) -> None:
    for garbage in ("{", "[]", '"text"', "null", '{"worker": 7}', "\xff"):
        harness.redis.set(host_key(DEPLOYMENT, QUEUE), garbage)
        assert harness.hosts().report(build_report()) is ReportResult.REPLACED
        assert harness.hosts().find(QUEUE) is None


def test_the_slots_of_a_shared_queue_are_those_of_its_living_workers(harness: HostHarness) -> None:
    for queue, count in (("pool.a.1", 4), ("pool.b.2", 6)):
        harness.hosts().report(build_report(queue, queue, kind="web", slots=count, pools=(POOL_WEB,)))
    harness.redis.hset(
        worker_slots_key(DEPLOYMENT, POOL_WEB), mapping={"pool.c.3": f"9 {int(time.time()) - 1}", "pool.d.4": "many"}
    )

    harness.hosts().report(build_report("pool.a.1", "pool.a.1", kind="web", pools=(POOL_WEB,)))

    assert slots(harness, POOL_WEB) == 10
    assert slots(harness, "pool.a.1") is None  # no calls come to a web worker's own queue
    assert harness.redis.hkeys(worker_slots_key(DEPLOYMENT, POOL_WEB)) == [b"pool.a.1", b"pool.b.2"]


def test_a_worker_that_drains_offers_no_slots_of_shared_queues_but_goes_on_with_its_own(harness: HostHarness) -> None:
    hosts = harness.hosts()
    hosts.report(build_report(pools=(POOL_WEB,)))
    assert (slots(harness, QUEUE), slots(harness, POOL_WEB)) == (4, 4)
    hosts.report(build_report(draining=True, pools=(POOL_WEB,)))
    assert (slots(harness, QUEUE), slots(harness, POOL_WEB)) == (4, None)


def test_a_drained_worker_does_not_leave_while_a_call_waits_in_its_queue(harness: HostHarness) -> None:
    hosts = harness.hosts()
    hosts.report(build_report())
    harness.redis.lpush(QUEUE, "a call")

    assert not hosts.leave("drained", build_report())
    assert hosts.find(QUEUE) is not None
    harness.redis.delete(QUEUE)
    assert hosts.leave("drained", build_report())

    assert hosts.find(QUEUE) is None
    assert (slots(harness, QUEUE), harness.redis.zscore(hosts_key(DEPLOYMENT), QUEUE)) == (None, None)


def test_a_worker_that_is_restarted_is_waited_for(harness: HostHarness) -> None:
    hosts = harness.hosts()
    hosts.report(build_report())

    assert hosts.leave("restarting", build_report())

    parting = hosts.find(QUEUE)
    assert parting is not None
    assert (parting.worker, parting.draining) == ("", True)
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
def test_a_worker_refuses_to_start_while_another_reports_under_its_name(
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


def test_a_restarted_machine_keeps_its_name(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "REPORT_TIMEOUT_S", 0.05)
    harness.hosts().report(build_report("host.a.b0", "w1", process="before-its-restart/1/2/3"))
    with capture_logs():
        assert take(harness).queue == "host.a.b1"


def test_the_later_of_two_workers_refuses_to_start(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both processes have read the name before either reports.
    monkeypatch.setattr(reports, "_find_ended", lambda *_: ())
    monkeypatch.setattr(reports, "_has_fallen_silent", lambda *_: False)
    assert take(harness, "w1").queue == "host.a.b1"
    with pytest.raises(ConfigError, match="another worker already serves this sandboxd"):
        take(harness, "w2")
    assert [report.worker for report in harness.hosts().reports("a")] == ["w1"]


def test_a_worker_that_reports_no_more_is_gone(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "REPORT_TIMEOUT_S", 0.05)
    take(harness, "w1")
    with capture_logs():
        taken = take(harness, "w2")
    assert (taken.queue, [report.worker for report in taken.ended]) == ("host.a.b1.2", ["w1"])


def test_a_process_that_does_not_live_is_gone_at_once(harness: HostHarness) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        described = describe_process(process.pid)
        assert not has_surely_ended(described)
    harness.hosts().report(build_report(worker="w1", process=described))

    began = time.monotonic()
    assert [report.worker for report in take(harness).ended] == ["w1"]
    assert time.monotonic() - began < reports.REPORT_TIMEOUT_S


def test_a_worker_of_another_boot_that_may_live_is_neither_gone_nor_in_the_way(harness: HostHarness) -> None:
    take(harness, "w1", "b1")
    taken = take(harness, "w2", "b2")
    assert (taken.queue, taken.ended) == ("host.a.b2", ())


@pytest.mark.parametrize("process", ["", "x", "a/b/c/d", "a/1/2/3/4", "boot/1/999999999999999999999/1"])
def test_of_a_process_of_another_machine_nothing_is_known(process: str) -> None:
    assert not has_surely_ended(process)


# --- the heartbeat ----------------------------------------------------------------------------------------------------


class Beating:
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
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "LEAVE_POLL_S", 0.02)


@pytest.mark.usefixtures("quick")
def test_a_worker_that_finds_its_tombstone_is_reported_once_and_never_reports_again(harness: HostHarness) -> None:
    beating = Beating(harness)
    with capture_logs():
        beating.duty.start()
        wait_until(lambda: beating.hosts.find(QUEUE) is not None, 20, "the host reports")
        # As the reaper: the report has expired, then the name is given up.
        harness.redis.set(tombstone_key(DEPLOYMENT, QUEUE), "1")
        harness.redis.delete(host_key(DEPLOYMENT, QUEUE))
        assert beating.lost.wait(20)
        beating.end("restarting")

    assert beating.reasons == ["host.a.b1 was declared lost"]
    assert beating.hosts.find(QUEUE) is None


@pytest.mark.usefixtures("quick")
def test_a_worker_that_was_paused_and_replaced_ends(harness: HostHarness) -> None:
    beating = Beating(harness)
    harness.hosts().report(build_report(worker="w2"))
    with capture_logs():
        beating.duty.start()
        assert beating.lost.wait(20)
        beating.end("stopped")
    report = beating.hosts.find(QUEUE)
    assert beating.reasons == ["host.a.b1 now belongs to another worker"]
    assert report is not None
    assert report.worker == "w2"


@pytest.mark.usefixtures("quick")
def test_an_outage_of_redis_ends_no_heartbeat(harness: HostHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    beating = Beating(harness)
    failures = threading.Semaphore(0)
    report = beating.hosts.report

    def away(*_: object, **__: object) -> ReportResult:
        failures.release()
        raise BrokerUnavailable("away")

    with capture_logs() as logs:
        monkeypatch.setattr(beating.hosts, "report", away)
        beating.duty.start()
        assert failures.acquire(timeout=20)
        assert failures.acquire(timeout=20)
        monkeypatch.setattr(beating.hosts, "report", report)
        wait_until(lambda: beating.hosts.find(QUEUE) is not None, 20, "the host reports")
        beating.end("stopped")
    assert {entry["event"] for entry in logs} == {"worker_not_reported"}
    assert not beating.reasons


@pytest.mark.usefixtures("quick")
def test_a_drained_worker_is_not_reported_again_by_a_heartbeat_that_came_too_late(harness: HostHarness) -> None:
    beating = Beating(harness)
    beating.duty.start()
    harness.redis.lpush(QUEUE, "a call")
    results: list[bool] = []
    leaving = threading.Thread(target=lambda: results.append(beating.heart.leave_drained(lambda: False)))
    leaving.start()
    wait_until(lambda: beating.hosts.find(QUEUE) is not None, 20, "the host reports")
    assert not results
    harness.redis.delete(QUEUE)
    leaving.join(20)
    beating.duty.run_soon()
    beating.end("restarting")
    assert results == [True]
    assert beating.hosts.find(QUEUE) is None


def test_a_worker_that_ends_with_calls_in_its_queue_has_not_left(harness: HostHarness) -> None:
    beating = Beating(harness)
    beating.heart.beat()
    harness.redis.lpush(QUEUE, "a call")
    ending = iter([False, True])
    assert not beating.heart.leave_drained(lambda: next(ending))
    assert beating.hosts.find(QUEUE) is not None


def test_a_wrong_clock_is_reported_once(harness: HostHarness) -> None:
    harness.clock = SharedClock(lambda: time.time() - SKEW_WARNING_S - 30)
    beating = Beating(harness)
    with capture_logs() as logs:
        for _ in range(3):
            beating.heart.beat()
    assert [entry["event"] for entry in logs] == ["clock_is_wrong"]
    assert logs[0]["behind_s"] == pytest.approx(35, abs=5)
