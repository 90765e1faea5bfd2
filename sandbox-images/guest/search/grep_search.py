"""Handle grep requests.

The first step finds the matching files and their counts. The second step sends lines, from the newest file to the
oldest, up to the limit.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import time

from guest.failures import FILE_TOO_LARGE, INTERNAL, TIMEOUT, RequestFailure, describe_os_error
from guest.search.child import BlockedError, Child
from guest.search.clock import Clock
from guest.search.grep_files import (
    HEAD_BYTES,
    MAX_FOUND_BYTES,
    MAX_NAMED_BYTES,
    has_binary_head,
    is_binary,
    open_file,
    read_text,
)
from guest.search.grep_lines import FilePrinter, MatchPage, MatchPosition, find_offsets
from guest.search.grep_patterns import GrepPattern
from guest.search.grep_records import group_positions
from guest.search.hints import EXPLAIN_GLOBS, explain_links, find_links
from guest.search.names import build_names
from guest.search.readings import Reading, build_readings, shorten_hints
from guest.search.ripgrep import FileSelection, NameFilter, Ripgrep, list_files
from guest.search.start import Start
from guest.search.start_opening import open_start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from guest.paths import GuestPaths
    from guest.request_context import RequestContext
    from guest.search.requests import GrepRequest

_REST_S = 0.001
_LARGE_CHECK_S = 0.05
_FIRST_BATCH = 4
_LAST_BATCH = 128
MIN_EARLY_FILES = 500
MIN_EARLY_BYTES = 4 << 20
MAX_EARLY_FILES = 256
EARLY_S = 3.0
"""The lines of the newest files are sent before all files are searched, unless there are few and small files. Limits of
these files, and of the time for them.
"""


class _LargeFileError(Exception):
    """Error: ripgrep is reading a file that is larger than MAX_FOUND_BYTES."""


class _NeedsPcreError(Exception):
    """Error: the pattern has syntax that only PCRE2 supports."""


def grep(request: GrepRequest, context: RequestContext) -> dict[str, object]:
    """Send the matching lines.

    Raises RequestFailure for an invalid pattern, for a path that does not exist or is not allowed, and if the time ends
    before anything is found.
    """
    clock = Clock(context.watch, request.timeout_s)
    pattern = GrepPattern(request.pattern, request.fixed_strings, request.ignore_case, request.multiline)
    start = open_start(request.path, context.paths)
    names = NameFilter(request.include, request.exclude, request.type, start)
    # ripgrep runs in this directory, and its output has names relative to the directory.
    try:
        os.fchdir(start.fd)
    except OSError as error:
        raise describe_os_error(error, start.show(b"")) from None
    search = _find(pattern, names, lambda pattern: _Search(request, pattern, start, context, clock))
    search.send()
    return search.fields()


def _find(pattern: GrepPattern, names: NameFilter, open_search: Callable[[GrepPattern], _Search]) -> _Search:
    """Return the search with its matching files. If nothing matches, the pattern may mean something else to its writer:
    the first other reading that matches is used, and the hints name it.
    """
    search = _find_as_read(pattern, names, open_search, sends_early=True)
    if search.has_matches or search.is_partial:
        return search
    readings = build_readings(pattern.written, fixed=pattern.fixed_strings, ignore_case=pattern.ignore_case)
    with contextlib.suppress(RequestFailure):
        # One search for all readings, because most patterns that match nothing match nothing in any reading.
        if readings and _find_as_read(_join_readings(readings, pattern), names, open_search).has_matches:
            for reading in readings:
                with contextlib.suppress(RequestFailure):
                    other = _find_as_read(_read_as(reading, pattern), names, open_search)
                    if other.has_matches:
                        return _use_reading(search, other, reading)
    return search


def _find_as_read(
    pattern: GrepPattern, names: NameFilter, open_search: Callable[[GrepPattern], _Search], *, sends_early: bool = False
) -> _Search:
    search = open_search(pattern)
    try:
        search.find(names, sends_early)
    except _NeedsPcreError:
        search = open_search(pattern)
        search.find(names, sends_early)
    return search


def _use_reading(search: _Search, other: _Search, reading: Reading) -> _Search:
    if reading.is_shown:
        other.hints.append(f"nothing matches the pattern as it is written. These lines match it {reading.hint}")
        return other
    search.hints.append(f"{other.count_files()} {reading.hint}")
    return search


def _read_as(reading: Reading, pattern: GrepPattern) -> GrepPattern:
    return GrepPattern(reading.text, reading.fixed, reading.ignore_case or pattern.ignore_case, pattern.multiline)


def _join_readings(readings: list[Reading], pattern: GrepPattern) -> GrepPattern:
    valid = "|".join(reading.as_regex() for reading in readings)
    return GrepPattern(valid, False, pattern.ignore_case, pattern.multiline)


class _Search:
    """The search of one request: its state and its result."""

    def __init__(
        self, request: GrepRequest, pattern: GrepPattern, start: Start, context: RequestContext, clock: Clock
    ) -> None:
        self._request = request
        self._pattern = pattern
        self._start = start
        self._context = context
        self._paths: GuestPaths = context.paths
        self._clock = clock
        self._page = MatchPage(request.max_lines, request.max_bytes)
        # A heap of matching files as (negative modification time, path, count), so that the newest file comes first,
        # then by path. `_file_matches`: the files that were taken from the heap so far; `_binary`: those of them with
        # binary content.
        self._matches: list[tuple[int, bytes, int]] = []
        self._file_matches: list[tuple[int, bytes, int]] = []
        self._binary: set[bytes] = set()
        self._unreadable: set[bytes] = set()
        self._large: list[bytes] = []
        self._ignored = 0
        # Number of files that the filters `include`, `exclude` and `type` select. It is counted only if no file
        # matches.
        self._searched: int | None = None
        self.is_partial = self._was_killed = False
        self.hints: list[str] = []
        # Files whose lines were sent.
        self._sent: set[bytes] = set()
        self._shown = self._shown_files = 0
        self._ripgrep = Ripgrep(self._paths.ripgrep, pattern)

    @property
    def has_matches(self) -> bool:
        return bool(self._matches)

    def count_files(self) -> str:
        return "1 file would" if len(self._matches) == 1 else f"{len(self._matches)} files would"

    # --- which files --------------------------------------------------------------------------------------------------

    def find(self, names: NameFilter, sends_early: bool) -> None:
        """Find the matching files, or if the request names one file, its matches. Raises RequestFailure, and
        _NeedsPcreError.

        `sends_early`: send the lines of the newest files first, before all files are searched.
        """
        if self._start.file is None:
            if sends_early and self._request.mode == "content":
                self._send_newest(names)
            self._find_files(names)
        else:
            self._find_in_file(self._start.file)

    def _send_newest(self, names: NameFilter) -> None:
        """Search the newest files one batch after the other, and send the lines of each batch at once. The complete
        search then counts all matches, and `send` continues behind these files.
        """
        late_at = time.monotonic() + EARLY_S
        newest = self._list_newest(names, late_at)
        at, batch = 0, 1
        while at < len(newest) and self._shown < self._request.limit and time.monotonic() < late_at:
            paths = newest[at : at + batch]
            self._send_files(paths, self._request.limit - self._shown, late_at)
            if self._page.is_full:
                return
            at, batch = at + batch, min(4 * batch, _LAST_BATCH)

    def _list_newest(self, names: NameFilter, late_at: float) -> list[bytes]:
        """Return the MAX_EARLY_FILES newest files that the search covers. Return nothing if all files are searched soon
        anyway, or cannot be listed in time.
        """
        files = size = 0
        selection = FileSelection(self._start, self._paths, not self._request.include_ignored)
        options = selection.options(names.included, names.excluded, names.type_name)

        def read_times(child: Child) -> Iterator[tuple[int, bytes]]:
            nonlocal files, size
            for record in child.read_records(b"\0", lambda: self._clock.is_over or time.monotonic() > late_at):
                path = record[2:]
                with contextlib.suppress(OSError):
                    if names.takes(path) and (status := os.lstat(path)).st_size <= MAX_FOUND_BYTES:
                        files, size = files + 1, size + status.st_size
                        yield -status.st_mtime_ns, path

        with Child(list_files(self._paths.ripgrep, options), _REST_S, opens_rule_files=True) as child:
            try:
                newest = heapq.nsmallest(MAX_EARLY_FILES, read_times(child))
            except BlockedError:
                return []
        # After an incomplete list, a newer file could follow the lines that were sent.
        is_small = files < MIN_EARLY_FILES and size < MIN_EARLY_BYTES
        return [] if is_small or child.was_cut_off or child.has_refused else [path for _, path in newest]

    def _find_files(self, names: NameFilter) -> None:
        """Find the matching files below the start.

        ripgrep applies the ignore rules. Only matching files are queried for their time and size. If ripgrep reads a
        large file, the search starts again and skips large files. This is not done from the start, because the check of
        every file's size takes a sixth of the time.
        """
        use_rules = not self._request.include_ignored
        limits: list[bytes] = []
        while True:
            selection = FileSelection(self._start, self._paths, use_rules)
            options = [*selection.options(names.included, names.excluded, names.type_name), *limits]
            try:
                self._count_files(options, names, skips_large=bool(limits), use_rules=use_rules)
                break
            except _LargeFileError:
                limits = [b"--max-filesize=%d" % MAX_FOUND_BYTES]
            except BlockedError:
                use_rules = False
            self._matches, self._large = [], []
        # Make a heap and do not sort, because only the first matches are shown.
        heapq.heapify(self._matches)
        self._check_partial()
        if not self._matches and not names.is_empty:
            with Child(list_files(self._paths.ripgrep, options)) as child:
                self._searched = sum(
                    names.takes(path[2:]) for path in child.read_records(b"\0", lambda: self._clock.is_over)
                )

    def _count_files(self, options: list[bytes], names: NameFilter, *, skips_large: bool, use_rules: bool) -> None:
        """Collect the matching files, and the paths that ripgrep left out.

        Raises BlockedError, and _LargeFileError unless `skips_large`.
        """
        start = self._ripgrep.start_counting(options, self._names_only)
        with Child(start, _REST_S, opens_rule_files=use_rules) as child:
            for raw, count in self._read_counts(child, skips_large):
                path = raw[2:]
                # ripgrep's options may select more files than `include`, so check again.
                if not names.takes(path):
                    continue
                try:
                    status = os.lstat(path)
                except OSError:
                    # The file was removed meanwhile.
                    continue
                if status.st_size > MAX_FOUND_BYTES:
                    self._large.append(path)
                else:
                    self._matches.append((-status.st_mtime_ns, path, count))
        # A folder that was left out counts even if its name does not match the filters.
        left_out = child.left_out
        self._unreadable.update(path for path in left_out.unreadable if names.takes(path) or os.path.isdir(path))
        self._large += [path for path in left_out.large if names.takes(path)]
        self._ignored = sum(names.takes(path) or os.path.isdir(path) for path in left_out.ignored)

    def _find_in_file(self, name: bytes) -> None:
        """Search the one file that the request names.

        No filter and no ignore rule applies, and the size limit is larger.
        """
        shown = self._start.show(name)
        try:
            fd = open_file(self._start.fd, name, self._paths.use_openat2)
        except OSError as error:
            raise describe_os_error(error, shown) from None
        status = os.fstat(fd)
        if status.st_size > MAX_NAMED_BYTES:
            raise RequestFailure(
                FILE_TOO_LARGE,
                f"{shown}: has {status.st_size} bytes, more than {MAX_NAMED_BYTES}; search it with grep in bash_tool",
                size=status.st_size,
            )
        with Child(self._ripgrep.start_counting_one(fd, self._names_only), _REST_S) as child:
            self._matches += [(-status.st_mtime_ns, name, count) for _, count in self._read_counts(child)]
        os.close(fd)
        self._check_partial()

    @property
    def _names_only(self) -> bool:
        return self._request.mode == "files"

    def _read_counts(self, child: Child, skips_large: bool = True) -> Iterator[tuple[bytes, int]]:
        """Yield (path, count) of each matching file.

        Raises RequestFailure if ripgrep rejects the pattern, and _LargeFileError unless `skips_large`.
        """
        check_at = time.monotonic() + _LARGE_CHECK_S

        def is_late() -> bool:
            nonlocal check_at
            if not skips_large and time.monotonic() >= check_at:
                if child.find_largest_open() > MAX_FOUND_BYTES:
                    raise _LargeFileError
                check_at = time.monotonic() + _LARGE_CHECK_S
            return self._clock.is_too_late_to_find

        yield from self._ripgrep.read_counting(child, self._names_only, is_late)
        if child.was_cut_off:
            if not skips_large and not child.was_late:
                # ripgrep may have failed because a line of a large file needed too much memory.
                raise _LargeFileError
            self.is_partial = True
            self._was_killed = not child.was_late
        if child.has_refused:
            if self._pattern.turn_to_pcre(child.left_out.text):
                raise _NeedsPcreError
            raise self._pattern.explain(child.left_out.text)

    def _check_partial(self) -> None:
        """Raise RequestFailure if the search ended early and has found nothing."""
        if not self.is_partial or self._matches:
            return
        if self._was_killed:
            raise RequestFailure(
                INTERNAL,
                "the search was killed before it found anything, because memory or processes ran out: narrow path or "
                "include, or end other processes",
            )
        raise RequestFailure(
            TIMEOUT,
            f"nothing found in {self._clock.seconds:g} s, and not all files were searched: narrow path or include, or "
            f"simplify the pattern",
        )

    # --- which lines --------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send each part of the result as soon as it is known. Files whose lines are not sent are not checked for
        binary content.
        """
        if self._request.mode == "content":
            self._send_lines()
        else:
            self._send_names()
        self._matches += [match for match in self._file_matches if match[1] not in self._binary]

    def _take(self) -> tuple[bytes, int]:
        """Return path and count of the next matching file."""
        match = heapq.heappop(self._matches)
        self._file_matches.append(match)
        return match[1], match[2]

    def _send_names(self) -> None:
        while self._matches and self._shown_files < self._request.limit:
            path, count = self._take()
            if has_binary_head(path):
                self._binary.add(path)
                continue
            shown = self._start.show(path)
            if not self._page.add(f"{shown}\n" if self._names_only else f"{shown}:{count}\n"):
                break
            self._shown += count
            self._shown_files += 1
        self._context.writer.send("lines", self._page.take())

    def _send_lines(self) -> None:
        remaining, batch = self._request.limit - self._shown, _FIRST_BATCH
        while remaining > 0 and self._matches and not self._page.is_full:
            paths: list[bytes] = []
            expected = 0
            while self._matches and len(paths) < batch and expected < remaining:
                path, count = self._take()
                if path in self._sent:
                    continue
                expected += count if self._request.max_per_file is None else min(count, self._request.max_per_file)
                paths.append(path)
            remaining -= self._send_files(paths, remaining)
            batch = _LAST_BATCH
            if self._clock.is_over:
                self.is_partial = self.is_partial or (remaining > 0 and bool(self._matches))
                return

    def _send_files(self, paths: list[bytes], limit: int, late_at: float = math.inf) -> int:
        """Send the lines of some files, at most `limit` matches. Returns the number of matches sent.

        `late_at`: the monotonic time at which an early search stops. It leaves it to the complete search to name files
        that it cannot read.
        """
        shown, is_early = 0, late_at < math.inf
        with contextlib.ExitStack() as opened:
            by_name: dict[bytes, tuple[bytes, int]] = {}
            for path in paths:
                try:
                    fd = open_file(self._start.fd, path, self._paths.use_openat2)
                except OSError:
                    if not is_early:
                        self._unreadable.add(path)
                    continue
                opened.callback(os.close, fd)
                if is_binary(os.pread(fd, HEAD_BYTES, 0)):
                    if not is_early:
                        self._binary.add(path)
                    continue
                by_name[b"/proc/self/fd/%d" % fd] = (path, fd)
            if not by_name:
                return 0
            most = limit if self._request.max_per_file is None else min(limit, self._request.max_per_file)
            child = opened.enter_context(Child(self._ripgrep.start_marking([fd for _, fd in by_name.values()], most)))
            records = child.read_records(b"\n", lambda: self._clock.is_over or time.monotonic() > late_at)
            for name, positions in group_positions(records):
                self._sent.add(by_name[name][0])
                shown += self._send_file(*by_name[name], itertools.islice(positions, min(most, limit - shown)))
                if shown >= limit or self._page.is_full:
                    return shown
            if child.was_cut_off and (shown or not is_early):
                self.is_partial = True
        return shown

    def _send_file(self, path: bytes, fd: int, positions: Iterable[MatchPosition]) -> int:
        text = read_text(fd)
        printer = FilePrinter(self._page, self._start.show(path), text, self._request.before, self._request.after)
        # PCRE2 searches a text with a replacement character for each byte that is not UTF-8, so find the offsets anew.
        printer.print_positions(find_offsets(text, positions) if self._pattern.needs_pcre else positions)
        self._context.writer.send("lines", self._page.take())
        self._shown += printer.matches
        self._shown_files += printer.matches > 0
        return printer.matches

    def fields(self) -> dict[str, object]:
        """Return the fields of the done event."""
        return {
            "is_file": self._start.file is not None,
            "matches": sum(match[2] for match in self._matches),
            "files": len(self._matches),
            "shown": self._shown,
            "shown_files": self._shown_files,
            "cut": self._page.is_full,
            "cut_lines": self._page.cut_lines,
            "searched": self._searched,
            "ignored": self._ignored,
            "large": len(self._large),
            "large_names": build_names(map(self._named, sorted(self._large))),
            "binary": len(self._binary),
            "binary_names": build_names(map(self._named, sorted(self._binary))),
            "unreadable": len(self._unreadable),
            "unreadable_names": build_names(map(self._named, sorted(self._unreadable))),
            "partial": self.is_partial,
            "hints": shorten_hints([*self.hints, *self._explain_nothing()]),
        }

    def _explain_nothing(self) -> Iterator[str]:
        """Yield what a search that found nothing has not read, and how to search it."""
        if self._matches or self._start.file is not None:
            return
        if self._searched == 0:
            yield EXPLAIN_GLOBS.format("include, exclude and type select no file")
        yield from explain_links([self._named(path) for path in find_links(lambda: self._clock.is_over)])

    def _named(self, path: bytes) -> bytes:
        return self._start.shown + path
