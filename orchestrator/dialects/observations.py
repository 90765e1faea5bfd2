"""Observations: the messages that tell a model the results of its calls, in the transcript and in the form that servers
take.
"""

from collections.abc import Sequence

from contract.calls import ToolResult
from orchestrator.dialects.model import Message

UNKNOWN_TOOL = "unknown"
"""The name of a result whose call named no tool."""
NAMELESS_TOOL = "the tool"
"""In a history, a result that does not say whose it is."""


def build_tool_messages(results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
    """A tool message for each result, in order."""
    return [
        {"role": "tool", "tool_call_id": call_id, "name": result.name, "content": result.text()}
        for call_id, result in results
    ]


def build_wire_messages(messages: Sequence[Message], closing_hint: str = "") -> list[Message]:
    """The transcript as servers take it. They refuse a tool message that no native call precedes, and many chat
    templates two user messages in a row: results of calls by tag share one user message, which `closing_hint` ends. So
    do tool messages of a history whose call is not in it.
    """
    wire: list[Message] = []
    asked: set[str] = set()
    sections: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            if message.get("tool_call_id") in asked:
                wire.append({key: value for key, value in message.items() if key != "name"})
            else:
                sections.append(
                    f"Tool result for {message.get('name') or NAMELESS_TOOL}:\n{message.get('content') or ''}"
                )
            continue
        _flush(wire, sections, closing_hint)
        asked = (
            {entry["id"] for entry in message.get("tool_calls") or ()} if message.get("role") == "assistant" else set()
        )
        wire.append(message)
    _flush(wire, sections, closing_hint)
    return wire


def _flush(wire: list[Message], sections: list[str], closing_hint: str) -> None:
    if sections:
        wire.append({"role": "user", "content": "\n\n".join([*sections, closing_hint] if closing_hint else sections)})
        sections.clear()
