"""Reads `<tool_action>` calls from streamed text, independent of the chunk boundaries. The grammar of a message:

::

    message   = *( text / call )
    call      = open *( S / comment / param ) close / "<tool_action" 1*S attrs S* "/>"
    open      = "<tool_action" 1*S attrs S* ">"
    attrs     = name=quoted, others ignored
    close     = "</tool_action" S* ">"
    param     = "<" NAME 1*S "value" S* "=" S* quoted S* "/>"
              / "<" NAME S* ">" body "</" NAME S* ">"
              / "<" NAME S* "/>"                       ; empty value
    NAME      = 1*( any but blank / > = < " ' ! ? & )
    quoted    = DQ value DQ / SQ value SQ              ; ends before "/>" or "></NAME>"; entities are decoded once
    body      = literal text / S* 1*( "<![CDATA[" ... "]]>" ) S*
"""

from toolcrew.orchestrator.dialects.fences import FenceTracker
from toolcrew.orchestrator.dialects.tag_events import MalformedTag, TagCall, TagEvent, Text
from toolcrew.orchestrator.dialects.tag_grammar import (
    BLANKS,
    COMMON_CALL,
    COMMON_CHILDREN,
    COMMON_START,
    MARKER,
    MENTION,
    TAG,
)
from toolcrew.orchestrator.dialects.tag_machine import OpenTag
from toolcrew.orchestrator.dialects.tag_values import decode_entities

MAX_TAG_CHARS = 16 * 1024 * 1024
SMALLEST_LIMIT = 64
THINK = "<think>"
THINK_END = "</think>"
MAX_BUFFER_CHARS = 256
"""Number of characters up to which the start of a tag is matched again with each chunk. Up to this length, matching
again is faster than saving the state.
"""

_BEHIND_MARKER = frozenset(BLANKS + ">/")
_MARKER_START = MARKER[:3]
_MARKER_STARTS = (MARKER[:1], MARKER[:2])
_CLOSING = f"</{TAG}"
_new = object.__new__


class TagStreamParser:
    """Parses the text of one reply into events. Text is emitted at once, except for at most 12 characters that may
    begin a tag. A tag is buffered until it is complete. The texts and raw texts of the events, joined in order, are the
    input. Chunk boundaries change only where texts are split. `ignore_fenced`: tags inside Markdown code fences are
    text. `max_tag_chars`: a longer tag is malformed; a value below 64 raises ValueError.
    """

    def __init__(self, *, ignore_fenced: bool = False, max_tag_chars: int = MAX_TAG_CHARS) -> None:
        if max_tag_chars < SMALLEST_LIMIT:
            raise ValueError(f"max_tag_chars is {max_tag_chars}: use at least {SMALLEST_LIMIT}")
        self._fences = FenceTracker() if ignore_fenced else None
        self._ignore_fenced = ignore_fenced
        self._max_tag_chars = max_tag_chars
        # Text that may begin a tag. If longer than the marker, it is a tag in the common form so far. `_is_certain`
        # means that it has passed the commit point.
        self._buffer = ""
        self._is_certain = False
        self._max_buffer_chars = min(MAX_BUFFER_CHARS, max_tag_chars)
        self._tag: OpenTag | None = None
        self._at_start = True
        self._thinking = False
        self._is_off = False
        self._is_ending = False
        # True if neither a think block nor code fences must be tracked, so that a chunk without a marker is text.
        self._is_simple = False
        # True if, in addition, no text is held back and no tag is open. Checked first, because nearly every chunk is
        # plain text.
        self._is_plain = False

    def renew(self) -> "TagStreamParser":
        """Return a parser with the same options that has read nothing."""
        return TagStreamParser(ignore_fenced=self._ignore_fenced, max_tag_chars=self._max_tag_chars)

    def feed(self, chunk: str) -> list[TagEvent]:
        """Return the events that `chunk` completes, in order."""
        if self._is_plain and "<" not in chunk and chunk:
            # Equals Text(chunk) without the call of __init__, which would cost time for every chunk of every reply.
            event = _new(Text)
            event.text = chunk
            return [event]
        tag = self._tag
        if tag is not None:
            if (
                tag.is_committed
                and tag.size + tag.deferred_size + len(chunk) < self._max_tag_chars
                and tag.defers(chunk)
            ):
                return []
        elif self._is_simple:
            if self._buffer:
                if self._is_certain and ">" not in chunk and len(self._buffer) + len(chunk) <= self._max_buffer_chars:
                    self._buffer += chunk
                    return []
                chunk, self._buffer, self._is_certain = self._buffer + chunk, "", False
            last = chunk.rfind(_MARKER_START)
            if last == 0 and MARKER.startswith(chunk):
                self._buffer, self._is_plain = chunk, False
                return []
            if last < 0 or (last == 0 and not chunk.startswith(MARKER)):
                return self._read_marker_free(chunk)
            if last == 0 and _CLOSING not in chunk and self._may_become_common(chunk):
                self._buffer, self._is_plain = chunk, False
                return []
        return self._read_chunk(chunk)

    def finish(self) -> list[TagEvent]:
        """Return the last events: held text, or the error of a tag that was never closed."""
        events: list[TagEvent] = []
        self._is_ending = True
        if len(self._buffer) > len(MARKER):
            self._read("", events)
        while self._tag is not None and self._tag.deferred_size:
            self._read(self._tag.take_deferred(), events)
        tag, self._tag = self._tag, None
        if tag is not None:
            return [*events, tag.abandon()] if tag.size else events
        return [*events, *self._flush_buffer()]

    def release(self) -> list[TagEvent]:
        """Stop searching for tags. Return held text; all later input is text."""
        tag, self._tag = self._tag, None
        self._is_off, self._fences, self._at_start, self._thinking = True, None, False, False
        self._is_simple = self._is_plain = False
        if tag is not None:
            raw = tag.raw() + tag.take_deferred()
            return [Text(raw)] if raw else []
        return self._flush_buffer()

    def _flush_buffer(self) -> list[TagEvent]:
        text, self._buffer = self._buffer, ""
        return [Text(text)] if text else []

    def _read_chunk(self, chunk: str) -> list[TagEvent]:
        events: list[TagEvent] = []
        self._read(chunk, events)
        self._is_simple = not (self._at_start or self._thinking or self._is_off or self._fences is not None)
        self._is_plain = self._is_simple and self._tag is None and not self._buffer
        return events

    def _read_marker_free(self, chunk: str) -> list[TagEvent]:
        """Return `chunk` as text, except for an end that the next chunk may complete to a marker."""
        end = len(chunk)
        if chunk.endswith(_MARKER_STARTS):
            end = chunk.rfind("<")
            self._buffer = chunk[end:]
        self._is_plain = not self._buffer
        return [Text(chunk[:end])] if end else []

    def _read(self, chunk: str, events: list[TagEvent]) -> None:
        if self._buffer:
            chunk, self._buffer, self._is_certain = self._buffer + chunk, "", False
        position, size = 0, len(chunk)
        while position < size:
            if self._tag is not None:
                position = self._read_tag(self._tag, chunk, position, events)
            else:
                position = self._read_text(chunk, position, events)

    def _may_defer(self, tag: OpenTag, length: int) -> bool:
        """Return whether text may be stored and read later. This is not allowed while the text may still show that the
        tag is only mentioned.
        """
        return tag.is_committed and not self._is_ending and tag.size + tag.deferred_size + length < self._max_tag_chars

    def _read_tag(self, tag: OpenTag, chunk: str, position: int, events: list[TagEvent]) -> int:
        size = len(chunk)
        if self._may_defer(tag, size - position) and tag.defers(chunk[position:] if position else chunk):
            return size
        if tag.deferred_size:
            self._read(tag.take_deferred() + chunk[position:], events)
            return size
        if tag.is_committed:
            # Read up to the last `>` only. The rest is read together with the next `>`.
            size = chunk.rfind(">", position) + 1 or size
        position = tag.feed(chunk, position, min(size, position + self._max_tag_chars - tag.size))
        if tag.outcome == "open":
            if tag.size >= self._max_tag_chars:
                error, tail = tag.overflow()
                events.append(error)
                self._read(tail, events)
            return position
        if tag.outcome == "mention":
            self._tag = None
            self._emit(tag.raw(), events)
            return position
        self._tag = OpenTag() if tag.outcome == "reopen" else None
        event: TagCall | MalformedTag = tag.abandon() if tag.outcome == "reopen" else tag.close()
        # A tag that was too long gives an event without text if the next tag begins exactly at the cut. Such an event
        # is dropped.
        if event.raw:
            events.append(event)
        if self._fences is not None:
            self._fences.interrupt_line()
        return position

    def _read_text(self, chunk: str, position: int, events: list[TagEvent]) -> int:
        """Read text up to the next tag. Return the position in `chunk` after the text."""
        if self._is_off:
            events.append(Text(chunk[position:]))
            return len(chunk)
        if self._at_start:
            if len(chunk) < len(THINK) and THINK.startswith(chunk):
                self._buffer = chunk
                return len(chunk)
            self._at_start, self._thinking = False, chunk.startswith(THINK)
        if self._thinking:
            return self._read_thought(chunk, position, events)
        return self._find_tag(chunk, position, events)

    def _read_thought(self, chunk: str, position: int, events: list[TagEvent]) -> int:
        """Read a think block up to its end. Its code fences are not tracked, because they do not affect the text of the
        answer.
        """
        end_mark = chunk.find(THINK_END, position)
        self._thinking = end_mark < 0
        end = _end_of_text(chunk, position, THINK_END) if end_mark < 0 else end_mark + len(THINK_END)
        if end > position:
            events.append(Text(chunk[position:end]))
        if end_mark < 0:
            self._buffer, end = chunk[end:], len(chunk)
        return end

    def _find_tag(self, chunk: str, start: int, events: list[TagEvent]) -> int:
        """Emit text, and calls in the common form. Begin to read the first other tag, or hold its beginning back.
        Return the position after the text that was read.
        """
        search = start
        while (mark := chunk.find(MARKER, search)) >= 0:
            search = mark + len(MARKER)
            if search < len(chunk) and chunk[search] not in _BEHIND_MARKER:
                continue
            self._emit(chunk[start:mark], events)
            start = mark
            if self._fences is not None and self._fences.is_inside:
                continue
            mention = MENTION(chunk, mark)
            if mention is not None and mention.end() - mark <= self._max_buffer_chars:
                search = mention.end() - 1
                continue
            end = self._read_common(chunk, mark, events)
            if end:
                start = search = end
                continue
            if search == len(chunk) or (
                len(chunk) - mark <= self._max_buffer_chars and self._may_become_common(chunk[mark:])
            ):
                self._buffer = chunk[mark:]
                return len(chunk)
            self._tag = OpenTag()
            return search
        end = _end_of_text(chunk, start, MARKER)
        self._emit(chunk[start:end], events)
        self._buffer = chunk[end:]
        return len(chunk)

    def _read_common(self, chunk: str, start: int, events: list[TagEvent]) -> int:
        """Emit a call that is complete in the chunk and in the common form. Return the position after it, or 0."""
        match = COMMON_CALL(chunk, start)
        if match is None or match.end() - start > self._max_tag_chars:
            return 0
        children = COMMON_CHILDREN(match[2])
        arguments = {name: decode_entities(value) for name, value in children}
        if len(arguments) < len(children) or TAG in arguments:
            return 0
        events.append(TagCall(match[1], arguments, match[0]))
        if self._fences is not None:
            self._fences.interrupt_line()
        return match.end()

    def _may_become_common(self, text: str) -> bool:
        """Return whether `text` is the start of a tag in the common form. Sets `_is_certain`."""
        match = COMMON_START(text) if len(text) <= self._max_buffer_chars and not self._is_ending else None
        self._is_certain = match is not None and match.lastindex is not None
        return match is not None

    def _emit(self, text: str, events: list[TagEvent]) -> None:
        if not text:
            return
        events.append(Text(text))
        if self._fences is not None:
            self._fences.feed(text)


def _end_of_text(chunk: str, start: int, literal: str) -> int:
    """Return the position in `chunk` from which on the rest of the chunk may be the beginning of `literal`; the chunk's
    length if there is no such position.
    """
    end = chunk.rfind("<", max(start, len(chunk) - len(literal) + 1))
    return end if end >= 0 and literal.startswith(chunk[end:]) else len(chunk)
