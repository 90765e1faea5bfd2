"""Reads `<tool_action>` calls out of streamed text, whatever the chunks (grammar: docs/dialects.md)."""

from orchestrator.dialects.fences import FenceTracker
from orchestrator.dialects.tag_events import Call, Malformed, TagEvent, Text
from orchestrator.dialects.tag_grammar import BLANKS, COMMON_CALL, COMMON_CHILDREN, COMMON_START, MARKER, MENTION, TAG
from orchestrator.dialects.tag_machine import OpenTag
from orchestrator.dialects.tag_values import decode_entities

MAX_TAG_CHARS = 16 * 1024 * 1024
SMALLEST_LIMIT = 64
THINK = "<think>"
THINK_END = "</think>"
LONGEST_HELD = 256
"""Looking at the start of a tag again with a chunk is quicker than keeping a place in it, while it is short."""

_BEHIND_MARKER = frozenset(BLANKS + ">/")
_MARKER_START = MARKER[:3]
_MARKER_STARTS = (MARKER[:1], MARKER[:2])
_CLOSING = f"</{TAG}"
_new = object.__new__


class TagStreamParser:
    """One reply's text as events. Text goes out at once, but for at most 12 characters that may begin a tag; a tag is
    kept until it is complete. Text + raw of calls + raw of errors = input, and the events do not depend on the chunks
    (but for where texts are cut).

    `ignore_fenced`: tags inside Markdown code fences are text. `max_tag_chars`: a longer tag is malformed; ValueError
    below 64.
    """

    def __init__(self, *, ignore_fenced: bool = False, max_tag_chars: int = MAX_TAG_CHARS) -> None:
        if max_tag_chars < SMALLEST_LIMIT:
            raise ValueError(f"max_tag_chars must be at least {SMALLEST_LIMIT}, not {max_tag_chars}")
        self._fences = FenceTracker() if ignore_fenced else None
        self._max_tag_chars = max_tag_chars
        # What may begin a tag. Longer than the marker it is a tag, in the common form so far; `_is_certain` behind its
        # commit point.
        self._held = ""
        self._is_certain = False
        self._longest_held = min(LONGEST_HELD, max_tag_chars)
        self._tag: OpenTag | None = None
        self._at_start = True
        self._thinking = False
        self._is_off = False
        self._is_ending = False
        # Text without a marker is text as it stands, unless it is searched for more: a thought, its end, fences.
        self._is_simple = False
        # Nothing is held or open besides: looked at first, since nearly every chunk is plain text.
        self._is_plain = False

    def feed(self, chunk: str) -> list[TagEvent]:
        """The events that `chunk` completes, in order."""
        if self._is_plain and "<" not in chunk and chunk:
            # Text(chunk), but without a call of its __init__: one is made for every chunk of every reply.
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
            if self._held:
                if self._is_certain and ">" not in chunk and len(self._held) + len(chunk) <= self._longest_held:
                    self._held += chunk
                    return []
                chunk, self._held, self._is_certain = self._held + chunk, "", False
            last = chunk.rfind(_MARKER_START)
            if last == 0 and MARKER.startswith(chunk):
                self._held, self._is_plain = chunk, False
                return []
            if last < 0 or (last == 0 and not chunk.startswith(MARKER)):
                return self._read_marker_free(chunk)
            if last == 0 and _CLOSING not in chunk and self._may_become_common(chunk):
                self._held, self._is_plain = chunk, False
                return []
        return self._read_all(chunk)

    def finish(self) -> list[TagEvent]:
        """The events of the end: held text, or the error of a tag that was never closed."""
        events: list[TagEvent] = []
        self._is_ending = True
        if len(self._held) > len(MARKER):
            self._read("", events)
        while self._tag is not None and self._tag.deferred_size:
            self._read(self._tag.take_deferred(), events)
        tag, self._tag = self._tag, None
        if tag is not None:
            return [*events, tag.abandon()] if tag.size else events
        return [*events, *self._held_text()]

    def release(self) -> list[TagEvent]:
        """Stop looking for tags: what is held goes out as text, and so does all that follows."""
        tag, self._tag = self._tag, None
        self._is_off, self._fences, self._at_start, self._thinking = True, None, False, False
        self._is_simple = self._is_plain = False
        if tag is not None:
            raw = tag.raw() + tag.take_deferred()
            return [Text(raw)] if raw else []
        return self._held_text()

    def _held_text(self) -> list[TagEvent]:
        held, self._held = self._held, ""
        return [Text(held)] if held else []

    def _read_all(self, chunk: str) -> list[TagEvent]:
        events: list[TagEvent] = []
        self._read(chunk, events)
        self._is_simple = not (self._at_start or self._thinking or self._is_off or self._fences is not None)
        self._is_plain = self._is_simple and self._tag is None and not self._held
        return events

    def _read_marker_free(self, chunk: str) -> list[TagEvent]:
        """Text, but for an end that the next chunk may make a marker of."""
        end = len(chunk)
        if chunk.endswith(_MARKER_STARTS):
            end = chunk.rfind("<")
            self._held = chunk[end:]
        self._is_plain = not self._held
        return [Text(chunk[:end])] if end else []

    def _read(self, chunk: str, events: list[TagEvent]) -> None:
        if self._held:
            chunk, self._held, self._is_certain = self._held + chunk, "", False
        position, size = 0, len(chunk)
        while position < size:
            if self._tag is not None:
                position = self._read_tag(self._tag, chunk, position, events)
            else:
                position = self._read_text(chunk, position, events)

    def _may_defer(self, tag: OpenTag, length: int) -> bool:
        """Whether text may wait. Not before the commit point: there it may show that all was a mention."""
        return tag.is_committed and not self._is_ending and tag.size + tag.deferred_size + length < self._max_tag_chars

    def _read_tag(self, tag: OpenTag, chunk: str, position: int, events: list[TagEvent]) -> int:
        size = len(chunk)
        if self._may_defer(tag, size - position) and tag.defers(chunk[position:] if position else chunk):
            return size
        if tag.deferred_size:
            self._read(tag.take_deferred() + chunk[position:], events)
            return size
        if tag.is_committed:
            # Only up to the last `>`: what follows is read at once with the next one.
            size = chunk.rfind(">", position) + 1 or size
        position = tag.feed(chunk, position, min(size, position + self._max_tag_chars - tag.size))
        if tag.outcome == "open":
            if tag.size >= self._max_tag_chars:
                error, again = tag.overflow()
                events.append(error)
                self._read(again, events)
            return position
        if tag.outcome == "mention":
            self._tag = None
            self._emit(tag.raw(), events)
            return position
        self._tag = OpenTag() if tag.outcome == "reopen" else None
        event: Call | Malformed = tag.abandon() if tag.outcome == "reopen" else tag.close()
        # Nothing is left of a tag that was too long, if the next begins right where it was cut.
        if event.raw:
            events.append(event)
        if self._fences is not None:
            self._fences.interrupt_line()
        return position

    def _read_text(self, chunk: str, position: int, events: list[TagEvent]) -> int:
        """Read text up to the next tag. Gives the position in `chunk` behind what was read."""
        if self._is_off:
            events.append(Text(chunk[position:]))
            return len(chunk)
        if self._at_start:
            if len(chunk) < len(THINK) and THINK.startswith(chunk):
                self._held = chunk
                return len(chunk)
            self._at_start, self._thinking = False, chunk.startswith(THINK)
        if self._thinking:
            return self._read_thought(chunk, position, events)
        return self._find_tag(chunk, position, events)

    def _read_thought(self, chunk: str, position: int, events: list[TagEvent]) -> int:
        """Read a thought up to its end. Its fences do not count: nobody sees it and the answer as one text."""
        found = chunk.find(THINK_END, position)
        self._thinking = found < 0
        end = _end_of_text(chunk, position, THINK_END) if found < 0 else found + len(THINK_END)
        if end > position:
            events.append(Text(chunk[position:end]))
        if found < 0:
            self._held, end = chunk[end:], len(chunk)
        return end

    def _find_tag(self, chunk: str, start: int, events: list[TagEvent]) -> int:
        """Emit text and common calls; open or hold the first other tag. Gives the position behind what was read."""
        search = start
        while (found := chunk.find(MARKER, search)) >= 0:
            search = found + len(MARKER)
            if search < len(chunk) and chunk[search] not in _BEHIND_MARKER:
                continue
            self._emit(chunk[start:found], events)
            start = found
            if self._fences is not None and self._fences.is_inside:
                continue
            mention = MENTION(chunk, found)
            if mention is not None and mention.end() - found <= self._longest_held:
                search = mention.end() - 1
                continue
            end = self._read_common(chunk, found, events)
            if end:
                start = search = end
                continue
            if search == len(chunk) or (
                len(chunk) - found <= self._longest_held and self._may_become_common(chunk[found:])
            ):
                self._held = chunk[found:]
                return len(chunk)
            self._tag = OpenTag()
            return search
        end = _end_of_text(chunk, start, MARKER)
        self._emit(chunk[start:end], events)
        self._held = chunk[end:]
        return len(chunk)

    def _read_common(self, chunk: str, start: int, events: list[TagEvent]) -> int:
        """Emit the call that is whole in the chunk and in the common form; gives the position behind it, 0 when there
        is none.
        """
        found = COMMON_CALL(chunk, start)
        if found is None or found.end() - start > self._max_tag_chars:
            return 0
        children = COMMON_CHILDREN(found[2])
        arguments = {name: decode_entities(value) for name, value in children}
        if len(arguments) < len(children) or TAG in arguments:
            return 0
        events.append(Call(found[1], arguments, found[0]))
        if self._fences is not None:
            self._fences.interrupt_line()
        return found.end()

    def _may_become_common(self, text: str) -> bool:
        """Whether `text` begins a tag, as far as it goes, and all of it is in the common form. Notes whether it is
        behind the commit point.
        """
        found = COMMON_START(text) if len(text) <= self._longest_held and not self._is_ending else None
        self._is_certain = found is not None and found.lastindex is not None
        return found is not None

    def _emit(self, text: str, events: list[TagEvent]) -> None:
        if not text:
            return
        events.append(Text(text))
        if self._fences is not None:
            self._fences.feed(text)


def _end_of_text(chunk: str, start: int, literal: str) -> int:
    """Where the end of `chunk` that may begin `literal` starts; its length when there is none."""
    end = chunk.rfind("<", max(start, len(chunk) - len(literal) + 1))
    return end if end >= 0 and literal.startswith(chunk[end:]) else len(chunk)
