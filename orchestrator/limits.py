"""What a run may spend: steps, seconds, tokens; and why it stopped."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

from contract.calls import DEFAULT_TIMEOUT_S


class StopReason(StrEnum):
    """Why a run ended."""

    ANSWERED = "answered"
    MAX_ITERATIONS = "max_iterations"
    MAX_WALL = "max_wall"
    MAX_TOKENS = "max_tokens"
    EMPTY_REPLY = "empty_reply"
    CUT_REPLY = "cut_reply"

    @property
    def is_limit(self) -> bool:
        return self in (StopReason.MAX_ITERATIONS, StopReason.MAX_WALL, StopReason.MAX_TOKENS)


@dataclass(frozen=True)
class ReActOptions:
    """Limits of a run. `max_wall_s` and `max_tokens` None: none; both are looked at between steps."""

    enable_tool_action_parsing: bool = True
    max_iterations: int = 5
    tool_timeout_s: float = DEFAULT_TIMEOUT_S
    max_wall_s: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_iterations < 1:
            raise ValueError(f"max_iterations must be at least 1, not {self.max_iterations}")
        if not self.tool_timeout_s > 0:
            raise ValueError(f"tool_timeout_s must be above 0, not {self.tool_timeout_s:g}")


@dataclass
class Spending:
    """What a run has used so far."""

    options: ReActOptions
    steps: int = 0
    tokens: int = 0
    started_at: float = field(default_factory=time.monotonic)

    def exhausted(self) -> StopReason | None:
        """The first budget that is used up, or None."""
        if self.steps >= self.options.max_iterations:
            return StopReason.MAX_ITERATIONS
        if self.options.max_wall_s is not None and time.monotonic() - self.started_at >= self.options.max_wall_s:
            return StopReason.MAX_WALL
        if self.options.max_tokens is not None and self.tokens >= self.options.max_tokens:
            return StopReason.MAX_TOKENS
        return None
