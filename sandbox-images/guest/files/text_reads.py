"""Handle the file request that reads text.

The result is a page of lines as UTF-8 for any encoding of the file. The file is never held in memory as a
whole.
"""

from __future__ import annotations

import codecs
import heapq
import os

from guest.confinement import DirectoryEntry, find_entry, open_pinned, pin_file
from guest.failures import (
    BINARY_FILE,
    FILE_NOT_FOUND,
    FILE_TOO_LARGE,
    INVALID_ARGUMENTS,
    OFFSET_OUT_OF_RANGE,
    RequestFailure,
    describe_os_error,
)
from guest.fields import escaped
from guest.files.encodings import TextForm, check_codec, find_sure_form, guess_form, guess_window
from guest.files.file_types import HEAD_BYTES, find_type
from guest.files.line_page import LinePage
from guest.files.requests import EMPTY_ANSWER, ReadTextRequest
from guest.files.sha256 import new_digest
from guest.files.snapshots import MAX_DATA_BYTES, forget, key_of, remember
from guest.search.suggestions import missing_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest.request_context import RequestContext

MAX_NAMES = 100
_STRIDE = 1024
SEEK_BYTES = 1_073_741_824
"""Maximum number of bytes that are read to find the start of a page."""
COUNT_BYTES = 67_108_864
"""Maximum number of bytes that are read after the last line of the page, only to count the lines of the file."""
DIGEST_BYTES = 33_554_432
"""Maximum size of a file that is remembered, in bytes. A digest of a larger file would take longer than the read."""
_BLOCK = 262_144


def list_folder(folder: DirectoryEntry, max_bytes: int, context: RequestContext) -> dict[str, object]:
    """Send the first names of a directory in order, one per line, with a slash after directories.

    At most MAX_NAMES names and `max_bytes` bytes are sent. Raises OSError.
    """
    fd = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.directory)
    counter = _EntryCounter(context)
    with os.scandir(fd) as entries:
        hidden = os.path.relpath(context.paths.state, os.readlink(f"/proc/self/fd/{fd}".encode()))
        names = heapq.nsmallest(
            MAX_NAMES, counter.pass_on(entry for entry in entries if os.fsencode(entry.name) != hidden), key=_order
        )
    lines: list[bytes] = []
    for entry in names:
        line = (
            escaped(os.fsencode(entry.name)).encode() + (b"/" if entry.is_dir(follow_symlinks=False) else b"") + b"\n"
        )
        max_bytes -= len(line)
        if max_bytes < 0:
            break
        lines.append(line)
    context.writer.send("file", b"".join(lines))
    return {**EMPTY_ANSWER, "kind": "directory", "count": len(lines), "entries": counter.count}


class _EntryCounter:
    """Counts directory entries, and checks the time limit of the request at intervals."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self.count = 0

    def pass_on(self, entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        for entry in entries:
            self.count += 1
            if self.count % _STRIDE == 0:
                self._context.watch.check()
            yield entry


def _order(entry: os.DirEntry[str]) -> bytes:
    return os.fsencode(entry.name)


def read_text(request: ReadTextRequest, context: RequestContext) -> dict[str, object]:
    """Send a page of a text file, or the names in a directory.

    For an image or a document, only the type and size are returned. Raises RequestFailure.
    """
    if request.encoding != "auto":
        check_codec(request.encoding)
    try:
        entry = find_entry(request.path, context.paths, to_read=True)
    except RequestFailure as failure:
        raise missing_file(request.path, context.paths) if failure.code == FILE_NOT_FOUND else failure from None
    try:
        return _TextRead(request, context, entry, open_pinned(pin_file(entry), os.O_RDONLY)).run()
    except FileNotFoundError:
        raise missing_file(request.path, context.paths) from None
    except IsADirectoryError:
        return list_folder(entry, request.max_bytes, context)
    except OSError as error:
        raise describe_os_error(error, entry.shown) from None
    finally:
        entry.close()


class _WrongUtf8(Exception):
    """Raised when the file stops being valid UTF-8 at the byte `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class _TextRead:
    def __init__(self, request: ReadTextRequest, context: RequestContext, entry: DirectoryEntry, fd: int) -> None:
        self._request = request
        self._context = context
        self._entry = entry
        self._fd = fd
        status = os.fstat(fd)
        self._size = status.st_size
        self._changed_ns = status.st_ctime_ns
        self._key = key_of(entry)
        # The file has the output of a command, which was shown as UTF-8 with replacement characters. Read the file in
        # the same way, even if it is binary.
        self._is_output = self._key.startswith(context.paths.output + b"/")

    def run(self) -> dict[str, object]:
        head = os.pread(self._fd, HEAD_BYTES, 0)
        if self._request.encoding == "auto" and not self._is_output:
            found = find_type(head)
            if found is not None and found.medium != "data":
                return {**EMPTY_ANSWER, "kind": found.medium, "type": found.name, "size": self._size}
        form = self._find_form(head)
        try:
            scan = self._scan(form)
        except _WrongUtf8 as wrong:
            form = self._guess_form(wrong.position)
            scan = self._scan(form)
        self._check_page(scan)
        if not self._is_output:
            self._remember(scan)
        return self._answer(form, scan)

    def _find_form(self, head: bytes) -> TextForm:
        if self._is_output and self._request.encoding == "auto":
            return TextForm("utf-8")
        try:
            form = find_sure_form(head, self._request.encoding)
        except RequestFailure as failure:
            raise self._named(failure) from None
        return form or TextForm("utf-8")

    def _guess_form(self, wrong: int) -> TextForm:
        """Return the form that `find_form` would find for the whole file, without loading the file."""
        if self._is_output:
            return TextForm("utf-8", is_guess=True)
        start, end = guess_window(wrong)
        try:
            return guess_form(os.pread(self._fd, end - start, start), start > 0)
        except RequestFailure as failure:
            raise self._named(failure) from None

    def _named(self, failure: RequestFailure) -> RequestFailure:
        if failure.code != BINARY_FILE:
            return failure
        return RequestFailure(
            BINARY_FILE, f"{self._entry.shown}: {failure.message}, {self._size} bytes", size=self._size
        )

    def _remember(self, scan: _Scan) -> None:
        """Record the content, so that later calls can detect a change by another process.

        Files above DIGEST_BYTES are not recorded.
        """
        digest = scan.memory.digest() if scan.has_ended else None
        if digest is None:
            forget(self._context.paths, self._key)
        else:
            remember(self._context.paths, self._key, digest, scan.memory.data, self._changed_ns)

    def _scan(self, form: TextForm) -> _Scan:
        scan = _Scan(self._request, form, self._size)
        os.lseek(self._fd, 0, os.SEEK_SET)
        while not scan.is_over:
            self._context.watch.check()
            block = os.read(self._fd, _BLOCK)
            try:
                scan.take(block)
            except UnicodeError:
                # Even in "replace" mode, some codecs raise an error for bytes of a very different encoding.
                raise RequestFailure(
                    INVALID_ARGUMENTS, f"{self._entry.shown}: cannot be read as {form.codec}"
                ) from None
        scan.page.finish()
        return scan

    def _check_page(self, scan: _Scan) -> None:
        """Raise RequestFailure if the page is empty: the requested line or column is beyond the end, or too far into a
        large file.
        """
        page, offset, column = scan.page, self._request.offset, self._request.column
        shown = self._entry.shown
        if not page.shown and not scan.has_ended:
            message = (
                f"{shown}: line {offset} does not begin within its first {scan.bytes} bytes, which have {page.lines} "
                "lines"
            )
            raise RequestFailure(FILE_TOO_LARGE, message, size=self._size, lines=page.lines)
        if not page.shown and (page.lines or offset > 1):
            raise RequestFailure(
                OFFSET_OUT_OF_RANGE,
                f"{shown}: has {page.lines} lines, none at {offset}; offset can be 1 to {max(1, page.lines)}",
                lines=page.lines,
            )
        if column > max(1, page.first_length):
            message = (
                f"{shown}: line {offset} has {page.first_length} characters, none at {column}; column can be 1 to "
                f"{max(1, page.first_length)}"
            )
            raise RequestFailure(OFFSET_OUT_OF_RANGE, message, lines=page.lines)

    def _answer(self, form: TextForm, scan: _Scan) -> dict[str, object]:
        page = scan.page
        text = "\n".join([*page.shown, ""])
        self._context.writer.send("file", text.encode("utf-8", "replace"))
        return {
            **EMPTY_ANSWER,
            "size": self._size,
            "lines": page.lines,
            "is_counted": scan.has_ended,
            "count": len(page.shown),
            "is_out_of_room": page.is_out_of_room,
            "cuts": page.cuts,
            "encoding": form.codec,
            "has_bom": bool(form.bom),
            "is_guess": form.is_guess,
            "is_damaged": scan.is_lenient and "\ufffd" in text,
            "newline": _newline_style(page),
            "final_newline": page.has_final_newline or not scan.has_ended,
        }


class _Scan:
    """One pass through a file from its start, in blocks. Each block goes to the page and to the digest."""

    def __init__(self, request: ReadTextRequest, form: TextForm, size: int) -> None:
        self.page = LinePage(request.offset, request.limit, request.column, request.max_bytes)
        self.bytes = 0
        self.has_ended = False
        self.is_lenient = form.codec != "utf-8" or form.is_guess or bool(form.bom) or request.encoding != "auto"
        self.memory = _Memory(size)
        self._decoder = codecs.getincrementaldecoder(form.codec)("replace" if self.is_lenient else "strict")
        self._bom = form.bom
        self._bytes_at_last_line = 0
        self._shown_lines = 0

    @property
    def is_over(self) -> bool:
        """Return whether the file has ended or enough of it has been read."""
        if self.page.is_reached:
            return self.has_ended or self.bytes - self._bytes_at_last_line > COUNT_BYTES
        return self.has_ended or self.bytes > SEEK_BYTES

    def take(self, block: bytes) -> None:
        """Process the next block; an empty block means the end.

        Raises _WrongUtf8 if the encoding was assumed to be UTF-8 and a byte is not valid.
        """
        self.memory.take(block)
        self.has_ended = not block
        if self._bom:
            block, self._bom = block.removeprefix(self._bom), b""
        self.page.take(self._decode(block))
        self.bytes += len(block)
        if len(self.page.shown) != self._shown_lines or not self.page.is_reached:
            self._shown_lines, self._bytes_at_last_line = len(self.page.shown), self.bytes

    def _decode(self, block: bytes) -> str:
        pending = 0 if self.is_lenient else len(self._decoder.getstate()[0])
        try:
            return self._decoder.decode(block, final=self.has_ended)
        except UnicodeDecodeError as error:
            raise _WrongUtf8(self.bytes - pending + error.start) from None


class _Memory:
    """Digest of the bytes read so far; also the bytes, up to a limit."""

    def __init__(self, size: int) -> None:
        self.data: bytes | None = b""
        self._digest = new_digest() if size <= DIGEST_BYTES else None
        self._bytes = 0

    def take(self, block: bytes) -> None:
        self._bytes += len(block)
        if self._digest is not None and self._bytes <= DIGEST_BYTES:
            self._digest.update(block)
        if self.data is not None:
            self.data = self.data + block if self._bytes <= MAX_DATA_BYTES else None

    def digest(self) -> bytes | None:
        return self._digest.digest() if self._digest is not None and self._bytes <= DIGEST_BYTES else None


def _newline_style(page: LinePage) -> str:
    """Return "none", "lf", "crlf", "mixed" or "cr". "cr" means CR alone, which does not end a line here."""
    if page.newlines == 0:
        return "cr" if page.has_cr else "none"
    if page.crlf == 0:
        return "lf"
    return "crlf" if page.crlf == page.newlines else "mixed"
