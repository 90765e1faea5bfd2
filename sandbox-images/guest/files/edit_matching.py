"""Where a text occurs in a file's bytes, and what stands there afterwards. Exact, but that LF in the arguments matches
CRLF in the file.
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
# A byte of these may begin or end anywhere: UTF-8 because no character is within another, the others because each byte
# is one.
_ANYWHERE = ("utf-8", "ascii", "latin-1", "iso8859", "cp125", "cp437", "cp850", "koi8")
# Below this no byte of any encoding is the rest of a character.
_FIRST_REST_BYTE = 0x30


class Needle:
    """What is looked for in one state of a file's body, which has the encoding `codec`."""

    def __init__(self, body: bytes, old: bytes, codec: str) -> None:
        self._body = body
        self._old = old
        self._decoder = None if codec.startswith(_ANYWHERE) else codecs.getincrementaldecoder(codec)("replace")
        # Where a character is known to begin: a long line without a low byte is not read from its start for each match.
        self._known = 0
        self._mixed: _MixedEnds | None = None
        if b"\n" in old and b"\r\n" in body and not old.endswith(b"\r"):
            if body.count(b"\r\n") == body.count(b"\n"):
                self._old = to_crlf(old)
            elif _LONE_LF.search(old):
                self._mixed = _MixedEnds(body, old)

    @property
    def literal(self) -> bytes | None:
        """The bytes of every match, when each occurrence of them is one."""
        return None if self._mixed is not None or self._decoder is not None else self._old

    def find_next(self, at: int) -> Span | None:
        """The first match that begins there or later."""
        while True:
            span = self._mixed.find_next(at) if self._mixed is not None else self._find_bytes(at)
            if span is None or self._is_character(span[0]):
                return span
            at = span[0] + 1

    def find_all(self) -> Iterator[Span]:
        """Matches from the left, none within another."""
        span = self.find_next(0)
        while span is not None:
            yield span
            span = self.find_next(span[1])

    def _find_bytes(self, at: int) -> Span | None:
        start = self._body.find(self._old, at)
        return None if start < 0 else (start, start + len(self._old))

    def _is_character(self, at: int) -> bool:
        """Whether a character begins there, rather than that its second byte looks like one."""
        if self._decoder is None:
            return True
        least = self._known if self._known <= at else 0
        start = at
        while start > least and self._body[start - 1] >= _FIRST_REST_BYTE:
            start -= 1
        self._decoder.reset()
        self._decoder.decode(self._body[start:at])
        begun = len(self._decoder.getstate()[0])
        self._known = at - begun
        return not begun


class _MixedEnds:
    """A search in a body with both line ends: it looks with all of them as LF, then back to where that is in the
    body.
    """

    def __init__(self, body: bytes, old: bytes) -> None:
        self._body = body
        self._plain = body.replace(b"\r\n", b"\n")
        self._old = old.replace(b"\r\n", b"\n")
        # CRLF in the arguments is meant: it matches no LF.
        self._exact = re.compile(b"\r?\n".join(re.escape(part) for part in _LONE_LF.split(old)))
        self._pairs = array("Q", (found.start() for found in re.finditer(rb"\r\n", body)))

    def find_next(self, at: int) -> Span | None:
        plain_at = self._plain.find(self._old, at - bisect_left(self._pairs, at))
        while plain_at >= 0:
            start, end = self._to_body(plain_at), self._to_body(plain_at + len(self._old))
            if start >= at and self._exact.fullmatch(self._body, start, end):
                return start, end
            plain_at = self._plain.find(self._old, plain_at + 1)
        return None

    def _to_body(self, plain_at: int) -> int:
        """Every CRLF before made the plain text one byte shorter."""
        low, high = 0, len(self._pairs)
        while low < high:
            middle = (low + high) // 2
            if self._pairs[middle] - middle < plain_at:
                low = middle + 1
            else:
                high = middle
        return plain_at + low


def to_crlf(text: bytes) -> bytes:
    """With CRLF for each LF that stands alone."""
    return _LONE_LF.sub(b"\r\n", text)


def fit_line_ends(new: bytes, body: bytes, span: Span) -> bytes:
    """The new text with the line ends of what it replaces: each its own when there are as many, else the first one's.

    Where nothing replaced has one, the end of its line decides. CRLF in the new text stays.
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
    return re.sub(rb"\r?\n", lambda found: found[0] if next(ends) == b"\n" else b"\r\n", new)


def _end_of_line(body: bytes, span: Span) -> bytes:
    at = body.find(b"\n", span[1])
    if at < 0:
        at = body.rfind(b"\n", 0, span[0])
    return b"\r\n" if at > 0 and body[at - 1] == 0x0D else b"\n"
