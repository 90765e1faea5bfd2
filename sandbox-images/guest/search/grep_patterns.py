r"""Check the regular expression of a request, choose the engine and explain errors in the pattern.

Both engines accept letters, `.`, groups, `|`, `^`, `$`, and classes with ranges and negation. Both accept
`\d \w \s \b` and their opposites, and the repetitions `* + ? {n} {n,} {n,m}`, also lazy. Only Python accepts
look-around, backreferences, atomic groups and possessive repetitions.
"""

from __future__ import annotations

import re

from guest.failures import INVALID_PATTERN, Failure
from guest.files.suggestions import escaped

MAX_PATTERN_BYTES = 131_000
"""Maximum size of a pattern, in bytes. It must fit into one argument of a program."""
# Maximum length of a pattern for ripgrep. For longer patterns ripgrep would build very large tables.
_RIPGREP_CHARS = 8192
_TOKEN = re.compile(
    r"\\(?P<escape>.)|(?P<group>\(\?(?:<?[=!]|>|\(|P=))|(?P<open>\[)|(?P<dot>\.)|(?P<possessive>[*+?}]\+)|.", re.DOTALL
)
# A byte that is not valid UTF-8 is decoded to one of these characters. No class may match such a character.
_NO_TEXT = "\\udc80-\\udcff"
_OPERATORS = re.compile(r"\\[wdsbWDSB.]|\.[*+?]|[\])][*+?]|\||^\^|\$$|\[\^|\(\?")
_CARET = re.compile(r"^ {4}( *)\^+$", re.MULTILINE)
_REASON = re.compile(r"^error: (.+)$", re.MULTILINE)


class GrepPattern:
    """Checked pattern. The constructor raises Failure if no engine can accept the pattern."""

    def __init__(self, text: str, fixed_strings: bool, ignore_case: bool, multiline: bool) -> None:
        self.text = text
        self.fixed_strings = fixed_strings
        self.ignore_case = ignore_case
        self.multiline = multiline
        if not text:
            raise Failure(
                INVALID_PATTERN, "the pattern is empty: give what to look for; . matches every line that is not empty"
            )
        if "\0" in text:
            raise Failure(INVALID_PATTERN, "the pattern has a NUL character, which no text file has")
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise self._bad("half of a surrogate pair", error.start + 1) from None
        if size > MAX_PATTERN_BYTES:
            raise Failure(
                INVALID_PATTERN, f"the pattern has {size} bytes, more than {MAX_PATTERN_BYTES}: look for a part of it"
            )
        if "\n" in text and not multiline:
            raise self._spans_lines(text.index("\n"))
        self._tokens = [] if fixed_strings else list(_TOKEN.finditer(text))
        self.needs_python = self._find_python_syntax() or len(text) > _RIPGREP_CHARS

    def compile(self) -> re.Pattern[str]:
        """Compile the pattern for the Python engine. Raises Failure."""
        flags = (re.IGNORECASE if self.ignore_case else 0) | (re.MULTILINE | re.DOTALL if self.multiline else 0)
        try:
            return re.compile(self._translate(), flags)
        except re.error as error:
            raise self._bad(error.msg, self._find_error(error.pos)) from None
        except (OverflowError, RecursionError):
            raise self._bad("nested too deeply, or repeated too often", None) from None

    def _find_error(self, at: int | None) -> int | None:
        """Return the position of the error in the original pattern. The translated pattern is longer."""
        try:
            re.compile(self.text)
        except re.error as error:
            at = error.pos
        return None if at is None else min(at, len(self.text)) + 1

    def explain(self, complaint: str) -> Failure:
        """Convert an error message of ripgrep about this pattern to a failure."""
        caret, reason = _CARET.search(complaint), _REASON.search(complaint)
        lines = [line.strip() for line in complaint.splitlines() if line.strip()]
        words = reason[1] if reason else (lines[0] if lines else "not understood")
        return self._bad(words[:300], len(caret[1]) + 1 if caret and "\n" not in self.text else None)

    def _find_python_syntax(self) -> bool:
        """Return whether only Python can accept the pattern. Raises Failure if no line can match the pattern."""
        only_python = False
        in_class = 0
        for found in self._tokens:
            if found.start() < in_class:
                continue
            if found["open"]:
                in_class = _end_of_class(self.text, found.start())
            elif found["escape"] == "n" and not self.multiline:
                raise self._spans_lines(found.start())
            elif found["group"] or found["possessive"] or (found["escape"] or "?") in "123456789":
                only_python = True
        return only_python

    def _translate(self) -> str:
        """Return the pattern in Python syntax."""
        if self.fixed_strings:
            return re.escape(self.text)
        parts, at = [], 0
        for found in self._tokens:
            if found.start() < at:
                continue
            at = found.end()
            if found["open"]:
                at = _end_of_class(self.text, found.start())
                parts.append(self._translate_class(found.start(), at))
            elif found["dot"]:
                parts.append(f"[^{_NO_TEXT}]" if self.multiline else f"[^\\n{_NO_TEXT}]")
            elif found["escape"] == "z":
                parts.append("\\Z")
            elif found["escape"] in ("p", "P", "Z"):
                raise self._bad(f"\\{found['escape']} is not known to this engine", found.start() + 1)
            elif found["escape"] in ("D", "S", "W"):
                parts.append(f"[^{_NO_TEXT}\\{found['escape'].lower()}]")
            else:
                parts.append(found.group())
        return "".join(parts)

    def _translate_class(self, start: int, end: int) -> str:
        text = self.text[start:end]
        if "[:" in text or "&&" in text or "--" in text or "~~" in text or re.search(r"(?<!\\)\[", text[1:]):
            raise self._bad("a class within a class, or an operator of classes, is not known to this engine", start + 1)
        return f"[^{_NO_TEXT}{text[2:]}" if text.startswith("[^") else text

    def _bad(self, reason: str, position: int | None) -> Failure:
        where = f" at character {position}" if position is not None else ""
        words = f"not a regular expression{where}: {reason}; the pattern was {_shorten(self.text)}"
        if not self.fixed_strings and not _OPERATORS.search(self.text):
            words += "; if it is meant literally, retry with fixed_strings=true"
        return Failure(INVALID_PATTERN, words)

    def _spans_lines(self, at: int) -> Failure:
        words = (
            f"the pattern has a line end at character {at + 1}, and no single line matches it: set multiline=true; it "
            f"was {_shorten(self.text)}"
        )
        return Failure(INVALID_PATTERN, words)


def _shorten(text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return f"'{escaped(shown.encode('utf-8', 'backslashreplace'))}'"


def _end_of_class(text: str, start: int) -> int:
    """Return the position after the class that opens at `start`, or the end of the text if the class is not closed."""
    at = start + 1
    at += text[at : at + 1] == "^"
    at += text[at : at + 1] == "]"
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "[" and text[at + 1 : at + 2] == ":":
            closing = text.find(":]", at + 2)
            at = closing + 1 if closing >= 0 else at
        elif text[at] == "]":
            return at + 1
        at += 1
    return len(text)
