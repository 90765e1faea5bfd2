"""Checks the budgets of a tenant before requests to a model, and counts the tokens of replies.

Invariant: a request that was sent is counted, even if its reply is cancelled or its process is killed. An estimate of
the request is counted when it is sent. At the end of the reply, the difference to the tokens of the server is added. A
reply that ends early keeps the estimate of the request and of the part that arrived.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.model_endpoints import Prices
from toolcrew.orchestrator.dialects.model import Chunk, Model, ModelRequest, TokenUsage
from toolcrew.orchestrator.dialects.reader import read_usage
from toolcrew.orchestrator.dialects.token_estimates import CompletionEstimate, estimate_prompt
from toolcrew.store.tasks import retry_until_available
from toolcrew.store.usage import ReplySpending
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

Count = Callable[[ReplySpending], Awaitable[int]]
"""Adds amounts to the tenant's usage, and returns the time in Unix seconds at which they count."""


def price_reply(chunks: Iterable[Chunk], prices: Prices | None, prompt_tokens: int = 0) -> ReplySpending:
    """Return the tokens of a reply and their cost. A server that counts during the reply sends sums, so its last count
    is used. `prompt_tokens`: the estimate of the request, for a server that does not count.
    """
    usage, estimate = TokenUsage(), CompletionEstimate()
    for chunk in chunks:
        estimate.add(chunk)
        usage = read_usage(chunk) or usage
    return _price(usage if usage != TokenUsage() else TokenUsage(prompt_tokens, estimate.tokens), prices)


def _price(usage: TokenUsage, prices: Prices | None) -> ReplySpending:
    # A fallback with other prices may have answered, so the cost in the reply counts first.
    cost = prices.cost(usage) if usage.cost is None and prices is not None else usage.cost
    return ReplySpending(usage, cost)


@dataclass
class Reservation:
    """The amounts of one request that are counted so far. `counted_at`: the time at which they count; 0: none are
    counted.
    """

    prompt_tokens: int
    prices: Prices | None
    counted: ReplySpending = field(default_factory=ReplySpending)
    counted_at: int = 0

    def remainder(self, spending: ReplySpending) -> ReplySpending:
        """Return what must be added, so that `spending` is counted. The amounts may be negative."""
        return spending.minus(self.counted, at=self.counted_at)

    def complete(self, chunks: Iterable[Chunk]) -> ReplySpending:
        """Return what must be added for a complete reply."""
        return self.remainder(price_reply(chunks, self.prices, self.prompt_tokens))


class BilledModel:
    """Model of a tenant. `check` raises ToolFailure(BUDGET_EXCEEDED) before a request. `count` adds to the usage.
    `hand_over`: receives the reservation of each complete reply, whose remainder is counted elsewhere; None: it is
    counted here.
    """

    def __init__(
        self,
        model: Model,
        check: Callable[[], Awaitable[None]],
        count: Count,
        prices: Prices | None = None,
        hand_over: Callable[[Reservation], object] | None = None,
    ) -> None:
        self._model = model
        self._check = check
        self._count = count
        self._prices = prices
        self._hand_over = hand_over

    @property
    def name(self) -> str:
        return self._model.name

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """Yield the chunks of the model. Raises the exceptions of the model, of `check` and of `count`."""
        await retry_until_available(self._check)
        reservation = Reservation(estimate_prompt(request), self._prices)
        reply, usage, is_complete, is_refunded = CompletionEstimate(), list[Chunk](), False, False
        try:
            async for chunk in self._model.stream(replace(request, before_send=lambda: self._reserve(reservation))):
                reply.add(chunk)
                if chunk.get("usage"):
                    usage[:] = [chunk]
                yield chunk
            is_complete = True
        except Exception:
            # A server that answers with an error bills nothing. A cancellation is not caught here: the server may
            # already work on the reply.
            is_refunded = not reply.has_begun
            raise
        finally:
            if not is_complete:
                spending = ReplySpending() if is_refunded else self._spending(reservation, reply, usage)
                await self._end_early(reservation, spending, has_begun=reply.has_begun)
        await self._end(reservation, reply, usage)

    async def aclose(self) -> None:
        """Do nothing: the code that opened the model closes the model."""

    async def _reserve(self, reservation: Reservation) -> None:
        """Count the estimate of a request. A request is counted once, even if it is sent several times."""
        if not reservation.counted_at:
            estimate = _price(TokenUsage(reservation.prompt_tokens), self._prices)
            reservation.counted_at = await retry_until_available(lambda: self._count(estimate))
            reservation.counted = estimate

    async def _end(self, reservation: Reservation, reply: CompletionEstimate, usage: list[Chunk]) -> None:
        """Count the remainder of a complete reply, or hand over its reservation."""
        if self._hand_over is not None:
            self._hand_over(reservation)
            return
        remainder = reservation.remainder(self._spending(reservation, reply, usage))
        await retry_until_available(lambda: self._count(remainder))

    async def _end_early(self, reservation: Reservation, spending: ReplySpending, *, has_begun: bool) -> None:
        """Count what a reply that did not end has cost. A request that was not sent costs nothing."""
        if not reservation.counted_at and not has_begun:
            return
        try:
            # Once: this code runs in tasks that are being cancelled, and the request itself is counted already.
            await self._count(reservation.remainder(spending))
        except BrokerUnavailable as error:
            log.warning("reply_part_not_counted", error=str(error))

    def _spending(self, reservation: Reservation, reply: CompletionEstimate, usage: list[Chunk]) -> ReplySpending:
        """Return what the reply has cost so far: the server's count, or an estimate."""
        counted = (read_usage(usage[0]) if usage else None) or TokenUsage()
        estimate = TokenUsage(reservation.prompt_tokens, reply.tokens)
        return _price(estimate if counted == TokenUsage() else counted, self._prices)
