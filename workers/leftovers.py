"""Closes what sandboxd still has of sessions that have ended, whoever ended them and whatever this host was doing then."""

import threading
from collections.abc import Callable

import structlog

from contract.errors import OperatorError, ToolFailure
from store.sessions import WorkerSessionStore
from workers.host_watch import parse_rows
from workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

LOOK_S = 10.0
BATCH = 500


class LeftoverSweep:
    """A thread that looks every LOOK_S seconds which of sandboxd's sessions were closed, or live on another host, until `stop` is set.

    An order to close may find nobody who obeys it: the worker that was to read it was killed, or the sandbox was still being made. Then nobody knows of
    the sandbox, and it would live until its time is up. A session without a location in Redis is left alone.
    """

    def __init__(self, open_client: Callable[[], SandboxClient], sessions: WorkerSessionStore, stop: threading.Event) -> None:
        self._open_client = open_client
        self._sessions = sessions
        self._stop = stop
        self._thread = threading.Thread(target=self._run, name="leftovers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self, client: SandboxClient) -> int:
        """One round; gives how many were closed. Raises OperatorError, ToolFailure: then the next round does the rest."""
        fences = {row.name: row.fence for row in parse_rows(client.sessions())}
        names, count = list(fences), 0
        for at in range(0, len(names), BATCH):
            for name in sorted(self._sessions.find_ended(names[at : at + BATCH])):
                # By its fence: meanwhile the session may have been opened here again.
                if client.close(name, fence=fences[name]):
                    log.warning("leftover_session_closed", session=name.partition(":")[2])
                    count += 1
        return count

    def _run(self) -> None:
        with self._open_client() as client:
            while not self._stop.wait(LOOK_S):
                try:
                    self.look(client)
                except (OperatorError, ToolFailure) as error:
                    log.warning("leftovers_not_closed", error=str(error))
