"""A worker's start: what its sandboxd has of sessions is taken over when it is this host's, and closed when it lives elsewhere by now or was closed."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import structlog

from contract.errors import BrokerUnavailable, OperatorError, ToolFailure
from contract.hosts import HostReport
from store.hosts import WorkerHostStore
from store.sessions import AdoptionResult, WorkerSessionStore
from workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

RETRY_S = 1.0
BATCH = 500


class AdoptionMonitor:
    """Takes over sessions: `begin` before the worker serves calls; then, as a thread, what could not be decided or closed at once."""

    def __init__(
        self, sessions: WorkerSessionStore, hosts: WorkerHostStore, ended: Sequence[HostReport], open_client: Callable[[], SandboxClient]
    ) -> None:
        """`ended`: reports of workers of this host that have ended and whose reports have not expired."""
        self._sessions = sessions
        self._hosts = hosts
        self._ended = ended
        self._open_client = open_client
        self._held: list[str] = []
        self._stale: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adoption", daemon=True)

    def begin(self, names: Iterable[str]) -> Counter[AdoptionResult]:
        """Decide about all sessions that sandboxd has (`names`); return how many were decided how. Raises BrokerUnavailable."""
        counts = self._adopt(list(names))
        # Only now: when a host is lost, orchestrators move its sessions away.
        for report in self._ended:
            self._hosts.dismiss(report)
        if counts:
            log.info("sessions_adopted", **{str(result): count for result, count in counts.items()})
        return counts

    def start(self) -> None:
        if self._held or self._stale:
            self._thread.start()

    def stop(self) -> None:
        """Returns at once."""
        self._stop.set()

    def _adopt(self, names: list[str]) -> Counter[AdoptionResult]:
        counts: Counter[AdoptionResult] = Counter()
        held = []
        for at in range(0, len(names), BATCH):
            for name, result in self._sessions.adopt(names[at : at + BATCH], [report.queue for report in self._ended]).items():
                counts[result] += 1
                if result is AdoptionResult.HELD:
                    held.append(name)
                elif result in (AdoptionResult.ELSEWHERE, AdoptionResult.CLOSED) and name not in self._stale:
                    self._stale.append(name)
        # Only when Redis has answered for all: else they are all asked about again.
        self._held = held
        return counts

    def _run(self) -> None:
        while not self._stop.is_set():
            self._close_stale()
            if not self._held and not self._stale:
                return
            self._stop.wait(RETRY_S)
            try:
                self._adopt(self._held)
            except BrokerUnavailable as error:
                log.warning("sessions_not_adopted", left=len(self._held), error=str(error))

    def _close_stale(self) -> None:
        """Another host serves them from an older or newer state, or nobody does: nobody may go on with this one."""
        stale, self._stale = self._stale, []
        with self._open_client() as client:
            for name in stale:
                if self._stop.is_set():
                    return
                try:
                    client.close(name)
                    log.info("stale_session_closed", session=name.partition(":")[2])
                except (OperatorError, ToolFailure) as error:
                    log.warning("stale_session_not_closed", error=str(error))
                    self._stale.append(name)
