"""Moves an open `<tool_action` tag through the grammar's states and records the positions of its parts."""

from collections.abc import Callable
from typing import Literal

from toolcrew.orchestrator.dialects.tag_events import MalformedTag, TagCall
from toolcrew.orchestrator.dialects.tag_grammar import (
    BLANKS,
    CHILD,
    CLOSE,
    COMMIT,
    DELIMITERS,
    HEADER,
    MARKER,
    NOT_CLOSED,
    STATES,
    TAG,
    WRONG_CLOSE,
    State,
)
from toolcrew.orchestrator.dialects.tag_values import decode_attribute, decode_entities, strip_body

Outcome = Literal["open", "complete", "mention", "reopen"]
"""`mention`: the characters read are text. `reopen`: a new tag begins at `cut`."""

_HEADER, _BODY, _GAP = STATES["header"], STATES["body"], STATES["gap"]
_BEHIND_MARKER = frozenset(BLANKS + ">/")
_LONGEST_CLOSE = 64
"""Longest closing tag that is found across the size limit. A longer one may be missed."""


class OpenTag:
    """One tag that is being read, from its marker `<tool_action` on. Offsets count from the `<`. The text is stored in
    pieces, which are joined once, at the end.
    """

    def __init__(self) -> None:
        self.outcome: Outcome = "open"
        self.is_committed = False
        self.deferred_size = 0
        self._deferred: list[str] = []
        self._awaited = ">"
        self.size = len(MARKER)
        self.cut = 0
        self._pieces = [MARKER]
        self._state: State = STATES["header"]
        self._chunk = ""
        self._base = 0
        self._name: str | None = None
        self._problem: str | None = None
        self._skipping = False
        self._attribute = ""
        self._attributes = 0
        self._child = ""
        self._quote = ""
        self._mark = self._open_at = self._start = self._end = 0
        self._sections: list[tuple[int, int]] = []
        self._values: list[tuple[str, list[tuple[int, int]], str]] = []
        self._child_names: set[str] = set()

    def feed(self, chunk: str, position: int, size: int) -> int:
        """Read `chunk` from `position` up to `size`. Return the position after the last character consumed.

        Returns early when `outcome` is decided. Returns early also when the text has just become certainly a call,
        because the rest may then be stored for later (`defers`).
        """
        start, state, was_committed = position, self._state, self.is_committed
        self._chunk, self._base = chunk, self.size - position
        while position < size:
            if state is _HEADER or state is _BODY or state is _GAP:
                position, state = self._take_shortcuts(state, position, size)
                if position == size or self.outcome != "open":
                    break
                if self.is_committed and not was_committed and chunk.find(">", position, size) < 0:
                    break
            run = state.run(chunk, position, size)
            assert run is not None
            position = run.end()
            if position == size:
                break
            character = chunk[position]
            edge = state.edges.get(character)
            if edge is None:
                edge = state.otherwise if state.name_edge is None or character in DELIMITERS else state.name_edge
            target, step, action, reason = edge
            if reason is not None:
                self._fail(reason)
            elif action is not None:
                target = _ACTIONS[action](self, self._base + position) or target
            position += step
            if self.outcome != "open":
                break
            state = STATES[target]
        self._state, self._awaited = state, state.awaited
        self.is_committed = self.is_committed or not state.is_header
        self._pieces.append(chunk[start:position])
        self.size += position - start
        return position

    def _take_shortcuts(self, state: State, position: int, size: int) -> tuple[int, State]:
        """Consume whole parts of the common form from `position` on. Return the new position and state."""
        if state is _HEADER:
            match = HEADER(self._chunk, position, size)
            if match is None or self._attributes:
                return position, state
            self._attributes, self._name = 1, match[1]
            position, state = match.end(), _BODY
        while (match := CHILD(self._chunk, position, size)) is not None and match[1] != TAG:
            self._child = match[1]
            self._add_value([(self._base + match.start(2), self._base + match.end(2))], '"')
            position, state = match.end(), _GAP
        match = CLOSE(self._chunk, position, size)
        if match is not None:
            self.outcome = "complete"
            position = match.end()
        elif state is _BODY and COMMIT(self._chunk, position, size) is not None:
            self.is_committed = True
        return position, state

    def defers(self, text: str) -> bool:
        """Store `text` for later if nothing can end or begin in it, and return whether it was stored.

        Reading many small pieces at once is much faster.
        """
        if self._awaited in text:
            if ">" in text:
                return False
            self._awaited = ">"
        self._deferred.append(text)
        self.deferred_size += len(text)
        return True

    def take_deferred(self) -> str:
        deferred = "".join(self._deferred)
        self._deferred, self.deferred_size, self._awaited = [], 0, ">"
        return deferred

    def raw(self) -> str:
        return "".join(self._pieces)

    def close(self) -> TagCall | MalformedTag:
        """Return the event of a completed tag."""
        raw = self.raw()
        if self._problem is None and not self._name:
            self._problem = "missing tool name"
        if self._problem is not None or self._name is None:
            return MalformedTag(self._problem or "", self._name or None, raw)
        return TagCall(
            self._name, {child: self._join_value(raw, spans, quote) for child, spans, quote in self._values}, raw
        )

    def abandon(self, reason: str = "unclosed") -> MalformedTag:
        """Return the event of a tag that ends without being complete. An earlier error takes
        precedence over `reason`.
        """
        raw = self.raw()[: self.cut] if self.outcome == "reopen" else self.raw()
        return MalformedTag(self._problem if self._skipping and self._problem else reason, self._name or None, raw)

    def overflow(self) -> tuple[MalformedTag, str]:
        """Return the event of a tag larger than the limit, and the tail to feed again, which may begin the closing tag.

        The tag stays open and skips to its end, with empty buffers.
        """
        raw = self.raw()
        cut = raw.rfind("<", max(1, len(raw) - _LONGEST_CLOSE))
        cut = cut if cut > 0 else len(raw)
        self._fail("too long")
        self._state, self._awaited = STATES["skip"], ">"
        self._pieces, self.size = [], 0
        return MalformedTag("too long", self._name or None, raw[:cut]), raw[cut:]

    @staticmethod
    def _join_value(raw: str, spans: list[tuple[int, int]], quote: str) -> str:
        if quote == "cdata":
            return "".join(raw[start:end] for start, end in spans)
        value = raw[spans[0][0] : spans[0][1]]
        return decode_attribute(value, quote) if quote else strip_body(value)

    def _fail(self, reason: str) -> None:
        self._skipping = True
        self._problem = self._problem or reason

    def _slice(self, start: int, end: int) -> str:
        """Return the text between two offsets. `end` is in the current chunk."""
        if start >= self.size:
            return self._chunk[start - self._base : end - self._base]
        missing, parts = self.size - start, [self._chunk[self.size - self._base : end - self._base]]
        for piece in reversed(self._pieces):
            parts.append(piece[-missing:] if len(piece) > missing else piece)
            missing -= len(piece)
            if missing <= 0:
                break
        return "".join(reversed(parts))

    def _record_mark(self, offset: int) -> None:
        self._mark = offset

    def _record_mark_next(self, offset: int) -> None:
        self._mark = offset + 1

    def _record_open(self, offset: int) -> None:
        self._open_at = offset

    def _record_attribute(self, offset: int) -> None:
        self._attribute = self._slice(self._mark, offset)

    def _record_attribute_value(self, offset: int) -> None:
        self._attributes += 1
        if self._attribute != "name":
            return
        if self._name is not None:
            self._problem = "duplicate attribute 'name'"
        self._name = decode_entities(self._slice(self._mark, offset))

    def _mention(self, offset: int) -> None:
        self.outcome = "mention"

    def _self_closed(self, offset: int) -> None:
        self.outcome = "complete" if self._attributes else "mention"

    def _complete(self, offset: int) -> None:
        self.outcome = "complete"

    def _close_name(self, offset: int) -> str:
        if self._slice(self._mark, offset) == TAG:
            return "close_end"
        self._fail(WRONG_CLOSE)
        return "skip"

    def _child_name(self, offset: int) -> str:
        name = self._slice(self._mark, offset)
        if name == TAG and self._chunk[offset - self._base] in _BEHIND_MARKER:
            self._reopen()
        self._child = name
        return "child_tight"

    def _reopen(self) -> None:
        self.outcome = "reopen"
        self.cut = self._open_at

    def _reopen_skipped(self, offset: int) -> str:
        if self._slice(self._mark, offset) == TAG:
            self._reopen()
        return "skip"

    def _skip_close_name(self, offset: int) -> str:
        return "skip_end" if self._slice(self._mark, offset) == TAG else "skip"

    def _value_attribute(self, offset: int) -> str:
        name = self._slice(self._mark, offset)
        if name == "value":
            return "equals"
        self._fail(f"unexpected attribute '{name}'")
        return "skip"

    def _second_attribute(self, offset: int) -> None:
        self._fail(f"unexpected attribute '{self._attribute}'")

    def _begin_value(self, offset: int) -> None:
        self._start = offset + 1
        self._quote = self._chunk[offset - self._base]

    def _end_value(self, offset: int) -> None:
        self._end = offset

    def _store_value(self, offset: int) -> None:
        self._add_value([(self._start, self._end)], self._quote)

    def _empty_value(self, offset: int) -> None:
        self._add_value([(offset, offset)], "")

    def _paired_value_name(self, offset: int) -> str:
        name = self._slice(self._mark, offset)
        if name == self._child:
            return "paired_value_end"
        self._fail(NOT_CLOSED)
        return "skip_end" if name == TAG else "skip"

    def _begin_paired(self, offset: int) -> None:
        self._start = offset + 1
        self._sections = []

    def _literal(self, offset: int) -> None:
        self._sections = []

    def _end_name(self, offset: int) -> str:
        if self._slice(self._mark, offset) == self._child:
            return "end_close"
        self._literal(offset)
        return "literal"

    def _end_paired(self, offset: int) -> None:
        self._end = self._open_at

    def _follow_name(self, offset: int) -> str:
        name = self._slice(self._mark, offset)
        if name == self._child:
            return "end_close"
        if name == TAG:
            self._store_paired(offset)
            return "close_end"
        self._literal(offset)
        return "literal"

    def _store_paired(self, offset: int) -> None:
        self._add_value(self._sections or [(self._start, self._end)], "cdata" if self._sections else "")

    def _store_paired_child(self, offset: int) -> None:
        self._store_paired(offset)
        self._mark = offset

    def _begin_cdata(self, offset: int) -> None:
        self._mark = offset + 1

    def _end_cdata(self, offset: int) -> None:
        self._sections.append((self._mark, offset - 2))

    def _add_value(self, spans: list[tuple[int, int]], quote: str) -> None:
        if self._child in self._child_names:
            # Reading continues to the tag's end, because its values may contain text that resembles another tag.
            self._problem = self._problem or f"duplicate parameter '{self._child}'"
        self._child_names.add(self._child)
        self._values.append((self._child, spans, quote))


_ACTIONS: dict[str, Callable[[OpenTag, int], str | None]] = {
    "mark": OpenTag._record_mark,
    "mark_next": OpenTag._record_mark_next,
    "open": OpenTag._record_open,
    "attribute": OpenTag._record_attribute,
    "attribute_value": OpenTag._record_attribute_value,
    "mention": OpenTag._mention,
    "self_closed": OpenTag._self_closed,
    "complete": OpenTag._complete,
    "close_name": OpenTag._close_name,
    "child_name": OpenTag._child_name,
    "value_attribute": OpenTag._value_attribute,
    "begin_value": OpenTag._begin_value,
    "end_value": OpenTag._end_value,
    "store_value": OpenTag._store_value,
    "empty_value": OpenTag._empty_value,
    "second_attribute": OpenTag._second_attribute,
    "paired_value_name": OpenTag._paired_value_name,
    "begin_paired": OpenTag._begin_paired,
    "literal": OpenTag._literal,
    "end_name": OpenTag._end_name,
    "end_paired": OpenTag._end_paired,
    "follow_name": OpenTag._follow_name,
    "store_paired": OpenTag._store_paired,
    "store_paired_child": OpenTag._store_paired_child,
    "begin_cdata": OpenTag._begin_cdata,
    "end_cdata": OpenTag._end_cdata,
    "skip_close_name": OpenTag._skip_close_name,
    "reopen_skipped": OpenTag._reopen_skipped,
}
