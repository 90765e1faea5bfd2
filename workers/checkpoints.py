"""Checkpoints from which a session is opened on its next host: those that the worker takes by itself, and those that a caller asked for."""

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from contract.errors import BrokerUnavailable, OperatorError, ToolFailure
from store.sessions import RecordedCheckpoint, WorkerSessionStore
from workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

SUPERSEDED_S = 60.0
"""How long a checkpoint is kept after a newer one: somebody may just be restoring it."""
NOTE_RETRY_S = 1.0


class AutomaticCheckpoints:
    """Takes and forgets checkpoints that nobody has asked for. Between threads: each brings its own client of sandboxd."""

    def __init__(self, sessions: WorkerSessionStore, clock: Callable[[], float], stop: threading.Event) -> None:
        self._sessions = sessions
        self._clock = clock
        self._stop = stop
        self._superseded: deque[tuple[float, str, str]] = deque()

    def take(self, client: SandboxClient, name: str, fence: int) -> str | None:
        """Keep a session's files, and record that in its location; return the checkpoint. None if the session is not ours any more: then nothing is kept.

        Raises ToolFailure and SandboxUnavailable as sandboxd refuses; BrokerUnavailable when the worker ends before Redis has answered.
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
    """A client of sandboxd for calls: a checkpoint that a caller asks for is also recorded in its session's location, and never deleted by us."""

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
