"""Find lines that models write in place of text that they left out, for example `// ... rest of the code ...`."""

from __future__ import annotations

import re
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MARKS = r"[\s#/*;%<>!(){}\[\]\-]*"
_DOTS = r"(?:\.{3,}|…+)"
_WHAT = (
    r"(?:the\s+)?(?:rest|remainder|remaining|existing|other|previous|same|unchanged|original)\b[^.…]{0,60}?"
    r"|[^.…]{0,40}?\b(?:unchanged|omitted|stays? the same|remains? the same|as before|same as (?:before|above))"
    r"\b[^.…]{0,20}?"
    r"|[^.…]{0,20}?(?:其余|剩余|省略|保持不变|同上|原有代码)[^.…]{0,20}?"
)
# A placeholder has dots before or after the words. A comment about "the rest" without dots is no placeholder.
_LINE = rf"{_MARKS}(?:{_DOTS}\s*(?:{_WHAT})\s*{_DOTS}?|(?:{_WHAT})\s*{_DOTS}){_MARKS}"
_MAX_LINE = 120
_MAX_INDENT = 200
# Maximum number of lines with dots that are examined, and of placeholder lines that `old` contains too. At a limit the
# search stops.
_MAX_LOOKS = 1000
_MAX_KNOWN = 20


def find_placeholder(text: str, old: bytes = b"") -> tuple[int, str] | None:
    """Return (line from 1, text) of the first placeholder line that `old` does not contain, or None."""
    if "..." not in text and "\u2026" not in text:
        return None
    count = 0
    for start, line in islice(_lines_with_dots(text), _MAX_LOOKS):
        if len(line) > _MAX_LINE or not re.fullmatch(_LINE, line, re.IGNORECASE):
            continue
        if line.encode() not in old:
            return text.count("\n", 0, start) + 1, line
        count += 1
        if count == _MAX_KNOWN:
            return None
    return None


def _lines_with_dots(text: str) -> Iterator[tuple[int, str]]:
    """Yield (start, stripped text) of each line that may be a placeholder. Each line is yielded once."""
    dots = re.compile(_DOTS)
    at = 0
    while hint := dots.search(text, at):
        start = text.rfind("\n", 0, hint.start()) + 1
        end = text.find("\n", hint.end())
        at = end if end >= 0 else len(text)
        if at - start <= _MAX_LINE + _MAX_INDENT:
            yield start, text[start:at].strip()
