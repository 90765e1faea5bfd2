"""Reads one streamed reply for every dialect: native calls, calls by tag, and which of them count."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from toolcrew.contract.calls import MAX_NAME_CHARS, ToolCall
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.orchestrator.dialects.base import CallRequested, Event, MalformedCall, ReplyEnd, Text
from toolcrew.orchestrator.dialects.call_ids import build_call_id, build_short_id
from toolcrew.orchestrator.dialects.finish_reasons import ReplyEnding, announces_calls, classify_ending, explain_ending
from toolcrew.orchestrator.dialects.model import Chunk, Message, TokenUsage
from toolcrew.orchestrator.dialects.native_assembler import MalformedNativeCall, NativeCall, NativeCallAssembler
from toolcrew.orchestrator.dialects.tag_events import TagCall, TagEvent
from toolcrew.orchestrator.dialects.tag_parser import TagStreamParser
from toolcrew.orchestrator.dialects.thinking import (
    LONGEST_MARK,
    REASONING,
    THINK,
    find_end,
    find_first_end,
    find_lone_end,
    find_opened,
    may_open,
)
from toolcrew.telemetry.logs import get_logger

BROKEN = "the connection to the model was interrupted, so this call was not run; write it again"
CUT = "the reply was cut at the token limit, so this call was not run; write it again, shorter"
TAG_HINT = (
    'Use <name value="..." />, escape " as &quot;, or put long text between <name> and </name>. Close the call with '
    "</tool_action>."
)

NATIVE_HINT = "The arguments must be one JSON object that fits the tool's parameters."

MAX_CALLS = 256
"""Limit of the calls of one reply that run. A model that repeats itself sends tens of thousands."""
TOO_MANY_CALLS = (
    f"the reply has more than {MAX_CALLS} calls. The first {MAX_CALLS} were run; this call and all later ones "
    "were not. Send fewer calls in one reply."
)
MAX_COST = 1e9
"""Limit of the cost that a server may report for one reply. A higher value is not used."""

log = get_logger(__name__)
_KEPT_CHARS = 56
"""Characters of the beginning and of the end of a name that is too long."""
_TOKEN = "<|cut|>"
_UNFIT_FOR_NAME = re.compile(r"[^A-Za-z0-9_-]")


class StreamReader:
    """A ReplyReader. If `tags` is None, the text is not searched for calls.

    `provisional`: the request contained native tools, so tag calls wait for the end of the reply. If a native call
    comes, tags are text. Otherwise a tag call is returned as soon as it is complete.

    A complete tag counts even in a reply that was cut, because its closing tag proves that it is whole. The last native
    call of a reply that did not end normally does not count.
    """

    def __init__(
        self, run: str, step: int, *, tags: TagStreamParser | None, provisional: bool, short_ids: bool = False
    ) -> None:
        self._run = run
        self._step = step
        self._short_ids = short_ids
        self._assembler = NativeCallAssembler(run, step)
        self._tags = tags
        self._provisional = provisional
        self._waiting: list[TagEvent] = []
        self._index = 0
        self._texts: list[str] = []
        self._start = _ReplyStart()
        self._usage = TokenUsage()

    def feed(self, chunk: Chunk) -> list[Event]:
        events: list[Event] = []
        self._usage = read_usage(chunk) or self._usage
        self._start.expect(chunk.get(REASONING))
        for text in self._assembler.feed(chunk):
            events += self._read_text(text)
        if self._tags is not None and self._assembler.has_calls:
            events += self._prefer_native(self._tags)
        return self._record_texts(events)

    def finish(self, *, is_broken: bool = False) -> tuple[list[Event], ReplyEnd]:
        events = [event for text in self._assembler.flush() for event in self._read_text(text)]
        events += self._release_start()
        reply = self._assembler.finish(strict=False)
        ending = classify_ending(reply.finish_reason, is_refusal=reply.refusal)
        if self._tags is not None:
            waiting = self._drop_reasoning([*self._waiting, *self._tags.finish()])
            events += [self._convert_tag_event(event, ending) for event in waiting]
        # Keep one call more than the limit, so that the model gets an error for it. The rest of the reply is dropped.
        natives = reply.in_order()[: MAX_CALLS + 1]
        entries = []
        for position, native in enumerate(natives):
            cut = explain_unrun(ending, reply.finish_reason) if native is natives[-1] else None
            cut = BROKEN if is_broken else TOO_MANY_CALLS if position == MAX_CALLS else cut
            event = self._convert_native_call(native, cut, is_parallel=len(natives) > 1)
            entries.append(_build_message_entry(native, event.model_id))
            events.append(event)
        has_calls = any(not isinstance(event, Text) for event in events)
        if (
            self._provisional
            and not has_calls
            and ending is ReplyEnding.NORMAL
            and announces_calls(reply.finish_reason)
        ):
            ending = ReplyEnding.BAD_CALL
        if ending is ReplyEnding.BAD_CALL and not has_calls:
            events.append(MalformedCall(self._next_id(), None, f"{explain_unrun(ending, None)}. {NATIVE_HINT}", ""))
        message: Message = {"role": "assistant", "content": reply.text or (None if entries else ""), **reply.fields}
        if entries:
            message["tool_calls"] = entries
        self._record_texts(events)
        return events, ReplyEnd(message, "".join(self._texts), reply.finish_reason, self._usage, ending)

    def _read_text(self, text: Text) -> list[Event]:
        if self._tags is None:
            return [text]
        reasoning, rest = self._start.feed(text.text)
        events: list[TagEvent] = [Text(reasoning)] if reasoning else []
        return self._convert_tag_events([*events, *(self._tags.feed(rest) if rest else ())])

    def _release_start(self) -> list[Event]:
        """Read the start of a reply whose reasoning did not end: all of it is reasoning only if it has a beginning."""
        text, is_reasoning = self._start.finish()
        if not text or self._tags is None:
            return [Text(text)] if text else []
        return self._convert_tag_events([Text(text)] if is_reasoning else self._tags.feed(text))

    def _drop_reasoning(self, waiting: list[TagEvent]) -> list[TagEvent]:
        """Return the waiting events of a complete reply. If a lone end of reasoning is in them, everything before it is
        text.
        """
        raw = "".join(event.text if isinstance(event, Text) else event.raw for event in waiting)
        if not waiting or not (end := find_lone_end(raw)) or self._tags is None:
            return waiting
        parser = self._tags.renew()
        return [Text(raw[:end]), *parser.feed(raw[end:]), *parser.finish()]

    def _convert_tag_events(self, tag_events: list[TagEvent]) -> list[Event]:
        """Convert tag events to events of the reply.

        While a native call may still come, everything from the first call on waits in `_waiting`.
        """
        if not self._provisional:
            return [self._convert_tag_event(event) for event in tag_events]
        events: list[Event] = []
        for event in tag_events:
            if self._waiting or not isinstance(event, Text):
                self._waiting.append(event)
            else:
                events.append(event)
        return events

    def _prefer_native(self, tags: TagStreamParser) -> list[Event]:
        """Treat all tags as text, from the first native call on: waiting ones, the open one and later ones."""
        self._tags = None
        waiting, self._waiting = self._waiting, []
        if self._index:
            log.warning(
                "native_calls_after_tags",
                message="Tag calls of this reply have already run. Later tags are treated as text.",
            )
        start, _ = self._start.finish()
        texts = [
            start,
            *(event.text if isinstance(event, Text) else event.raw for event in [*waiting, *tags.release()]),
        ]
        return [Text(text) for text in texts if text]

    def _convert_tag_event(self, event: TagEvent, ending: ReplyEnding = ReplyEnding.NORMAL) -> Event:
        if isinstance(event, Text):
            return event
        if self._index > MAX_CALLS:
            return Text(event.raw)
        call_id = self._next_id()
        if self._index > MAX_CALLS:
            return MalformedCall(call_id, event.name, TOO_MANY_CALLS, event.raw)
        if isinstance(event, TagCall):
            return build_call_event(call_id, event.name, event.arguments, event.raw, is_text=True)
        cut = (
            ", since the reply was cut at the token limit"
            if ending is ReplyEnding.CUT and event.reason == "unclosed"
            else ""
        )
        about = f" ({event.name})" if event.name else ""
        return MalformedCall(
            call_id, event.name, f"Malformed tool_action{about}: {event.reason}{cut}. {TAG_HINT}", event.raw
        )

    def _convert_native_call(
        self, native: NativeCall | MalformedNativeCall, cut: str | None, *, is_parallel: bool
    ) -> CallRequested | MalformedCall:
        call_id = self._next_id()
        model_id = build_short_id(native.id, call_id) if self._short_ids else native.id
        if cut is not None:
            return MalformedCall(call_id, native.name or None, cut, native.raw, model_id)
        if isinstance(native, NativeCall):
            return build_call_event(
                call_id, native.name, native.arguments, native.raw, model_id=model_id, is_parallel=is_parallel
            )
        return MalformedCall(
            call_id, native.name or None, f"Malformed tool call: {native.reason}. {NATIVE_HINT}", native.raw, model_id
        )

    def _next_id(self) -> str:
        self._index += 1
        return build_call_id(self._run, self._step, self._index - 1)

    def _record_texts(self, events: list[Event]) -> list[Event]:
        self._texts += [event.text for event in events if isinstance(event, Text)]
        return events


class _ReplyStart:
    """The start of a reply, which is held back while it may be reasoning."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0
        self._expected: int | bool = False
        self._opened: str | None = None
        self._tail = ""
        self._is_open = True

    def expect(self, reasoning: object) -> None:
        """Set what the client of the endpoint knows about the reasoning of this reply (`REASONING`)."""
        if isinstance(reasoning, bool | int) and self._is_open:
            self._expected = self._expected or reasoning

    def feed(self, text: str) -> tuple[str, str]:
        """Return the reasoning that has ended, and the text after it. Both are "" while the text is held back."""
        if not self._is_open:
            return "", text
        self._pieces.append(text)
        self._size += len(text)
        # Only the new piece and the length of a mark before it can contain the end.
        recent, self._tail = self._tail + text, (self._tail + text)[-LONGEST_MARK:]
        if not self._expected and self._opened is None:
            return self._look_for_opening()
        if self._expected is not True and self._expected:
            return self._split(self._expected) if self._size >= self._expected else ("", "")
        end = find_end(recent, self._opened) if self._opened else find_first_end(recent)
        return self._split(self._size - len(recent) + end) if end else ("", "")

    def finish(self) -> tuple[str, bool]:
        """Return the text that is still held back, and whether it is reasoning."""
        text, self._pieces = "".join(self._pieces), []
        self._is_open = False
        return text, self._opened is not None

    def _look_for_opening(self) -> tuple[str, str]:
        text = "".join(self._pieces)
        if may_open(text):
            return "", ""
        opened = find_opened(text)
        # The parser of tags reads blocks of the most usual kind itself, if they begin its text.
        if opened is None or opened == THINK:
            return self._split(0 if opened is None else len(text) - len(text.lstrip()))
        self._opened = opened
        end = find_end(text, opened)
        return self._split(end) if end else ("", "")

    def _split(self, end: int) -> tuple[str, str]:
        text, self._pieces, self._is_open = "".join(self._pieces), [], False
        return text[:end], text[end:]


def build_call_event(
    call_id: str, name: str, arguments: Mapping[str, Any], raw: str, **fields: Any
) -> CallRequested | MalformedCall:
    """Return the call as an event. `fields` are other fields of CallRequested.

    A call that the contract rejects (nesting 300 deep) becomes MalformedCall. A name that is too long is shortened in
    its middle: models and servers add control tokens and text before or after the tool's name.
    """
    try:
        return CallRequested(ToolCall(id=call_id, name=_shorten_name(name), arguments=dict(arguments)), raw, **fields)
    except ValidationError as error:
        reason = f"Malformed tool call: {describe_invalid(error)}. {NATIVE_HINT}"
        return MalformedCall(call_id, name[:64], reason, raw, fields.get("model_id", ""))


def _shorten_name(name: str) -> str:
    """Return the name with at most MAX_NAME_CHARS characters: its beginning and its end. A control token at the cut is
    removed whole, so that the tool's name next to it can still be found. The mark of the cut is in no tool's name.
    """
    if len(name) <= MAX_NAME_CHARS:
        return name
    head = re.sub(r"<\|[^|<>]*\|?$", _TOKEN, name[:_KEPT_CHARS])
    tail = re.sub(r"^[^|<>]*\|?>", _TOKEN, name[-_KEPT_CHARS:])
    return f"{head}~~{tail}"


def _build_message_entry(native: NativeCall | MalformedNativeCall, model_id: str) -> dict[str, Any]:
    """Return the call as an entry of the assistant message. Malformed calls are included, so that a tool message can
    answer them.

    Servers reject invalid names and arguments, and templates parse the arguments, so both are replaced by valid ones.
    """
    arguments = native.raw if isinstance(native, NativeCall) and native.raw.strip().startswith("{") else "{}"
    function = {**native.fields.get("function", {}), "name": build_wire_name(native.name), "arguments": arguments}
    return {**native.fields, "id": model_id, "type": "function", "function": function}


def explain_unrun(ending: ReplyEnding, finish_reason: str | None) -> str | None:
    """Return why the last call of a reply with that ending did not run; None if it runs. An unknown finish_reason says
    nothing against a complete call.
    """
    if ending in (ReplyEnding.NORMAL, ReplyEnding.UNKNOWN):
        return None
    if ending is ReplyEnding.CUT:
        return CUT
    return f"{explain_ending(ending, finish_reason)}, so this call was not run; write it again if it is still needed"


def build_wire_name(name: str) -> str:
    """Return the name of a call in the form that servers accept in a message."""
    return _UNFIT_FOR_NAME.sub("_", name)[:64] or "unknown"


def read_usage(chunk: Chunk) -> TokenUsage | None:
    usage = chunk.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    cost = usage.get("cost")
    return TokenUsage(
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        cached,
        float(cost) if isinstance(cost, int | float) and 0 <= cost < MAX_COST else None,
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
