"""Rows S0-14 to S0-17 of the scenarios: tags in the ReAct loop, switched off, and together with native calls."""

import asyncio
from typing import Any

import pytest

from tests.support.stack.waiting import SOON_S
from toolcrew.contract.run_events import CallStarted, RunEvent, TextArrived
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.functions.function_tools import tool
from toolcrew.orchestrator.loop.agent import Agent, RunResult
from toolcrew.orchestrator.loop.limits import ReActOptions, StopReason
from toolcrew.orchestrator.models.choice import choose_dialect
from toolcrew.orchestrator.models.scripted import Calls, Raw, ScriptedModel
from toolcrew.orchestrator.sdk.local_tools import LocalTools

TAG = '<tool_action name="vector-search"><query value="读取文件" /></tool_action>'
NATIVE = Calls([("vector-search", {"query": "native"})])


class Search:
    """The search tool, with a record of its queries."""

    def __init__(self) -> None:
        self.queries: list[str] = []

        @tool(name="vector-search")
        async def search(query: str) -> str:
            """Search the code base."""
            self.queries.append(query)
            return f"3 hits for {query}"

        self.tools = LocalTools([search])


async def work(
    model: ScriptedModel,
    dialect: Dialect,
    search: Search,
    options: ReActOptions | None = None,
    events: list[RunEvent] | None = None,
) -> RunResult:
    agent = Agent(
        model,
        dialect,
        search.tools.specs(),
        search.tools.run_call,
        options=options or ReActOptions(),
        on_event=(events if events is not None else []).append,
    )
    async with asyncio.timeout(SOON_S):
        return await agent.run("搜索")


def join_texts(events: list[RunEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextArrived))


async def test_s0_14_tags_and_native_calls_work_in_one_run() -> None:
    search, model = Search(), ScriptedModel([NATIVE, TAG, "好了"])
    result = await work(model, NativeDialect(), search)
    assert (search.queries, result.answer, result.steps) == (["native", "读取文件"], "好了", 3)


def test_s0_15_tag_parsing_is_on_by_default() -> None:
    assert ReActOptions().enable_tool_action_parsing is True


@pytest.mark.parametrize("name", ["tags", "native"])
async def test_s0_15_a_tag_call_runs_and_its_result_message_starts_the_next_iteration(name: str) -> None:
    search, model = Search(), ScriptedModel([TAG, "好了"])
    result = await work(model, choose_dialect(name), search)
    assert search.queries == ["读取文件"]
    history = result.transcript.messages()
    assert [message["role"] for message in history] == ["system", "user", "assistant", "tool", "assistant"]
    assert (history[2]["content"], history[3]["content"]) == (TAG, "3 hits for 读取文件")
    assert (len(model.requests), result.steps, result.stop_reason) == (2, 2, StopReason.ANSWERED)
    assert "3 hits for 读取文件" in model.requests[1].messages[-1]["content"]


@pytest.mark.parametrize("name", ["tags", "native"])
async def test_s0_16_with_parsing_off_a_tag_is_ordinary_text(name: str) -> None:
    search, model, options = Search(), ScriptedModel([f"看: {TAG}!"]), ReActOptions(enable_tool_action_parsing=False)
    events: list[RunEvent] = []
    result = await work(model, choose_dialect(name), search, options, events)
    assert (search.queries, len(model.requests), result.stop_reason) == ([], 1, StopReason.ANSWERED)
    assert (result.answer, join_texts(events)) == (f"看: {TAG}!", f"看: {TAG}!")


async def test_s0_17_native_calls_take_precedence_and_tags_of_that_reply_are_ordinary_text() -> None:
    search = Search()
    events: list[RunEvent] = []
    model = ScriptedModel([Calls(NATIVE.calls, f"前{TAG}后"), "好了"])
    result = await work(model, NativeDialect(), search, events=events)
    assert (search.queries, result.answer) == (["native"], "好了")
    assert join_texts(events) == f"前{TAG}后好了"
    assert sum(isinstance(event, CallStarted) for event in events) == 1
    assert [message["role"] for message in result.transcript][2:] == ["assistant", "tool", "assistant"]


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


async def test_s0_17_native_calls_take_precedence_in_any_order_of_the_stream() -> None:
    call = {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": {"name": "vector-search", "arguments": '{"query": "native"}'},
    }
    search = Search()
    events: list[RunEvent] = []
    model = ScriptedModel([Raw([delta(tool_calls=[call]), delta(content=TAG[:30]), delta(content=TAG[30:])]), "好了"])
    await work(model, NativeDialect(), search, events=events)
    assert (search.queries, join_texts(events)) == (["native"], f"{TAG}好了")
