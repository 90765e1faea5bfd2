"""Holds the text of a file (without its byte order mark) while edits are applied, and the positions of the changed
places.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

from guest.failures import FILE_TOO_LARGE, RequestFailure
from guest.files.edit_matching import Needle, fit_line_ends

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.files.edit_matching import Span
    from guest.request_context import Watch

_MAX_PLACES = 20
"""Maximum number of changed places with a known position. Further places are only counted."""
_WINDOW_BYTES = 65_536
_AROUND = 5
# Number of matches between two checks of the time limit.
_STRIDE = 128
MAX_BYTES = 67_108_864
"""Maximum size of an edited file, in bytes.

Without a limit, replacing many occurrences of a short text by a long one could fill the memory.
"""


class EditedText:
    """Body of a file after the edits so far.

    `count` is the number of replacements. `places`: the (start, end) positions of the first replacements in `body`.
    `parts`: the same bytes as `body`, in pieces as the last replacement leaves them, because joining takes as long as
    writing.
    """

    def __init__(self, body: bytes) -> None:
        self.parts: tuple[bytes | memoryview, ...] = (body,)
        self._body: bytes | None = body
        self._last = body
        self.count = 0
        self.places: list[Span] = []

    @property
    def body(self) -> bytes:
        if self._body is None:
            self._body = self._last = b"".join(self.parts)
            self.parts = (self._body,)
        return self._body

    @body.setter
    def body(self, body: bytes) -> None:
        self._body = self._last = body
        self.parts = (body,)

    def equals(self, body: bytes) -> bool:
        """Return whether the text equals `body`, the bytes it was made from.

        After exactly one replacement no comparison is needed, because a replacement always changes the text.
        """
        return not (self._body is None and self.count == 1) and self.body == body

    def window(self) -> tuple[bytes, int, int]:
        """Return enough of the body to show every place with its context.

        The result is (bytes, offset of the bytes in the body, number of their first line).
        """
        if self._body is None and len(self.places) == 1:
            before, new, after = self.parts
            cut = max(0, len(before) - _WINDOW_BYTES)
            head, tail = bytes(before[cut:]), bytes(after[:_WINDOW_BYTES])
            if (not cut or head.count(b"\n") > _AROUND) and (len(tail) == len(after) or tail.count(b"\n") > _AROUND):
                return b"".join((head, new, tail)), cut, self._last.count(b"\n", 0, cut) + 1
        return self.body, 0, 1

    def line_of(self, at: int) -> int:
        """Return the line, from 1, that contains the byte at `at`."""
        return self.body.count(b"\n", 0, at) + 1

    def count_matches(self, needle: Needle, watch: Watch) -> int:
        """Return the number of matches that do not overlap."""
        if needle.literal is not None:
            return self.body.count(needle.literal)
        count = 0
        for count, _ in enumerate(needle.find_all(), start=1):
            if count % _STRIDE == 0:
                watch.check()
        return count

    def replace(self, span: Span, new: bytes) -> None:
        """Replace one span. Raises RequestFailure(FILE_TOO_LARGE) if the result is larger than MAX_BYTES."""
        start, end = span
        grown = len(new) - (end - start)
        _check_size(len(self.body) + grown)
        self._move_places(lambda at: at if at <= start else max(at, end) + grown)
        self._keep_place(start, len(new))
        before = memoryview(self.body)
        self.parts = (before[:start], new, before[end:])
        self._body = None
        self.count += 1

    def replace_all(self, needle: Needle, new: bytes, watch: Watch) -> None:
        """Replace every match of the needle. The needle must be made for this body and must have at least one match."""
        first = needle.find_next(0)
        if needle.literal is not None and first is not None and self._has_one_line_end(new):
            self._replace_literal(needle, needle.literal, fit_line_ends(new, self.body, first))
        else:
            self._replace_one_by_one(needle, new, watch)

    def _has_one_line_end(self, new: bytes) -> bool:
        return b"\n" not in new or self.body.count(b"\r\n") in (0, self.body.count(b"\n"))

    def _replace_literal(self, needle: Needle, literal: bytes, new: bytes) -> None:
        count, grown = self.body.count(literal), len(new) - len(literal)
        _check_size(len(self.body) + count * grown)
        self._move_places(lambda at: at + grown * self.body.count(literal, 0, at))
        for number, (start, _) in zip(range(_MAX_PLACES), needle.find_all()):
            self._keep_place(start + number * grown, len(new))
        self.count += count
        self.body = self.body.replace(literal, new)

    def _replace_one_by_one(self, needle: Needle, new: bytes, watch: Watch) -> None:
        edited = bytearray()
        ends, growths = array("q", (-1,)), array("q", (0,))
        places: list[Span] = []
        at = 0
        for number, span in enumerate(needle.find_all()):
            if number % _STRIDE == 0:
                watch.check()
            fitted = fit_line_ends(new, self.body, span)
            edited += self.body[at : span[0]]
            if len(places) < _MAX_PLACES:
                places.append((len(edited), len(fitted)))
            edited += fitted
            _check_size(len(edited))
            at = span[1]
            ends.append(at)
            growths.append(len(edited) - at)
        edited += self.body[at:]
        self._move_places(lambda before: before + growths[bisect_right(ends, before) - 1])
        for place in places:
            self._keep_place(*place)
        self.count += len(ends) - 1
        self.body = bytes(edited)

    def _keep_place(self, start: int, size: int) -> None:
        if len(self.places) < _MAX_PLACES:
            self.places.append((start, start + size))

    def _move_places(self, move: Callable[[int], int]) -> None:
        self.places = [(move(start), move(end)) for start, end in self.places]


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise RequestFailure(
            FILE_TOO_LARGE,
            f"the edits would make it {size} bytes, more than {MAX_BYTES}; nothing was written; use bash_tool",
            size=size,
        )
