"""Reports of a worker to the deployment: its process, its queue name, and its heartbeat.

Invariant: each worker process has a queue name that no other process has had, and a sandboxd has at most one worker.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from toolcrew.contract.errors import BrokerUnavailable, ConfigError
from toolcrew.contract.hosts import HEARTBEAT_S, MAX_IMAGES_PRESENT, MAX_PROBLEM_CHARS, HostReport
from toolcrew.contract.names import host_queue
from toolcrew.store.clock import SKEW_WARNING_S, SharedClock
from toolcrew.store.hosts import Departure, ReportResult, WorkerHostStore

log = structlog.get_logger(__name__)

RETRY_S = 0.5
LEAVE_POLL_S = 0.2
REPORT_TIMEOUT_S = HEARTBEAT_S + 1.5
"""Seconds without a new report after which a worker has ended or hangs."""
CHECK_INTERVAL_S = 0.25
START_TTL_S = 60
"""Seconds for which the first report is valid.

Before the heartbeat starts, the worker takes over sessions and starts its pool.
"""
_MEMINFO = Path("/proc/meminfo")


class Heartbeat:
    """Reports that the worker runs, and learns whether the deployment has declared the worker lost.

    `build` returns the current report. `on_lost` is called once with the reason when the worker must not use its name
    any more. After that no report is sent.
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
        # Serializes reports: a heartbeat that started earlier must not arrive after the last report.
        self._lock = threading.Lock()
        self._is_over = False
        self._has_logged_skew = False

    def leave(self, departure: Departure) -> None:
        """Send a last report that says that the worker has ended, so that no process waits for it longer than
        necessary.

        If Redis does not answer, the report expires.
        """
        try:
            self._leave(departure)
        except BrokerUnavailable as error:
            log.warning("worker_stop_not_reported", error=str(error))

    def leave_drained(self, is_ending: Callable[[], bool]) -> bool:
        """Remove the report when the queue is empty. After the removal no process sends calls to the queue.

        Return False when the worker ends or is declared lost before that.
        """
        while not is_ending() and not self._is_over:
            try:
                if self._leave("drained"):
                    return True
            except BrokerUnavailable as error:
                log.warning("worker_stop_not_reported", error=str(error))
            time.sleep(LEAVE_POLL_S)
        return False

    def _leave(self, departure: Departure) -> bool:
        with self._lock:
            if self._is_over:
                return False
            self._is_over = self._hosts.leave(departure, self._build())
            return self._is_over

    def beat(self) -> bool:
        """Send a report. Return True when the worker has left or was declared lost; then no further report is sent.
        Raises BrokerUnavailable.
        """
        with self._lock:
            if self._is_over:
                return True
            report = self._build()
            result = self._hosts.report(report)
            self._is_over = result is not ReportResult.ACCEPTED
        self._log_skew()
        if self._is_over:
            reason = "was declared lost" if result is ReportResult.GIVEN_UP else "now belongs to another worker"
            log.error("worker_name_lost", queue=report.queue, reason=reason)
            self._on_lost(f"{report.queue} {reason}")
        return self._is_over

    def _log_skew(self) -> None:
        skew_s = self._clock.offset_s
        if abs(skew_s) > SKEW_WARNING_S and not self._has_logged_skew:
            self._has_logged_skew = True
            log.warning(
                "clock_is_wrong",
                behind_s=round(skew_s, 1),
                remedy="set the clock of this host, or synchronize the clock with NTP",
            )


@dataclass(frozen=True)
class TakenQueueName:
    """A queue name that this worker has taken.

    `ended` lists the reports of ended workers of this host. Their sessions now belong to this worker.
    """

    queue: str
    ended: tuple[HostReport, ...]


def take_queue_name(host: str, boot: str, hosts: WorkerHostStore, build: Callable[[str], HostReport]) -> TakenQueueName:
    """Take the first free queue name of this boot: `host.<host>.<boot>`, then the name with `.2`, `.3`.

    Send the first report under this name. Each process needs its own name: a killed worker loses the message that Redis
    has just delivered to it, and a call that was sent to a name without reports is recognized as lost and sent again.
    `build` returns the first report for a queue name.

    Raises ConfigError: another worker serves the sandboxd, or another machine uses the host's name. Raises
    BrokerUnavailable.
    """
    ended = _find_ended(hosts, host, host_queue(host, boot))
    queue = _take_name(host, boot, hosts, build)
    # Read the reports again after our own report. Of two workers that start together, each now sees the other's report,
    # and the one with the later name ends.
    rival = _find_elder(hosts, host, queue)
    if rival is not None:
        # Withdraw the name again, so that no process sends calls to a worker that ends now.
        hosts.leave("drained", build(queue))
        raise _second(rival)
    return TakenQueueName(queue, ended)


def _take_name(host: str, boot: str, hosts: WorkerHostStore, build: Callable[[str], HostReport]) -> str:
    for number in itertools.count(1):
        queue = host_queue(host, boot if number == 1 else f"{boot}.{number}")
        if hosts.report(build(queue), is_first=True, ttl_s=START_TTL_S) is ReportResult.ACCEPTED:
            return queue
    raise AssertionError


def _find_ended(hosts: WorkerHostStore, host: str, base: str) -> tuple[HostReport, ...]:
    """Return the reports of workers that have ended.

    Raises ConfigError: a worker of this boot, or a worker of another machine, still reports. `base` is the first name
    of this boot.
    """
    ended = []
    for report in hosts.reports(host):
        if not report.worker or has_surely_ended(report.process):
            ended.append(report)
        elif _is_of_boot(report, base):
            if not _has_fallen_silent(hosts, report):
                raise _second(report)
            ended.append(report)
        elif is_elsewhere(report.process) and not _has_fallen_silent(hosts, report):
            raise ConfigError(
                f"a worker of another machine reports as host '{report.host}', as {report.queue}: set a different "
                "TOOLCREW_HOST on each machine"
            )
    return tuple(ended)


def _has_fallen_silent(hosts: WorkerHostStore, report: HostReport) -> bool:
    """Wait up to REPORT_TIMEOUT_S. Return whether no new report of that worker arrived."""
    log.info("another_worker_reported", queue=report.queue, worker=report.worker, waits_s=REPORT_TIMEOUT_S)
    until = time.monotonic() + REPORT_TIMEOUT_S
    while time.monotonic() < until:
        time.sleep(CHECK_INTERVAL_S)
        stored = hosts.find(report.queue)
        if stored is None or not stored.worker:
            return True
        if stored.reported_at != report.reported_at:
            return False
    return True


def _find_elder(hosts: WorkerHostStore, host: str, queue: str) -> HostReport | None:
    """Return the report of a worker of the same boot with an earlier name.

    If two workers start together, the one with the later name ends.
    """
    own_number = _number(queue)
    base = ".".join(queue.split(".")[:3])
    rivals = [
        report
        for report in hosts.reports(host)
        if report.worker and _is_of_boot(report, base) and _number(report.queue) < own_number
    ]
    return next(
        (report for report in rivals if not has_surely_ended(report.process) and not _has_fallen_silent(hosts, report)),
        None,
    )


def _is_of_boot(report: HostReport, base: str) -> bool:
    return report.queue == base or report.queue.startswith(f"{base}.")


def _number(queue: str) -> int:
    """Return the number of the queue name among the names of its boot."""
    parts = queue.split(".")
    return int(parts[3]) if len(parts) > 3 and parts[3].isdigit() else 1


def _second(report: HostReport) -> ConfigError:
    return ConfigError(
        f"another worker already serves this sandboxd as {report.queue}: stop that worker first. For more calls at a "
        "time, raise TOOLCREW_CONCURRENCY"
    )


def build_host_report(status: Mapping[str, Any], *, is_silent: bool, **fields: Any) -> HostReport:
    """Return the report of a worker next to a sandboxd. `fields` are the worker's own facts.

    A long `problem` is shortened.
    """
    largest = status.get("largest")
    problem = str(fields.pop("problem", "sandboxd does not answer: check its log" if is_silent else ""))
    facts: dict[str, Any] = {
        "sessions": _count(status, "sessions"),
        "max_sessions": _count(status, "max_sessions"),
        "sandboxes": _count(status, "sandboxes"),
        "max_sandboxes": _count(status, "max_sandboxes"),
        "memory_free_bytes": _count(status, "memory_free_bytes") or find_free_memory(),
        "disk_free_bytes": _count(status, "disk_free_bytes"),
        "classes": _names(status, "classes"),
        "largest": largest if isinstance(largest, Mapping) else {},
        "egress_classes": _names(status, "egress_classes"),
        "images": _names(status, "images"),
        "images_present": _names(status, "images_present")[:MAX_IMAGES_PRESENT],
        "store": read_store(status),
        "healthy": not is_silent,
        "problem": problem if len(problem) <= MAX_PROBLEM_CHARS else f"{problem[: MAX_PROBLEM_CHARS - 1]}…",
    }
    return HostReport.model_validate({"kind": "sandbox", "reported_at": 0.0, **facts, **fields})


def build_pool_report(**fields: Any) -> HostReport:
    """Return the report of a worker without sandboxes."""
    return HostReport.model_validate(
        {"kind": "web", "reported_at": 0.0, "memory_free_bytes": find_free_memory(), **fields}
    )


def read_store(status: Mapping[str, Any]) -> Literal["local", "shared"]:
    """Return where a sandboxd stores checkpoints (`local` or `shared`), by its status."""
    return "shared" if status.get("store") == "shared" else "local"


def find_free_memory() -> int:
    """Return the bytes that programs can use without swapping, as the kernel estimates them."""
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
    """Return the identity of a process: the machine's boot id, the pid namespace, the pid, and the start time."""
    pid = os.getpid() if pid is None else pid
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{pid}/{_began_at(pid)}"


def is_elsewhere(process: str) -> bool:
    """Return whether the process belongs to another machine, or to an earlier boot of this machine."""
    parts = process.split("/")
    return len(parts) == 4 and parts[0] != describe_process().split("/")[0]


def has_surely_ended(process: str) -> bool:
    """Return whether a process of this machine and namespace has ended.

    False for any other process: its state is unknown.
    """
    parts = process.split("/")
    if len(parts) != 4 or not parts[2].isdigit():
        return False
    try:
        own_parts = describe_process().split("/")
        # The start time distinguishes the process from a later process with the same pid.
        return parts[:2] == own_parts[:2] and _began_at(int(parts[2])) != parts[3]
    except OSError:
        return False


def _began_at(pid: int) -> str:
    """Return the start time in clock ticks since the machine's boot; empty for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The state is the first field after the name. Z and X are processes that have ended and are not reaped yet.
    return "" if fields[0] in "ZX" else fields[19]
