"""Checks the budgets of a tenant before requests to a model, and counts the tokens of replies."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from contract.model_endpoints import Prices
from orchestrator.dialects.model import Chunk, Model, ModelRequest, TokenUsage
from orchestrator.dialects.reader import read_usage
from store.tasks import retry_until_available
from store.usage import ReplySpending


def price_reply(chunks: Iterable[Chunk], prices: Prices | None) -> ReplySpending:
    """Return the tokens that the server counted for a reply, and their cost."""
    usage = sum((counted for chunk in chunks if (counted := read_usage(chunk)) is not None), TokenUsage())
    # A fallback with other prices may have answered, so the cost in the reply counts first.
    cost = prices.cost(usage) if usage.cost is None and prices is not None else usage.cost
    return ReplySpending(usage, cost)


class BilledModel:
    """Model of a tenant. `check` raises ToolFailure(BUDGET_EXCEEDED) before a request. `count` receives the chunks with
    the token counts of each complete reply; None: the tokens are counted elsewhere.
    """

    def __init__(
        self,
        model: Model,
        check: Callable[[], Awaitable[None]],
        count: Callable[[Iterable[Chunk]], Awaitable[None]] | None = None,
    ) -> None:
        self._model, self._check, self._count = model, check, count

    @property
    def name(self) -> str:
        return self._model.name

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """Yield the chunks of the model. Raises the exceptions of the model, of `check` and of `count`."""
        await retry_until_available(self._check)
        counted: list[Chunk] = []
        async for chunk in self._model.stream(request):
            if chunk.get("usage"):
                counted.append(chunk)
            yield chunk
        if self._count is not None:
            await self._count(counted)

    async def aclose(self) -> None:
        """Do nothing: the code that opened the model closes the model."""
