"""Lines that stand for text that was left out, as models write them: `// ... rest of the code ...`."""

from __future__ import annotations

import re

_MARKS = r"[\s#/*;%<>!(){}\[\]\-]*"
_DOTS = r"(?:\.{3,}|…+)"
_WHAT = (
    r"(?:the\s+)?(?:rest|remainder|remaining|existing|other|previous|same|unchanged|original)\b[^.…]{0,60}?"
    r"|[^.…]{0,40}?\b(?:unchanged|omitted|stays? the same|remains? the same|as before|same as (?:before|above))\b[^.…]{0,20}?"
    r"|[^.…]{0,20}?(?:其余|剩余|省略|保持不变|同上|原有代码)[^.…]{0,20}?"
)
# The dots are what makes it a placeholder, before the words or behind them; a comment about "the rest" is none.
_LINE = rf"{_MARKS}(?:{_DOTS}\s*(?:{_WHAT})\s*{_DOTS}?|(?:{_WHAT})\s*{_DOTS}){_MARKS}"
_MAX_LINE = 120


def find_placeholder(text: str, old: bytes = b"") -> tuple[int, str] | None:
    """The first line, from 1, that looks like one and that `old` does not have; None when there is none."""
    if "..." not in text and "\u2026" not in text:
        return None
    for hint in re.finditer(_DOTS, text):
        start = text.rfind("\n", 0, hint.start()) + 1
        end = text.find("\n", hint.end())
        line = text[start : end if end >= 0 else len(text)].strip()
        if len(line) <= _MAX_LINE and re.fullmatch(_LINE, line, re.IGNORECASE) and line.encode() not in old:
            return text.count("\n", 0, start) + 1, line
    return None
