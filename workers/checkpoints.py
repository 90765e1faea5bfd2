"""Checkpoints from which a session is opened on its next host: those that the worker takes by itself, and those that a
caller asked for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from contract.errors import BrokerUnavailable, OperatorError, ToolFailure
from contract.session_locations import LocationState
from store.sessions import RecordedCheckpoint, WorkerSessionStore
from workers.host_duties import SessionRow, parse_rows
from workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

SUPERSEDED_S = 60.0
"""How long a checkpoint is kept after a newer one: somebody may just be restoring it."""
NOTE_RETRY_S = 1.0
DEFAULT_EVERY_S = 60.0
LOOK_EVERY_S = 2.0
QUIET_S = 1.0
"""A session that has been idle for so long is mostly between two steps of its model: the time at which packing is in
nobody's way.
"""
AT_ONCE = 2
"""Of a host's sessions: packing takes a processor, and calls want them."""
MAX_PAUSE_S = 600.0


class AutomaticCheckpoints:
    """Takes and forgets checkpoints that nobody has asked for. Between threads: each brings its own client of
    sandboxd.
    """

    def __init__(self, sessions: WorkerSessionStore, clock: Callable[[], float], stop: threading.Event) -> None:
        self._sessions = sessions
        self._clock = clock
        self._stop = stop
        self._superseded: deque[tuple[float, str, str]] = deque()

    def take(self, client: SandboxClient, name: str, fence: int) -> str | None:
        """Keep a session's files, and record that in its location; return the checkpoint. None if the session is not
        ours any more: then nothing is kept.

        Raises ToolFailure and SandboxUnavailable as sandboxd refuses; BrokerUnavailable when the worker ends before
        Redis has answered.
        """
        taken_at = self._clock()
        checkpoint = str(client.checkpoint(name, automatic=True)["checkpoint"])
        recorded = self._record(name, fence, checkpoint, taken_at)
        if recorded is None:
            client.delete_checkpoint(name, checkpoint)
            return None
        if recorded.previous is not None:
            self.forget_later(name, recorded.previous)
        return checkpoint

    def forget_later(self, name: str, checkpoint: str) -> None:
        """Nothing refers to it any more."""
        self._superseded.append((time.monotonic() + SUPERSEDED_S, name, checkpoint))

    def forget_superseded(self, client: SandboxClient) -> None:
        """Delete those that nobody restores any more. What cannot be deleted sandboxd deletes by its age."""
        while self._superseded and self._superseded[0][0] <= time.monotonic():
            _, name, checkpoint = self._superseded.popleft()
            try:
                client.delete_checkpoint(name, checkpoint)
            except (OperatorError, ToolFailure) as error:
                log.warning("checkpoint_not_deleted", checkpoint=checkpoint, error=str(error))

    def _record(self, name: str, fence: int, checkpoint: str, taken_at: float) -> RecordedCheckpoint | None:
        """Try until Redis answers: without a record nothing would refer to the checkpoint."""
        while True:
            try:
                return self._sessions.record_automatic(name, fence, checkpoint, taken_at)
            except BrokerUnavailable as error:
                log.warning("checkpoint_not_noted", checkpoint=checkpoint, error=str(error))
                if self._stop.wait(NOTE_RETRY_S):
                    # It may have been recorded: then it is all that the session has.
                    raise


class RecordingSandboxClient(SandboxClient):
    """A client of sandboxd for calls: a checkpoint that a caller asks for is also recorded in its session's location,
    and never deleted by us.
    """

    def __init__(self, socket_path: Path | str, sessions: WorkerSessionStore, clock: Callable[[], float]) -> None:
        super().__init__(socket_path)
        self._sessions = sessions
        self._clock = clock

    def checkpoint(self, name: str, *, automatic: bool = False) -> dict[str, Any]:
        taken_at = self._clock()
        saved = super().checkpoint(name, automatic=automatic)
        try:
            self._sessions.record_requested(name, str(saved["checkpoint"]), taken_at)
        except BrokerUnavailable as error:
            # The checkpoint is there: only what a lost host would cost is more than need be.
            log.warning("checkpoint_not_noted", checkpoint=saved["checkpoint"], error=str(error))
        return saved


@dataclass
class WatchedSession:
    """A session as the last looks saw it, in monotonic seconds. `changed_at`: when its files were first seen changed,
    None while they are kept.
    """

    kept_at: float = float("-inf")
    changed_at: float | None = None
    checkpoint: str = ""
    """The last one taken of it."""
    failures: int = 0
    retry_at: float = field(default=float("-inf"))

    def is_due(self, row: SessionRow, now: float, every_s: float) -> bool:
        """Whether its files should be kept now: when it is quiet; after `every_s` in any pause between calls; after
        three times that beside them.
        """
        if self.changed_at is None or now < self.kept_at + every_s or now < self.retry_at:
            return False
        waited_s = now - self.changed_at
        if row.calls:
            return waited_s >= 3 * every_s
        return row.idle_s >= QUIET_S or waited_s >= every_s


class CheckpointMonitor:
    """Checkpoints what has changed, at most every `every_s` seconds a session, a few sessions at a time, so that the
    loss of a host costs little.
    """

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
        self._watched: dict[str, WatchedSession] = {}

    def look(self, client: SandboxClient) -> int:
        """One round: keep what is due; gives how many sessions were kept. Raises OperatorError."""
        rows = {row.name: row for row in parse_rows(client.sessions())}
        now = time.monotonic()
        ended = {
            name: watched.checkpoint
            for name, watched in self._watched.items()
            if watched.checkpoint and name not in rows
        }
        self._watched = {name: self._watched.get(name, WatchedSession()) for name in rows}
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
        """`ended`: sessions that sandboxd has no more, with their last checkpoints. What goes on elsewhere needs its
        own; closed and expired ones do not.
        """
        locations = self._sessions.find(ended) if ended else {}
        for name, checkpoint in ended.items():
            location = locations.get(name)
            if location is None or (location.queue == self._sessions.queue and location.state is LocationState.OPEN):
                self._checkpoints.forget_later(name, checkpoint)
