"""Fields of a reply that the chat format does not define: reasoning, signatures, and other data of a provider.

Providers refuse the next request if such a field is missing (DeepSeek, Kimi, Gemini), so the fields stay in the
assistant message. They go back only to the endpoint that sent them: other servers refuse unknown fields, or a
signature that is not their own.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolcrew.orchestrator.dialects.model import Chunk, Message
from toolcrew.orchestrator.dialects.surrogates import join_surrogates

ORIGIN = "toolcrew_endpoint"
"""The key of a chunk and of an assistant message that names the endpoint of the other fields. It is never sent."""
PARTS = "toolcrew_parts"
"""The key of a delta and of an assistant message with the parts of the content that are no text, such as Mistral's
`thinking`. They go back to their endpoint as parts of `content`, before the text.
"""
MAX_CHARS = 4 * 1024 * 1024
"""Limit of the characters in the other fields of one reply. A longer reply keeps none of them."""
MAX_PIECES = 1_000_000
"""Limit of the values and pieces of texts in the other fields of one reply."""
MAX_DEPTH = 16

MESSAGE_FIELDS = frozenset({"role", "content", "tool_calls", "function_call", "refusal", "name", ORIGIN})
CALL_FIELDS = frozenset({"index", "id", "type", "function"})
FUNCTION_FIELDS = frozenset({"name", "arguments"})
_IDENTITIES = frozenset({"id", "index", "type", "format", "role", "name", "object", "mime_type"})
"""Fields that name a value. A later delta repeats or replaces them, and never continues them."""
_REPEATED = _IDENTITIES | {"signature", "thought_signature", "thoughtSignature", "data", "encrypted_content"}
"""Fields that some servers send whole in each delta. An equal value is a repetition."""


class TooLarge(ValueError):
    """The other fields of a reply exceed a limit."""


class FieldCollector:
    """Merges the other fields of the deltas of one reply: texts are appended, entries of lists are matched by their
    `index`, objects are merged, and any other value replaces the earlier one. A null is no value.
    """

    def __init__(self, shared: "FieldCollector | None" = None) -> None:
        """Create a collector. `shared`: another collector of the same reply, which has the same limits."""
        self._fields: dict[str, Any] = {}
        self._budget: _Budget = shared._budget if shared is not None else _Budget()

    def add(self, delta: Mapping[str, Any], known: frozenset[str]) -> None:
        """Add the fields of a delta that `known` does not contain."""
        if not self._budget.is_exceeded:
            try:
                _merge(self._fields, ((key, delta[key]) for key in delta if key not in known), self._budget, 0)
            except TooLarge:
                self._fields.clear()

    @property
    def is_too_large(self) -> bool:
        """Return whether the fields were dropped because they exceed a limit."""
        return self._budget.is_exceeded

    def build(self) -> dict[str, Any]:
        """Return the merged fields; none if they exceed a limit."""
        return {} if self.is_too_large else {key: _build(value) for key, value in self._fields.items()}


class _Budget:
    def __init__(self) -> None:
        self._chars = self._values = 0
        self.is_exceeded = False

    def spend(self, chars: int, depth: int) -> None:
        """Count one new value, or one more piece of a text. Repeated values need no memory and cost nothing."""
        self._chars += chars
        self._values += 1
        if self._chars > MAX_CHARS or self._values > MAX_PIECES or depth > MAX_DEPTH:
            self.is_exceeded = True
            raise TooLarge


class _Pieces(list[str]):
    """A text that is being received. Joining at each delta would take quadratic time."""

    def text(self) -> str:
        return join_surrogates("".join(self))


class _Entries(list[Any]):
    """A list that is being received. `places`: position by index and type of the entry."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[tuple[int, str], int] = {}


def _merge(target: dict[str, Any], fields: Iterable[tuple[str, Any]], budget: _Budget, depth: int) -> None:
    for key, value in fields:
        if not isinstance(key, str) or not _is_json(value):
            continue
        if key not in target:
            budget.spend(len(key), depth)
        target[key] = _merge_value(key, target.get(key), value, budget, depth + 1)


def _is_json(value: Any) -> bool:
    """Return whether the value exists in JSON, and is not null."""
    return isinstance(value, str | int | dict | list) or (isinstance(value, float) and math.isfinite(value))


def _merge_value(key: str, earlier: Any, value: Any, budget: _Budget, depth: int) -> Any:
    match value:
        case str():
            return _merge_text(key, earlier, value, budget, depth)
        case dict():
            merged = earlier if isinstance(earlier, dict) else {}
            _merge(merged, value.items(), budget, depth)
            return merged
        case list():
            entries = earlier if isinstance(earlier, _Entries) else _Entries()
            _merge_entries(entries, value, budget, depth)
            return entries
        case _:
            return value


def _merge_text(key: str, earlier: Any, text: str, budget: _Budget, depth: int) -> _Pieces:
    pieces = earlier if isinstance(earlier, _Pieces) else None
    if pieces == [text] and key in _REPEATED:
        return _Pieces([text])
    if text or pieces is None:
        budget.spend(len(text), depth)
    if pieces is None or key in _IDENTITIES:
        return _Pieces([text])
    pieces.append(text)
    return pieces


def _merge_entries(entries: _Entries, values: Sequence[Any], budget: _Budget, depth: int) -> None:
    for value in values:
        if not _is_json(value):
            continue
        index = value.get("index") if isinstance(value, dict) else None
        place = (index, str(value.get("type"))[:64]) if isinstance(index, int) else None
        if place is not None and place in entries.places:
            position = entries.places[place]
            entries[position] = _merge_value("", entries[position], value, budget, depth + 1)
            continue
        if place is None and value is values[0] and _continues(entries, value):
            entries[-1] = _merge_value("", entries[-1], value, budget, depth + 1)
            continue
        budget.spend(0, depth)
        if place is not None:
            entries.places[place] = len(entries)
        entries.append(_merge_value("", None, value, budget, depth + 1))


def _continues(entries: _Entries, value: Any) -> bool:
    """Return whether an entry without index is the next piece of the last entry: a block of thinking that has no
    signature yet. Blocks of one delta are whole.
    """
    last = entries[-1] if entries else None
    if not isinstance(last, dict) or not isinstance(value, dict) or value.get("type") != "thinking":
        return False
    return _build(last.get("type")) == "thinking" and not _build(last.get("signature"))


def _build(value: Any) -> Any:
    match value:
        case _Pieces():
            return value.text()
        case dict():
            return {join_surrogates(key): _build(inner) for key, inner in value.items()}
        case list():
            return [_build(inner) for inner in value]
        case _:
            return value


# --- Origin -----------------------------------------------------------------------------------------------------------


def build_origin(address: str, model: str) -> str:
    """Return the id of an endpoint. It reveals no address."""
    return hashlib.sha256(f"{address}\n{model}".encode()).hexdigest()[:16]


def mark_origin(chunk: Chunk, origin: str) -> None:
    """Name the endpoint in a chunk that has other fields. Only the client of the endpoint may call this."""
    chunk.pop(ORIGIN, None)
    if any(_find_fields(delta) for delta in _deltas(chunk)):
        chunk[ORIGIN] = origin


def select_fields(message: Message, origin: str | None) -> Message:
    """Return the message as it is sent to the endpoint `origin`: without the other fields of a reply of another
    endpoint. `origin` None: without any. A message that names no endpoint was written by the caller and stays as it is,
    unless `origin` is None.
    """
    if message.get("role") != "assistant":
        return message
    if message.get(ORIGIN, origin) == origin and origin is not None:
        own = {key: value for key, value in message.items() if key not in (ORIGIN, PARTS)}
        return own | _build_content(message) if ORIGIN in message or PARTS in message else message
    if not has_fields(message) and ORIGIN not in message:
        return message
    plain = {key: value for key, value in message.items() if key in MESSAGE_FIELDS and key != ORIGIN}
    if isinstance(calls := message.get("tool_calls"), list):
        plain["tool_calls"] = [_select_call(call) for call in calls]
    return plain


def number_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a delta's content so that the pieces of one thought are merged. Other parts stay as they are."""
    thoughts = part.get("thinking")
    if part.get("type") != "thinking" or not isinstance(thoughts, list | str):
        return part
    if isinstance(thoughts, list):
        thoughts = [{**piece, "index": 0} if _is_text(piece) else piece for piece in thoughts]
    return {**part, "thinking": thoughts, "index": 0}


def _build_content(message: Message) -> Message:
    """Return the `content` of a message that has parts besides its text; {} for a message that has none."""
    parts, text = message.get(PARTS), message.get("content")
    if not isinstance(parts, list) or not parts:
        return {}
    texts = [{"type": "text", "text": text}] if isinstance(text, str) and text else []
    return {"content": [*(_remove_numbers(part) for part in parts if isinstance(part, dict)), *texts]}


def _remove_numbers(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part as its endpoint sent it, without what `number_part` added."""
    thoughts = part.get("thinking")
    if part.get("type") != "thinking" or not isinstance(thoughts, list | str):
        return part
    if isinstance(thoughts, list):
        thoughts = [
            {key: value for key, value in piece.items() if key != "index"} if _is_text(piece) else piece
            for piece in thoughts
        ]
    return {key: value for key, value in part.items() if key != "index"} | {"thinking": thoughts}


def _is_text(piece: Any) -> bool:
    return isinstance(piece, dict) and piece.get("type") == "text"


def has_fields(message: Message) -> bool:
    """Return whether an assistant message has other fields, in itself or in a call."""
    return message.get("role") == "assistant" and _find_fields(message)


def _find_fields(message: Mapping[str, Any]) -> bool:
    calls = message.get("tool_calls")
    return any(value is not None and key not in MESSAGE_FIELDS for key, value in message.items()) or any(
        isinstance(call, dict) and _select_call(call) != {key: call[key] for key in call if key != "index"}
        for call in (calls if isinstance(calls, list) else ())
    )


def _select_call(call: Any) -> Any:
    """Return the call without other fields, and without its index."""
    if not isinstance(call, dict):
        return call
    plain = {key: value for key, value in call.items() if key in CALL_FIELDS and key != "index"}
    if isinstance(function := call.get("function"), dict):
        plain["function"] = {key: value for key, value in function.items() if key in FUNCTION_FIELDS}
    return plain


def _deltas(chunk: Chunk) -> list[dict[str, Any]]:
    choices = chunk.get("choices")
    deltas = [
        choice.get("delta") for choice in (choices if isinstance(choices, list) else ()) if isinstance(choice, dict)
    ]
    return [delta for delta in deltas if isinstance(delta, dict)]
