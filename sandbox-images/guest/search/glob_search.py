"""Handle glob requests: find names below a directory that match a pattern, the newest first."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import stat
import time
import unicodedata

from guest.failures import (
    FILE_NOT_FOUND,
    INVALID_ARGUMENTS,
    INVALID_PATTERN,
    NOT_A_DIRECTORY,
    PATH_NOT_ALLOWED,
    RequestFailure,
    describe_os_error,
)
from guest.fields import escaped
from guest.search.child import BlockedError, Child
from guest.search.clock import Clock
from guest.search.glob_patterns import MAX_PATTERN_CHARS, Globs, has_magic, split_list
from guest.search.hints import NearMisses, explain_pattern
from guest.search.readings import shorten_hints
from guest.search.ripgrep import FileSelection, list_files
from guest.search.start import Start
from guest.search.start_opening import open_folder
from guest.search.suggestions import missing_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from guest.call_pipes import ReportWriter
    from guest.paths import GuestPaths
    from guest.request_context import RequestContext
    from guest.search.requests import GlobRequest


def glob(request: GlobRequest, context: RequestContext) -> dict[str, object]:
    """Send the matching paths, one per line.

    Raises RequestFailure for an invalid pattern, and for a path that does not exist or is not allowed.
    """
    clock = Clock(context.watch, request.timeout_s)
    text, paths = request.pattern, context.paths
    if not text.strip() or "\0" in text or len(text) > MAX_PATTERN_CHARS:
        raise RequestFailure(
            INVALID_PATTERN,
            f"the pattern must have 1 to {MAX_PATTERN_CHARS} characters and no NUL; **/* matches every file",
        )
    if ".." in text.split("/"):
        raise RequestFailure(PATH_NOT_ALLOWED, "a pattern cannot contain '..': give the directory to search as path")
    live = _LiveMatches(request, context.writer) if request.live_bytes else None
    finder = _Finder(request, clock, paths, live)
    _search(text, request, paths, finder)
    for other_text, how in _build_readings(text, paths) if finder.is_empty else ():
        other = _Finder(request, clock, paths, live)
        with contextlib.suppress(RequestFailure):
            _search(other_text, request, paths, other)
        if not other.is_empty:
            other.hints = [f"nothing matches the pattern as it is written. These paths match it {how}"]
            finder = other
            break
    return finder.send(request, context.writer)


def _build_readings(text: str, paths: GuestPaths) -> Iterator[tuple[str, str]]:
    """Yield the other readings of a pattern that has matched nothing, and how each one is written."""
    bare = text.strip().strip("'\"`").strip()
    items = split_list(bare)
    readings = {text.replace("\\", "/"): "with / for \\", bare: "without quotes and blanks around it"}
    if len(items) > 1:
        readings["{" + ",".join(items) + "}"] = "as a list of patterns"
    if bare.startswith("~/"):
        readings[paths.environment["HOME"] + bare[1:]] = "with the home for ~"
    if not text.isascii():
        readings |= {unicodedata.normalize(form, text): _LOOK_ALIKE for form in ("NFC", "NFD")}
    yield from ((reading, how) for reading, how in readings.items() if reading and reading != text)


_LOOK_ALIKE = "with other characters that look the same. Use * for them"


def _search(text: str, request: GlobRequest, paths: GuestPaths, finder: _Finder) -> None:
    """Search for a pattern, and if nothing matches, find out why. Raises RequestFailure."""
    is_absolute = text.startswith("/")
    *folders, name = [part for part in text.split("/") if part not in ("", ".")] or ["**"]
    # Start the search in the folder that the first parts of the pattern name, if these parts have no special
    # characters.
    literal = list(itertools.takewhile(lambda part: not has_magic(part), folders))
    if is_absolute:
        start: Start | None = open_folder("/" + "/".join(literal), paths)
    else:
        start = _open_below(open_folder(request.path, paths), request.path, literal, paths)
    if start is None and _repeats_path(request.path, literal):
        start = _open_below(open_folder(".", paths), ".", literal, paths)
        finder.hints.append("path was not used: the pattern begins with it")
    if start is None:
        finder.hints.append(str(missing_file("/".join((request.path, *literal)), paths)))
        return
    # A pattern that is the path of an existing file matches this file, even if the path contains special characters or
    # an ignore rule hides it.
    rest = folders[len(literal) :]
    finder.add_literal(_open_below(start, os.fsdecode(start.real), rest, paths), name)
    try:
        globs = Globs(["/".join(([""] if is_absolute or literal else []) + [*rest, name])], "the pattern")
    except RequestFailure:
        if not finder.has_literal:
            raise
    else:
        finder.search(start, globs)
        if finder.is_empty:
            finder.explain(start, globs, text)


def _repeats_path(path: str, literal: list[str]) -> bool:
    """Return whether a pattern for a folder begins with the path of this folder."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return bool(parts) and literal[: len(parts)] == parts


def _open_below(start: Start, path: str, parts: list[str], paths: GuestPaths) -> Start | None:
    """Open the directory `parts` below `path`, which is open as `start`.

    Returns None if it does not exist. Raises RequestFailure.
    """
    if not parts:
        return start
    try:
        return open_folder("/".join((path.rstrip("/"), *parts)), paths, may_miss=True)
    except RequestFailure as failure:
        if failure.code in (FILE_NOT_FOUND, NOT_A_DIRECTORY, INVALID_ARGUMENTS):
            return None
        raise


_REST_S = 0.001
_MESSAGE_BYTES = 64
"""What sandboxd counts for a message in addition to its body, in bytes."""
_LIVE_S = 0.1
"""Shortest time between two messages with matches that were found, in seconds."""
# A link to a file counts as a file. The search does not follow links.
_KINDS = {"file": (stat.S_IFREG, stat.S_IFLNK), "dir": (stat.S_IFDIR,)}


class _LiveMatches:
    """Sends the first matches of a search while it runs, in the order in which they are found."""

    def __init__(self, request: GlobRequest, writer: ReportWriter) -> None:
        self._writer = writer
        self._remaining = request.limit
        self._remaining_bytes = request.live_bytes
        # A search that starts again without ignore files finds the same paths.
        self._sent: set[bytes] = set()
        self._lines: list[bytes] = []
        self._due_at = 0.0

    def add(self, path: bytes) -> None:
        """Send a match, together with others that were found shortly before."""
        if self._remaining <= 0 or path in self._sent:
            return
        line = f"{escaped(path)}\n".encode()
        # A message for each line is the worst case.
        self._remaining_bytes -= len(line) + _MESSAGE_BYTES
        if self._remaining_bytes < 0:
            self._remaining = 0
            return
        self._remaining -= 1
        self._sent.add(path)
        self._lines.append(line)
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at = now + _LIVE_S
            self._writer.send("found", b"".join(self._lines))
            self._lines.clear()


class _Finder:
    """Collects the matches of one request, and counts paths that were left out."""

    def __init__(self, request: GlobRequest, clock: Clock, paths: GuestPaths, live: _LiveMatches | None = None) -> None:
        self._live = live
        # A slash at the end of the pattern selects directories.
        self._kind = "dir" if request.pattern.endswith("/") else request.kind
        self._clock = clock
        self._paths = paths
        self._use_rules = not request.include_ignored
        # The sort order of the tuples is: newest first, then by path.
        self._matches: list[tuple[int, bytes]] = []
        self._literal = b""
        self._ignored = 0
        self._unreadable = 0
        self._is_partial = False
        self.hints: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not self._matches

    @property
    def has_literal(self) -> bool:
        return bool(self._literal)

    def add_literal(self, folder: Start | None, name: str) -> None:
        """Add the entry whose name equals the pattern, if it exists."""
        if folder is None or os.path.join(folder.real, os.fsencode(name)) == os.path.realpath(self._paths.state):
            return
        try:
            status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        except OSError:
            return
        if self._is_wanted(status):
            self._literal = folder.shown + os.fsencode(name)
            self._matches.append((-status.st_mtime_ns, self._literal))

    def search(self, start: Start, globs: Globs) -> None:
        """Add the entries below the start that match."""
        try:
            os.fchdir(start.fd)
        except OSError as error:
            raise describe_os_error(error, start.show(b"")) from None
        try:
            self._list(start, globs, use_rules=self._use_rules)
        except BlockedError:
            self._matches = [found for found in self._matches if found[1] == self._literal]
            self._list(start, globs, use_rules=False)

    def _list(self, start: Start, globs: Globs, *, use_rules: bool) -> None:
        selection = FileSelection(start, self._paths, use_rules)
        start_listing = list_files(self._paths.ripgrep, selection.options())
        with Child(start_listing, _REST_S, opens_rule_files=use_rules) as child:
            listed = child.read_records(b"\0", lambda: self._clock.is_over)
            if self._kind == "file":
                self._take(start, globs, (path[2:] for path in listed))
            else:
                for _ in listed:
                    pass
        self._is_partial = child.was_cut_off
        left_out = child.left_out
        # ripgrep lists only files; links to files are in its messages about paths that it left out.
        others = left_out.special if self._kind == "file" else self._walk(selection, set(left_out.ignored))
        self._take(start, globs, others)
        self._ignored = sum(globs.match(os.fsdecode(path)) or os.path.isdir(path) for path in left_out.ignored)
        self._unreadable = len(left_out.unreadable)

    def _walk(self, selection: FileSelection, ignored: set[bytes]) -> Iterator[bytes]:
        """Yield all files and directories below the current directory, except for paths that ripgrep left out."""
        pending = [b""]
        while pending:
            folder = pending.pop()
            if self._clock.is_over:
                self._is_partial = True
                return
            try:
                with os.scandir(folder or b".") as entries:
                    for entry in entries:
                        path = folder + entry.name
                        if path not in ignored and not selection.leaves_out(path, entry.name):
                            yield path
                            if entry.is_dir(follow_symlinks=False):
                                pending.append(path + b"/")
            except OSError:
                # ripgrep has already reported that this folder cannot be read.
                continue

    def _take(self, start: Start, globs: Globs, paths: Iterable[bytes]) -> None:
        """Add the matching entries of the requested kind, except for one that `add_literal` has added."""
        takes_all, literal = globs.accept_all, self._literal
        for path in paths:
            if takes_all or globs.match(os.fsdecode(path)):
                try:
                    status = os.lstat(path)
                except OSError:
                    # The file was removed meanwhile.
                    continue
                shown = start.shown + path
                if self._is_wanted(status) and shown != literal:
                    self._matches.append((-status.st_mtime_ns, shown))
                    if self._live is not None:
                        self._live.add(shown)

    def _is_wanted(self, status: os.stat_result) -> bool:
        return self._kind == "any" or stat.S_IFMT(status.st_mode) in _KINDS[self._kind]

    def explain(self, start: Start, globs: Globs, pattern: str) -> None:
        """Add hints on what a search that found nothing has left out."""
        near = NearMisses(globs, self._kind, _KINDS.get(self._kind) if self._use_rules else ())
        for path in self._walk(FileSelection(start, self._paths, False), set()):
            near.add(path, start.shown + path)
        self.hints += [*near.hints(), *explain_pattern(pattern)]

    def send(self, request: GlobRequest, writer: ReportWriter) -> dict[str, object]:
        """Send the first matches. Returns the fields of the done event."""
        lines, remaining_bytes = [], request.max_bytes
        for _, path in heapq.nsmallest(request.limit, self._matches):
            line = f"{escaped(path)}\n".encode()
            remaining_bytes -= len(line)
            if remaining_bytes < 0:
                break
            lines.append(line)
        writer.send("lines", b"".join(lines))
        return {
            "total": len(self._matches),
            "shown": len(lines),
            "cut": remaining_bytes < 0,
            "ignored": self._ignored,
            "unreadable": self._unreadable,
            "partial": self._is_partial,
            "hints": shorten_hints(self.hints),
        }
