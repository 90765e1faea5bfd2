"""A real connection that ends after any byte of a reply: same answer, no call twice, no text shown twice."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.models.model_endpoint import RecordedSleep, serving, stream
from tests.support.records.builders import build_spec
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.run_events import RunEvent, TextArrived, TextWithdrawn
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect, build_tag_call
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.loop.limits import ReActOptions
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.models.retries import RetryPolicy

STEP = 29
"""Between two cuts; no divisor of anything in the replies."""


def text(content: str) -> Chunk:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]}


def native(arguments: str, **fields: Any) -> Chunk:
    entry = {"index": 0, "function": {"arguments": arguments, **fields}} | ({"id": "c1"} if fields else {})
    return {"choices": [{"index": 0, "delta": {"tool_calls": [entry]}, "finish_reason": None}]}


END: Chunk = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
TAG = build_tag_call("echo", {"text": "ä"})
DECISION = json.dumps({"tool": "echo", "arguments": {"text": "ä"}})
CALLS: dict[str, tuple[Dialect, list[Chunk]]] = {
    "native": (NativeDialect(), [text("I look."), native("", name="echo"), native('{"text": '), native('"ä"}'), END]),
    "tags": (TagsDialect(), [text("I look."), text(TAG[:20]), text(TAG[20:]), END]),
    "json": (JsonDecisionDialect(), [text(DECISION[:9]), text(DECISION[9:]), END]),
}
ANSWERS = {"json": [text('{"tool": null, "reply": "It is ä."}'), END]}


def add_content_length(reply: bytes) -> bytes:
    """Return the reply with its length in its head, so that a connection that ends early is a broken connection."""
    head, _, body = reply.partition(b"\r\n\r\n")
    return (
        head.replace(b"connection: close", b"connection: close\r\ncontent-length: %d" % len(body)) + b"\r\n\r\n" + body
    )


@pytest.mark.parametrize("name", CALLS)
async def test_a_connection_cut_at_any_byte_does_not_change_the_result(name: str) -> None:
    dialect, chunks = CALLS[name]
    call_reply, final_reply = (
        add_content_length(stream(*chunks)),
        add_content_length(stream(*ANSWERS.get(name, [text("It is "), text("ä."), END]))),
    )
    for cut in range(0, len(call_reply), STEP):
        calls: list[ToolCall] = []
        events: list[RunEvent] = []

        async def run_call(call: ToolCall, calls: list[ToolCall] = calls) -> ToolResult:
            calls.append(call)
            return ToolResult(call_id=call.id, name=call.name, success=True, output="done")

        def reply(number: int, body: dict[str, Any], cut: int = cut) -> bytes:
            if number == 1:
                return call_reply[:cut]
            return final_reply if "done" in str(body["messages"][-1]["content"]) else call_reply

        async with serving(reply) as server, asyncio.timeout(SOON_S):
            model = OpenAIModel("m", server.url, "key", 5.0, retries=RetryPolicy(attempts=3, sleep=RecordedSleep()))
            agent = Agent(
                model, dialect, [build_spec("echo")], run_call, options=ReActOptions(), on_event=events.append
            )
            result = await agent.run("go")
            await model.aclose()
        assert (cut, result.answer, [call.arguments for call in calls]) == (cut, "It is ä.", [{"text": "ä"}])
        assert (cut, visible_text(events)) == (cut, "It is ä." if name == "json" else "I look.It is ä.")


def visible_text(events: list[RunEvent]) -> str:
    """Return the text that a user who follows the events sees."""
    text = ""
    for event in events:
        if isinstance(event, TextArrived):
            text += event.text
        elif isinstance(event, TextWithdrawn):
            text = text[: len(text) - event.characters]
    return text
