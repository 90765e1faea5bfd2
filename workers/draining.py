"""Drain of a host: save a checkpoint of each session, release the session for other hosts, then end the worker.

Invariant: a session is released only after its last change is in a checkpoint, except when the drain has passed its
time limit or may lose files.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from toolcrew.contract.errors import BrokerUnavailable, OperatorError, SandboxUnavailable, ToolFailure
from toolcrew.contract.plurals import count
from toolcrew.contract.session_locations import LocationState, SessionLocation
from toolcrew.store.sessions import WorkerSessionStore
from toolcrew.workers.checkpoints import AutomaticCheckpoints
from toolcrew.workers.host_duties import SandboxdSession, parse_rows
from toolcrew.workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

AT_ONCE = 4
CHECK_INTERVAL_S = 0.5
HOLD_S = 60.0
"""Seconds that calls of a session may wait during its checkpoint.

Afterwards another host may open the session from an earlier checkpoint.
"""
QUIET_WAIT_S = 5.0
"""Seconds in which the calls of a held session must end. Otherwise the hold ends, and the drain tries again later."""
BUSY_WAIT_S = 3.0
"""Seconds to wait for a session that always has a running call. Afterwards new calls of the session wait."""
RETRY_S = 5.0
MAX_RETRY_S = 60.0
"""Longest pause between two holds of a session.

A failed hold makes the session's other calls wait, so each pause is longer than the one before.
"""
POLL_S = 0.05


class HostDrain:
    """Moves this host's sessions away.

    `find_at_work` returns the sessions with a call that left the queue and has not ended. With `is_lossy`, no other
    host can read this host's checkpoints, so a session moves without its files. The result of the session's next call
    reports the loss.
    """

    def __init__(
        self,
        open_client: Callable[[], SandboxClient],
        sessions: WorkerSessionStore,
        checkpoints: AutomaticCheckpoints,
        find_at_work: Callable[[], set[str]],
        stop: threading.Event,
    ) -> None:
        self._open_client = open_client
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._find_at_work = find_at_work
        self._stop = stop
        self._since: dict[str, float] = {}
        self._retry_at: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._refusals: dict[str, str] = {}
        self._moving_fences: dict[str, int] = {}
        self.remaining_count = 0
        """Number of sessions that are still on this host."""

    @property
    def problem(self) -> str:
        """Message for the operator: the number of remaining sessions, and one session that cannot be saved."""
        message = f"{count(self.remaining_count, 'session')} left"
        if not self._refusals:
            return message
        name, reason = next(iter(self._refusals.items()))
        return f"{message}; {len(self._refusals)} cannot be saved, for example {name.partition(':')[2]}: {reason}"

    def finish(self, limit_s: float, leave: Callable[[], bool], *, is_lossy: bool) -> bool:
        """Move all sessions, call `leave`, then move the sessions that were opened before `leave` took effect.

        Return False when the worker ends before the drain is complete. After `leave` this host receives no calls.
        """
        return self.run(limit_s, is_lossy=is_lossy) and leave() and self.run(limit_s, is_lossy=is_lossy)

    def run(self, limit_s: float, *, is_lossy: bool) -> bool:
        """Move all sessions. After `limit_s` seconds the remaining sessions move with their last checkpoint.

        Return False when the worker ends first.
        """
        until = time.monotonic() + limit_s
        while not self._stop.is_set():
            try:
                if not self._round(is_lossy=is_lossy, is_late=time.monotonic() >= until):
                    return True
            except (OperatorError, ToolFailure) as error:
                log.warning("drain_delayed", error=str(error))
            self._stop.wait(CHECK_INTERVAL_S)
        return False

    def _round(self, *, is_lossy: bool, is_late: bool) -> int:
        """Move the sessions that can move now. Return the number of remaining sessions."""
        try:
            with self._open_client() as client:
                rows = {row.name: row for row in parse_rows(client.sessions())}
        except SandboxUnavailable as error:
            if not is_late:
                raise
            # sandboxd does not answer, so no process can save these sessions. The next call of each session finds that
            # this worker has ended.
            log.error("drained_without_sandboxd", error=str(error))
            return 0
        locations = {
            name: location for name, location in self._sessions.find(rows).items() if self._may_move(name, location)
        }
        self.remaining_count = len(locations)
        now = time.monotonic()
        names = [name for name in locations if is_late or now >= self._retry_at.get(name, now)]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="drain") as threads:
            moved = threads.map(
                lambda name: self._try(rows[name], locations[name], is_lossy=is_lossy, is_late=is_late), names
            )
            self.remaining_count -= sum(moved)
        # A session that is being opened has no row yet.
        return self.remaining_count or len(self._find_at_work())

    def _may_move(self, name: str, location: SessionLocation) -> bool:
        """Return whether this drain may move the session. Return False for a session that another process is moving."""
        return location.queue == self._sessions.queue and (
            location.state is LocationState.OPEN or self._moving_fences.get(name) == location.fence
        )

    def _try(self, row: SandboxdSession, location: SessionLocation, *, is_lossy: bool, is_late: bool) -> bool:
        """Try to move the session. Return whether it has left this host."""
        name = row.name
        since = self._since.setdefault(name, time.monotonic())
        if name in self._find_at_work() and not is_late and time.monotonic() < since + BUSY_WAIT_S:
            return False
        try:
            with self._open_client() as client:
                is_moved = self._move(client, row, location, is_lossy=is_lossy, is_late=is_late)
        except (OperatorError, ToolFailure) as error:
            self._refusals[name] = str(error)
            log.warning("session_not_moved", session=row.session, error=str(error))
            is_moved = False
        if not is_moved:
            self._retry_at[name] = time.monotonic() + min(MAX_RETRY_S, RETRY_S * 2 ** self._failures[name])
            self._failures[name] += 1
            return False
        self._refusals.pop(name, None)
        return True

    def _move(
        self, client: SandboxClient, row: SandboxdSession, location: SessionLocation, *, is_lossy: bool, is_late: bool
    ) -> bool:
        """Save a checkpoint, hold the session (its calls wait), save the changes since the checkpoint, and release the
        session.

        The first checkpoint makes the time short in which calls wait.
        """
        name, needs_checkpoint = row.name, not is_lossy and not is_late
        if (
            needs_checkpoint
            and (row.changed or not location.checkpoint)
            and not self._checkpoints.take(client, name, location.fence)
        ):
            return False
        fence = self._hold(name, location)
        if fence is None:
            return False
        try:
            if not self._await_quiet(name) and not is_late:
                self._sessions.unhold(name, fence)
                return False
            if needs_checkpoint and self._has_changed(client, name):
                self._checkpoints.take(client, name, fence)
        except BrokerUnavailable:
            # Redis may have executed the request. The next round reads the session's state again.
            raise
        except (OperatorError, ToolFailure):
            self._sessions.unhold(name, fence)
            raise
        if self._sessions.release(name, fence):
            log.info("session_moved", session=row.session, with_checkpoint=needs_checkpoint)
        client.close(name)
        return True

    def _hold(self, name: str, location: SessionLocation) -> int | None:
        if location.state is LocationState.MOVING:
            return location.fence
        # Store the fence (the number of this hold) before the request: if the reply is lost, the next round recognizes
        # the hold as its own.
        self._moving_fences[name] = location.fence + 1
        return self._sessions.hold(name, location.fence, HOLD_S)

    def _await_quiet(self, name: str) -> bool:
        """Wait for the calls that left the queue before the hold. Return whether they have ended."""
        until = time.monotonic() + QUIET_WAIT_S
        while name in self._find_at_work():
            if time.monotonic() >= until or self._stop.wait(POLL_S):
                return False
        return True

    def _has_changed(self, client: SandboxClient, name: str) -> bool:
        return any(row.changed for row in parse_rows(client.sessions()) if row.name == name)
