"""Tools of a shop: a basket in the state of the session, its price, an order, and thanks that a model writes."""

from typing import Literal

from pydantic import BaseModel

from toolcrew import CallContext, ErrorCode, ToolFailure, tool

PRICES = {"chair": 90.0, "lamp": 40.0}


class Address(BaseModel):
    street: str
    city: str
    country: Literal["DE", "FR", "JP"] = "DE"


class Quote(BaseModel):
    total: float
    currency: str


@tool
async def add_to_basket(context: CallContext, article: str, pieces: int = 1) -> dict[str, int]:
    """Put pieces of an article into the basket, and give the whole basket.

    Args:
        article: Its name: chair or lamp.
        pieces: How many; below 0 to take some out.
    """
    if article not in PRICES:
        raise ToolFailure(ErrorCode.NO_MATCH, f"there is no article '{article}': the articles are {', '.join(PRICES)}")

    def add(basket: dict[str, int] | None) -> dict[str, int]:
        updated = {**(basket or {})}
        updated[article] = max(0, updated.get(article, 0) + pieces)
        return updated

    return await context.state.update("basket", add)


@tool(read_only=True, timeout_s=5)
def quote_basket(context: CallContext, express: bool = False) -> Quote:
    """Return the price of the basket.

    Args:
        express: Delivered tomorrow, for more.
    """
    basket = context.wait(context.state.get("basket", {}))
    print(f"quoting {len(basket)} articles")  # to the worker's log
    total = sum(PRICES[article] * pieces for article, pieces in basket.items()) * (1.5 if express else 1)
    return Quote(total=total, currency=context.config.get("currency", "EUR"))


@tool(
    requires_permission=True,
    validators=[lambda arguments: None if arguments["address"]["street"].strip() else "give the street, with a number"],
)
async def place_order(context: CallContext, address: Address) -> str:
    """Order what is in the basket. It is empty afterwards.

    Args:
        address: Where it goes.
    """
    ordered: list[dict[str, int]] = []

    def empty(basket: dict[str, int] | None) -> dict[str, int]:
        # Runs again when another call changed the basket first. Only the last basket counts.
        ordered[:] = [basket or {}]
        return {}

    await context.state.update("basket", empty)
    if not any(ordered[0].values()):
        raise ToolFailure(ErrorCode.NO_MATCH, "the basket is empty: add_to_basket first")
    pieces = ", ".join(f"{count} x {article}" for article, count in ordered[0].items() if count)
    return f"Order {context.call_id}: {pieces} to {address.street}, {address.city}, {address.country}"


@tool(timeout_s=60)
async def word_thanks(context: CallContext, customer: str, tone: Literal["formal", "friendly"] = "friendly") -> str:
    """Thanks to a customer, in one sentence.

    Args:
        customer: The customer's name.
        tone: How to address them.
    """
    completion = await context.require_model().complete(
        f"Thank {customer} for an order, in one {tone} sentence.", max_tokens=100
    )
    return completion.text.strip()
