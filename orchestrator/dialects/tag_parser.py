"""Reads `<tool_action>` calls out of streamed text, whatever the chunks (grammar: docs/dialects.md)."""

from orchestrator.dialects.fences import FenceTracker
from orchestrator.dialects.tag_events import TagEvent, Text
from orchestrator.dialects.tag_grammar import BLANKS, MARKER
from orchestrator.dialects.tag_machine import OpenTag

MAX_TAG_CHARS = 16 * 1024 * 1024
THINK = "<think>"
THINK_END = "</think>"

_BEHIND_MARKER = frozenset(BLANKS + ">/")


class TagStreamParser:
    """One reply's text as events. Text goes out at once, but for at most 12 characters that may begin a tag; a tag is kept until it is
    complete. Text + raw of calls + raw of errors = input, and the events do not depend on the chunks (but for where texts are cut).

    `ignore_fenced`: tags inside Markdown code fences are text. `max_tag_chars`: a longer tag is malformed.
    """

    def __init__(self, *, ignore_fenced: bool = False, max_tag_chars: int = MAX_TAG_CHARS) -> None:
        self._fences = FenceTracker() if ignore_fenced else None
        self._max_tag_chars = max_tag_chars
        self._held = ""
        self._tag: OpenTag | None = None
        self._at_start = True
        self._thinking = False
        self._is_off = False
        self._is_ending = False
        # True when a chunk without "<" is text as it stands: looked at first, since nearly every chunk is one.
        self._is_plain = False

    def feed(self, chunk: str) -> list[TagEvent]:
        """The events that `chunk` completes, in order."""
        if self._is_plain and "<" not in chunk:
            return [Text(chunk)] if chunk else []
        tag = self._tag
        if tag is not None and ">" not in chunk and self._may_defer(tag, len(chunk)):
            tag.defer(chunk)
            return []
        events: list[TagEvent] = []
        self._read(chunk, events)
        self._is_plain = self._tag is None and not (self._held or self._at_start or self._thinking or self._fences)
        return events

    def finish(self) -> list[TagEvent]:
        """The events of the end: held text, or the error of a tag that was never closed."""
        events: list[TagEvent] = []
        while self._tag is not None and self._tag.deferred_size:
            self._is_ending = True
            self._read(self._tag.take_deferred(), events)
        tag, self._tag = self._tag, None
        if tag is not None:
            return [*events, tag.abandon()] if tag.size else events
        return [*events, *self._held_text()]

    def release(self) -> list[TagEvent]:
        """Stop looking for tags: what is held goes out as text, and so does all that follows."""
        tag, self._tag = self._tag, None
        self._is_off, self._fences, self._at_start, self._thinking = True, None, False, False
        if tag is not None:
            raw = tag.raw() + tag.take_deferred()
            return [Text(raw)] if raw else []
        return self._held_text()

    def _held_text(self) -> list[TagEvent]:
        held, self._held = self._held, ""
        return [Text(held)] if held else []

    def _read(self, chunk: str, events: list[TagEvent]) -> None:
        position = 0
        while position < len(chunk):
            if self._tag is not None:
                position = self._read_tag(self._tag, chunk, position, events)
            else:
                position = self._read_text(chunk, position, events)

    def _may_defer(self, tag: OpenTag, length: int) -> bool:
        """Whether text without a `>` may wait: it completes no tag behind the commit point, but it may show that a header is none."""
        return tag.is_committed and not self._is_ending and tag.size + tag.deferred_size + length < self._max_tag_chars

    def _read_tag(self, tag: OpenTag, chunk: str, position: int, events: list[TagEvent]) -> int:
        if tag.deferred_size:
            self._read(tag.take_deferred() + chunk[position:], events)
            return len(chunk)
        size = len(chunk)
        if tag.is_committed:
            # Only up to the last `>`: what follows is read at once with the next one.
            last = chunk.rfind(">", position) + 1
            if not last and self._may_defer(tag, size - position):
                tag.defer(chunk[position:] if position else chunk)
                return size
            size = last or size
        position = tag.feed(chunk, position, min(size, position + self._max_tag_chars - tag.size))
        if tag.outcome == "open":
            if tag.size >= self._max_tag_chars:
                event, again = tag.overflow()
                events.append(event)
                self._read(again, events)
            return position
        if tag.outcome == "mention":
            self._tag = None
            self._emit(tag.raw(), events)
        elif tag.outcome == "reopen":
            events.append(tag.abandon())
            self._tag = OpenTag()
        else:
            self._tag = None
            events.append(closed := tag.close())
            if self._fences is not None:
                self._fences.feed(closed.raw)
        return position

    def _read_text(self, chunk: str, position: int, events: list[TagEvent]) -> int:
        """Read text up to the next tag. Gives the position in `chunk` behind what was read."""
        held, self._held = self._held, ""
        data = held + (chunk[position:] if position else chunk)
        if self._is_off:
            self._emit(data, events)
            return len(chunk)
        start = 0
        if self._at_start:
            if len(data) < len(THINK) and THINK.startswith(data):
                self._held = data
                return len(chunk)
            self._at_start, self._thinking = False, data.startswith(THINK)
        if self._thinking:
            start = self._read_thought(data, events)
            if self._thinking:
                return len(chunk)
        end = self._find_tag(data, start, events)
        return len(chunk) if end < 0 else len(chunk) - (len(data) - end)

    def _read_thought(self, data: str, events: list[TagEvent]) -> int:
        end = data.find(THINK_END)
        if end < 0:
            self._hold(data, 0, THINK_END, events)
            return len(data)
        self._thinking = False
        self._emit(data[: end + len(THINK_END)], events)
        return end + len(THINK_END)

    def _find_tag(self, data: str, start: int, events: list[TagEvent]) -> int:
        """Emit the text before the next tag and open it; gives the position behind its marker, -1 when there is none."""
        search = start
        while (found := data.find(MARKER, search)) >= 0:
            search = found + len(MARKER)
            if search == len(data):
                self._emit(data[start:found], events)
                self._held = MARKER
                return -1
            if data[search] not in _BEHIND_MARKER:
                continue
            self._emit(data[start:found], events)
            start = found
            if self._fences is None or not self._fences.is_inside:
                self._tag = OpenTag()
                return search
        self._hold(data, start, MARKER, events)
        return -1

    def _hold(self, data: str, start: int, literal: str, events: list[TagEvent]) -> None:
        """Emit `data` from `start`, but for an end that may begin `literal`."""
        end = data.rfind("<", max(start, len(data) - len(literal) + 1))
        if end >= 0 and literal.startswith(data[end:]):
            self._held = data[end:]
            data = data[:end]
        self._emit(data[start:] if start else data, events)

    def _emit(self, text: str, events: list[TagEvent]) -> None:
        if not text:
            return
        events.append(Text(text))
        if self._fences is not None:
            self._fences.feed(text)
