"""Agents in messages: a conversation stays valid for servers, for any output of the model and any truncation."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.records.fakes import StreamModel
from toolcrew.contract.errors import ModelInterrupted
from toolcrew.orchestrator.dialects.model import Chunk, Message, ModelRequest
from toolcrew.orchestrator.loop.chat_messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    build_tool_call,
    convert_to_wire,
)
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.models.scripted import Calls, Raw, ScriptedModel
from toolcrew.orchestrator.sdk.tool_agent import CustomAgent, LLMClient, ToolAgent
from toolcrew.orchestrator.sdk.tool_loop import create_tool_registry, run_tool_loop

CALL_TEXT = '{"tool": "echo", "arguments": {"text": "a"}}'


class Echo:
    """A tool that records its input, and hangs if the text is `hang`."""

    name = "echo"
    description = "Repeat a text"

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.hangs = asyncio.Event()

    async def _run(self, text: str = "") -> str:
        self.texts.append(text)
        if text == "hang":
            self.hangs.set()
            await asyncio.Event().wait()
        return f"did {text}"


def chunk(text: str = "", finish: str | None = None, **delta: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}]}


async def test_conversation_continues_after_a_cancelled_call() -> None:
    tool, model = Echo(), ScriptedModel([Calls([("echo", {"text": "hang"})]), "Sorry."])
    agent = CustomAgent(ToolAgent(model).bind_tools([tool]))
    running = asyncio.create_task(agent.run("one"))
    await tool.hangs.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await agent.run("two")).content == "Sorry."
    messages = model.requests[1].messages
    call_ids = [entry["id"] for message in messages for entry in message.get("tool_calls", ())]
    assert call_ids == [message["tool_call_id"] for message in messages if message["role"] == "tool"]


@pytest.mark.parametrize("arguments", ["", '{"text": "b"}'])
async def test_last_call_of_a_cut_reply_is_not_run(arguments: str) -> None:
    entries = [
        {"index": n, "id": f"c{n}", "function": {"name": "echo", "arguments": text}}
        for n, text in enumerate(['{"text": "a"}', arguments])
    ]
    tool, model = Echo(), ScriptedModel([Raw([chunk(tool_calls=entries), chunk("", "length")]), "ok"])
    await CustomAgent(ToolAgent(model).bind_tools([tool])).run("go")
    assert tool.texts == ["a"]
    assert "cut at the token limit" in model.requests[1].messages[-1]["content"]


@pytest.mark.parametrize("name", ["bad name!", "x" * 200, "名"])
async def test_invalid_tool_name_is_replaced_in_later_requests(name: str) -> None:
    model = ScriptedModel([Calls([(name, {})]), "ok"])
    assert (await CustomAgent(ToolAgent(model).bind_tools([Echo()])).run("go")).content == "ok"
    [entry] = model.requests[1].messages[-2]["tool_calls"]
    assert (entry["function"]["name"].isascii(), len(entry["function"]["name"]) <= 64) == (True, True)
    assert " " not in entry["function"]["name"]


async def test_interrupted_reply_is_requested_again() -> None:
    replies = iter([[chunk("ha"), ModelInterrupted("broke off")], [chunk("whole", "stop")]])

    async def stream(_: ModelRequest) -> AsyncIterator[Chunk]:
        for item in next(replies):
            if isinstance(item, Exception):
                raise item
            yield item

    assert (await ToolAgent(StreamModel(stream)).invoke([HumanMessage("go")])).content == "whole"


@pytest.mark.parametrize("kind", ["ai", "AIMessageChunk"])
def test_foreign_assistant_message_without_calls_is_converted(kind: str) -> None:
    foreign = SimpleNamespace(type=kind, content="Hi.", tool_calls=[])
    assert convert_to_wire(foreign) == {"role": "assistant", "content": "Hi."}


# The fallback


def fallback(model: ScriptedModel) -> ToolAgent:
    return ToolAgent(LLMClient(model, function_calling=False)).bind_tools([Echo()])


async def test_fallback_requests_contain_the_call_and_its_result() -> None:
    model = ScriptedModel([f"Let me see. {CALL_TEXT}", "ok"])
    await CustomAgent(fallback(model)).run("go")
    reply, result = model.requests[1].messages[-2:]
    assert reply == {"role": "assistant", "content": f"Let me see. {CALL_TEXT}"}
    assert result == {"role": "user", "content": "Tool result for echo:\ndid a"}


async def test_fallback_ignores_calls_inside_a_think_block() -> None:
    text = f"<think>I could write {CALL_TEXT}</think>No need."
    reply = await fallback(ScriptedModel([text])).invoke([HumanMessage("go")])
    assert (reply.content, reply.tool_calls) == (text, [])


async def test_fallback_converts_messages_of_any_content() -> None:
    model = ScriptedModel(["ok"])
    history: list[ChatMessage | Message] = [
        SystemMessage(""),
        {"role": "user", "content": ""},
        AIMessage("", [build_tool_call("c", "echo", {})]),
        ToolMessage("did", "c"),
    ]
    await fallback(model).invoke(history)
    contents = [message["content"] for message in model.requests[0].messages[1:]]
    assert contents == ["", '{"tool": "echo", "arguments": {}}', "Tool result for echo:\ndid"]


REPLY = json.dumps({"tool": None, "reply": "hi"})


@pytest.mark.parametrize(
    "reply",
    [REPLY, {"role": "assistant", "content": REPLY}, SimpleNamespace(content=REPLY)],
    ids=["text", "mapping", "message"],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_gateway_may_return_text_mapping_or_message(reply: Any, is_async: bool) -> None:
    async def reply_async(_: list[Message]) -> Any:
        return reply

    result = await run_tool_loop(
        {"chat": reply_async if is_async else lambda _: reply, "tool_registry": create_tool_registry()}, "s", "hello"
    )
    assert (result.reply, result.rounds, result.stop_reason) == ("hi", 1, StopReason.ANSWERED)


async def test_gateway_reply_without_text_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="content as a string"):
        await run_tool_loop({"chat": lambda _: 5, "tool_registry": create_tool_registry()}, "s", "hello")
