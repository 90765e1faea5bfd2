"""Reports every few seconds that the worker lives, and learns whether it was given up."""

import threading
from collections.abc import Callable

import structlog

from contract.clock import SKEW_TOLD_S, SharedClock
from contract.errors import BrokerUnavailable
from contract.hosts import HEARTBEAT_S, HostReport
from store.hosts import Departure, ReportResult, WorkerHostStore

log = structlog.get_logger(__name__)

RETRY_S = 0.5
LEAVE_POLL_S = 0.2


class Heartbeat:
    """A thread that reports. Redis may be away for any time: it tries again. `build`: the report as of now.

    `on_lost`: called once, with the reason, when the worker must not go on under its name; nothing is reported from then on.
    """

    def __init__(self, hosts: WorkerHostStore, build: Callable[[], HostReport], clock: SharedClock, on_lost: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._build = build
        self._clock = clock
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._turn = threading.Lock()
        self._is_over = False
        self._has_told_skew = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat_soon(self) -> None:
        """Report now, because something has changed."""
        self._wake.set()

    def stop(self, departure: Departure) -> None:
        """Send the last report, so that no process waits longer for the worker than necessary. If Redis does not answer, the report expires by itself."""
        self._stop.set()
        self._wake.set()
        try:
            self._leave(departure)
        except BrokerUnavailable as error:
            log.warning("worker_left_unsaid", error=str(error))

    def leave_drained(self, is_ending: Callable[[], bool]) -> bool:
        """Take the report away once the queue is empty: from then on nothing is sent there. False when the worker ends, or is lost, first."""
        while not is_ending() and not self._is_over:
            try:
                if self._leave("drained"):
                    return True
            except BrokerUnavailable as error:
                log.warning("worker_left_unsaid", error=str(error))
            self._stop.wait(LEAVE_POLL_S)
        return False

    def _leave(self, departure: Departure) -> bool:
        with self._turn:
            if self._is_over:
                return False
            self._is_over = self._hosts.leave(departure, self._build())
            return self._is_over

    def _run(self) -> None:
        while not self._stop.is_set() and not self._is_over:
            has_told = self._beat()
            self._wake.wait(HEARTBEAT_S if has_told else RETRY_S)
            self._wake.clear()

    def _beat(self) -> bool:
        """Whether Redis has answered."""
        try:
            with self._turn:
                if self._is_over:
                    return True
                report = self._build()
                result = self._hosts.report(report)
                self._is_over = result is not ReportResult.ACCEPTED
        except BrokerUnavailable as error:
            log.warning("worker_not_reported", error=str(error))
            return False
        self._tell_skew()
        if self._is_over:
            reason = "was given up for lost" if result is ReportResult.GIVEN_UP else "is another worker's by now"
            log.error("worker_lost_its_name", queue=report.queue, reason=reason)
            self._on_lost(f"{report.queue} {reason}")
        return True

    def _tell_skew(self) -> None:
        skew_s = self._clock.offset_s
        if abs(skew_s) > SKEW_TOLD_S and not self._has_told_skew:
            self._has_told_skew = True
            log.warning("clock_is_wrong", behind_s=round(skew_s, 1), remedy="set this host's clock, or have it kept by NTP")
