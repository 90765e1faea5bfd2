"""What `toolcrew run` keeps of a session when the run has ended. The answer is never lost by it: what cannot be kept is
told beside it.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from contract.errors import ConfigError, OperatorError, ToolFailure
from orchestrator.dispatch.sessions import Checkpoint, Session
from orchestrator.settings import load_settings


class Keeping:
    """A copy of the workspace in a folder here, a checkpoint, both, or neither. `failure`: why one of them was not
    kept.
    """

    def __init__(self, folder: Path | None, wants_checkpoint: bool) -> None:
        self._folder = folder
        self._wants_checkpoint = wants_checkpoint
        self._skipped: list[str] = []
        self._checkpoint: Checkpoint | None = None
        self.failure: ToolFailure | OperatorError | None = None

    async def keep(self, session: Session) -> None:
        """Tries both, whatever becomes of the other."""
        for work in (self._keep_checkpoint, self._keep_copy):
            try:
                await work(session)
            except (ToolFailure, OperatorError) as failure:
                self.failure = failure

    async def _keep_checkpoint(self, session: Session) -> None:
        if self._wants_checkpoint:
            self._checkpoint = await session.checkpoint()

    async def _keep_copy(self, session: Session) -> None:
        if self._folder is None:
            return
        try:
            self._skipped = await session.export(self._folder)
        except OSError as error:
            raise ConfigError(
                f"/workspace cannot be copied to {self._folder} ({error}): give another folder"
            ) from error

    def lines(self) -> list[str]:
        """For people."""
        kept, lines = self._checkpoint, []
        if kept is not None:
            lines.append(f"checkpoint {kept.id} ({kept.bytes} bytes)")
        if self._skipped:
            lines.append(f"not copied, as they lead out or are no files: {', '.join(self._skipped)}")
        if self.failure is not None:
            lines.append(f"toolcrew: the run has ended, and not all that was asked for was kept: {self.failure}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """For the command's object."""
        found: dict[str, Any] = {} if self._checkpoint is None else {"checkpoint": asdict(self._checkpoint)}
        if self._skipped:
            found["not_copied"] = self._skipped
        if self.failure is not None:
            found["error"] = {"code": self.failure.code.value, "message": str(self.failure)}
        return found


def check_store() -> None:
    """Raises ConfigError when a checkpoint would go with the stack of this command."""
    settings = load_settings()
    if settings.redis_url is None and settings.workspace_store is None:
        raise ConfigError(
            "a checkpoint would go with the stack of this command: set TOOLCREW_WORKSPACE_STORE to a folder that keeps "
            "it, or TOOLCREW_REDIS_URL to a pool"
        )
