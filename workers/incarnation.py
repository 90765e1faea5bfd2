"""Which name a sandbox worker serves under: that of its sandboxd's boot, and never one that another process has had."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis
import structlog

from contract.errors import BrokerUnavailable, ConfigError
from contract.hosts import HEARTBEAT_S, HostReport
from contract.names import host_queue
from workers.processes import is_elsewhere, is_surely_gone
from workers.reporting import Incarnations, Reporter, Verdict

log = structlog.get_logger(__name__)

STALE_S = HEARTBEAT_S + 1.5
"""A worker that has not reported anew for so long does not live, or hangs."""
LOOK_S = 0.25
START_TTL_S = 60
"""How long the first report counts: whoever has taken a name takes over sessions and starts a pool before the heartbeat begins."""


@dataclass(frozen=True)
class Incarnation:
    """A name that was taken. `gone`: reports of workers of this host that do not live any more, and whose sessions are now this one's."""

    reporter: Reporter
    gone: tuple[HostReport, ...]


def take_incarnation(
    host: str, boot: str, others: Incarnations, open_reporter: Callable[[str], Reporter], build: Callable[[str], HostReport]
) -> Incarnation:
    """Report under the first name of this boot that nobody has had: `host.<host>.<boot>`, then with `.2`, `.3`.

    Each process has a name of its own because a worker that is killed takes along a message that Redis had just given it: as the call of a name
    that reports no more it is seen to be lost, and sent again. `build`: the first report of a queue.
    Raises ConfigError when another worker serves the sandboxd, or another machine has the host's name; BrokerUnavailable.
    """
    try:
        gone = _find_gone(others, host_queue(host, boot))
        reporter = _take_name(host, boot, open_reporter, build)
        rival = _find_elder(others, reporter)
        if rival is not None:
            reporter.leave("drained", build(reporter.queue))
            raise _second(rival)
    except redis.RedisError as error:
        raise BrokerUnavailable(
            f"Redis did not take the worker's first report ({error}): see that it is up and may be written to"
        ) from error
    return Incarnation(reporter, gone)


def _take_name(host: str, boot: str, open_reporter: Callable[[str], Reporter], build: Callable[[str], HostReport]) -> Reporter:
    for number in itertools.count(1):
        queue = host_queue(host, boot if number == 1 else f"{boot}.{number}")
        reporter = open_reporter(queue)
        if reporter.report(build(queue), is_first=True, ttl_s=START_TTL_S) is Verdict.KEPT:
            return reporter
    raise AssertionError


def _find_gone(others: Incarnations, base: str) -> tuple[HostReport, ...]:
    """Of those that are reported. Raises ConfigError while one of this boot, whose first name is `base`, or one on another machine goes on reporting."""
    gone = []
    for report in others.reports():
        if not report.worker or is_surely_gone(report.process):
            gone.append(report)
        elif _is_of_boot(report, base):
            if not _has_fallen_silent(others, report):
                raise _second(report)
            gone.append(report)
        elif is_elsewhere(report.process) and not _has_fallen_silent(others, report):
            raise ConfigError(
                f"a worker of another machine reports as host '{report.host}', as {report.queue}: give each machine a TOOLCREW_HOST of its own"
            )
    return tuple(gone)


def _has_fallen_silent(others: Incarnations, report: HostReport) -> bool:
    """Watches whether another report follows."""
    log.info("another_worker_reported", queue=report.queue, worker=report.worker, waits_s=STALE_S)
    until = time.monotonic() + STALE_S
    while time.monotonic() < until:
        time.sleep(LOOK_S)
        seen = next((one for one in others.reports() if one.queue == report.queue), None)
        if seen is None or not seen.worker:
            return True
        if seen.reported_at != report.reported_at:
            return False
    return True


def _find_elder(others: Incarnations, own: Reporter) -> HostReport | None:
    """A worker of the same boot that took its name before: of two that start at the same time one must give way."""
    mine = _number(own.queue)
    base = ".".join(own.queue.split(".")[:3])
    rivals = [report for report in others.reports() if report.worker and _is_of_boot(report, base) and _number(report.queue) < mine]
    return next((report for report in rivals if not is_surely_gone(report.process) and not _has_fallen_silent(others, report)), None)


def _is_of_boot(report: HostReport, base: str) -> bool:
    return report.queue == base or report.queue.startswith(f"{base}.")


def _number(queue: str) -> int:
    """Of a name, as they are taken."""
    words = queue.split(".")
    return int(words[3]) if len(words) > 3 and words[3].isdigit() else 1


def _second(other: HostReport) -> ConfigError:
    return ConfigError(
        f"another worker serves this sandboxd, as {other.queue}: stop it first, since one sandboxd has one worker; for more calls at a time raise "
        "TOOLCREW_CONCURRENCY"
    )
