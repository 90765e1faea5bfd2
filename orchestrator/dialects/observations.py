"""Observations: messages with the results of calls, as stored in the transcript and as sent to servers."""

from collections.abc import Sequence

from toolcrew.contract.calls import COMMAND_FAILED, FOUND_NOTHING, NO_OUTPUT, ToolResult
from toolcrew.orchestrator.dialects.model import Message

UNKNOWN_TOOL = "unknown"
"""The tool name in the message of a result whose call had no name."""
NAMELESS_TOOL = "the tool"
"""The tool name in a tool message that comes from the history of a request and names no tool."""


def build_tool_messages(results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
    """Return one tool message per result, in order."""
    return [
        {"role": "tool", "tool_call_id": call_id, "name": result.name, "content": result.text()}
        for call_id, result in results
    ]


NO_TEXT = "(no text)"
"""The content of an assistant message without text and calls."""


def fill_blank(message: Message) -> Message:
    """Return the message with visible content, or with none: some servers refuse blank content."""
    content, role = message.get("content"), message.get("role")
    if role not in ("tool", "assistant") or not isinstance(content, str | None) or (content or "").strip():
        return message
    if role == "tool":
        return {**message, "content": NO_OUTPUT}
    return {**message, "content": None if message.get("tool_calls") else NO_TEXT}


def build_wire_messages(messages: Sequence[Message], closing_hint: str = "") -> list[Message]:
    """Return the transcript in the form that servers accept.

    Servers reject a tool message without a preceding native call, and many chat templates reject two user messages in a
    row. Therefore results of calls by tag, and tool messages whose call is not in the history, are joined into one user
    message. The message ends with `closing_hint`, unless the last result is a failure.
    """
    wire: list[Message] = []
    native_ids: set[str] = set()
    sections: list[str] = []
    for message in map(fill_blank, messages):
        if message.get("role") == "tool":
            if message.get("tool_call_id") in native_ids:
                wire.append({key: value for key, value in message.items() if key != "name"})
            else:
                sections.append(
                    f"Tool result for {message.get('name') or NAMELESS_TOOL}:\n{message.get('content') or ''}"
                )
            continue
        _flush(wire, sections, closing_hint)
        native_ids = (
            {entry["id"] for entry in message.get("tool_calls") or ()} if message.get("role") == "assistant" else set()
        )
        wire.append(message)
    _flush(wire, sections, closing_hint)
    return wire


def is_failure(text: str) -> bool:
    """Return whether the text of a result says that the call or its command failed."""
    return text.startswith("Error [") or text.endswith((COMMAND_FAILED, FOUND_NOTHING))


def _flush(wire: list[Message], sections: list[str], closing_hint: str) -> None:
    if sections:
        has_hint = closing_hint and not is_failure(sections[-1].partition("\n")[2])
        wire.append({"role": "user", "content": "\n\n".join([*sections, closing_hint] if has_hint else sections)})
        sections.clear()
