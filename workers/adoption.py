"""A worker's start: what its sandboxd has of sessions is taken over when it is this host's, and closed when it lives elsewhere by now or was closed."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import redis
import structlog

from contract.errors import BrokerUnavailable, OperatorError, ToolFailure
from contract.hosts import HostReport
from workers.places import Adoption, WorkerPlaces
from workers.reporting import Incarnations
from workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

RETRY_S = 1.0
BATCH = 500


class Adopter:
    """Takes over sessions: `begin` before the worker serves calls; then, as a thread, what could not be decided or closed at once."""

    def __init__(
        self, places: WorkerPlaces, others: Incarnations, gone: Sequence[HostReport], open_client: Callable[[], SandboxClient]
    ) -> None:
        """`gone`: what is still reported of this host's workers that do not live any more."""
        self._places = places
        self._others = others
        self._gone = gone
        self._open_client = open_client
        self._held: list[str] = []
        self._stale: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adoption", daemon=True)

    def begin(self, names: Iterable[str]) -> Counter[Adoption]:
        """`names`: of all sessions that sandboxd has. Gives what was decided. Raises BrokerUnavailable."""
        try:
            counts = self._adopt(list(names))
            # Only now: whoever finds a host lost moves its sessions away.
            for report in self._gone:
                self._others.dismiss(report)
        except redis.RedisError as error:
            raise BrokerUnavailable(f"Redis did not say where this host's sessions live ({error}): see that it is up") from error
        if counts:
            log.info("sessions_adopted", **{str(adoption): count for adoption, count in counts.items()})
        return counts

    def start(self) -> None:
        if self._held or self._stale:
            self._thread.start()

    def stop(self) -> None:
        """Returns at once."""
        self._stop.set()

    def _adopt(self, names: list[str]) -> Counter[Adoption]:
        counts: Counter[Adoption] = Counter()
        held = []
        for at in range(0, len(names), BATCH):
            for name, adoption in self._places.adopt(names[at : at + BATCH], [report.queue for report in self._gone]).items():
                counts[adoption] += 1
                if adoption is Adoption.HELD:
                    held.append(name)
                elif adoption in (Adoption.ELSEWHERE, Adoption.CLOSED) and name not in self._stale:
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
            except redis.RedisError as error:
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
