"""Explain why an edit did not find its old text.

The usual mistakes are tested one after the other. The explanation also shows the most similar block of the file.
"""

from __future__ import annotations

import re
import time
import unicodedata

from guest.files.closest_block import find_closest
from guest.files.diffs import build_diff

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.files.edits import Edit
    from guest.files.file_texts import FileText

_MAX_BYTES = 16_777_216
_TELLING_CHARS = 8
_MAX_LINES = 500_000
_DIFF_LINES = 40
_DIFF_CHARS = 2400
_READ_AGAIN = "Read the file again with read_tool and copy the text as it is."
_NUMBERED = re.compile(r"^[ ]*\d+(?:\t|→|\||: ?)", re.MULTILINE)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "'": "'", "`": "`", "\\": "\\", "/": "/"}
_ENTITIES = (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#39;", "'"), ("&apos;", "'"), ("&amp;", "&"))
_LOOK_ALIKE = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u00b4\u02b9\u02bc", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb\u300c\u300d", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u30fc", "-"),
        **dict.fromkeys("\u3002", "."),
        **dict.fromkeys("\u3001", ","),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", None),
    }
)


def explain_miss(edit: Edit, text: FileText, body: bytes, change: tuple[bytes, str] | None, until: float) -> str:
    """Return the explanation for an edit whose old_string is not in `body`, at most about 3400 characters.

    `change`: the content that the session last saw and the diff from that content to the present one. None means that
    the file did not change. After `until`, a time on the monotonic clock, no further cause is tested.
    """
    if body != text.body and text.encode(edit.old, "old_string") in text.body:
        return (
            "It was there before an earlier edit of this call changed it: edits are made in order, each on what the "
            "one before it left."
        )
    if len(body) > _MAX_BYTES or body.count(b"\n") > _MAX_LINES:
        return f"The file is too large to look for the cause. Find the place with grep_tool. {_READ_AGAIN}"
    miss = _Miss(
        text.decode(body).replace("\r\n", "\n"), edit.old.replace("\r\n", "\n"), edit.new.replace("\r\n", "\n"), until
    )
    cause = miss.find_cause()
    if cause is None and change is not None:
        known_data, diff = change
        was_there = known_data and text.encode(edit.old, "old_string") in known_data
        when = "It was there when this session last read the file, which has" if was_there else "The file has"
        return f"{when} been changed by something else since:\n{diff}"
    closest = miss.describe_closest()
    if cause is None and closest is None:
        return f"{'' if time.monotonic() < until else 'No cause was found in the time there is. '}{_READ_AGAIN}"
    return "\n".join(hints for hints in (cause or _READ_AGAIN, closest) if hints)


class _Miss:
    """Search for the cause of one failed match. All texts have LF line ends."""

    def __init__(self, body: str, old: str, new: str, until: float) -> None:
        self._body = body
        self._lines = body.split("\n")
        self._old = old
        self._new = new
        self._until = until

    def find_cause(self) -> str | None:
        """Return a description of the first cause that applies, or None."""
        for test in (
            self._test_line_ends,
            self._test_line_numbers,
            self._test_escapes,
            self._test_indentation,
            self._test_trailing_blanks,
            self._test_blanks,
            self._test_case,
            self._test_look_alikes,
            self._test_replaced,
        ):
            if time.monotonic() >= self._until:
                return None
            cause = test()
            if cause is not None:
                return cause
        return None

    def describe_closest(self) -> str | None:
        """Return a diff from old_string to the most similar block, or None if no block is similar enough."""
        old = self._old.strip("\n")
        if not old.strip() or time.monotonic() >= self._until:
            return None
        block_match = find_closest(self._lines, old.split("\n"), self._until)
        if block_match is None:
            return None
        start, end, ratio = block_match
        block = "\n".join(self._lines[start:end])
        diff = build_diff(
            f"{old}\n".encode("utf-8", "replace"),
            f"{block}\n".encode("utf-8", "replace"),
            _decode,
            _DIFF_LINES,
            _DIFF_CHARS,
        )
        if not diff.text:
            return None
        shown = "\n".join("..." if line.startswith("@@") else line for line in diff.text.split("\n")).removeprefix(
            "...\n"
        )
        where = f"line {start + 1}" if end - start == 1 else f"lines {start + 1}-{end}"
        end_note = "" if diff.is_whole else f"\n[diff cut; see {where} with read_tool]"
        return f"Closest: {where}, {ratio:.0%} alike (- is old_string, + the file):\n{shown}{end_note}"

    def _where(self, position: int, body: str | None = None) -> str:
        return f"line {(body if body is not None else self._body).count(chr(10), 0, position) + 1}"

    def _test_line_ends(self) -> str | None:
        at = self._body.find(self._old)
        if at < 0:
            return None
        return (
            f"It differs from {self._where(at)} only in its line ends: give them as LF (\\n), which matches LF and "
            "CRLF."
        )

    def _test_line_numbers(self) -> str | None:
        lines = [line for line in self._old.split("\n") if line.strip()]
        if not lines or not all(_NUMBERED.match(line) for line in lines):
            return None
        old = _NUMBERED.sub("", self._old)
        at = self._body.find(old) if old.strip() else -1
        if at < 0 and "\t" not in lines[0]:
            return None
        self._old = old
        where = (
            f" Without them it stands at {self._where(at)}." if at >= 0 else " Without them it is not found, either."
        )
        return (
            "Its lines begin with line numbers, as read_tool shows them, which are not in the file: leave them "
            f"out.{where}"
        )

    def _test_escapes(self) -> str | None:
        plain = re.sub(r"\\([ntr\"'`\\/])", lambda found: _ESCAPES[found[1]], self._old)
        at = self._body.find(plain) if plain != self._old else -1
        if at >= 0:
            return (
                'It has escaped characters (such as \\n, \\t, \\") where the file has plain ones, at '
                f"{self._where(at)}: send them unescaped."
            )
        for escape in (
            _escape_breaks,
            _escape_quotes,
            lambda text: _escape_quotes(_escape_breaks(text.replace("\\", "\\\\"))),
        ):
            escaped = escape(self._old)
            at = self._body.find(escaped) if escaped != self._old else -1
            if at >= 0:
                return (
                    'The file has it with a backslash before characters (such as \\n, \\t, \\"), at '
                    f"{self._where(at)}: send these as they are there."
                )
        decoded = self._old
        for entity, sign in _ENTITIES:
            decoded = decoded.replace(entity, sign)
        at = self._body.find(decoded) if decoded != self._old else -1
        return (
            f"It has &lt;, &amp; or the like where the file has plain characters, at {self._where(at)}: send these."
            if at >= 0
            else None
        )

    def _test_indentation(self) -> str | None:
        match = self._find_by_line(lambda line: line.lstrip(" \t"))
        if match is None:
            return None
        pairs = [
            (number, line, self._lines[number])
            for number, line in enumerate(self._old.split("\n"), start=match)
            # The first line of old_string may begin in the middle of a line of the file.
            if line.strip()
            and number < len(self._lines)
            and (number > match or self._lines[number].strip() == line.strip())
        ]
        number, ours, theirs = next(
            (pair for pair in pairs if _indent_of(pair[1]) != _indent_of(pair[2])),
            (match, self._old, self._lines[match]),
        )
        return (
            f"Its indentation differs: line {number + 1} of the file begins with {_indent_of(theirs)}, "
            f"old_string has {_indent_of(ours)} there."
        )

    def _test_trailing_blanks(self) -> str | None:
        stripped = self._old.strip()
        at = self._body.find(stripped) if stripped and stripped != self._old else -1
        if at >= 0:
            return f"Without the blanks and line ends at its own beginning and end it stands at {self._where(at)}."
        match = self._find_by_line(lambda line: line.rstrip(" \t"))
        return (
            f"It differs in blanks at the ends of lines, in the text from line {match + 1} on."
            if match is not None
            else None
        )

    def _test_blanks(self) -> str | None:
        match = self._find_by_line(_squeeze)
        return (
            f"It differs only in blanks within or around its lines, in the text from line {match + 1} on."
            if match is not None
            else None
        )

    def _test_case(self) -> str | None:
        body = self._body.lower()
        at = body.find(self._old.lower())
        return f"It differs only in upper and lower case, at {self._where(at, body)}." if at >= 0 else None

    def _test_look_alikes(self) -> str | None:
        if self._body.isascii() and self._old.isascii():
            return None
        body, old = _fold(self._body), _fold(self._old)
        at = body.find(old) if old.strip() else -1
        if at < 0:
            return None
        first = body.count("\n", 0, at)
        block = "\n".join(self._lines[first : first + self._old.count("\n") + 1])
        ours, theirs = _name_signs(self._old, block), _name_signs(block, self._old)
        return (
            f"It differs only in characters that look alike, at line {first + 1}: old_string has "
            f"{ours or 'none of them'}, the file has {theirs or 'none of them'}."
        )

    def _test_replaced(self) -> str | None:
        # A short text may occur anywhere and proves nothing.
        at = self._body.find(self._new) if len(self._new.strip()) >= _TELLING_CHARS else -1
        return (
            f"new_string is in the file already, at {self._where(at)}: the edit may have been made before."
            if at >= 0
            else None
        )

    def _find_by_line(self, change: Callable[[str], str]) -> int | None:
        """Return the line, from 0, where old_string occurs, or None. `change` is first applied to each line of both
        texts.
        """
        old = "\n".join(change(line) for line in self._old.split("\n"))
        if not old.strip():
            return None
        body = "\n".join([change(line) for line in self._lines])
        at = body.find(old)
        return body.count("\n", 0, at) if at >= 0 else None


def _decode(line: bytes) -> str:
    return line.decode("utf-8", "replace")


def _squeeze(line: str) -> str:
    """Return the line with one space for each run of spaces and tabs. Other characters that look like spaces stay."""
    return " ".join(part for part in line.replace("\t", " ").split(" ") if part)


def _escape_breaks(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


def _escape_quotes(text: str) -> str:
    return text.replace('"', '\\"')


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_LOOK_ALIKE)


def _name_signs(text: str, other: str) -> str:
    """Return the names of up to three characters of `text` that `other` does not contain."""
    signs = sorted({sign for sign in text if not sign.isalnum() or not sign.isascii()} - set(other) - {"\n"})
    return ", ".join(f"{sign if sign.isprintable() else ' '} (U+{ord(sign):04X})" for sign in signs[:3])


def _indent_of(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    tabs, spaces = indent.count("\t"), indent.count(" ")
    parts = [f"{count} {name}{'s' * (count > 1)}" for count, name in ((tabs, "tab"), (spaces, "space")) if count]
    return " and ".join(parts) or "no blanks"
