"""Chat messages as objects, for programs that manage a conversation themselves, and conversion to the OpenAI wire
shape.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from toolcrew.orchestrator.dialects.model import Message, TokenUsage
from toolcrew.orchestrator.dialects.observations import fill_blank
from toolcrew.orchestrator.dialects.reader import build_wire_name
from toolcrew.orchestrator.dialects.reply_fields import MESSAGE_FIELDS, ORIGIN


@dataclass(frozen=True)
class SystemMessage:
    """A message with the system prompt."""

    content: str


@dataclass(frozen=True)
class HumanMessage:
    """A message of the user."""

    content: str


@dataclass(frozen=True)
class AIMessage:
    """A reply. `tool_calls`: dicts with id, name, type "tool_call", and the parsed arguments as both `arguments` and
    `args`. `additional_kwargs`: other fields of the reply (reasoning, signatures), which its server needs back; a call
    with such fields has the same key.
    """

    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: TokenUsage = field(default_factory=TokenUsage)
    additional_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolMessage:
    """The result of a tool. `artifact`: the result's metadata, which the model does not see."""

    content: str
    tool_call_id: str
    name: str | None = None
    status: Literal["success", "error"] = "success"
    artifact: Any = None


ChatMessage = SystemMessage | HumanMessage | AIMessage | ToolMessage

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


def build_tool_call(
    call_id: str, name: str, arguments: Mapping[str, Any], fields: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return an entry of `AIMessage.tool_calls`. `fields`: other fields of the call."""
    parsed = dict(arguments)
    call = {"id": call_id, "name": name, "arguments": parsed, "args": parsed, "type": "tool_call"}
    return {**call, "additional_kwargs": dict(fields)} if fields else call


def convert_to_wire(message: Any) -> Message:
    """Return the message in the wire shape.

    Accepts the message objects of this module, a dict in the wire shape (copied), or an object with `type` and
    `content`. Raises TypeError for anything else.
    """
    if isinstance(message, Mapping):
        return dict(fill_blank(dict(message)))
    role = _find_role(message)
    wire: Message = {"role": role, "content": message.content}
    if role == "assistant" and isinstance(fields := getattr(message, "additional_kwargs", None), Mapping):
        wire |= {name: value for name, value in fields.items() if name == ORIGIN or name not in MESSAGE_FIELDS}
    if role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    calls: Sequence[Mapping[str, Any]] = getattr(message, "tool_calls", None) or ()
    if calls:
        wire["tool_calls"] = [_build_entry(call) for call in calls]
        wire["content"] = message.content or None
    return fill_blank(wire)


def _find_role(message: Any) -> str:
    own: dict[type, str] = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant", ToolMessage: "tool"}
    role = own.get(type(message)) or _ROLES.get(str(getattr(message, "type", "")).removesuffix("MessageChunk").lower())
    if role is None or not hasattr(message, "content"):
        raise TypeError(
            f"a message is a {type(message).__name__}: pass a dict with role and content, or a message object"
        )
    return role


def _build_entry(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["arguments"] if "arguments" in call else call.get("args", {})
    fields = call.get("additional_kwargs") or {}
    function = {"name": build_wire_name(call["name"]), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {**fields, "id": call["id"], "type": "function", "function": {**fields.get("function", {}), **function}}
