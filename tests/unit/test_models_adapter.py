"""The model as tools use it: complete replies, a budget, and errors that the tool's caller can read."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import FrozenInstanceError

import pytest

from contract.errors import ErrorCode, ModelInterrupted, ModelUnavailable, ToolFailure
from contract.functions.call_context import ModelAdapter
from orchestrator.dialects.model import Chunk, ModelRequest, Usage
from orchestrator.models.adapter import BudgetedModel, Completion
from orchestrator.models.scripted import Calls, Raw, ScriptedModel
from tests.fakes import StreamModel
from tests.model_endpoint import END, HELLO


async def test_a_prompt_is_answered_with_a_whole_reply() -> None:
    model = ScriptedModel(["forty-two"])
    assert await BudgetedModel(model).complete("what?") == Completion("forty-two", Usage(1, 9), "stop")
    assert model.requests == [ModelRequest([{"role": "user", "content": "what?"}])]


async def test_messages_and_a_bound_go_out_as_they_are() -> None:
    model, messages = (
        ScriptedModel(["ok"]),
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    )
    await BudgetedModel(model).complete(messages, max_tokens=5)
    assert model.requests == [ModelRequest(messages, [], {"max_tokens": 5})]


async def test_usage_is_summed_and_the_adapter_itself_is_frozen() -> None:
    adapter = BudgetedModel(ScriptedModel(["one", "three"]))
    await adapter.complete("a")
    await adapter.complete("b")
    assert adapter.usage == Usage(2, 8)
    with pytest.raises(FrozenInstanceError):
        adapter.max_calls = 1000  # type: ignore[misc]


async def test_it_is_what_tools_expect_and_bears_the_models_name() -> None:
    adapter = BudgetedModel(ScriptedModel([], name="gpt"))
    assert isinstance(adapter, ModelAdapter)
    assert adapter.name == "gpt"


async def test_more_calls_than_allowed_are_refused_and_do_not_reach_the_model() -> None:
    model = ScriptedModel(lambda _: "ok")
    adapter = BudgetedModel(model, max_calls=2)
    results = await asyncio.gather(*(adapter.complete("x") for _ in range(5)), return_exceptions=True)
    failures = [result for result in results if isinstance(result, ToolFailure)]
    assert (len(model.requests), len(failures)) == (2, 3)
    assert failures[0].code is ErrorCode.PERMISSION_DENIED
    assert "budget of 2 calls" in failures[0].message


async def test_more_tokens_than_allowed_are_refused() -> None:
    adapter = BudgetedModel(ScriptedModel(lambda _: "x" * 50), max_tokens=50)
    await adapter.complete("x")
    with pytest.raises(ToolFailure, match="used 51 tokens, and its budget is 50"):
        await adapter.complete("x")


async def test_a_server_that_does_not_count_does_not_make_the_budget_endless() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "x" * 400}, "finish_reason": "stop"}]}
    adapter = BudgetedModel(ScriptedModel(lambda _: Raw([chunk])), max_tokens=100)
    await adapter.complete("x")
    assert adapter.usage == Usage()
    with pytest.raises(ToolFailure, match="its budget is 100"):
        await adapter.complete("x")


async def test_questions_at_once_or_without_an_answer_count_as_well() -> None:
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


async def test_a_reply_that_takes_too_long_is_a_timeout_of_the_tool() -> None:
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


async def test_a_broken_reply_is_requested_again_from_the_start() -> None:
    requests = 0

    async def breaking(_: ModelRequest) -> AsyncIterator[Chunk]:
        nonlocal requests
        requests += 1
        yield HELLO
        if requests < 3:
            raise ModelInterrupted("broke off")
        yield END

    assert (await BudgetedModel(StreamModel(breaking)).complete("x")).text == HELLO["choices"][0]["delta"]["content"]


async def test_a_lost_model_is_an_operator_error() -> None:
    async def breaking(_: ModelRequest) -> AsyncIterator[Chunk]:
        yield HELLO
        raise ModelInterrupted("broke off")

    for model in (StreamModel(breaking), ScriptedModel([])):
        with pytest.raises(ModelUnavailable):
            await BudgetedModel(model).complete("x")


async def test_calls_in_a_reply_are_not_run_and_no_text() -> None:
    assert (await BudgetedModel(ScriptedModel([Calls([("rm", {})], "sure")])).complete("x")).text == "sure"
