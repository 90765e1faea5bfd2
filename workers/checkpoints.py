"""Checkpoints from which another host can open a session. Some are automatic; callers request others.

Invariant: a checkpoint is recorded in the session's location (its record in Redis of the host that serves it) only
while this host serves the session. The fence, a number that each opening increases, proves this. An automatic
checkpoint without a record is deleted.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from toolcrew.contract.errors import BrokerUnavailable, OperatorError, ToolFailure
from toolcrew.contract.session_locations import LocationState
from toolcrew.store.sessions import RecordedCheckpoint, WorkerSessionStore
from toolcrew.workers.host_duties import SandboxdSession, parse_rows
from toolcrew.workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

SUPERSEDED_S = 60.0
"""Seconds that a checkpoint is kept after a newer one: another host may be restoring it."""
RECORD_RETRY_S = 1.0
DEFAULT_EVERY_S = 60.0
CHECK_INTERVAL_S = 2.0
QUIET_S = 1.0
"""Idle seconds after which a session is usually between two steps of its model, so that a checkpoint disturbs no call.
"""
AT_ONCE = 2
"""Maximum number of checkpoints of a host at the same time. Each uses a processor that calls need."""
MAX_PAUSE_S = 600.0
ROUND_S = 30.0
"""Maximum time in seconds that a round waits for its saves."""


def tenant_of(name: str) -> str:
    """Return the tenant in the name of a session."""
    return name.partition(":")[0]


class AutomaticCheckpoints:
    """Takes and deletes automatic checkpoints.

    Threads may share an instance; each thread passes its own client of sandboxd.
    """

    def __init__(self, sessions: WorkerSessionStore, clock: Callable[[], float], stop: threading.Event) -> None:
        self._sessions = sessions
        self._clock = clock
        self._stop = stop
        self._superseded: deque[tuple[float, str, str]] = deque()

    def take(self, client: SandboxClient, name: str, fence: int) -> str | None:
        """Save a checkpoint of a session and record it in the session's location. Return the checkpoint's id.

        Return None, and keep nothing, if the session no longer belongs to this host. Raises ToolFailure and
        SandboxUnavailable from sandboxd. Raises BrokerUnavailable: the worker ends before Redis has answered.
        """
        # Read the clock before the request: changes after this time may be missing from the checkpoint.
        checkpoint_at = self._clock()
        saved = client.checkpoint(name, automatic=True)
        checkpoint = str(saved["checkpoint"])
        recorded = self._record(name, fence, checkpoint, checkpoint_at, int(saved["bytes"]))
        if recorded is None:
            client.delete_checkpoint(name, checkpoint)
            return None
        if recorded.previous is not None:
            self.forget_later(name, recorded.previous)
        return checkpoint

    def forget_later(self, name: str, checkpoint: str) -> None:
        """Delete a checkpoint that no session refers to, after SUPERSEDED_S seconds."""
        self._superseded.append((time.monotonic() + SUPERSEDED_S, name, checkpoint))

    def forget_superseded(self, client: SandboxClient) -> None:
        """Delete the checkpoints that are due. If this fails, sandboxd deletes the checkpoints later, by their age."""
        while self._superseded and self._superseded[0][0] <= time.monotonic():
            _, name, checkpoint = self._superseded.popleft()
            try:
                client.delete_checkpoint(name, checkpoint)
                self._sessions.count_deleted(name, checkpoint)
            except BrokerUnavailable:
                # The bytes of the deleted checkpoint must still be subtracted, so the next round tries again.
                self.forget_later(name, checkpoint)
                return
            except (OperatorError, ToolFailure) as error:
                log.warning("checkpoint_not_deleted", checkpoint=checkpoint, error=str(error))

    def _record(
        self, name: str, fence: int, checkpoint: str, checkpoint_at: float, stored_bytes: int
    ) -> RecordedCheckpoint | None:
        """Record the checkpoint. Retry until Redis answers: without a record nothing refers to the checkpoint."""
        while True:
            try:
                return self._sessions.record_automatic(name, fence, checkpoint, checkpoint_at, stored_bytes)
            except BrokerUnavailable as error:
                log.warning("checkpoint_not_recorded", checkpoint=checkpoint, error=str(error))
                if self._stop.wait(RECORD_RETRY_S):
                    # Redis may have recorded the checkpoint. This checkpoint may then be the session's only one, so
                    # keep it.
                    raise


class RecordingSandboxClient(SandboxClient):
    """The sandboxd client of calls. It stores the id of each requested checkpoint in the session's location in Redis.

    Another host can then restore the session from this checkpoint. The client never deletes such a checkpoint.
    """

    def __init__(self, socket_path: Path | str, sessions: WorkerSessionStore, clock: Callable[[], float]) -> None:
        super().__init__(socket_path)
        self._sessions = sessions
        self._clock = clock

    def checkpoint(self, name: str, *, automatic: bool = False) -> dict[str, Any]:
        checkpoint_at = self._clock()
        saved = super().checkpoint(name, automatic=automatic)
        try:
            self._sessions.record_requested(name, str(saved["checkpoint"]), checkpoint_at)
        except BrokerUnavailable as error:
            # The checkpoint exists, so the call succeeds. If the host is lost, the session continues from an older
            # checkpoint.
            log.warning("checkpoint_not_recorded", checkpoint=saved["checkpoint"], error=str(error))
        return saved


@dataclass
class WatchedSession:
    """State of a session at the last rounds of the monitor. Times are in monotonic seconds.

    `changed_at` is the time of the first unsaved change; None when all files are saved.
    """

    saved_at: float = float("-inf")
    changed_at: float | None = None
    checkpoint: str = ""
    """The session's last checkpoint."""
    failures: int = 0
    retry_at: float = field(default=float("-inf"))

    def is_due(self, row: SandboxdSession, now: float, every_s: float) -> bool:
        """Return whether the session's files should be saved now.

        - A quiet session is due at once.
        - A session without running calls is due after `every_s`.
        - A session with running calls is due after three times `every_s`.
        """
        if self.changed_at is None or now < self.saved_at + every_s or now < self.retry_at:
            return False
        waited_s = now - self.changed_at
        if row.calls:
            return waited_s >= 3 * every_s
        return row.idle_s >= QUIET_S or waited_s >= every_s


class CheckpointMonitor:
    """Saves changed sessions, so that few changes are lost with a host.

    A session is saved at most once per `every_s` seconds. At most AT_ONCE sessions are saved at the same time.
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
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="checkpoint")
        self._saving: dict[str, Future[bool]] = {}

    def run_round(self, client: SandboxClient) -> int:
        """Run one round: save the sessions that are due. Return the number of saved sessions. Raises OperatorError."""
        rows = {row.name: row for row in parse_rows(client.sessions())}
        now = time.monotonic()
        ended = {
            name: watched.checkpoint
            for name, watched in self._watched.items()
            if watched.checkpoint and name not in rows
        }
        self._watched = {name: self._watched.get(name, WatchedSession()) for name in rows}
        self._delete_of_ended(ended)
        for name, row in rows.items():
            watched = self._watched[name]
            watched.changed_at = (watched.changed_at or now) if row.changed else None
        due_names = [name for name, row in rows.items() if self._watched[name].is_due(row, now, self._every_s)]
        # The session that has waited longest is first.
        due_names.sort(key=lambda name: self._watched[name].changed_at or now)
        due_names = [name for name in due_names if name not in self._saving]
        saved_count = self._save_all(due_names, len({tenant_of(name) for name in rows}))
        self._checkpoints.forget_superseded(client)
        return saved_count

    def _save_all(self, names: Sequence[str], tenants: int) -> int:
        """Save sessions, and return how many were saved. Saves that are not complete after ROUND_S continue during the
        next rounds. `tenants`: number of tenants on this host; with several, one tenant never takes all threads.
        """
        locations = self._sessions.find(names) if names else {}
        waiting = [name for name in names if name in locations and locations[name].queue == self._sessions.queue]
        share, until, saved = (AT_ONCE - 1 if tenants > 1 else AT_ONCE), time.monotonic() + ROUND_S, 0
        while True:
            while (name := self._choose_next(waiting, share)) is not None:
                waiting.remove(name)
                self._saving[name] = self._threads.submit(self._save, name, locations[name].fence)
            if not self._saving:
                return saved
            done, _ = wait(self._saving.values(), max(0.0, until - time.monotonic()), FIRST_COMPLETED)
            for name in [name for name, saving in self._saving.items() if saving in done]:
                saved += self._saving.pop(name).result()
            if not done:
                return saved

    def _choose_next(self, waiting: Sequence[str], share: int) -> str | None:
        """Return the first session that may be saved now: a thread is free, and its tenant has fewer saves than
        `share`.
        """
        if len(self._saving) >= AT_ONCE:
            return None
        running = Counter(tenant_of(name) for name in self._saving)
        return next((name for name in waiting if running[tenant_of(name)] < share), None)

    def _save(self, name: str, fence: int) -> bool:
        if self._stop.is_set():
            return False
        watched = self._watched.get(name) or WatchedSession()
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
            log.warning(
                "session_checkpoint_failed", session=name.partition(":")[2], error=str(error), retry_in_s=pause_s
            )
            return False
        watched.saved_at, watched.failures, watched.checkpoint = time.monotonic(), 0, checkpoint or ""
        return checkpoint is not None

    def _delete_of_ended(self, ended: Mapping[str, str]) -> None:
        """Delete the last checkpoints of closed and expired sessions later.

        `ended` maps sessions that sandboxd no longer has to these checkpoints. A session that continues on another
        host still needs its checkpoint.
        """
        locations = self._sessions.find(ended) if ended else {}
        for name, checkpoint in ended.items():
            location = locations.get(name)
            if location is None or (location.queue == self._sessions.queue and location.state is LocationState.OPEN):
                self._checkpoints.forget_later(name, checkpoint)
