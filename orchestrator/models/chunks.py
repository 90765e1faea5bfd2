"""Chunks of a reply: normalises streamed deltas, and splits a whole reply into chunks."""

from collections.abc import Iterable, Iterator
from typing import Any

from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.dialects.reply_fields import PARTS, number_part

_CONTENT_FIELDS = (
    "content",
    "refusal",
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    PARTS,
)


def normalize(chunk: Chunk) -> Chunk:
    """Return the chunk with its text in `content`, and other parts of the content in PARTS. Some servers send parts, or
    a refusal in a separate field.
    """
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if isinstance(delta, dict) and not (isinstance(content := delta.get("content"), str) and content):
            _normalize_delta(delta)
    return chunk


def has_content(chunk: Chunk) -> bool:
    """Return whether the chunk contains a part of the reply. A role, empty text and usage do not
    count; reasoning does.
    """
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if isinstance(delta, dict) and any(delta.get(name) for name in _CONTENT_FIELDS):
            return True
    return False


def join_content(chunks: Iterable[Chunk]) -> str:
    """Return the text of the first choice in these chunks."""
    texts: list[str] = []
    for chunk in chunks:
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        delta = choice.get("delta") if isinstance(choice, dict) else None
        content = delta.get("content") if isinstance(delta, dict) else None
        if isinstance(content, str):
            texts.append(content)
    return "".join(texts)


def is_end(chunk: Chunk) -> bool:
    """Return whether the chunk ends the reply: it has a finish_reason, or the usage after the last choice. Some servers
    send only one of the two.
    """
    choices = chunk.get("choices")
    if not choices:
        return bool(chunk.get("usage"))
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") for choice in choices
    )


def split_reply(reply: Any) -> Iterator[Chunk] | None:
    """Return the chunks of a `chat.completion`: its message, finish_reason and usage. None for any other value.

    A counted reply without a choice, and a choice without a message, are empty: providers send them if they withhold a
    reply.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not (choices or reply.get("usage")):
        return None
    choice = choices[0] if choices else {}
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict | None):
        return None
    return _split(reply, choice, choice.get("message") or {})


def _split(reply: dict[str, Any], choice: dict[str, Any], message: dict[str, Any]) -> Iterator[Chunk]:
    head = {key: reply[key] for key in ("id", "model", "created", "prompt_token_ids") if key in reply} | {
        "object": "chat.completion.chunk"
    }
    delta = dict(message)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        # Numbered by position: some servers send index 0 for every call.
        delta["tool_calls"] = [
            {**call, "index": position} for position, call in enumerate(calls) if isinstance(call, dict)
        ]
    tokens = {key: choice[key] for key in ("logprobs", "token_ids") if choice.get(key) is not None}
    yield normalize({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **tokens}]})
    # The reply is complete even without a finish_reason, because it is one JSON value.
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason")}]}
    if reply.get("usage"):
        yield {**head, "choices": [], "usage": reply["usage"]}


def _normalize_delta(delta: dict[str, Any]) -> None:
    content, refusal = delta.get("content"), delta.get("refusal")
    if isinstance(content, list):
        delta["content"] = "".join(_part_text(part) for part in content)
        others = [part for part in content if isinstance(part, dict) and part.get("type") not in (None, "text")]
        delta[PARTS] = [number_part(part) for part in others] or None
    elif not content and isinstance(refusal, str) and refusal:
        delta["content"] = refusal


def _part_text(part: Any) -> str:
    """Return the text of one part of a message. For a part with reasoning, return "", because reasoning is never
    searched for calls.
    """
    text = part.get("text") if isinstance(part, dict) and part.get("type") in (None, "text") else None
    return text if isinstance(text, str) else ""
