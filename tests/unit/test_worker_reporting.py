"""Workers' reports in a real Redis: who may report under a name, how many slots a queue has, and how a worker leaves."""

import subprocess
import sys
import threading
import time

import pytest
import redis
from structlog.testing import capture_logs

from contract.clock import SKEW_TOLD_S, SharedClock
from contract.errors import ConfigError
from contract.hosts import HOST_TTL_S, RESTART_GRACE_S
from contract.names import POOL_WEB, host_key, hosts_key, slots_key, tombstone_key, worker_slots_key
from tests.conftest import RedisProcess
from tests.fake_host import DEPLOYMENT, HostGround, build_report
from workers import heartbeat as heartbeat_module
from workers import incarnation
from workers.heartbeat import Heartbeat
from workers.incarnation import take_incarnation
from workers.processes import describe_process, is_surely_gone
from workers.reporting import EarlierIncarnations, Verdict

QUEUE = "host.a.b1"


@pytest.fixture
def ground(redis_server: RedisProcess) -> HostGround:
    return HostGround(redis_server)


def slots(ground: HostGround, queue: str) -> int | None:
    told = ground.redis.get(slots_key(DEPLOYMENT, queue))
    return int(told) if told is not None else None  # type: ignore[arg-type]


def test_a_report_is_there_while_its_worker_lives_and_is_listed_by_redis_s_clock(ground: HostGround) -> None:
    reporter = ground.reporter()

    assert reporter.report(build_report()) is Verdict.KEPT

    told = ground.redis.get(host_key(DEPLOYMENT, QUEUE))
    assert 0 < ground.redis.ttl(host_key(DEPLOYMENT, QUEUE)) <= HOST_TTL_S  # type: ignore[operator]
    listed = ground.redis.zscore(hosts_key(DEPLOYMENT), QUEUE)
    assert told is not None and listed == pytest.approx(ground.redis.time()[0], abs=5)  # type: ignore[index]


def test_a_worker_with_a_wrong_clock_reports_redis_s_time(ground: HostGround) -> None:
    ground.clock = SharedClock(lambda: time.time() - 60)
    reporter = ground.reporter()
    reporter.report(build_report())
    reporter.report(build_report())
    seen = reporter.seen()
    assert seen is not None and seen.reported_at == pytest.approx(time.time(), abs=10)
    assert ground.clock.offset_s == pytest.approx(60, abs=5)


def test_an_incarnation_that_was_given_up_is_told_so_and_reports_nothing(ground: HostGround) -> None:
    ground.redis.set(tombstone_key(DEPLOYMENT, QUEUE), "1")
    assert ground.reporter().report(build_report()) is Verdict.GIVEN_UP
    assert ground.reporter().seen() is None


def test_of_two_workers_under_one_name_the_second_is_told_that_the_first_reports(ground: HostGround) -> None:
    ground.reporter(worker="w1").report(build_report(worker="w1"))
    assert ground.reporter(worker="w2").report(build_report(worker="w2")) is Verdict.REPLACED
    seen = ground.reporter().seen()
    assert seen is not None and seen.worker == "w1"


def test_a_report_that_is_no_json_does_not_keep_a_worker_from_reporting(ground: HostGround) -> None:
    for garbage in ("{", "[]", '"text"', "null", '{"worker": 7}', "\xff"):
        ground.redis.set(host_key(DEPLOYMENT, QUEUE), garbage)
        assert ground.reporter().report(build_report()) is Verdict.KEPT


def test_the_slots_of_a_shared_queue_are_those_of_its_living_workers(ground: HostGround) -> None:
    for queue, count in (("pool.a.1", 4), ("pool.b.2", 6)):
        ground.reporter(queue, queue, (POOL_WEB,)).report(build_report(queue, queue, kind="web", slots=count))
    ground.redis.hset(worker_slots_key(DEPLOYMENT, POOL_WEB), mapping={"pool.c.3": f"9 {int(time.time()) - 1}", "pool.d.4": "many"})

    ground.reporter("pool.a.1", "pool.a.1", (POOL_WEB,)).report(build_report("pool.a.1", "pool.a.1", kind="web"))

    assert slots(ground, POOL_WEB) == 10
    assert slots(ground, "pool.a.1") is None  # no calls come to a web worker's own queue
    assert ground.redis.hkeys(worker_slots_key(DEPLOYMENT, POOL_WEB)) == [b"pool.a.1", b"pool.b.2"]


def test_a_worker_that_drains_offers_no_slots_of_shared_queues_but_goes_on_with_its_own(ground: HostGround) -> None:
    reporter = ground.reporter(pools=(POOL_WEB,))
    reporter.report(build_report())
    assert (slots(ground, QUEUE), slots(ground, POOL_WEB)) == (4, 4)
    reporter.report(build_report(draining=True))
    assert (slots(ground, QUEUE), slots(ground, POOL_WEB)) == (4, None)


def test_a_drained_worker_does_not_leave_while_a_call_waits_in_its_queue(ground: HostGround) -> None:
    reporter = ground.reporter()
    reporter.report(build_report())
    ground.redis.lpush(QUEUE, "a call")

    assert not reporter.leave("drained", build_report())
    assert reporter.seen() is not None
    ground.redis.delete(QUEUE)
    assert reporter.leave("drained", build_report())

    assert reporter.seen() is None
    assert (slots(ground, QUEUE), ground.redis.zscore(hosts_key(DEPLOYMENT), QUEUE)) == (None, None)


def test_a_worker_that_is_restarted_is_waited_for_and_its_successor_takes_the_name_at_once(ground: HostGround) -> None:
    reporter = ground.reporter(worker="w1")
    reporter.report(build_report(worker="w1"))

    assert reporter.leave("parted", build_report(worker="w1"))

    parting = reporter.seen()
    assert parting is not None and (parting.worker, parting.draining) == ("", True)
    assert HOST_TTL_S < ground.redis.ttl(host_key(DEPLOYMENT, QUEUE)) <= RESTART_GRACE_S  # type: ignore[operator]
    assert ground.reporter(worker="w2").report(build_report(worker="w2")) is Verdict.KEPT
    assert reporter.leave("gone", build_report(worker="w1"))
    seen = reporter.seen()
    assert seen is not None and seen.worker == "w2", "who was replaced takes nothing away"


def test_a_worker_that_leaves_its_queue_to_others_stays_listed(ground: HostGround) -> None:
    reporter = ground.reporter()
    reporter.report(build_report())
    reporter.leave("gone", build_report())
    assert reporter.seen() is None and ground.redis.zscore(hosts_key(DEPLOYMENT), QUEUE) is not None


def test_a_later_boot_dismisses_what_is_reported_of_an_earlier_one_of_its_host_only(ground: HostGround) -> None:
    for queue in ("host.a.b1", "host.a.b2", "host.ab.b1", "pool.a.x"):
        ground.reporter(queue).report(build_report(queue))
    earlier = EarlierIncarnations(ground.redis, DEPLOYMENT, "a", "host.a.b2")

    (report,) = earlier.reports()
    earlier.dismiss(report.model_copy(update={"worker": "another"}))
    assert [found.queue for found in earlier.reports()] == ["host.a.b1"]
    earlier.dismiss(report)
    assert earlier.reports() == []


# --- taking a name --------------------------------------------------------------------------------------------------------


def take(ground: HostGround, worker: str = "w2") -> str:
    return take_incarnation("a", "b1", lambda queue: ground.reporter(queue, worker), lambda queue: build_report(queue, worker)).queue


def test_a_name_that_was_given_up_is_not_taken_again(ground: HostGround) -> None:
    ground.redis.set(tombstone_key(DEPLOYMENT, "host.a.b1"), "1")
    ground.redis.set(tombstone_key(DEPLOYMENT, "host.a.b1.2"), "1")
    with capture_logs():
        assert take(ground) == "host.a.b1.3"


def test_a_second_worker_refuses_to_start_while_the_first_goes_on_reporting(ground: HostGround, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnation, "LOOK_S", 0.01)
    first = ground.reporter(worker="w1")
    first.report(build_report(worker="w1"))
    stop = threading.Event()

    def report_on() -> None:
        while not stop.wait(0.05):
            HostGround.reporter(other, worker="w1").report(build_report(worker="w1"))

    other = HostGround.__new__(HostGround)
    other.redis, other.clock = ground.redis, SharedClock()
    reporting = threading.Thread(target=report_on)
    reporting.start()
    try:
        with capture_logs(), pytest.raises(ConfigError, match="another worker \\(w1\\) serves host.a.b1: stop it first"):
            take(ground)
    finally:
        stop.set()
        reporting.join()


def test_the_place_of_a_worker_that_reports_no_more_is_taken(ground: HostGround, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnation, "STALE_S", 0.05)
    ground.reporter(worker="w1").report(build_report(worker="w1"))
    with capture_logs():
        assert take(ground) == "host.a.b1"
    seen = ground.reporter().seen()
    assert seen is not None and seen.worker == "w2"


def test_the_place_of_a_process_that_is_gone_is_taken_at_once(ground: HostGround) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        described = describe_process(process.pid)
        assert not is_surely_gone(described)
    ground.reporter(worker="w1").report(build_report(worker="w1", process=described))

    began = time.monotonic()
    assert take(ground) == "host.a.b1"
    assert time.monotonic() - began < incarnation.STALE_S


@pytest.mark.parametrize("process", ["", "x", "a/b/c/d", "a/1/2/3/4", "boot/1/999999999999999999999/1"])
def test_of_a_process_of_another_machine_nothing_is_known(process: str) -> None:
    assert not is_surely_gone(process)


# --- the heartbeat --------------------------------------------------------------------------------------------------------


class Beating:
    """A heartbeat over a real Redis, and what it was told."""

    def __init__(self, ground: HostGround) -> None:
        self.lost = threading.Event()
        self.reasons: list[str] = []
        self.reporter = ground.reporter()
        self.heart = Heartbeat(self.reporter, build_report, ground.clock, self.note)

    def note(self, reason: str) -> None:
        self.reasons.append(reason)
        self.lost.set()


def await_true(is_so: object, within_s: float = 20.0) -> None:
    until = time.monotonic() + within_s
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(heartbeat_module, "RETRY_S", 0.02)
    monkeypatch.setattr(heartbeat_module, "LEAVE_POLL_S", 0.02)


@pytest.mark.usefixtures("quick")
def test_a_worker_that_finds_its_tombstone_is_told_once_and_never_reports_again(ground: HostGround) -> None:
    beating = Beating(ground)
    with capture_logs():
        beating.heart.start()
        await_true(lambda: beating.reporter.seen() is not None)
        # As the reaper: the report has expired, then the name is given up.
        ground.redis.set(tombstone_key(DEPLOYMENT, QUEUE), "1")
        ground.redis.delete(host_key(DEPLOYMENT, QUEUE))
        assert beating.lost.wait(20)
        beating.heart.stop("parted")

    assert beating.reasons == ["host.a.b1 was given up for lost"]
    assert beating.reporter.seen() is None


@pytest.mark.usefixtures("quick")
def test_a_worker_that_was_paused_and_replaced_ends(ground: HostGround) -> None:
    beating = Beating(ground)
    ground.reporter(worker="w2").report(build_report(worker="w2"))
    with capture_logs():
        beating.heart.start()
        assert beating.lost.wait(20)
        beating.heart.stop("gone")
    seen = beating.reporter.seen()
    assert beating.reasons == ["host.a.b1 is served by another worker"] and seen is not None and seen.worker == "w2"


@pytest.mark.usefixtures("quick")
def test_an_outage_of_redis_ends_no_heartbeat(ground: HostGround, monkeypatch: pytest.MonkeyPatch) -> None:
    beating = Beating(ground)
    failures = threading.Semaphore(0)
    told = beating.reporter.report

    def away(*_: object, **__: object) -> Verdict:
        failures.release()
        raise redis.ConnectionError("away")

    with capture_logs() as logs:
        monkeypatch.setattr(beating.reporter, "report", away)
        beating.heart.start()
        assert failures.acquire(timeout=20) and failures.acquire(timeout=20)
        monkeypatch.setattr(beating.reporter, "report", told)
        await_true(lambda: beating.reporter.seen() is not None)
        beating.heart.stop("gone")
    assert {entry["event"] for entry in logs} == {"worker_not_reported"} and not beating.reasons


@pytest.mark.usefixtures("quick")
def test_a_drained_worker_is_not_reported_again_by_a_heartbeat_that_came_too_late(ground: HostGround) -> None:
    beating = Beating(ground)
    beating.heart.start()
    ground.redis.lpush(QUEUE, "a call")
    left: list[bool] = []
    leaving = threading.Thread(target=lambda: left.append(beating.heart.leave_drained(lambda: False)))
    leaving.start()
    await_true(lambda: beating.reporter.seen() is not None)
    assert not left
    ground.redis.delete(QUEUE)
    leaving.join(20)
    beating.heart.beat_soon()
    beating.heart.stop("parted")
    assert left == [True] and beating.reporter.seen() is None


def test_a_wrong_clock_is_told_once(ground: HostGround) -> None:
    ground.clock = SharedClock(lambda: time.time() - SKEW_TOLD_S - 30)
    beating = Beating(ground)
    with capture_logs() as logs:
        for _ in range(3):
            beating.heart._beat()
    assert [entry["event"] for entry in logs] == ["clock_is_wrong"] and logs[0]["behind_s"] == pytest.approx(35, abs=5)
