"""Checks the regular expression of a request, and explains errors in it.

ripgrep's own engine takes time that is linear in the text. PCRE2 is used only for syntax that this engine does not
have: look-around, backreferences and atomic groups.
"""

from __future__ import annotations

import re

from guest.failures import INVALID_ARGUMENTS, INVALID_PATTERN, RequestFailure
from guest.fields import escaped
from guest.search.readings import accept_escapes, accept_line_ends, escape_lines

MAX_PATTERN_BYTES = 131_000
"""Maximum size of a pattern, in bytes. It must fit into one argument of a program."""
# Maximum length of a pattern for ripgrep's own engine. For a longer pattern this engine would build very large tables.
_MAX_OWN_CHARS = 8192
_OPERATORS = re.compile(r"\\[wdsbWDSB.]|\.[*+?]|[\])][*+?]|\||^\^|\$$|\[\^|\(\?")
_CARET = re.compile(r"^ {4}( *)\^+$", re.MULTILINE)
# Messages of ripgrep 13 and 14. Those of ripgrep 14 begin with this prefix. Their positions count from the group into
# which ripgrep 14 puts every pattern.
_PREFIX = "rg: "
_GROUP = "(?:"
_LINE_ENDS = "(*ANYCRLF)"
"""Start of a pattern for PCRE2. With --crlf, ripgrep leaves the line end of a line without \\r in its text. In the
group of ripgrep 14 it is an error, so there `$` does not match before \\r."""
_PCRE = re.compile(r"PCRE2: error compiling pattern at offset (\d+): (.+)")
_ONLY_PCRE = re.compile(r"^error: (?:.* not supported|unrecognized flag)$", re.MULTILINE)
_LINE_END = re.compile(r"^(?:rg: )?the literal '?\"\\n\"'? is not allowed", re.MULTILINE)
_UNKNOWN_TYPE = re.compile(r"^(?:rg: )?unrecognized file type: (.*)$", re.MULTILINE)
_BAD_GLOB = re.compile(r"^(?:rg: )?error parsing (glob .*)$", re.MULTILINE)
_REASON = re.compile(r"^error: (.+)$", re.MULTILINE)


class GrepPattern:
    """A checked pattern. The constructor raises RequestFailure if no line can match it."""

    def __init__(self, text: str, fixed_strings: bool, ignore_case: bool, multiline: bool) -> None:
        # What ripgrep searches for. Messages show `written`.
        self.text = text if fixed_strings else accept_escapes(text)
        self.written = text
        self.fixed_strings = fixed_strings
        self.is_regex = not fixed_strings
        """Whether `text` is a regular expression. Lines that are meant literally become one."""
        if multiline and not fixed_strings:
            self.text = accept_line_ends(self.text)
        elif multiline and "\n" in text:
            self.text, self.is_regex = escape_lines(text), True
        self.ignore_case = ignore_case
        self.multiline = multiline
        if not text:
            raise RequestFailure(
                INVALID_PATTERN, "the pattern is empty: give the text to find; . matches every line that is not empty"
            )
        if "\0" in text:
            raise RequestFailure(
                INVALID_PATTERN, "the pattern has a NUL character, which no text file has: leave it out"
            )
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise self._build_failure("a lone surrogate", error.start + 1) from None
        if size > MAX_PATTERN_BYTES:
            raise RequestFailure(
                INVALID_PATTERN, f"the pattern has {size} bytes, more than {MAX_PATTERN_BYTES}: search for a part of it"
            )
        if "\n" in text and not multiline:
            raise self._spans_lines()
        self.needs_pcre = len(text) > _MAX_OWN_CHARS
        self.pcre_start = _LINE_ENDS

    def turn_to_pcre(self, error_text: str) -> bool:
        """Switch to PCRE2, or to the form of PCRE2 that ripgrep 14 accepts, if the error message shows that the pattern
        needs it. Return whether this is so.
        """
        is_grouped = error_text.startswith(_PREFIX)
        if self.needs_pcre:
            can_turn = is_grouped and self.pcre_start != "" and "(*VERB)" in error_text
        else:
            can_turn = _ONLY_PCRE.search(error_text) is not None
        if can_turn:
            self.needs_pcre = True
            self.pcre_start = "" if is_grouped else _LINE_ENDS
        return can_turn

    def explain(self, error_text: str) -> RequestFailure:
        """Convert an error message of ripgrep about this pattern, or about a type or a glob, to a failure."""
        if (unknown := _UNKNOWN_TYPE.search(error_text)) is not None:
            return RequestFailure(
                INVALID_ARGUMENTS,
                f"unknown type '{escaped(unknown[1].encode())[:80]}': give the file extension in include, like *.py",
            )
        if (glob := _BAD_GLOB.search(error_text)) is not None:
            return RequestFailure(INVALID_PATTERN, f"exclude: {escaped(glob[1].encode())[:300]}")
        if _LINE_END.search(error_text) is not None:
            return self._spans_lines()
        is_grouped = error_text.startswith(_PREFIX)
        pcre = _PCRE.search(error_text)
        if pcre is not None:
            # The offset in the message includes the text before the pattern.
            before = len(_GROUP if is_grouped else self.pcre_start)
            return self._build_failure(pcre[2][:300], min(max(0, int(pcre[1]) - before), len(self.text)) + 1)
        before = len(_GROUP) if is_grouped else 0
        caret, reason = _CARET.search(error_text), _REASON.search(error_text)
        lines = [line.strip().removeprefix("rg: ") for line in error_text.splitlines() if line.strip()]
        reason_text = reason[1] if reason else (lines[0] if lines else "not understood")
        # A parenthesis without its end is an error of the group.
        has_position = caret is not None and len(caret[1]) >= before and "\n" not in self.text
        return self._build_failure(reason_text[:300], len(caret[1]) + 1 - before if caret and has_position else None)

    def _build_failure(self, reason: str, position: int | None) -> RequestFailure:
        where = f" at character {position}" if position is not None and self.text == self.written else ""
        message = f"not a regular expression{where}: {reason}; the pattern was {_shorten(self.written)}"
        if not self.fixed_strings and not _OPERATORS.search(self.written):
            message += "; if it is meant literally, retry with fixed_strings=true"
        return RequestFailure(INVALID_PATTERN, message)

    def _spans_lines(self) -> RequestFailure:
        message = (
            "the pattern has a line end, and no single line matches it: set multiline=true; it was "
            f"{_shorten(self.written)}"
        )
        return RequestFailure(INVALID_PATTERN, message)


def _shorten(text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return f"'{escaped(shown.encode('utf-8', 'backslashreplace'))}'"
