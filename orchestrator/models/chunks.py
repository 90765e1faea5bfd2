"""The chunks of a reply: streamed deltas made plain, and a reply that came whole told as the chunks it would have
been.
"""

from collections.abc import Iterator
from typing import Any

from orchestrator.dialects.model import Chunk

_CONTENT_FIELDS = ("content", "tool_calls", "reasoning_content", "reasoning")


def mend(chunk: Chunk) -> Chunk:
    """The chunk, its text always in `content`: some servers send parts, and a refusal stands in a field of its own."""
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if isinstance(delta, dict) and not isinstance(delta.get("content"), str):
            _mend_delta(delta)
    return chunk


def has_content(chunk: Chunk) -> bool:
    """Whether a part of the reply is in it; a role, an empty text, usage are none. Reasoning is: it cost the wait."""
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if isinstance(delta, dict) and any(delta.get(name) for name in _CONTENT_FIELDS):
            return True
    return False


def is_end(chunk: Chunk) -> bool:
    """A finish_reason, or the usage that follows the last choice: servers that omit one send the other."""
    choices = chunk.get("choices")
    if not choices:
        return bool(chunk.get("usage"))
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") for choice in choices
    )


def split_reply(reply: Any) -> Iterator[Chunk] | None:
    """The chunks of a `chat.completion`: its message, its finish_reason, its usage. None when it is no such thing."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        return None
    return _split(reply, choice, choice["message"])


def _split(reply: dict[str, Any], choice: dict[str, Any], message: dict[str, Any]) -> Iterator[Chunk]:
    head = {key: reply[key] for key in ("id", "model", "created") if key in reply} | {"object": "chat.completion.chunk"}
    delta = dict(message)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        # By place: here an index says nothing, and some servers number every call 0.
        delta["tool_calls"] = [{**call, "index": place} for place, call in enumerate(calls) if isinstance(call, dict)]
    yield mend({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    # Whole even without a finish_reason: it came as one JSON value.
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason")}]}
    if reply.get("usage"):
        yield {**head, "choices": [], "usage": reply["usage"]}


def _mend_delta(delta: dict[str, Any]) -> None:
    content, refusal = delta.get("content"), delta.get("refusal")
    if isinstance(content, list):
        delta["content"] = "".join(_part_text(part) for part in content)
    elif content is None and isinstance(refusal, str) and refusal:
        delta["content"] = refusal


def _part_text(part: Any) -> str:
    """The text of one part; of a part of reasoning nothing, which is never scanned for calls."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") in (None, "text") else None
    return text if isinstance(text, str) else ""
