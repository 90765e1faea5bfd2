"""Explain why an edit did not find its old text.

The usual mistakes are tested one after the other. The explanation also shows the most similar block of the file.
"""

from __future__ import annotations

import html
import re
import time
import unicodedata

from guest.files.closest_block import find_closest
from guest.files.diffs import build_diff

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.files.edit import Edit
    from guest.files.file_texts import FileText

    Normalize = Callable[[str], str]

_MAX_BYTES = 16_777_216
_TELLING_CHARS = 8
_MAX_LINES = 500_000
_DIFF_LINES = 40
_DIFF_CHARS = 2400
_READ_AGAIN = "Read the file again with read_tool and copy the text as it is."
_NUMBERED = re.compile(r"^[ ]*\d+(?:\t|→|\||: ?)", re.MULTILINE)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "'": "'", "`": "`", "\\": "\\", "/": "/"}
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

    `change`: the content that the session last saw, and the diff from that content to the present one; None if the file
    did not change. After the monotonic time `until`, no further cause is tested.
    """
    if body != text.body and text.encode(edit.old, "old_string") in text.body:
        return (
            "It was there before an earlier edit of this call changed it: each edit applies to the result of the edit "
            "before it."
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


class _Cause:
    """A usual mistake. It is the cause if the file contains old_string after the function `of_old` has changed
    old_string and `of_body` has changed the file.

    Neither function may change the number of lines before the match. `message` has a placeholder for the line.
    """

    __slots__ = ("message", "of_body", "of_old")

    def __init__(self, message: str, of_old: Normalize, of_body: Normalize | None = None) -> None:
        self.message = message
        self.of_old = of_old
        self.of_body = of_body or _unchanged


def _unchanged(text: str) -> str:
    return text


def _by_line(change: Normalize) -> Normalize:
    return lambda text: "\n".join([change(line) for line in text.split("\n")])


def _build_cause(description: str, change: Normalize) -> _Cause:
    """Return the cause "old_string and the file differ only in what `change` removes"."""
    return _Cause(description, change, change)


def _unescape(text: str) -> str:
    return re.sub(r"\\([ntr\"'`\\/])", lambda found: _ESCAPES[found[1]], text)


def _escape_breaks(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


def _escape_quotes(text: str) -> str:
    return text.replace('"', '\\"')


def _escape_all(text: str) -> str:
    return _escape_quotes(_escape_breaks(text.replace("\\", "\\\\")))


def _squeeze(line: str) -> str:
    """Return the line with one space for each run of spaces and tabs. Other characters that look like spaces stay."""
    return " ".join(part for part in line.replace("\t", " ").split(" ") if part)


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_LOOK_ALIKE)


_WITH_BACKSLASH = (
    'The file has it with a backslash before characters (such as \\n, \\t, \\"), at line {line}: send these as they '
    "are there."
)
_BLANKS_AT_ENDS = "It differs in blanks at the ends of lines, in the text from line {line} on."
_INDENTATION = "Its indentation differs, in the text from line {line} on:"
_LOOK_ALIKES = "It differs only in characters that look alike, at line {line}:"
_CAUSES = (
    _Cause(
        "It differs from line {line} only in its line ends: give them as LF (\\n), which matches LF and CRLF.",
        _unchanged,
    ),
    _Cause(
        "Its lines begin with line numbers, as read_tool shows them, which are not in the file: leave them out. "
        "Without them it stands at line {line}.",
        lambda text: _NUMBERED.sub("", text),
    ),
    _Cause(
        'It has escaped characters (such as \\n, \\t, \\") where the file has plain ones, at line {line}: send them '
        "unescaped.",
        _unescape,
    ),
    _Cause(_WITH_BACKSLASH, _escape_breaks),
    _Cause(_WITH_BACKSLASH, _escape_quotes),
    _Cause(_WITH_BACKSLASH, _escape_all),
    _Cause(
        "It has &lt;, &amp; or the like where the file has plain characters, at line {line}: send these.", html.unescape
    ),
    _build_cause(_INDENTATION, _by_line(lambda line: line.lstrip(" \t"))),
    _Cause("Without the blanks and line ends at its own beginning and end it stands at line {line}.", str.strip),
    _build_cause(_BLANKS_AT_ENDS, _by_line(lambda line: line.rstrip(" \t"))),
    _build_cause(
        "It differs only in blanks within or around its lines, in the text from line {line} on.", _by_line(_squeeze)
    ),
    _build_cause("It differs only in upper and lower case, at line {line}.", str.lower),
    _build_cause(_LOOK_ALIKES, _fold),
)


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
        for number, cause in enumerate(_CAUSES):
            if time.monotonic() >= self._until:
                return None
            old, body = cause.of_old(self._old), cause.of_body(self._body)
            # Skip a cause whose functions change neither text, because it cannot find a match. The first cause is an
            # exception: the line ends of both texts have already been changed.
            if not old.strip() or (number and old == self._old and body == self._body):
                continue
            at = body.find(old)
            if at >= 0:
                first = body.count("\n", 0, at)
                return cause.message.format(line=first + 1) + self._describe_difference(cause, first)
        # Do not test a short text, which may occur anywhere by chance.
        at = self._body.find(self._new) if len(self._new.strip()) >= _TELLING_CHARS else -1
        if at < 0:
            return None
        line = self._body.count("\n", 0, at) + 1
        return f"new_string is in the file already, at line {line}: the edit may have been made before."

    def _describe_difference(self, cause: _Cause, first: int) -> str:
        """Describe differences that are invisible in a diff: blanks, and characters that look alike."""
        if cause.message is _LOOK_ALIKES:
            block = "\n".join(self._lines[first : first + self._old.count("\n") + 1])
            ours, theirs = _name_signs(self._old, block), _name_signs(block, self._old)
            return f" old_string has {ours or 'none of them'}, the file has {theirs or 'none of them'}."
        if cause.message is not _INDENTATION:
            return ""
        for number, (ours, theirs) in enumerate(zip(self._old.split("\n"), self._lines[first:]), start=first + 1):
            # The first line of old_string may begin in the middle of a line of the file.
            is_aligned = number > first + 1 or ours.strip() == theirs.strip()
            if ours.strip() and is_aligned and _indent_of(ours) != _indent_of(theirs):
                return (
                    f" line {number} of the file begins with {_indent_of(theirs)}, old_string has {_indent_of(ours)} "
                    "there."
                )
        return " see the lines with read_tool."

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


def _decode(line: bytes) -> str:
    return line.decode("utf-8", "replace")


def _name_signs(text: str, other: str) -> str:
    """Return the Unicode names of up to three characters of `text` that `other` does not contain."""
    signs = sorted({sign for sign in text if not sign.isalnum() or not sign.isascii()} - set(other) - {"\n"})
    return ", ".join(f"{sign if sign.isprintable() else ' '} (U+{ord(sign):04X})" for sign in signs[:3])


def _indent_of(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    tabs, spaces = indent.count("\t"), indent.count(" ")
    parts = [f"{count} {name}{'s' * (count > 1)}" for count, name in ((tabs, "tab"), (spaces, "space")) if count]
    return " and ".join(parts) or "no blanks"
