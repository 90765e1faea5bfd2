"""Two duties of a sandbox worker: remove the locations of sessions that expired here, and the sandboxes of sessions that ended elsewhere."""

import threading
import time
from collections.abc import Callable

import structlog

from contract.errors import OperatorError, ToolFailure
from contract.hosts import HEARTBEAT_S
from store.sessions import WorkerSessionStore
from workers.host_watch import SessionRow, parse_rows
from workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

LOOK_S = 10.0
BATCH = 500


class ExpiryMonitor:
    """A thread that removes the locations of expired sessions every HEARTBEAT_S seconds, until `stop` is set. So they do not count among their tenant's.

    A session has expired if sandboxd removed it after it was idle for its time to live. One that sandboxd lost otherwise may go on from its checkpoint.
    """

    def __init__(self, open_client: Callable[[], SandboxClient], sessions: WorkerSessionStore, stop: threading.Event) -> None:
        self._open_client = open_client
        self._sessions = sessions
        self._stop = stop
        self._seen: dict[str, SessionRow] = {}
        self._seen_at = time.monotonic()
        self._expired: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="expiry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self, client: SandboxClient) -> int:
        """One round; returns how many locations were removed. Raises OperatorError: then the next round does it."""
        rows = {row.name: row for row in parse_rows(client.sessions())}
        now = time.monotonic()
        passed_s = now - self._seen_at
        self._expired |= {name for name, row in self._seen.items() if name not in rows and row.idle_s + passed_s >= row.ttl_s}
        self._seen, self._seen_at = rows, now
        count = self._sessions.forget(self._expired) if self._expired else 0
        self._expired.clear()
        return count

    def _run(self) -> None:
        with self._open_client() as client:
            while not self._stop.wait(HEARTBEAT_S):
                try:
                    self.look(client)
                except (OperatorError, ToolFailure) as error:
                    log.warning("expired_sessions_not_forgotten", error=str(error))


class LeftoverMonitor:
    """A thread that closes, every LOOK_S seconds, sandboxd's sessions that were closed or live on another host, until `stop` is set.

    An order to close is lost if the worker that should read it is killed, or if the sandbox is still being made. Then the sandbox would live until its
    time to live has passed. A session without a location in Redis is left alone.
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
