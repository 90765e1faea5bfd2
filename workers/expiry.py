"""Removes the locations of sessions whose time to live has passed, so that they do not count among their tenant's."""

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


class ExpiryWatch:
    """A thread that looks every HEARTBEAT_S seconds which sessions sandboxd has no more, until `stop` is set.

    Only one that was idle for its time to live has expired: what a sandboxd that ends or is started anew does not have may go on from its checkpoint.
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
