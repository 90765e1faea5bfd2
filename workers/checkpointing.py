"""Keeps sessions' files while they are used, so that the loss of the host costs a minute's work at most."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from contract.errors import BrokerUnavailable, OperatorError, ToolFailure
from contract.session_locations import LocationState
from store.sessions import WorkerSessionStore
from workers.checkpoints import AutomaticCheckpoints
from workers.host_watch import SessionRow, parse_rows
from workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

DEFAULT_EVERY_S = 60.0
LOOK_EVERY_S = 2.0
QUIET_S = 1.0
"""A session that has been idle for so long is mostly between two steps of its model: the time at which packing is in nobody's way."""
AT_ONCE = 2
"""Of a host's sessions: packing takes a processor, and calls want them."""
MAX_PAUSE_S = 600.0


@dataclass
class Watched:
    """A session as the last looks saw it, in monotonic seconds. `changed_at`: when its files were first seen changed, None while they are kept."""

    kept_at: float = float("-inf")
    changed_at: float | None = None
    checkpoint: str = ""
    """The last one taken of it."""
    failures: int = 0
    retry_at: float = field(default=float("-inf"))

    def is_due(self, row: SessionRow, now: float, every_s: float) -> bool:
        """Whether its files should be kept now: when it is quiet; after `every_s` in any pause between calls; after three times that beside them."""
        if self.changed_at is None or now < self.kept_at + every_s or now < self.retry_at:
            return False
        waited_s = now - self.changed_at
        if row.calls:
            return waited_s >= 3 * every_s
        return row.idle_s >= QUIET_S or waited_s >= every_s


class CheckpointMonitor:
    """A thread that checkpoints what has changed, at most every `every_s` seconds a session, a few sessions at a time."""

    def __init__(
        self,
        open_client: Callable[[], SandboxClient],
        sessions: WorkerSessionStore,
        checkpoints: AutomaticCheckpoints,
        every_s: float,
        stop: threading.Event,
    ) -> None:
        self._open_client = open_client
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._every_s = every_s
        self._stop = stop
        self._watched: dict[str, Watched] = {}
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)

    def start(self) -> None:
        if self._every_s:
            self._thread.start()

    def look(self, client: SandboxClient) -> int:
        """One round: keep what is due; gives how many sessions were kept. Raises OperatorError."""
        rows = {row.name: row for row in parse_rows(client.sessions())}
        now = time.monotonic()
        ended = {name: watched.checkpoint for name, watched in self._watched.items() if watched.checkpoint and name not in rows}
        self._watched = {name: self._watched.get(name, Watched()) for name in rows}
        self._forget_ended(ended)
        for name, row in rows.items():
            watched = self._watched[name]
            watched.changed_at = (watched.changed_at or now) if row.changed else None
        due = [name for name, row in rows.items() if self._watched[name].is_due(row, now, self._every_s)]
        # Whoever has waited longest goes first.
        due.sort(key=lambda name: self._watched[name].changed_at or now)
        kept = self._keep_all(due) if due else 0
        self._checkpoints.forget_superseded(client)
        return kept

    def _run(self) -> None:
        with self._open_client() as client:
            while not self._stop.wait(min(LOOK_EVERY_S, self._every_s)):
                try:
                    self.look(client)
                except (OperatorError, ToolFailure) as error:
                    log.warning("checkpoints_not_taken", error=str(error))

    def _keep_all(self, names: Sequence[str]) -> int:
        locations = self._sessions.find(names)
        ours = [name for name in names if name in locations and locations[name].queue == self._sessions.queue]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="checkpoint") as threads:
            return sum(threads.map(lambda name: self._keep(name, locations[name].fence), ours))

    def _keep(self, name: str, fence: int) -> bool:
        if self._stop.is_set():
            return False
        watched = self._watched[name]
        try:
            with self._open_client() as client:
                checkpoint = self._checkpoints.take(client, name, fence)
        except BrokerUnavailable:
            # The worker ends before Redis has answered.
            raise
        except (OperatorError, ToolFailure) as error:
            watched.failures += 1
            pause_s = min(MAX_PAUSE_S, self._every_s * 2**watched.failures)
            watched.retry_at = time.monotonic() + pause_s
            log.warning("session_not_kept", session=name.partition(":")[2], error=str(error), again_in_s=pause_s)
            return False
        watched.kept_at, watched.failures, watched.checkpoint = time.monotonic(), 0, checkpoint or ""
        return checkpoint is not None

    def _forget_ended(self, ended: Mapping[str, str]) -> None:
        """`ended`: sessions that sandboxd has no more, with their last checkpoints. What goes on elsewhere needs its own; closed and expired ones do not."""
        locations = self._sessions.find(ended) if ended else {}
        for name, checkpoint in ended.items():
            location = locations.get(name)
            if location is None or (location.queue == self._sessions.queue and location.state is LocationState.OPEN):
                self._checkpoints.forget_later(name, checkpoint)
