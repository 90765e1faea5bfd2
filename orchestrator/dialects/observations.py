"""Observations: the messages that tell a model the results of its calls."""

from collections.abc import Sequence

from contract.calls import ToolResult
from orchestrator.models.base import Message


def build_messages(results: Sequence[tuple[str, ToolResult]], closing_hint: str = "") -> list[Message]:
    """Messages for the results of one reply, in order. A result with an id of the model's answers a native call and is a tool message.

    The model knows no id of a call by tag; it comes with "" or with our own. Such results share one user message: servers refuse a tool
    message that no native call precedes, and many chat templates two user messages in a row. `closing_hint` ends it.
    """
    native = [(model_id, result) for model_id, result in results if model_id not in ("", result.call_id)]
    by_tag = [result for model_id, result in results if model_id in ("", result.call_id)]
    messages: list[Message] = [{"role": "tool", "tool_call_id": model_id, "content": result.text()} for model_id, result in native]
    sections = [f"Tool result for {result.name}:\n{result.text()}" for result in by_tag]
    if sections:
        messages.append({"role": "user", "content": "\n\n".join([*sections, closing_hint] if closing_hint else sections)})
    return messages
