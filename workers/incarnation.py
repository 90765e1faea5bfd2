"""Which name a sandbox worker serves under: that of its sandboxd's boot, and never one that another process has had."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from contract.errors import ConfigError
from contract.hosts import HEARTBEAT_S, HostReport
from contract.names import host_queue
from store.hosts import ReportResult, WorkerHostStore
from workers.processes import is_elsewhere, is_surely_gone

log = structlog.get_logger(__name__)

STALE_S = HEARTBEAT_S + 1.5
"""A worker that has not reported anew for so long does not live, or hangs."""
LOOK_S = 0.25
START_TTL_S = 60
"""How long the first report counts: whoever has taken a name takes over sessions and starts a pool before the heartbeat begins."""


@dataclass(frozen=True)
class Incarnation:
    """A name that was taken. `ended`: reports of workers of this host that have ended, and whose sessions are now this one's."""

    queue: str
    ended: tuple[HostReport, ...]


def take_incarnation(host: str, boot: str, hosts: WorkerHostStore, build: Callable[[str], HostReport]) -> Incarnation:
    """Report under the first name of this boot that no process has had: `host.<host>.<boot>`, then with `.2`, `.3`.

    Each process has a name of its own because a worker that is killed takes along a message that Redis had just given it: as the call of a name
    that reports no more it is seen to be lost, and sent again. `build`: the first report of a queue.
    Raises ConfigError when another worker serves the sandboxd, or another machine has the host's name; BrokerUnavailable.
    """
    ended = _find_ended(hosts, host, host_queue(host, boot))
    queue = _take_name(host, boot, hosts, build)
    rival = _find_elder(hosts, host, queue)
    if rival is not None:
        hosts.leave("drained", build(queue))
        raise _second(rival)
    return Incarnation(queue, ended)


def _take_name(host: str, boot: str, hosts: WorkerHostStore, build: Callable[[str], HostReport]) -> str:
    for number in itertools.count(1):
        queue = host_queue(host, boot if number == 1 else f"{boot}.{number}")
        if hosts.report(build(queue), is_first=True, ttl_s=START_TTL_S) is ReportResult.ACCEPTED:
            return queue
    raise AssertionError


def _find_ended(hosts: WorkerHostStore, host: str, base: str) -> tuple[HostReport, ...]:
    """Return the reports of workers that have ended. Raises ConfigError while one of this boot, whose first name is `base`, or one of another machine
    goes on reporting."""
    ended = []
    for report in hosts.reports(host):
        if not report.worker or is_surely_gone(report.process):
            ended.append(report)
        elif _is_of_boot(report, base):
            if not _has_fallen_silent(hosts, report):
                raise _second(report)
            ended.append(report)
        elif is_elsewhere(report.process) and not _has_fallen_silent(hosts, report):
            raise ConfigError(
                f"a worker of another machine reports as host '{report.host}', as {report.queue}: give each machine a TOOLCREW_HOST of its own"
            )
    return tuple(ended)


def _has_fallen_silent(hosts: WorkerHostStore, report: HostReport) -> bool:
    """Watches whether another report follows."""
    log.info("another_worker_reported", queue=report.queue, worker=report.worker, waits_s=STALE_S)
    until = time.monotonic() + STALE_S
    while time.monotonic() < until:
        time.sleep(LOOK_S)
        seen = hosts.find(report.queue)
        if seen is None or not seen.worker:
            return True
        if seen.reported_at != report.reported_at:
            return False
    return True


def _find_elder(hosts: WorkerHostStore, host: str, queue: str) -> HostReport | None:
    """A worker of the same boot that took its name before: of two that start at the same time one must give way."""
    mine = _number(queue)
    base = ".".join(queue.split(".")[:3])
    rivals = [report for report in hosts.reports(host) if report.worker and _is_of_boot(report, base) and _number(report.queue) < mine]
    return next((report for report in rivals if not is_surely_gone(report.process) and not _has_fallen_silent(hosts, report)), None)


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
