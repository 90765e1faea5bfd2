"""What a run may spend: steps, seconds, tokens, money, malformed replies; and why it stopped."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from contract.calls import DEFAULT_TIMEOUT_S
from orchestrator.dialects.model import Usage
from orchestrator.models.capabilities import Capabilities
from orchestrator.settings import OrchestratorSettings


class StopReason(StrEnum):
    """Why a run ended."""

    ANSWERED = "answered"
    MAX_ITERATIONS = "max_iterations"
    MAX_WALL = "max_wall"
    MAX_TOKENS = "max_tokens"
    MAX_COST = "max_cost"
    MALFORMED_REPLY = "malformed_reply"
    EMPTY_REPLY = "empty_reply"
    CUT_REPLY = "cut_reply"

    @property
    def is_limit(self) -> bool:
        return self in (StopReason.MAX_ITERATIONS, StopReason.MAX_WALL, StopReason.MAX_TOKENS, StopReason.MAX_COST)


@dataclass(frozen=True)
class Prices:
    """What a million tokens cost, in the currency that `max_cost` is in."""

    prompt_per_million: float
    completion_per_million: float

    def cost(self, usage: Usage) -> float:
        """What `usage` costs."""
        return (
            usage.prompt_tokens * self.prompt_per_million + usage.completion_tokens * self.completion_per_million
        ) / 1e6


@dataclass(frozen=True)
class ReActOptions:
    """Limits of a run; None: no such limit.

    `tool_timeout_s`: a call's, where neither it nor its tool says otherwise; whoever runs the calls (`ToolClient.run`,
    `LocalTools.run`) keeps it. `max_wall_s` ends what is running; tokens and cost are looked at between steps, and
    estimated for a server that does not count. `max_cost` needs `prices`. `max_malformed_replies`: so many replies in a
    row may be nothing but malformed calls. `max_parallel_calls`: read-only calls that the model asked for at once.
    `max_interruptions`: so often may one reply break off and be asked for again. `context_tokens`: the model's window;
    older results are shortened to stay below it.
    """

    enable_tool_action_parsing: bool = True
    max_iterations: int = 5
    tool_timeout_s: float = DEFAULT_TIMEOUT_S
    max_wall_s: float | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    prices: Prices | None = None
    max_malformed_replies: int = 3
    max_parallel_calls: int = 8
    max_interruptions: int = 2
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_iterations", "max_malformed_replies", "max_parallel_calls"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("tool_timeout_s", "max_wall_s", "max_tokens", "max_cost", "context_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value:g}")
        if self.max_interruptions < 0:
            raise ValueError(f"max_interruptions must be at least 0, not {self.max_interruptions}")
        if self.max_cost is not None and self.prices is None:
            raise ValueError("max_cost needs prices: give ReActOptions(prices=Prices(...)), too")


@dataclass
class Spending:
    """What a run has used so far. `usage`: what the server counted; `uncounted`: the estimate for replies that it did
    not count; `by_tools` gives what tools in workers had of the run's model. Budgets go by all three."""

    options: ReActOptions
    steps: int = 0
    usage: Usage = field(default_factory=Usage)
    uncounted: Usage = field(default_factory=Usage)
    by_tools: Callable[[], Usage] = Usage
    malformed_replies: int = 0
    """In a row, up to now."""
    started_at: float = field(default_factory=time.monotonic)

    @property
    def counted(self) -> Usage:
        """What the server counted, the tools' share included."""
        return self.usage + self.by_tools()

    @property
    def cost(self) -> float | None:
        """In the currency of the prices; None without prices."""
        return self.options.prices.cost(self.counted + self.uncounted) if self.options.prices is not None else None

    def charge(self, usage: Usage, estimate: Usage) -> bool:
        """Add the tokens of one reply: `estimate` counts when the server has not. True when a budget goes by an
        estimate from now on.
        """
        if usage != Usage():
            self.usage += usage
            return False
        is_first = self.uncounted == Usage()
        self.uncounted += estimate
        return is_first and (self.options.max_tokens, self.options.max_cost) != (None, None)

    def exhausted(self) -> StopReason | None:
        """The first budget that is used up, or None."""
        options = self.options
        if self.steps >= options.max_iterations:
            return StopReason.MAX_ITERATIONS
        if options.max_wall_s is not None and time.monotonic() - self.started_at >= options.max_wall_s:
            return StopReason.MAX_WALL
        spent = self.counted + self.uncounted
        if options.max_tokens is not None and spent.prompt_tokens + spent.completion_tokens >= options.max_tokens:
            return StopReason.MAX_TOKENS
        if options.max_cost is not None and self.cost is not None and self.cost >= options.max_cost:
            return StopReason.MAX_COST
        return None


def with_window(options: ReActOptions, settings: OrchestratorSettings, known: Capabilities | None) -> ReActOptions:
    """The options with the model's context window, where they do not name one: what the settings say, else what the
    server told.
    """
    told = known.context_window if known is not None else None
    return replace(options, context_tokens=options.context_tokens or settings.model_context_tokens or told)
