"""A session that another host had: what it is told of what it lost on the way."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from contract.errors import ErrorCode, ToolFailure
from workers.sandboxd.session import FILES_LOST

MAX_FENCE = 2**53
_LOST, _DRAINED = "the host that had this session was lost", "the host that had this session was taken out of service"
_RESTORED = (
    "{why}, and the session goes on elsewhere: its files, kept outputs and the shell's folder, variables and functions are those of {checkpoint}; "
    "changes since then, background jobs and /tmp are lost"
)


@dataclass(frozen=True)
class Moved:
    """`fence`: of the session's new place, which is also the generation of its sandbox; `checkpoint_at`: when what it is restored from was
    kept, None: nobody knows; `is_planned`: its host was drained, not lost."""

    fence: int
    checkpoint_at: datetime | None = None
    is_planned: bool = False

    def news(self) -> str:
        """Of a session that was restored from a checkpoint."""
        at = self.checkpoint_at
        checkpoint = f"the checkpoint of {at.isoformat(timespec='seconds')}" if at is not None else "its last checkpoint"
        return _RESTORED.format(why=self._why(), checkpoint=checkpoint)

    def loss(self) -> str:
        """Of a session of which nothing was kept."""
        return FILES_LOST.format(f"{self._why()}, and there was no checkpoint of it: the sandbox")

    def _why(self) -> str:
        return _DRAINED if self.is_planned else _LOST


def parse_moved(header: Mapping[str, Any]) -> Moved | None:
    """What a request to open says of it; None: the session is new. Raises ToolFailure."""
    told = header.get("moved")
    if told is None:
        return None
    if not isinstance(told, dict) or not told.keys() <= {"generation", "checkpoint_at", "is_planned"}:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "'moved' must have generation and, if known, checkpoint_at and is_planned")
    fence = told.get("generation")
    if isinstance(fence, bool) or not isinstance(fence, int) or not 0 < fence <= MAX_FENCE:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"moved.generation must be a whole number of at least 1 and at most {MAX_FENCE}")
    at = told.get("checkpoint_at")
    return Moved(fence, None if at is None else _parse_instant(at), told.get("is_planned") is True)


def _parse_instant(text: object) -> datetime:
    try:
        return datetime.fromisoformat(text if isinstance(text, str) else "").astimezone(UTC)
    except (ValueError, OverflowError):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "moved.checkpoint_at must be a time as 2030-01-31T12:00:00+00:00") from None
