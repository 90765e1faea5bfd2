"""Handle the file request that replaces text.

Either all edits are made or none. Bytes outside the matched text never change.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections import Counter

from guest.confinement import DirectoryEntry, find_entry
from guest.failures import (
    AMBIGUOUS_MATCH,
    FILE_NOT_FOUND,
    INVALID_ARGUMENTS,
    NO_CHANGE,
    NO_MATCH,
    RequestFailure,
    describe_os_error,
)
from guest.files.edit import Edit
from guest.files.edit_matching import Needle, fit_line_ends
from guest.files.edit_views import show_places
from guest.files.edited_text import EditedText
from guest.files.file_states import FileState, read_whole, shorten
from guest.files.file_texts import FileText
from guest.files.placeholders import find_placeholder
from guest.files.versions import BodyContent, BytesContent, OldFile, Version, open_old

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.files.edit_matching import Span
    from guest.files.requests import EditTextRequest
    from guest.request_context import RequestContext

_BLANKS = b" \t\r"
_MAX_BYTES = 262_144
_ONLY_PARSE = 0x0400
"""Value of `ast.PyCF_ONLY_AST`. Loading the ast module takes longer than parsing."""
_MESSAGE_CHARS = 200
_NAMES = {b".py": "Python", b".pyi": "Python", b".json": "JSON", b".toml": "TOML"}
_MAX_EDITS = 100
_LISTED_LINES = 10
_FOOTER_BYTES = 1024
_NOTES_CUT = "\n[notes cut; read the file with read_tool]"
# Limits of the time to explain a failed match: seconds, and share of the request's time limit.
_DIAGNOSIS_S = 1.0
_DIAGNOSIS_SHARE = 0.2


def find_unindented(body: bytes, old: bytes) -> Span | None:
    """Return the (start, end) of the only whole lines that equal the lines of `old` if blanks around lines are ignored.

    Returns None if there are no such lines or several. The last line end is included only if `old` ends with one.
    """
    stripped_old = [line.strip(_BLANKS) for line in old.split(b"\n")]
    has_end = not stripped_old[-1] and len(stripped_old) > 1
    if has_end:
        stripped_old.pop()
    if not any(stripped_old):
        return None
    lines = body.split(b"\n")
    stripped = [line.strip(_BLANKS) for line in lines]
    at = _find_only(stripped, stripped_old)
    if at is None or (has_end and at + len(stripped_old) == len(lines)):
        return None
    start = sum(map(len, lines[:at])) + at
    end = start + sum(map(len, lines[at : at + len(stripped_old)])) + len(stripped_old)
    if has_end:
        return start, end
    # A CR before the LF is part of the line end.
    return start, end - 1 - lines[at + len(stripped_old) - 1].endswith(b"\r")


def _find_only(lines: list[bytes], searched: list[bytes]) -> int | None:
    """Return the start of the only run of lines that equals `searched`, or None.

    The search looks for the rarest line of `searched` first, because others, such as blank lines, are frequent.
    """
    counts = Counter(lines)
    anchor = min(
        range(len(searched)), key=lambda number: counts[searched[number]] if searched[number] else len(lines) + 1
    )
    match = None
    at = -1
    while True:
        try:
            at = lines.index(searched[anchor], at + 1)
        except ValueError:
            return match
        start = at - anchor
        if start >= 0 and lines[start : start + len(searched)] == searched:
            if match is not None:
                return None
            match = start


def describe_syntax(name: bytes, before: bytes, parts: tuple[bytes | memoryview, ...]) -> str | None:
    """Return a note if the new content is not valid Python, JSON or TOML.

    `parts` is the new content in pieces. Returns None if the content is valid or cannot be checked.
    """
    kind = name[name.rfind(b".") :]
    parse = _PARSERS.get(kind)
    if parse is None or max(len(before), sum(map(len, parts))) > _MAX_BYTES:
        return None
    syntax_error = _find_syntax_error(parse, b"".join(parts))
    if syntax_error is None:
        return None
    since = "" if not before else " any more" if _find_syntax_error(parse, before) is None else ", as before"
    return f"[note: the file is no valid {_NAMES[kind]}{since}: {syntax_error}]"


def _find_syntax_error(parse: Callable[[bytes], object], data: bytes) -> str | None:
    try:
        parse(data)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"[:_MESSAGE_CHARS]
    except ValueError as error:
        return str(error)[:_MESSAGE_CHARS]
    except (RecursionError, MemoryError):
        return None
    return None


def _parse_toml(data: bytes) -> object:
    import tomllib

    return tomllib.loads(data.decode())


def _parse_python(data: bytes) -> object:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(data, "file", "exec", _ONLY_PARSE, dont_inherit=True)


_PARSERS: dict[bytes, Callable[[bytes], object]] = {
    b".py": _parse_python,
    b".pyi": _parse_python,
    b".json": json.loads,
    b".toml": _parse_toml,
}


def edit_text(request: EditTextRequest, context: RequestContext) -> dict[str, object]:
    """Apply the edits in the body of the request. Raises RequestFailure: the file is then unchanged."""
    edits = _read_edits(context)
    creates = not edits[0].old
    try:
        entry = find_entry(request.path, context.paths, make_parents=creates)
    except RequestFailure as failure:
        raise _missing(request.path, context) if failure.code == FILE_NOT_FOUND else failure from None
    try:
        old = open_old(entry, os.O_RDWR)
        if old is None and not creates:
            raise _missing(request.path, context)
        return _FileEdit(request, edits, entry, context).run(old)
    except OSError as error:
        raise describe_os_error(error, entry.shown) from None
    finally:
        entry.close()


def _missing(path: str, context: RequestContext) -> RequestFailure:
    # Imported only here, because the import takes longer than an edit.
    from guest.search.suggestions import missing_file

    return missing_file(path, context.paths)


def _read_edits(context: RequestContext) -> list[Edit]:
    try:
        listed = json.loads(b"".join(BodyContent(context.body).blocks()))
    except (ValueError, RecursionError):
        raise RequestFailure(INVALID_ARGUMENTS, "the body is not JSON") from None
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_EDITS:
        raise RequestFailure(INVALID_ARGUMENTS, f"the body must be a list of 1 to {_MAX_EDITS} edits")
    return [Edit(fields, number, len(listed)) for number, fields in enumerate(listed, start=1)]


class _FileEdit:
    def __init__(
        self, request: EditTextRequest, edits: list[Edit], entry: DirectoryEntry, context: RequestContext
    ) -> None:
        self._request = request
        self._edits = edits
        self._entry = entry
        self._context = context
        self._state = FileState(entry, context.paths)
        self._notes: list[str] = []

    def run(self, old: OldFile | None) -> dict[str, object]:
        data = read_whole(old.fd, self._entry.shown, self._context.watch) if old is not None else b""
        text = FileText(data, self._entry.shown)
        edited = EditedText(text.body)
        for edit in self._edits:
            self._context.watch.check()
            self._apply_edit(edit, text, edited, data)
        if old is not None and edited.equals(text.body):
            raise RequestFailure(
                NO_CHANGE, f"{self._entry.shown}: the edits do not change the file; nothing was written; read it again"
            )
        pieces = text.join(edited.parts)
        self._warn_of_text(text, edited)
        self._report_foreign_change(data, old)
        status = Version(self._entry, BytesContent(*pieces), self._context.watch).replace(old, is_known=True)
        self._state.record(pieces, status)
        self._context.writer.send("file", self._view(text, edited))
        return {
            "created": old is None,
            "replaced": edited.count,
            "size": status.st_size,
            "mode_bits": stat.S_IMODE(status.st_mode),
            "encoding": text.form.codec,
        }

    def _view(self, text: FileText, edited: EditedText) -> bytes:
        notes = "".join(f"\n{note}" for note in self._notes)
        most = self._request.max_bytes // 8
        if len(notes) > most:
            notes = f"{notes[: most - len(_NOTES_CUT)]}{_NOTES_CUT}"
        remaining_chars = (self._request.max_bytes - _FOOTER_BYTES) // 4 - len(notes)
        return (show_places(edited, text.decode, remaining_chars) + notes).encode("utf-8", "replace")

    def _apply_edit(self, edit: Edit, text: FileText, edited: EditedText, data: bytes) -> None:
        old, new = text.encode(edit.old, f"{edit.name}old_string"), text.encode(edit.new, f"{edit.name}new_string")
        if old == new:
            raise RequestFailure(NO_CHANGE, f"{edit.name}old_string and new_string are the same; nothing was written")
        if not old:
            self._create(edit, new, edited)
            return
        needle = Needle(edited.body, old, text.codec)
        first = needle.find_next(0)
        if first is None:
            if self._request.tolerance == "whitespace" and self._replace_unindented(edit, old, new, edited):
                return
            raise self._unmatched(edit, text, edited, data)
        expected = self._request.expected_count
        if edit.replace_all or expected is not None:
            self._check_count(edit, needle, edited, expected)
            edited.replace_all(needle, new, self._context.watch)
        elif needle.find_next(first[0] + 1) is not None:
            raise self._ambiguous(edit, needle, edited, None)
        else:
            edited.replace(first, fit_line_ends(new, edited.body, first))

    def _unmatched(self, edit: Edit, text: FileText, edited: EditedText, data: bytes) -> RequestFailure:
        # Imported only here, because the import takes longer than an edit.
        from guest.files.edit_diagnosis import explain_miss

        until = time.monotonic() + min(_DIAGNOSIS_S, _DIAGNOSIS_SHARE * self._request.timeout_s)
        diagnosis = explain_miss(edit, text, edited.body, self._state.describe_since(data), until)
        return RequestFailure(
            NO_MATCH,
            f"{edit.name}{shorten(self._entry.shown)}: old_string was not found, and nothing was written. {diagnosis}",
        )

    def _create(self, edit: Edit, new: bytes, edited: EditedText) -> None:
        if edited.body:
            raise RequestFailure(
                INVALID_ARGUMENTS,
                f"{edit.name}{self._entry.shown}: has {len(edited.body)} bytes, and an empty old_string is only for a "
                f"new or an empty file; give the text to replace, or use write_tool",
            )
        if new:
            edited.replace((0, 0), new)

    def _replace_unindented(self, edit: Edit, old: bytes, new: bytes, edited: EditedText) -> bool:
        span = find_unindented(edited.body, old)
        if span is None:
            return False
        self._notes.append(
            f"[{edit.name}old_string matched only without the blanks around its lines; new_string was put in as it is]"
        )
        edited.replace(span, fit_line_ends(new, edited.body, span))
        return True

    def _check_count(self, edit: Edit, needle: Needle, edited: EditedText, expected: int | None) -> None:
        """Raise RequestFailure unless the old text occurs as often as expected.

        If a count is expected, all matches are replaced.
        """
        if expected is not None and edited.count_matches(needle, self._context.watch) != expected:
            raise self._ambiguous(edit, needle, edited, expected)

    def _ambiguous(self, edit: Edit, needle: Needle, edited: EditedText, expected: int | None) -> RequestFailure:
        count = edited.count_matches(needle, self._context.watch)
        lines: list[str] = []
        at = needle.find_next(0)
        while at is not None and len(lines) < _LISTED_LINES:
            lines.append(str(edited.line_of(at[0])))
            # List overlapping matches too, because each may be the place that the caller means.
            at = needle.find_next(at[0] + 1 if count < 2 else at[1])
        listed = list(dict.fromkeys(lines))
        where = f"line{'s' * (len(listed) > 1)} {', '.join(listed)}{' and more' if at is not None else ''}"
        if expected is not None:
            return RequestFailure(
                AMBIGUOUS_MATCH,
                f"{edit.name}{self._entry.shown}: old_string occurs {count} times, not {expected}, at {where}; nothing "
                "was replaced. Give the right expected_count, or an old_string with more of the text around the place",
            )
        times = f"{count} times" if count > 1 else "more than once, overlapping itself"
        return RequestFailure(
            AMBIGUOUS_MATCH,
            f"{edit.name}{self._entry.shown}: old_string occurs {times}, at {where}; nothing was replaced. Either give "
            "an old_string with more of the text around the one place, or replace_all=true for all of them",
        )

    def _report_foreign_change(self, data: bytes, old: OldFile | None) -> None:
        change = self._state.describe_since(data) if old is not None and self._state.is_touched(old.status) else None
        if change is not None:
            self._notes.append(
                "[the file had been changed by something else since this session last read or wrote it, and the edit "
                f"matched all the same; that change was:]\n{change[1]}"
            )

    def _warn_of_text(self, text: FileText, edited: EditedText) -> None:
        for edit in self._edits:
            placeholder = find_placeholder(edit.new, text.body)
            if placeholder is not None:
                self._notes.append(
                    f"[warning: {edit.name}line {placeholder[0]} of new_string looks like a placeholder for text left "
                    f"out, and was put in as it is: {placeholder[1]}]"
                )
                break
        if text.form.is_guess and not all(edit.new.isascii() for edit in self._edits):
            self._notes.append(f"[written as {text.form.codec}, which is a guess of the file's encoding]")
        syntax = describe_syntax(self._entry.name, text.body, edited.parts)
        if syntax is not None:
            self._notes.append(syntax)
