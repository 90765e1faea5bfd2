"""Limits of a run (steps, seconds, tokens, cost, malformed replies), and the reason why a run stopped."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from toolcrew.contract.calls import DEFAULT_TIMEOUT_S
from toolcrew.contract.model_endpoints import Prices
from toolcrew.contract.run_spec import MaxIterations, RunLimits, ToolTimeoutS
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.dialects.model import TokenUsage
from toolcrew.orchestrator.models.capabilities import Capabilities


class StopReason(StrEnum):
    """The reason for the end of a run."""

    ANSWERED = "answered"
    MAX_ITERATIONS = "max_iterations"
    MAX_WALL = "max_wall"
    MAX_TOKENS = "max_tokens"
    MAX_COST = "max_cost"
    MALFORMED_REPLY = "malformed_reply"
    EMPTY_REPLY = "empty_reply"
    CUT_REPLY = "cut_reply"
    CONTENT_FILTER = "content_filter"
    REFUSED = "refused"
    FAILED_REPLY = "failed_reply"
    UNKNOWN_END = "unknown_end"
    REPEATED_FAILURE = "repeated_failure"
    BUDGET_EXCEEDED = "budget_exceeded"

    @property
    def is_limit(self) -> bool:
        return self in (
            StopReason.MAX_ITERATIONS,
            StopReason.MAX_WALL,
            StopReason.MAX_TOKENS,
            StopReason.MAX_COST,
            StopReason.BUDGET_EXCEEDED,
        )


class ReActOptions(RunLimits):
    """Limits of a run. None: no limit.

    `tool_timeout_s`: the limit of a call for which neither the call nor its tool sets one; `run_call`
    (`ToolClient.run`, `LocalTools.run`) enforces it. `max_wall_s` cancels running calls. Tokens and cost are checked
    between steps and after a reply that broke off, whose tokens count. They are estimated for a server that does not
    count tokens. `max_cost` needs `prices`. `max_malformed_replies`: replies in a row that may contain only malformed
    calls. `max_parallel_calls`: concurrent read-only calls. `max_interruptions`: how often one reply may break off and
    be requested again. `context_tokens`: size of the model's context window; older results are shortened so that
    requests fit.
    """

    enable_tool_action_parsing: bool = True
    max_iterations: MaxIterations = 5
    tool_timeout_s: ToolTimeoutS = DEFAULT_TIMEOUT_S
    prices: Prices | None = None
    max_malformed_replies: int = Field(default=3, ge=1)
    max_parallel_calls: int = Field(default=8, ge=1)
    max_interruptions: int = Field(default=2, ge=0)
    context_tokens: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _can_count_cost(self) -> Self:
        if self.max_cost is not None and self.prices is None:
            raise ValueError("max_cost needs prices. Set ReActOptions(prices=Prices(...)).")
        return self


@dataclass
class Spending:
    """The resources that a run has used. All of these tokens count towards the run's budgets.

    `usage`: tokens that the server counted. `uncounted`: the estimate for replies whose tokens the server did not
    count. `by_tools` returns the usage of the run's model by tools in workers.
    """

    options: ReActOptions
    steps: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)
    uncounted: TokenUsage = field(default_factory=TokenUsage)
    by_tools: Callable[[], TokenUsage] = TokenUsage
    malformed_replies: int = 0
    """The current number of malformed replies in a row."""
    started_at: float = field(default_factory=time.monotonic)

    @property
    def counted(self) -> TokenUsage:
        """Return the tokens that the server counted, including the tokens of requests that tools made."""
        return self.usage + self.by_tools()

    @property
    def cost(self) -> float | None:
        """Return the cost in the currency of the prices; None if it is unknown. If a reply states its own cost, that
        cost is used and not the prices, because a fallback with other prices may have answered.
        """
        prices = self.options.prices
        if prices is None:
            return self.counted.cost
        parts = (self.usage, self.by_tools(), self.uncounted)
        return sum(prices.cost(usage) if usage.cost is None else usage.cost for usage in parts)

    def charge(self, usage: TokenUsage, estimate: TokenUsage) -> bool:
        """Add the tokens of one reply, or `estimate` if the server did not count.

        Returns True when this is the first estimate and a budget depends on it.
        """
        if usage != TokenUsage():
            self.usage += usage
            return False
        is_first = self.uncounted == TokenUsage()
        self.uncounted += estimate
        return is_first and (self.options.max_tokens, self.options.max_cost) != (None, None)

    def find_exhausted(self) -> StopReason | None:
        """Return the first budget that is used up, or None."""
        options = self.options
        if self.steps >= options.max_iterations:
            return StopReason.MAX_ITERATIONS
        if options.max_wall_s is not None and time.monotonic() - self.started_at >= options.max_wall_s:
            return StopReason.MAX_WALL
        return self.find_exhausted_budget()

    def find_exhausted_budget(self) -> StopReason | None:
        """Return the limit of tokens or cost that is used up, or None."""
        options, usage = self.options, self.counted + self.uncounted
        if options.max_tokens is not None and usage.prompt_tokens + usage.completion_tokens >= options.max_tokens:
            return StopReason.MAX_TOKENS
        if options.max_cost is not None and self.cost is not None and self.cost >= options.max_cost:
            return StopReason.MAX_COST
        return None


def with_window(
    options: ReActOptions, settings: OrchestratorSettings, capabilities: Capabilities | None
) -> ReActOptions:
    """Return the options with the model's context window.

    The window comes from the options, otherwise from the settings, otherwise from the server's report.
    """
    server_limit = capabilities.context_window if capabilities is not None else None
    tokens = options.context_tokens or settings.model_context_tokens or server_limit
    return options.model_copy(update={"context_tokens": tokens})
