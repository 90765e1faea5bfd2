"""Tests of the shop's tools in this process, without a worker, a queue and a sandbox."""

import asyncio
import json
from typing import Any

import order_tools

from toolcrew import AutoApprover, LocalTools, ScriptedModel, ToolCall, ToolResult

TOOLS = (order_tools.add_to_basket, order_tools.quote_basket, order_tools.place_order, order_tools.word_thanks)
ADDRESS = {"street": "Hauptstr. 1", "city": "Bonn"}


def run(*calls: tuple[str, dict[str, Any]], **options: Any) -> list[ToolResult]:
    """Run the calls of one session in order. Return their results."""
    tools = LocalTools(TOOLS, approver=AutoApprover(), **options)

    async def run_all() -> list[ToolResult]:
        return [
            await tools.run_call(ToolCall(id=f"call-{n}", name=name, arguments=arguments))
            for n, (name, arguments) in enumerate(calls)
        ]

    return asyncio.run(run_all())


def test_a_basket_is_filled_priced_and_ordered() -> None:
    results = run(
        ("add_to_basket", {"article": "lamp", "pieces": 2}),
        ("add_to_basket", {"article": "chair"}),
        ("quote_basket", {"express": True}),
        ("place_order", {"address": ADDRESS}),
        ("quote_basket", {}),
        config={"currency": "JPY"},
    )
    assert [result.error for result in results] == [None] * 5
    assert json.loads(results[1].output or "") == {"lamp": 2, "chair": 1}
    assert json.loads(results[2].output or "") == {"total": 255.0, "currency": "JPY"}
    assert results[3].output == "Order call-3: 2 x lamp, 1 x chair to Hauptstr. 1, Bonn, DE"
    assert json.loads(results[4].output or "")["total"] == 0


def test_what_cannot_be_done_is_said_in_words_a_model_can_use() -> None:
    unknown, blank, empty = run(
        ("add_to_basket", {"article": "sofa"}),
        ("place_order", {"address": {**ADDRESS, "street": " "}}),
        ("place_order", {"address": ADDRESS}),
    )
    assert unknown.error == "there is no article 'sofa': the articles are chair, lamp"
    assert blank.error == "place_order: give the street, with a number"
    assert empty.error == "the basket is empty: add_to_basket first"


def test_thanks_are_the_models_words() -> None:
    (result,) = run(
        ("word_thanks", {"customer": "Ada"}), model=ScriptedModel(lambda messages: f"Re: {messages[-1]['content']}")
    )
    assert result.output == "Re: Thank Ada for an order, in one friendly sentence."
