"""How a worker makes itself known: its process, the name it serves under, and the reports that say that it lives."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from contract.errors import BrokerUnavailable, ConfigError
from contract.hosts import HEARTBEAT_S, MAX_TROUBLE_CHARS, HostReport
from contract.names import host_queue
from store.connection import SKEW_WARNING_S, SharedClock
from store.hosts import Departure, ReportResult, WorkerHostStore

log = structlog.get_logger(__name__)

RETRY_S = 0.5
LEAVE_POLL_S = 0.2
STALE_S = HEARTBEAT_S + 1.5
"""A worker that has not reported anew for so long does not live, or hangs."""
LOOK_S = 0.25
START_TTL_S = 60
"""How long the first report counts: whoever has taken a name takes over sessions and starts a pool before the heartbeat
begins.
"""
_MEMINFO = Path("/proc/meminfo")


class Heartbeat:
    """Reports that the worker lives, and learns whether it was given up. `build`: builds the present report.

    `on_lost`: called once, with the reason, when the worker must not go on under its name; nothing is reported from
    then on.
    """

    def __init__(
        self,
        hosts: WorkerHostStore,
        build: Callable[[], HostReport],
        clock: SharedClock,
        on_lost: Callable[[str], None],
    ) -> None:
        self._hosts = hosts
        self._build = build
        self._clock = clock
        self._on_lost = on_lost
        self._turn = threading.Lock()
        self._is_over = False
        self._has_logged_skew = False

    def leave(self, departure: Departure) -> None:
        """Send the last report, so that no process waits longer for the worker than necessary. If Redis does not
        answer, the report expires by itself.
        """
        try:
            self._leave(departure)
        except BrokerUnavailable as error:
            log.warning("worker_left_unsaid", error=str(error))

    def leave_drained(self, is_ending: Callable[[], bool]) -> bool:
        """Take the report away once the queue is empty: from then on nothing is sent there. False when the worker ends,
        or is lost, first.
        """
        while not is_ending() and not self._is_over:
            try:
                if self._leave("drained"):
                    return True
            except BrokerUnavailable as error:
                log.warning("worker_left_unsaid", error=str(error))
            time.sleep(LEAVE_POLL_S)
        return False

    def _leave(self, departure: Departure) -> bool:
        with self._turn:
            if self._is_over:
                return False
            self._is_over = self._hosts.leave(departure, self._build())
            return self._is_over

    def beat(self) -> bool:
        """Report; return whether the worker has left, or was given up. Raises BrokerUnavailable."""
        with self._turn:
            if self._is_over:
                return True
            report = self._build()
            result = self._hosts.report(report)
            self._is_over = result is not ReportResult.ACCEPTED
        self._log_skew()
        if self._is_over:
            reason = "was given up for lost" if result is ReportResult.GIVEN_UP else "is another worker's by now"
            log.error("worker_lost_its_name", queue=report.queue, reason=reason)
            self._on_lost(f"{report.queue} {reason}")
        return self._is_over

    def _log_skew(self) -> None:
        skew_s = self._clock.offset_s
        if abs(skew_s) > SKEW_WARNING_S and not self._has_logged_skew:
            self._has_logged_skew = True
            log.warning(
                "clock_is_wrong", behind_s=round(skew_s, 1), remedy="set this host's clock, or have it kept by NTP"
            )


@dataclass(frozen=True)
class Incarnation:
    """A name that was taken. `ended`: reports of workers of this host that have ended, and whose sessions are now this
    one's.
    """

    queue: str
    ended: tuple[HostReport, ...]


def take_incarnation(host: str, boot: str, hosts: WorkerHostStore, build: Callable[[str], HostReport]) -> Incarnation:
    """Report under the first name of this boot that no process has had: `host.<host>.<boot>`, then with `.2`, `.3`.

    Each process has a name of its own because a worker that is killed takes along a message that Redis had just given
    it: as the call of a name that reports no more it is seen to be lost, and sent again. `build`: the first report of a
    queue. Raises ConfigError when another worker serves the sandboxd, or another machine has the host's name;
    BrokerUnavailable.
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
    """Return the reports of workers that have ended. Raises ConfigError while one of this boot, whose first name is
    `base`, or one of another machine goes on reporting."""
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
                f"a worker of another machine reports as host '{report.host}', as {report.queue}: give each machine a "
                "TOOLCREW_HOST of its own"
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
    rivals = [
        report
        for report in hosts.reports(host)
        if report.worker and _is_of_boot(report, base) and _number(report.queue) < mine
    ]
    return next(
        (report for report in rivals if not is_surely_gone(report.process) and not _has_fallen_silent(hosts, report)),
        None,
    )


def _is_of_boot(report: HostReport, base: str) -> bool:
    return report.queue == base or report.queue.startswith(f"{base}.")


def _number(queue: str) -> int:
    """Of a name, as they are taken."""
    words = queue.split(".")
    return int(words[3]) if len(words) > 3 and words[3].isdigit() else 1


def _second(other: HostReport) -> ConfigError:
    return ConfigError(
        f"another worker serves this sandboxd, as {other.queue}: stop it first, since one sandboxd has one worker; for "
        "more calls at a time raise TOOLCREW_CONCURRENCY"
    )


def build_host_report(status: Mapping[str, Any], *, is_silent: bool, **fields: Any) -> HostReport:
    """Of a worker beside a sandboxd. `fields`: those that the worker itself knows; too long a trouble is shortened."""
    trouble = str(fields.pop("trouble", "sandboxd does not answer: see its log" if is_silent else ""))
    facts: dict[str, Any] = {
        "sessions": _count(status, "sessions"),
        "max_sessions": _count(status, "max_sessions"),
        "sandboxes": _count(status, "sandboxes"),
        "max_sandboxes": _count(status, "max_sandboxes"),
        "memory_free_bytes": _count(status, "memory_free_bytes") or find_free_memory(),
        "disk_free_bytes": _count(status, "disk_free_bytes"),
        "classes": _names(status, "classes"),
        "images": _names(status, "images"),
        "store": read_store(status),
        "healthy": not is_silent,
        "trouble": trouble if len(trouble) <= MAX_TROUBLE_CHARS else f"{trouble[: MAX_TROUBLE_CHARS - 1]}…",
    }
    return HostReport.model_validate({"kind": "sandbox", "reported_at": 0.0, **facts, **fields})


def build_pool_report(**fields: Any) -> HostReport:
    """Of a worker without sandboxes."""
    return HostReport.model_validate(
        {"kind": "web", "reported_at": 0.0, "memory_free_bytes": find_free_memory(), **fields}
    )


def read_store(status: Mapping[str, Any]) -> Literal["local", "shared"]:
    """Where a sandboxd's checkpoints go; one that does not say keeps them to itself."""
    return "shared" if status.get("store") == "shared" else "local"


def find_free_memory() -> int:
    """Bytes that programs could have without swapping, as the kernel estimates it."""
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _count(status: Mapping[str, Any], name: str) -> int:
    value = status.get(name)
    return max(0, value) if isinstance(value, int) else 0


def _names(status: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = status.get(name)
    return tuple(str(item) for item in value) if isinstance(value, Sequence) and not isinstance(value, str) else ()


def describe_process(pid: int | None = None) -> str:
    """The machine's boot, the namespace that the number is of, the number, and when the process began."""
    pid = os.getpid() if pid is None else pid
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{pid}/{_began_at(pid)}"


def is_elsewhere(process: str) -> bool:
    """True for a described process of another machine, or of this one before its last start."""
    parts = process.split("/")
    return len(parts) == 4 and parts[0] != describe_process().split("/")[0]


def is_surely_gone(process: str) -> bool:
    """True for a described process of this machine and namespace that does not live any more. Of any other nothing is
    known: False.
    """
    parts = process.split("/")
    if len(parts) != 4 or not parts[2].isdigit():
        return False
    try:
        mine = describe_process().split("/")
        return parts[:2] == mine[:2] and _began_at(int(parts[2])) != parts[3]
    except OSError:
        return False


def _began_at(pid: int) -> str:
    """Clock ticks since the machine's boot; empty for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The state is the first field behind the name: Z is a process that nobody has reaped yet.
    return "" if fields[0] in "ZX" else fields[19]
