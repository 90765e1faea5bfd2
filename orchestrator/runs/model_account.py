"""Budgets and usage of a tenant: checks the budgets before requests to a model, and counts the tokens of replies.

Invariant: a request that was sent is counted, even if its reply is cancelled or its process is killed. An estimate of
the request is counted when it is sent. At the end of the reply, the difference to the tokens of the server is added. A
reply that ends early keeps the estimate of the request and of the part that arrived.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from toolcrew.concurrency.tasks import retry_until_available
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.model_endpoints import Prices
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest, TokenUsage
from toolcrew.orchestrator.dialects.reader import read_usage
from toolcrew.orchestrator.dialects.token_estimates import CompletionEstimate, estimate_prompt
from toolcrew.store.usage import ReplySpending
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

Count = Callable[[ReplySpending], Awaitable[int]]
"""Adds amounts to the tenant's usage, and returns the time in Unix seconds at which they count."""


@dataclass(frozen=True)
class ModelAccount:
    """The account of one run. `check` raises ToolFailure(BUDGET_EXCEEDED). `count` adds to the usage. `prices` None:
    the cost is unknown and not counted.
    """

    check: Callable[[], Awaitable[None]]
    count: Count
    prices: Prices | None = None


class ReplyBill:
    """What one request and its reply cost."""

    def __init__(self, account: ModelAccount, request: ModelRequest) -> None:
        self._account = account
        self._prompt_tokens = estimate_prompt(request)
        self._estimate = CompletionEstimate()
        self._usage = TokenUsage()
        self._counted = ReplySpending()
        """The amounts that are counted so far."""
        self._counted_at = 0
        """The time at which they count; 0: none are counted."""

    async def reserve(self) -> None:
        """Count the estimate of the request. A request is counted once, even if it is sent several times."""
        if not self._counted_at:
            estimate = self._price(TokenUsage(self._prompt_tokens))
            self._counted_at = await retry_until_available(lambda: self._account.count(estimate))
            self._counted = estimate

    def add(self, chunk: Chunk) -> None:
        """Add a chunk of the reply. A server that counts during the reply sends sums, so its last count is used."""
        self._estimate.add(chunk)
        if chunk.get("usage"):
            self._usage = read_usage(chunk) or self._usage

    def remainder(self) -> ReplySpending:
        """Return what must be added, so that the reply is counted as the server counted it; an estimate if the server
        does not count. The amounts may be negative.
        """
        estimate = TokenUsage(self._prompt_tokens, self._estimate.tokens)
        return self._minus_counted(self._price(estimate if self._usage == TokenUsage() else self._usage))

    async def end_early(self, *, is_refunded: bool) -> None:
        """Count what a reply that did not end has cost: nothing if it was not sent or `is_refunded`."""
        if not self._counted_at and not self._estimate.has_begun:
            return
        try:
            # Once: this code runs in tasks that are being cancelled, and the request itself is counted already.
            await self._account.count(self._minus_counted(ReplySpending()) if is_refunded else self.remainder())
        except BrokerUnavailable as error:
            log.warning("reply_part_not_counted", error=str(error))

    def _minus_counted(self, spending: ReplySpending) -> ReplySpending:
        return spending.minus(self._counted, at=self._counted_at)

    def _price(self, usage: TokenUsage) -> ReplySpending:
        # A fallback with other prices may have answered, so the cost in the reply counts first.
        prices = self._account.prices
        cost = prices.cost(usage) if usage.cost is None and prices is not None else usage.cost
        return ReplySpending(usage, cost)
