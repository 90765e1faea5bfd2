"""Assembles streamed native tool calls. Servers deviate from OpenAI's deltas; this module accepts these quirks:

- Fragments that are interleaved, have gaps in their indices, or a first index of 1 or as text: kept by index.
- Two entries of one index in a delta: merged. No index: a known id continues its call; a new id, or a name while the
  last call has one, starts a new call; otherwise the last call continues.
- Index 0 for every call: a new id with a name starts a new call. Another id on a continuation: the first id stays.
- Arguments alone at an unused index: they continue the last call, unless its first fragment is one whole object.
- A repeated id or name is a repetition; another piece of a name before the arguments is appended.
- No id, or the id of an earlier call: an id is made of run, step and position.
- No id, or the id of an earlier call, but the same name and another whole object as arguments: a new call.
- Arguments that are empty, blank, null, an empty list or text, or missing: `{}`. Arguments as an object: accepted. So
  is an object in a JSON string, an object that was sent twice, an empty object before or after the real one, and a text
  with unescaped line breaks.
- Other invalid JSON, two different objects, NaN, infinite numbers, a list, a string: malformed, never repaired.
- A `function_call` without `tool_calls`: a call.
- Any finish_reason with calls: reported, but it does not decide whether there are calls. After an abnormal end the last
  native call never runs. Chunks without choices or delta: skipped.
- Other fields of the message and of each call (reasoning, signatures): merged and kept (reply_fields.py).
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from toolcrew.contract.errors import ModelRefused
from toolcrew.contract.json_limits import has_more_values_in_text
from toolcrew.contract.schema import MAX_VALUES
from toolcrew.orchestrator.dialects.base import Text
from toolcrew.orchestrator.dialects.call_ids import build_missing_id
from toolcrew.orchestrator.dialects.finish_reasons import as_reason
from toolcrew.orchestrator.dialects.json_objects import parse_json_object
from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.dialects.native_fragments import CallSlots, PartialCall, parse_fragment
from toolcrew.orchestrator.dialects.reply_fields import MESSAGE_FIELDS, ORIGIN, FieldCollector
from toolcrew.orchestrator.dialects.surrogates import SurrogateJoiner, join_surrogates

MAX_REPLY_CHARS = 128 * 1024 * 1024
"""Limit of the characters of one reply, text and calls together, far above any model's token limit. Only a broken
server sends more.
"""
FRAGMENT_CHARS = 64
"""Minimum number of characters for which a fragment of a call counts towards the limit. The minimum limits the number
of very short fragments.
"""
NO_NAME = "the call has no tool name"


@dataclass(frozen=True)
class NativeCall:
    """A call whose arguments are a JSON object. `raw`: the JSON text of the arguments, as received if it is plain JSON.

    `id` is the id that the model sent, or a generated id if the model sent none. `position` is its index in the reply.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str
    position: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    """Other fields of the entry; those of its function are in `function`."""


@dataclass(frozen=True)
class MalformedNativeCall:
    """A call that cannot be run. `raw` is the argument string as received."""

    id: str
    name: str
    raw: str
    reason: str
    position: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NativeReply:
    """A whole reply. `finish_reason` is the server's value and does not decide whether the reply has calls. `refusal`:
    the model refused to answer, and the text is its explanation. `fields`: other fields of the message.
    """

    text: str
    calls: list[NativeCall]
    finish_reason: str | None
    malformed: list[MalformedNativeCall]
    refusal: bool = False
    fields: dict[str, Any] = field(default_factory=dict)

    def in_order(self) -> list[NativeCall | MalformedNativeCall]:
        return sorted([*self.calls, *self.malformed], key=lambda call: call.position)


class NativeCallAssembler:
    """Assembles one streamed reply. `run` and `step` are part of the ids that are generated for calls without an id."""

    def __init__(self, run: str = "run", step: int = 0) -> None:
        self._run = run
        self._step = step
        self._slots = CallSlots()
        self._text: list[str] = []
        self._surrogates = SurrogateJoiner()
        self._finish_reason: str | None = None
        self._chars = 0
        self._fields = FieldCollector()
        self._origin: str | None = None
        self._is_refusal = False
        self.has_calls = False

    def feed(self, chunk: Chunk) -> list[Text]:
        """Return the text of one `chat.completion.chunk`.

        Calls are returned by `finish`, because a later fragment may belong to any of them. Raises ModelRefused for a
        reply that is longer than MAX_REPLY_CHARS.
        """
        choice = _first_choice(chunk)
        if choice is None:
            return []
        reason = choice.get("finish_reason")
        if reason:
            self._finish_reason = join_surrogates(as_reason(reason))
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return []
        if isinstance(origin := chunk.get(ORIGIN), str):
            self._origin = origin
        self._fields.add(delta, MESSAGE_FIELDS)
        self._is_refusal = self._is_refusal or bool(delta.get("refusal"))
        self._add_fragments(_find_entries(delta))
        content = delta.get("content")
        return self._add_text(content) if isinstance(content, str) else []

    def flush(self) -> list[Text]:
        """Return the half of a surrogate pair whose other half has not arrived, as text. `finish` adds this half to the
        reply too, but without an event.
        """
        tail = self._surrogates.finish()
        if not tail:
            return []
        self._text.append(tail)
        return [Text(tail)]

    def finish(self, strict: bool = True) -> NativeReply:
        """Return the reply.

        If `strict`, raise ValueError with the tool name and the raw arguments of the first malformed call; otherwise
        list all malformed calls.
        """
        self.flush()
        reply = NativeReply("".join(self._text), [], self._finish_reason, [], self._is_refusal, self._fields.build())
        used: set[str] = set()
        for position, call in enumerate(self._slots.in_order()):
            call_id = join_surrogates(call.id)
            if not call_id or call_id in used:
                call_id = build_missing_id(self._run, self._step, position)
            used.add(call_id)
            item = _finish_call(call, call_id, position)
            if isinstance(item, NativeCall):
                reply.calls.append(item)
            elif strict:
                raise ValueError(f"tool call {item.name or '(no name)'}: {item.reason}; raw arguments: {item.raw}")
            else:
                reply.malformed.append(item)
        if self._origin is not None and (reply.fields or any(call.fields for call in reply.in_order())):
            reply.fields[ORIGIN] = self._origin
        return reply

    def _add_text(self, content: str) -> list[Text]:
        self._count_chars(len(content))
        text = self._surrogates.feed(content)
        if not text:
            return []
        self._text.append(text)
        return [Text(text)]

    def _add_fragments(self, entries: list[Any]) -> None:
        for entry in entries:
            fragment = parse_fragment(entry)
            if fragment is None:
                continue
            call = self._slots.assign(fragment)
            text = _argument_text(fragment.arguments)
            self._count_chars(FRAGMENT_CHARS + len(text) + len(fragment.id or ""))
            if fragment.fields:
                call.fields = call.fields or FieldCollector(self._fields)
                call.fields.add(fragment.fields, frozenset())
            if text and not (isinstance(fragment.arguments, dict) and call.fragments == [text]):
                call.fragments.append(text)
            self.has_calls = self.has_calls or not call.is_phantom()

    def _count_chars(self, chars: int) -> None:
        self._chars += chars
        if self._chars > MAX_REPLY_CHARS:
            raise ModelRefused(
                f"the reply of the model is longer than {MAX_REPLY_CHARS} characters. Check whether its server "
                "works correctly."
            )


def _first_choice(chunk: Chunk) -> dict[str, Any] | None:
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and choice.get("index") in (None, 0, "0"):
            return choice
    return None


def _find_entries(delta: dict[str, Any]) -> list[Any]:
    """Return the delta's entries of `tool_calls`. Older servers send one `function_call` instead; some send both."""
    entries, legacy = delta.get("tool_calls"), delta.get("function_call")
    if isinstance(entries, list) and entries:
        return entries
    if isinstance(entries, dict):
        return [entries]
    return [{"index": 0, "function": legacy}] if isinstance(legacy, dict) and not entries else []


def _argument_text(arguments: Any) -> str:
    """Return a fragment as text. Some servers send objects; they and other types become JSON, which
    the parser checks.
    """
    if isinstance(arguments, str):
        return arguments
    if arguments is None:
        return ""
    try:
        return json.dumps(arguments)
    except (RecursionError, TypeError, ValueError):
        return "(arguments that are no JSON)"


def _finish_call(call: PartialCall, call_id: str, position: int) -> NativeCall | MalformedNativeCall:
    raw = join_surrogates("".join(call.fragments))
    name = join_surrogates(call.name)
    fields = call.fields.build() if call.fields is not None else {}
    if not name:
        return MalformedNativeCall(call_id, name, raw, NO_NAME, position, fields)
    try:
        arguments, text = _read_arguments(raw)
        return NativeCall(call_id, name, arguments, text, position, fields)
    except ValueError as error:
        return MalformedNativeCall(call_id, name, raw, str(error), position, fields)


def parse_arguments(raw: str) -> dict[str, Any]:
    """Return the arguments of a call. Blank text and the other texts of _NOTHING mean none. Raises ValueError."""
    return _read_arguments(raw)[0]


def _read_arguments(raw: str) -> tuple[dict[str, Any], str]:
    """Return the arguments and their JSON text: `raw` if it is plain JSON. Raises ValueError."""
    if raw.strip() in _NOTHING:
        return {}, raw
    try:
        arguments = parse_json_object(raw, "the arguments")
    except ValueError:
        text = _find_only_object(raw)
        if text is None:
            raise
        arguments = parse_json_object(text, "the arguments")
        raw = text
    # Other servers and templates do not accept line breaks in texts.
    return arguments, raw if _is_plain(raw) else json.dumps(arguments, ensure_ascii=False)


def _is_plain(text: str) -> bool:
    """Return whether valid JSON is valid without the exception for control characters in texts."""
    try:
        return _CONTROL.search(text) is None or json.loads(text) is not None
    except ValueError:
        return False


_NOTHING = ("", "null", "None", "[]", '""')
"""Arguments of a call without arguments. PHP servers encode an empty object as a list."""
_CONTROL = re.compile(r"[\x00-\x1f]")
MAX_COPIES = 8
"""Limit of the values in one argument string that are compared."""


def _find_only_object(raw: str) -> str | None:
    """Return the text of the only object that an argument string has, if it is in a JSON string, repeated, or next to
    empty objects. None if it has no object or different ones.
    """
    if has_more_values_in_text(raw, MAX_VALUES):
        return None
    decoder, position, found = json.JSONDecoder(strict=False), 0, dict[str, Any]()
    try:
        for _ in range(MAX_COPIES):
            position += len(raw[position:]) - len(raw[position:].lstrip())
            if position == len(raw):
                break
            value, end = decoder.raw_decode(raw, position)
            if isinstance(value, str) and position == 0 and not raw[end:].strip():
                return value if value.lstrip().startswith("{") else None
            if value not in ({}, None):
                found.setdefault(json.dumps(value, sort_keys=True), raw[position:end])
            position = end
        else:
            return None
    except (ValueError, RecursionError):
        return None
    return next(iter(found.values())) if len(found) == 1 else None
