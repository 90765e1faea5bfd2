"""Assembles streamed native tool calls, whose deltas are only nominally OpenAI's (docs/dialects.md lists the
quirks).
"""

import json
from dataclasses import dataclass
from typing import Any

from contract.errors import ModelRefused
from orchestrator.dialects.base import Text
from orchestrator.dialects.call_ids import build_missing_id
from orchestrator.dialects.json_objects import parse_json_object
from orchestrator.dialects.model import Chunk
from orchestrator.dialects.native_fragments import CallSlots, PartialCall, parse_fragment
from orchestrator.dialects.surrogates import SurrogateJoiner, join_surrogates

MAX_REPLY_CHARS = 128 * 1024 * 1024
"""Text and calls of one reply; far more than a model has tokens for. Only a server that does not end sends more."""
FRAGMENT_CHARS = 64
"""A fragment of a call counts as so many, however short it is."""
NO_NAME = "the call has no tool name"


@dataclass(frozen=True)
class NativeCall:
    """A call whose arguments are a JSON object. `id` is the model's, made up when it sent none. `position`: its place
    in the reply.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str
    position: int = 0


@dataclass(frozen=True)
class MalformedNativeCall:
    """A call that cannot be run. `raw` is the argument string as it came."""

    id: str
    name: str
    raw: str
    reason: str
    position: int = 0


@dataclass(frozen=True)
class Reply:
    """A whole reply. `finish_reason` as the server sent it: it does not decide whether there are calls."""

    text: str
    calls: list[NativeCall]
    finish_reason: str | None
    malformed: list[MalformedNativeCall]

    def in_order(self) -> list[NativeCall | MalformedNativeCall]:
        return sorted([*self.calls, *self.malformed], key=lambda call: call.position)


class NativeCallAssembler:
    """Assembles one streamed reply. `run` and `step` go into the ids of calls that came without one."""

    def __init__(self, run: str = "run", step: int = 0) -> None:
        self._run = run
        self._step = step
        self._slots = CallSlots()
        self._text: list[str] = []
        self._surrogates = SurrogateJoiner()
        self._finish_reason: str | None = None
        self._chars = 0
        self.has_calls = False

    def feed(self, chunk: Chunk) -> list[Text]:
        """The text of one `chat.completion.chunk`. Calls come at `finish`: until then a fragment may still belong to
        any of them.

        Raises ModelRefused for a reply that is longer than MAX_REPLY_CHARS.
        """
        choice = _first_choice(chunk)
        if choice is None:
            return []
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self._finish_reason = join_surrogates(reason)
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return []
        entries = delta.get("tool_calls")
        if isinstance(entries, list):
            self._take_fragments(entries)
        content = delta.get("content")
        return self._take_text(content) if isinstance(content, str) else []

    def flush(self) -> list[Text]:
        """Text that was held for its other half, which never came. `finish` does this, too, but cannot show it."""
        tail = self._surrogates.finish()
        if not tail:
            return []
        self._text.append(tail)
        return [Text(tail)]

    def finish(self, strict: bool = True) -> Reply:
        """The reply. When `strict`, raises ValueError with tool name and raw arguments of the first malformed call;
        else lists them.
        """
        self.flush()
        reply = Reply("".join(self._text), [], self._finish_reason, [])
        used: set[str] = set()
        for position, call in enumerate(self._slots.in_order()):
            call_id = join_surrogates(call.id)
            if not call_id or call_id in used:
                call_id = build_missing_id(self._run, self._step, position)
            used.add(call_id)
            finished = _finished(call, call_id, position)
            if isinstance(finished, NativeCall):
                reply.calls.append(finished)
            elif strict:
                raise ValueError(
                    f"tool call {finished.name or '(no name)'}: {finished.reason}; raw arguments: {finished.raw}"
                )
            else:
                reply.malformed.append(finished)
        return reply

    def _take_text(self, content: str) -> list[Text]:
        self._grow(len(content))
        text = self._surrogates.feed(content)
        if not text:
            return []
        self._text.append(text)
        return [Text(text)]

    def _take_fragments(self, entries: list[Any]) -> None:
        for entry in entries:
            fragment = parse_fragment(entry)
            if fragment is None:
                continue
            call = self._slots.place(fragment)
            text = _argument_text(fragment.arguments)
            self._grow(FRAGMENT_CHARS + len(text) + len(fragment.id or ""))
            if text and not (isinstance(fragment.arguments, dict) and call.fragments == [text]):
                call.fragments.append(text)
            self.has_calls = self.has_calls or not call.is_phantom()

    def _grow(self, chars: int) -> None:
        self._chars += chars
        if self._chars > MAX_REPLY_CHARS:
            raise ModelRefused(
                f"the reply of the model is longer than {MAX_REPLY_CHARS} characters: see whether its server works"
            )


def _first_choice(chunk: Chunk) -> dict[str, Any] | None:
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and choice.get("index") in (None, 0, "0"):
            return choice
    return None


def _argument_text(arguments: Any) -> str:
    """A fragment as text. Objects (some servers send them whole) become JSON, other oddities too: then the parse
    refuses them.
    """
    if isinstance(arguments, str):
        return arguments
    if arguments is None:
        return ""
    try:
        return json.dumps(arguments)
    except (RecursionError, TypeError, ValueError):
        return "(arguments that are no JSON)"


def _finished(call: PartialCall, call_id: str, position: int) -> NativeCall | MalformedNativeCall:
    raw = join_surrogates("".join(call.fragments))
    name = join_surrogates(call.name)
    if not name:
        return MalformedNativeCall(call_id, name, raw, NO_NAME, position)
    try:
        return NativeCall(call_id, name, parse_arguments(raw), raw, position)
    except ValueError as error:
        return MalformedNativeCall(call_id, name, raw, str(error), position)


def parse_arguments(raw: str) -> dict[str, Any]:
    """The arguments of a call; blank text (and `null`) means none. Raises ValueError."""
    return {} if raw.strip() in ("", "null") else parse_json_object(raw, "the arguments")
