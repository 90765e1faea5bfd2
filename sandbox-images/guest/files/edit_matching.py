"""Find the occurrences of a text in the bytes of a file, and adapt replacement text to the line ends of the file.

Matches are exact, with one exception: LF in the arguments also matches CRLF in the file.
"""

from __future__ import annotations

import codecs
import re
from array import array
from bisect import bisect_left

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Span = tuple[int, int]

_LONE_LF = re.compile(rb"(?<!\r)\n")
# In these encodings every match of bytes is a match of characters: no UTF-8 character contains another one, and in the
# other encodings each byte is one character.
_ANYWHERE = ("utf-8", "ascii", "latin-1", "iso8859", "cp125", "cp437", "cp850", "koi8")
# In every supported encoding, a byte below this value is never the second or a later byte of a character.
_FIRST_REST_BYTE = 0x30


class Needle:
    """Search for `old` in one state of a file's body. `codec` is the encoding of both."""

    def __init__(self, body: bytes, old: bytes, codec: str) -> None:
        self._body = body
        self._old = old
        self._decoder = None if codec.startswith(_ANYWHERE) else codecs.getincrementaldecoder(codec)("replace")
        # A position where a character begins for certain. It saves time: each match in a long line without a low byte
        # would otherwise decode the line from its start.
        self._checked_until = 0
        self._mixed: _MixedEnds | None = None
        if b"\n" in old and b"\r\n" in body and not old.endswith(b"\r"):
            if body.count(b"\r\n") == body.count(b"\n"):
                self._old = to_crlf(old)
            elif _LONE_LF.search(old):
                self._mixed = _MixedEnds(body, old)

    @property
    def literal(self) -> bytes | None:
        """If a plain search for bytes finds exactly the matches, these bytes; otherwise None."""
        return None if self._mixed is not None or self._decoder is not None else self._old

    def find_next(self, at: int) -> Span | None:
        """Return the first match that begins at `at` or later."""
        while True:
            span = self._mixed.find_next(at) if self._mixed is not None else self._find_bytes(at)
            if span is None or self._is_character(span[0]):
                return span
            at = span[0] + 1

    def find_all(self) -> Iterator[Span]:
        """Yield the matches from left to right, without overlaps."""
        span = self.find_next(0)
        while span is not None:
            yield span
            span = self.find_next(span[1])

    def _find_bytes(self, at: int) -> Span | None:
        start = self._body.find(self._old, at)
        return None if start < 0 else (start, start + len(self._old))

    def _is_character(self, at: int) -> bool:
        """Return whether a character begins at `at`.

        In some encodings the second byte of a character equals another character.
        """
        if self._decoder is None:
            return True
        least = self._checked_until if self._checked_until <= at else 0
        start = at
        while start > least and self._body[start - 1] >= _FIRST_REST_BYTE:
            start -= 1
        self._decoder.reset()
        self._decoder.decode(self._body[start:at])
        begun = len(self._decoder.getstate()[0])
        self._checked_until = at - begun
        return not begun


class _MixedEnds:
    """Search in a body that contains both LF and CRLF.

    The search runs on a copy with LF only. Positions of matches are then converted to positions in the body.
    """

    def __init__(self, body: bytes, old: bytes) -> None:
        self._body = body
        self._plain = body.replace(b"\r\n", b"\n")
        self._old = old.replace(b"\r\n", b"\n")
        # CRLF in the arguments matches only CRLF.
        self._exact = re.compile(b"\r?\n".join(re.escape(part) for part in _LONE_LF.split(old)))
        self._pairs = array("Q", (match.start() for match in re.finditer(rb"\r\n", body)))

    def find_next(self, at: int) -> Span | None:
        plain_at = self._plain.find(self._old, at - bisect_left(self._pairs, at))
        while plain_at >= 0:
            start, end = self._to_body(plain_at), self._to_body(plain_at + len(self._old))
            if start >= at and self._exact.fullmatch(self._body, start, end):
                return start, end
            plain_at = self._plain.find(self._old, plain_at + 1)
        return None

    def _to_body(self, plain_at: int) -> int:
        """Convert a position in the LF-only copy to a position in the body.

        Each earlier CRLF shortens the copy by one byte.
        """
        low, high = 0, len(self._pairs)
        while low < high:
            middle = (low + high) // 2
            if self._pairs[middle] - middle < plain_at:
                low = middle + 1
            else:
                high = middle
        return plain_at + low


def to_crlf(text: bytes) -> bytes:
    """Return the text with CRLF in place of each LF that has no CR before it."""
    return _LONE_LF.sub(b"\r\n", text)


def fit_line_ends(new: bytes, body: bytes, span: Span) -> bytes:
    """Return the new text with the line ends of the text that it replaces.

    If both texts have the same number of line ends, each new line end becomes the one that it replaces. Otherwise all
    become the first replaced line end, or without one, the end of the line in which the replaced text is. CRLF in the
    new text stays.
    """
    if b"\n" not in new or b"\r\n" not in body:
        return new
    start, end = span
    replaced = re.findall(rb"\r?\n", body[start:end])
    if len(set(replaced)) < 2:
        return to_crlf(new) if (replaced[0] if replaced else _end_of_line(body, span)) == b"\r\n" else new
    if len(replaced) != new.count(b"\n"):
        return to_crlf(new) if replaced[0] == b"\r\n" else new
    ends = iter(replaced)
    return re.sub(rb"\r?\n", lambda match: match[0] if next(ends) == b"\n" else b"\r\n", new)


def _end_of_line(body: bytes, span: Span) -> bytes:
    at = body.find(b"\n", span[1])
    if at < 0:
        at = body.rfind(b"\n", 0, span[0])
    return b"\r\n" if at > 0 and body[at - 1] == 0x0D else b"\n"
