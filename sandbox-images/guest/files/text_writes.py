"""Handle the file request that writes text.

The text is written in the encoding of the file, and the answer describes the change. A write never overwrites a change
by another process that the session has not seen.
"""

from __future__ import annotations

import os
import stat

from guest.confinement import DirectoryEntry, find_entry
from guest.failures import BINARY_FILE, FILE_EXISTS, INVALID_ARGUMENTS, RequestFailure, describe_os_error
from guest.files.diffs import build_diff
from guest.files.encodings import TextForm, check_codec, find_form
from guest.files.file_states import MAX_BYTES, FileState, describe_stale, read_whole
from guest.files.file_texts import FileText, strip_mark
from guest.files.placeholders import find_placeholder
from guest.files.versions import BodyContent, BytesContent, OldFile, Version, open_old

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.files.requests import WriteTextRequest
    from guest.request_context import RequestContext

_SAMPLE_BYTES = 65_536
_NOTES_BYTES = 4096
_UTF8 = "utf-8"


def write_text(request: WriteTextRequest, context: RequestContext) -> dict[str, object]:
    """Write the body, UTF-8 text, to a file.

    Raises RequestFailure: the old content is then intact and no temporary file remains.
    """
    text = _read_body(context)
    if request.encoding != "auto":
        check_codec(request.encoding)
    entry = find_entry(request.path, context.paths, make_parents=True)
    try:
        return _TextWrite(request, text, entry, context).run()
    except OSError as error:
        raise describe_os_error(error, entry.shown) from None
    finally:
        entry.close()


def _read_body(context: RequestContext) -> str:
    data = b"".join(BodyContent(context.body).blocks())
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestFailure(INVALID_ARGUMENTS, f"the content is not UTF-8 at byte {error.start}") from None


class _TextWrite:
    def __init__(self, request: WriteTextRequest, text: str, entry: DirectoryEntry, context: RequestContext) -> None:
        self._request = request
        self._text = text
        self._entry = entry
        self._context = context
        self._state = FileState(entry, context.paths)
        self._notes: list[str] = []
        self._diff = ""
        self._old = b""

    def run(self) -> dict[str, object]:
        mode = self._request.mode
        old = open_old(self._entry, os.O_RDWR | (os.O_APPEND if mode == "append" else 0))
        if old is None:
            status, form, written = self._make(mode)
        elif mode == "create":
            raise RequestFailure(
                FILE_EXISTS, f"{self._entry.shown}: exists already; mode=overwrite replaces it, mode=append adds to it"
            )
        elif mode == "append":
            status, form, written = self._append(old)
        else:
            status, form, written = self._overwrite(old)
        self._warn_of_placeholder()
        self._context.writer.send(
            "file", "\n".join([*([self._diff] if self._diff else []), *self._notes]).encode("utf-8", "replace")
        )
        return {
            "created": old is None,
            "size": status.st_size,
            "mode_bits": stat.S_IMODE(status.st_mode),
            "written": written,
            "lines": self._text.count("\n") + (not self._text.endswith("\n") and bool(self._text)),
            "encoding": form.codec,
        }

    def _make(self, mode: str) -> tuple[os.stat_result, TextForm, int]:
        form = find_form(b"", self._request.encoding)
        pieces = (form.bom, self._encode(form, self._without_mark(form)))
        version = Version(self._entry, BytesContent(*pieces), self._context.watch)
        status = version.create() if mode == "create" else version.replace(None, is_known=True)
        self._state.record(pieces, status)
        return status, form, status.st_size

    def _overwrite(self, old: OldFile) -> tuple[os.stat_result, TextForm, int]:
        data = read_whole(old.fd, self._entry.shown, self._context.watch) if old.status.st_size <= MAX_BYTES else None
        form = self._choose_form(data if data is not None else os.pread(old.fd, _SAMPLE_BYTES, 0), data is not None)
        content = form.bom + self._encode(form, self._without_mark(form))
        if data is None:
            self._notes.append(f"[the old content, {old.status.st_size} bytes, was too large to compare]")
        else:
            self._compare(data, content, old.status)
        version = Version(self._entry, BytesContent(content), self._context.watch)
        status = version.replace(old, is_known=data is not None)
        self._state.record((content,), status)
        return status, form, status.st_size

    def _append(self, old: OldFile) -> tuple[os.stat_result, TextForm, int]:
        size = old.status.st_size
        data = read_whole(old.fd, self._entry.shown, self._context.watch) if size <= MAX_BYTES else None
        form = self._choose_form_to_append(
            data if data is not None else os.pread(old.fd, _SAMPLE_BYTES, 0), data is not None
        )
        content = (
            self._encode(form, self._without_mark(form))
            if size
            else form.bom + self._encode(form, self._without_mark(form))
        )
        is_stale = data is not None and self._state.is_stale(data)
        status = Version(self._entry, BytesContent(content), self._context.watch).append(old)
        if not form.codec.startswith(("utf-16", "utf-32")):
            self._report_line_ends(os.pread(old.fd, min(size, _SAMPLE_BYTES), 0))
        last = "\n".encode(form.codec)
        if size and self._text and os.pread(old.fd, len(last), size - len(last)) != last:
            self._notes.append("[the file did not end with a line end: the text went on in its last line]")
        if is_stale:
            self._notes.append(
                "[the file had been changed by something else since this session last read or wrote it; see it with "
                "read_tool]"
            )
        if data is None:
            self._state.forget()
        elif self._state.is_known and not is_stale:
            # After an append, record the content only if the session had seen the content before the append.
            self._state.record((data, content), status)
        return status, form, len(content)

    def _without_mark(self, form: TextForm) -> str:
        return strip_mark(self._text) if form.bom else self._text

    def _choose_form(self, data: bytes, is_whole: bool) -> TextForm:
        """Return the encoding and BOM (form) of the old file, unless the request names another encoding or the old one
        cannot encode the text.
        """
        if self._request.encoding != "auto":
            return find_form(data if not data or is_whole else b"", self._request.encoding)
        try:
            form = find_form(data, is_whole=is_whole)
            form.encode(self._text)
        except RequestFailure as failure:
            if failure.code != BINARY_FILE:
                raise
            return TextForm(_UTF8)
        except UnicodeEncodeError as error:
            sign = self._text[error.start]
            self._notes.append(f"[written as utf-8: the file was {form.codec}, which has no {sign!a}]")
            return TextForm(_UTF8)
        if form.codec != _UTF8 or form.bom:
            mark = " with its byte order mark" if form.bom else ""
            self._notes.append(
                f"[written in the file's own encoding, {form.codec}{' (guessed)' if form.is_guess else ''}{mark}]"
            )
        return form

    def _choose_form_to_append(self, data: bytes, is_whole: bool) -> TextForm:
        requested = self._request.encoding
        if not data:
            return find_form(b"", requested)
        try:
            form = find_form(data, is_whole=is_whole)
        except RequestFailure as failure:
            raise RequestFailure(
                failure.code, f"{self._entry.shown}: {failure.message}: append with bash_tool", **failure.details
            ) from None
        if (
            requested != "auto"
            and not (self._text.isascii() and data.isascii())
            and find_form(data, requested).codec != form.codec
        ):
            raise RequestFailure(
                INVALID_ARGUMENTS,
                f"{self._entry.shown}: is {form.codec}, and {requested} at its end would mix encodings; leave "
                "encoding out",
            )
        return form

    def _encode(self, form: TextForm, text: str) -> bytes:
        try:
            return form.encode(text)
        except UnicodeEncodeError as error:
            sign = text[error.start]
            raise RequestFailure(
                INVALID_ARGUMENTS,
                f"content has {sign!a} (character {error.start}), which {form.codec} cannot hold; leave it out",
            ) from None

    def _compare(self, data: bytes, content: bytes, status: os.stat_result) -> None:
        """Compare the old and the new content, and write the diff.

        Raises RequestFailure(STALE_FILE) if the write would replace a change that this session has not seen.
        """
        if data != content and self._state.is_stale(data):
            message = describe_stale(self._entry.shown, self._state.known_data, data)
            # Record the present content before the refusal, so that the same call succeeds when it is sent again. If
            # the record fails, continue with the write: otherwise every repeated call would be refused.
            if self._state.record((data,), status):
                raise message
        if data == content:
            self._notes.append("[the file had this content already]")
            return
        old = _as_utf8(data)
        if old is None:
            self._notes.append(f"[the old content, {len(data)} bytes, was not text: no diff]")
            return
        self._old = old
        self._report_line_ends(old)
        room = (self._request.max_bytes - _NOTES_BYTES) // 4
        diff = build_diff(old, self._text.encode(), lambda part: part.decode("utf-8", "replace"), max_chars=room)
        self._diff = diff.text
        if not diff.is_whole:
            self._notes.insert(0, "[diff cut: more lines changed than are shown; see the file with read_tool]")

    def _report_line_ends(self, old: bytes) -> None:
        before, now = _line_ends(old), _line_ends(self._text.encode())
        if before and now and before != now:
            self._notes.append(f"[line ends: the file had {before}, the content has {now}]")

    def _warn_of_placeholder(self) -> None:
        found = find_placeholder(self._text, self._old)
        if found is not None:
            self._notes.append(
                f"[warning: line {found[0]} of the content looks like a placeholder for text left out, and was written "
                f"as it is: {found[1]}]"
            )


def _as_utf8(data: bytes) -> bytes | None:
    """Return the text of a file as UTF-8 without its BOM, or None if the file is not text."""
    try:
        text = FileText(data, "")
    except RequestFailure:
        return None
    return text.body if text.codec == _UTF8 else text.decode(text.body).encode("utf-8", "replace")


def _line_ends(data: bytes) -> str:
    pairs, all_ends = data.count(b"\r\n"), data.count(b"\n")
    if not all_ends:
        return ""
    return "LF" if not pairs else "CRLF" if pairs == all_ends else "both LF and CRLF"
