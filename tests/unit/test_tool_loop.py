"""run_tool_loop and its parts: valid replies of a gateway, and the history that a session stores."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.dialects.model import Message
from orchestrator.loop.limits import StopReason
from orchestrator.sdk.tool_loop import create_tool_registry, run_tool_loop

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
