"""run_tool_loop and its parts: valid replies of a gateway, and the history that a session stores."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.dialects.model import Message
from orchestrator.loop.limits import StopReason
from orchestrator.models.scripted import ScriptedModel
from orchestrator.sdk.tool_loop import ContextEngine, ToolLoopDeps, create_tool_registry, run_tool_loop

REPLY = json.dumps({"tool": None, "reply": "hi"})


@pytest.mark.parametrize(
    "reply",
    [REPLY, {"role": "assistant", "content": REPLY}, SimpleNamespace(content=REPLY)],
    ids=["text", "mapping", "message"],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_gateway_gives_the_content_or_a_message_with_it(reply: Any, is_async: bool) -> None:
    async def later(_: list[Message]) -> Any:
        return reply

    result = await run_tool_loop(
        {"chat": later if is_async else lambda _: reply, "tool_registry": create_tool_registry()}, "s", "hello"
    )
    assert (result.reply, result.rounds, result.stop_reason) == ("hi", 1, StopReason.ANSWERED)


async def test_a_gateway_without_content_is_a_clear_error() -> None:
    with pytest.raises(TypeError, match="content as a string"):
        await run_tool_loop({"chat": lambda _: 5, "tool_registry": create_tool_registry()}, "s", "hello")


async def test_a_session_remembers_and_another_one_does_not() -> None:
    deps = ToolLoopDeps(ScriptedModel([REPLY] * 3), create_tool_registry(), ContextEngine("Be brief."))
    for session in ("a", "a", "b"):
        await run_tool_loop(deps, session, "hello")
    requests = deps.chat.requests  # type: ignore[union-attr]
    assert [[message["role"] for message in request.messages] for request in requests] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert requests[0].messages[0]["content"].startswith("Be brief.")
