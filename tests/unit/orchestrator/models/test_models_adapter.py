"""The model as tools use it: complete replies, a budget, and errors that the tool's caller can read."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import FrozenInstanceError

import pytest

from tests.support.models.model_endpoint import END, HELLO
from tests.support.records.fakes import StreamModel
from toolcrew.contract.errors import ErrorCode, ModelInterrupted, ToolFailure
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest, TokenUsage
from toolcrew.orchestrator.models.adapter import BudgetedModel, Completion
from toolcrew.orchestrator.models.scripted import ScriptedModel


async def test_adapter_sums_usage_and_is_frozen() -> None:
    model = ScriptedModel(["one", "three"])
    adapter = BudgetedModel(model)
    assert await adapter.complete("a") == Completion("one", TokenUsage(1, 3), "stop")
    assert model.requests == [ModelRequest([{"role": "user", "content": "a"}])]
    await adapter.complete("b")
    assert adapter.usage == TokenUsage(2, 8)
    with pytest.raises(FrozenInstanceError):
        adapter.max_calls = 1000  # type: ignore[misc]


async def test_calls_above_the_budget_do_not_reach_the_model() -> None:
    model = ScriptedModel(lambda _: "ok")
    adapter = BudgetedModel(model, max_calls=2)
    results = await asyncio.gather(*(adapter.complete("x") for _ in range(5)), return_exceptions=True)
    failures = [result for result in results if isinstance(result, ToolFailure)]
    assert (len(model.requests), len(failures)) == (2, 3)
    assert failures[0].code is ErrorCode.PERMISSION_DENIED
    assert "budget of 2 calls" in failures[0].message


async def test_concurrent_and_unanswered_requests_count_toward_the_token_budget() -> None:
    async def silent(_: ModelRequest) -> AsyncIterator[Chunk]:
        await asyncio.Event().wait()
        yield END

    adapter = BudgetedModel(StreamModel(silent), max_tokens=150)
    requests = (adapter.complete("x" * 400, timeout_s=0.01) for _ in range(4))
    codes = [
        error.code
        for error in await asyncio.gather(*requests, return_exceptions=True)
        if isinstance(error, ToolFailure)
    ]
    assert codes == [ErrorCode.TIMEOUT] * 2 + [ErrorCode.PERMISSION_DENIED] * 2
    with pytest.raises(ToolFailure, match="its budget is 150"):
        await adapter.complete("x")


async def test_slow_model_reply_is_a_tool_timeout() -> None:
    hung, closed = asyncio.Event(), asyncio.Event()

    async def silent(_: ModelRequest) -> AsyncIterator[Chunk]:
        try:
            await hung.wait()
            yield END
        finally:
            closed.set()

    with pytest.raises(ToolFailure, match=r"did not answer in 0\.01 s") as caught:
        await BudgetedModel(StreamModel(silent)).complete("x", timeout_s=0.01)
    assert caught.value.code is ErrorCode.TIMEOUT
    assert closed.is_set()


async def test_interrupted_reply_is_requested_again() -> None:
    requests = 0

    async def breaking(_: ModelRequest) -> AsyncIterator[Chunk]:
        nonlocal requests
        requests += 1
        yield HELLO
        if requests < 3:
            raise ModelInterrupted("broke off")
        yield END

    assert (await BudgetedModel(StreamModel(breaking)).complete("x")).text == HELLO["choices"][0]["delta"]["content"]
