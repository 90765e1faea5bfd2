"""Chunks of a reply: normalises streamed deltas, and splits a whole reply into chunks."""

import json
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


_TEXT_TYPES = (None, "text", "output_text")
_NO_REASON = ("null", "none")
"""A missing finish_reason, as some servers write it in each chunk."""


def normalize(chunk: Chunk, *, is_first: bool = False) -> Chunk:
    """Return the chunk with its text in `content`, and other parts of the content in PARTS. Some servers send parts, or
    a refusal in a separate field. `is_first`: the reply has no content yet, so a `message` without a delta is all of
    it.
    """
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        if is_first and "delta" not in choice and isinstance(message := choice.get("message"), dict):
            choice["delta"] = _as_delta(message)
        if isinstance(reason := choice.get("finish_reason"), str) and reason.lower() in _NO_REASON:
            choice["finish_reason"] = None
        delta = choice.get("delta")
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


class EndFinder:
    """Finds out whether a streamed reply has ended: it has a finish_reason, or usage after its last content. Some
    servers send only one of the two, and some send usage first.
    """

    def __init__(self) -> None:
        self._has_reason = self._is_counted = False

    @property
    def has_ended(self) -> bool:
        return self._has_reason or self._is_counted

    def feed(self, chunk: Chunk) -> None:
        """Read the next normalised chunk."""
        choices = chunk.get("choices")
        if not choices:
            self._is_counted = self._is_counted or bool(chunk.get("usage"))
        elif isinstance(choices, list):
            self._has_reason |= any(isinstance(choice, dict) and choice.get("finish_reason") for choice in choices)
            self._is_counted = self._is_counted and not has_content(chunk)


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
    delta = _as_delta(message)
    tokens = {key: choice[key] for key in ("logprobs", "token_ids") if choice.get(key) is not None}
    yield normalize({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **tokens}]})
    # The reply is complete even without a finish_reason, because it is one JSON value.
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason")}]}
    if reply.get("usage"):
        yield {**head, "choices": [], "usage": reply["usage"]}


def _as_delta(message: dict[str, Any]) -> dict[str, Any]:
    """Return a whole message as one delta. Its calls are numbered by position: some servers send index 0 for each."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    numbered = [{**call, "index": position} for position, call in enumerate(calls) if isinstance(call, dict)]
    return {**message, "tool_calls": numbered}


def _normalize_delta(delta: dict[str, Any]) -> None:
    content, refusal = delta.get("content"), delta.get("refusal")
    if isinstance(content, dict) and ("type" in content or "text" in content):
        content = [content]
    if isinstance(content, list):
        delta["content"] = "".join(_part_text(part) for part in content)
        others = [part for part in content if isinstance(part, dict) and not _is_text(part)]
        delta[PARTS] = [number_part(part) for part in others] or None
    elif content not in (None, ""):
        # A number, or an object that a server has parsed: the model wrote its JSON text.
        delta["content"] = json.dumps(content, ensure_ascii=False)
    elif isinstance(refusal, str) and refusal:
        delta["content"] = refusal


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("type") in _TEXT_TYPES


def _part_text(part: Any) -> str:
    """Return the text of one part of a message. For a part with reasoning, return "", because reasoning is never
    searched for calls.
    """
    if isinstance(part, dict):
        part = part.get("text") if _is_text(part) else None
    return part if isinstance(part, str) else ""
