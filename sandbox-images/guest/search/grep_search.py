"""Handle grep requests.

The first step finds the matching files and their counts. The second step sends lines, from the newest file to the
oldest, up to the limit.
"""

from __future__ import annotations

import contextlib
import itertools
import os

from guest.failures import FILE_TOO_LARGE, INTERNAL, TIMEOUT, Failure, describe_os_error
from guest.search.clock import ENTRIES_A_CHECK, Clock
from guest.search.filter import NameFilter
from guest.search.grep_children import Child
from guest.search.grep_files import (
    HEAD_BYTES,
    MAX_FOUND_BYTES,
    MAX_NAMED_BYTES,
    has_binary_head,
    is_binary,
    open_file,
    read_text,
)
from guest.search.grep_lines import FilePrinter, Mark, Page, find_offsets
from guest.search.grep_patterns import GrepPattern
from guest.search.grep_records import group_marks
from guest.search.grep_ripgrep import Ripgrep
from guest.search.names import build_names
from guest.search.start import Start, open_start
from guest.search.walk import Walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from guest.paths import GuestPaths
    from guest.search.requests import GrepRequest
    from guest.supervisors import RequestContext

_REST_S = 0.001
_MAX_ARGUMENTS_BYTES = 1 << 20
_FIRST_BATCH = 4
_LAST_BATCH = 64


def grep(request: GrepRequest, context: RequestContext) -> dict[str, object]:
    """Send the matching lines.

    Raises Failure for an invalid pattern, for a path that does not exist or is not allowed, and if the time ends
    before anything is found.
    """
    clock = Clock(context.watch, request.timeout_s)
    pattern = GrepPattern(request.pattern, request.fixed_strings, request.ignore_case, request.multiline)
    names = NameFilter(request.include, request.exclude, request.type)
    start = open_start(request.path, context.paths)
    # The engine runs in this directory, and its output has names relative to it.
    try:
        os.fchdir(start.fd)
    except OSError as error:
        raise describe_os_error(error, start.show(b"")) from None
    search = _Search(request, pattern, start, context, clock)
    if start.file is None:
        search.find_files(names)
    else:
        search.find_in_file(start.file)
    search.send()
    return search.fields()


class _Match:
    """File that matches.

    `changed` is the negative modification time, so that matches sort newest first, then by path.
    """

    __slots__ = ("changed", "count", "path")

    def __init__(self, changed: int, path: bytes, count: int) -> None:
        self.changed = changed
        self.path = path
        self.count = count


class _Survey:
    """Result of the walk over the files, before any file is searched."""

    def __init__(self) -> None:
        # Negative modification time of each file to search, so that the newest sorts first.
        self.files: dict[bytes, int] = {}
        self.ignored = 0
        self.large: list[bytes] = []


class _Search:
    """Search for one request."""

    def __init__(
        self, request: GrepRequest, pattern: GrepPattern, start: Start, context: RequestContext, clock: Clock
    ) -> None:
        self._request = request
        self._pattern = pattern
        self._start = start
        self._context = context
        self._paths: GuestPaths = context.paths
        self._clock = clock
        self._survey = _Survey()
        self._page = Page(request.max_lines, request.max_bytes)
        self._matches: list[_Match] = []
        # The first `_judged` matches have been checked for binary content.
        self._examined = 0
        self._binary: set[bytes] = set()
        self._unreadable: set[bytes] = set()
        self._bad_rules: list[str] = []
        self._is_partial = self._was_killed = False
        self._shown = self._shown_files = 0
        self._ripgrep = Ripgrep(self._paths.ripgrep, pattern)

    # --- which files --------------------------------------------------------------------------------------------------

    def find_files(self, names: NameFilter) -> None:
        """Find the matching files below the start. Raises Failure.

        ripgrep searches while this process walks: the walk gives times, sizes, and what is hidden and why.
        """
        walk = Walk(self._start, self._paths, not self._request.include_ignored, names.excludes)
        with Child(self._start_counting(walk, names), _REST_S) as child:
            self._survey_tree(walk, names)
            if not walk.has_odd_rules and not self._survey.large:
                self._collect(self._read_counts(child))
        if walk.has_odd_rules:
            # ripgrep would wait for a FIFO with the name of a rule file, and would apply rules that the walk does not
            # apply. It gets the names of the files instead.
            for files in _split(list(self._survey.files)):
                with Child(self._ripgrep.start_counting_files(files, self._names_only), _REST_S) as child:
                    self._collect(self._read_counts(child))
                if self._is_partial:
                    break
        elif self._survey.large:
            with Child(self._start_counting(walk, names, has_large=True), _REST_S) as child:
                self._collect(self._read_counts(child))
        self._unreadable.update(os.fsencode(name).rstrip(b"/") for name in walk.unreadable)
        self._bad_rules = walk.bad_rules
        self._matches.sort(key=lambda match: (match.changed, match.path))
        self._check_found()

    def find_in_file(self, name: bytes) -> None:
        """Search the one file that the request names.

        No filter and no ignore rule applies, and the size limit is larger. Raises Failure.
        """
        shown = self._start.show(name)
        try:
            fd = open_file(self._start.fd, name, self._paths.use_openat2)
        except OSError as error:
            raise describe_os_error(error, shown) from None
        status = os.fstat(fd)
        self._survey.files[name] = -status.st_mtime_ns
        if status.st_size > MAX_NAMED_BYTES:
            raise Failure(
                FILE_TOO_LARGE,
                f"{shown}: has {status.st_size} bytes, more than {MAX_NAMED_BYTES}; search it with grep in bash_tool",
                size=status.st_size,
            )
        with Child(self._ripgrep.start_counting_one(fd, self._names_only), _REST_S) as child:
            self._matches += [_Match(-status.st_mtime_ns, name, count) for _, count in self._read_counts(child)]
        os.close(fd)
        self._check_found()

    @property
    def _names_only(self) -> bool:
        return self._request.mode == "files"

    def _survey_tree(self, walk: Walk, names: NameFilter) -> None:
        survey = self._survey = _Survey()
        files, takes_all = survey.files, names.is_empty
        for folder in walk.folders():
            prefix = folder.prefix
            for number, entry in enumerate(folder.entries, 1):
                if not number % ENTRIES_A_CHECK and self._clock.is_too_late_to_find:
                    break
                name = entry.name
                if not entry.is_file(follow_symlinks=False) or not (takes_all or names.takes(prefix, name)):
                    continue
                if folder.hides(entry):
                    survey.ignored += 1
                    continue
                try:
                    status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                except OSError:
                    continue
                path = f"{prefix}{name}".encode("utf-8", "surrogateescape")
                if status.st_size > MAX_FOUND_BYTES:
                    survey.large.append(path)
                else:
                    files[path] = -status.st_mtime_ns
            if self._clock.is_too_late_to_find:
                self._is_partial = True
                return

    def _start_counting(self, walk: Walk, names: NameFilter, *, has_large: bool = False) -> Callable[[int, int], int]:
        return self._ripgrep.start_counting(
            self._names_only,
            names,
            not self._request.include_ignored,
            not walk.is_start_ignored,
            walk.kept_out,
            has_large,
        )

    def _collect(self, counts: Iterable[tuple[bytes, int]]) -> None:
        files = self._survey.files
        for raw, count in counts:
            path = raw[2:]
            changed = files.get(path)
            if changed is None:
                # The filter of ripgrep covers only a part of include and exclude.
                continue
            self._matches.append(_Match(changed, path, count))

    def _read_counts(self, child: Child) -> list[tuple[bytes, int]]:
        """Return (path, count) of each matching file. Raises Failure if ripgrep rejects the pattern."""
        counts = list(self._ripgrep.read_counting(child, self._names_only, lambda: self._clock.is_too_late_to_find))
        # ripgrep also reads files that the request excludes. Errors about those files are not reported.
        self._unreadable.update(
            path for path in child.unreadable() if path in self._survey.files or not os.path.isfile(path)
        )
        if child.was_cut_off:
            self._is_partial = True
            self._was_killed = not child.was_late
        if child.has_refused:
            raise self._pattern.explain(child.error_text)
        return counts

    def _check_found(self) -> None:
        """Raise Failure if the search ended early and has found nothing."""
        if not self._is_partial or self._matches:
            return
        if self._was_killed:
            raise Failure(
                INTERNAL,
                "the search was killed before it found anything, for want of memory or processes: narrow path or "
                "include, or end what runs beside it",
            )
        raise Failure(
            TIMEOUT,
            f"nothing found in {self._clock.seconds:g} s, and not all was searched: narrow path or include, or "
            "simplify the pattern",
        )

    # --- which lines --------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send each part of the result as soon as it is known.

        The remaining matches are checked for binary content only afterwards, because many checks take a while.
        """
        if self._request.mode == "content":
            self._send_lines()
        else:
            self._send_names()
        self._binary.update(match.path for match in self._matches[self._examined :] if has_binary_head(match.path))
        self._matches = [match for match in self._matches if match.path not in self._binary]

    def _send_names(self) -> None:
        for match in self._matches:
            if self._shown_files == self._request.limit:
                break
            self._examined += 1
            if has_binary_head(match.path):
                self._binary.add(match.path)
                continue
            shown = self._start.show(match.path)
            if not self._page.add(f"{shown}\n" if self._names_only else f"{shown}:{match.count}\n"):
                break
            self._shown += match.count
            self._shown_files += 1
        self._context.writer.send("lines", self._page.take())

    def _send_lines(self) -> None:
        remaining, batch = self._request.limit, _FIRST_BATCH
        while remaining > 0 and self._examined < len(self._matches) and not self._page.is_full:
            matches: list[_Match] = []
            expected = 0
            for match in self._matches[self._examined : self._examined + batch]:
                if expected >= remaining:
                    break
                expected += (
                    match.count if self._request.max_per_file is None else min(match.count, self._request.max_per_file)
                )
                matches.append(match)
            remaining -= self._send_files(matches, remaining)
            self._examined += len(matches)
            batch = min(4 * batch, _LAST_BATCH)
            if self._clock.is_over:
                self._is_partial = self._is_partial or (remaining > 0 and self._examined < len(self._matches))
                return

    def _send_files(self, matches: list[_Match], limit: int) -> int:
        """Send the lines of some files, at most `limit` matches. Returns the number of matches sent."""
        shown = 0
        with contextlib.ExitStack() as opened:
            by_name: dict[bytes, tuple[_Match, int]] = {}
            for match in matches:
                try:
                    fd = open_file(self._start.fd, match.path, self._paths.use_openat2)
                except OSError:
                    self._unreadable.add(match.path)
                    continue
                opened.callback(os.close, fd)
                if is_binary(os.pread(fd, HEAD_BYTES, 0)):
                    self._binary.add(match.path)
                    continue
                by_name[b"/proc/self/fd/%d" % fd] = (match, fd)
            if not by_name:
                return 0
            most = limit if self._request.max_per_file is None else min(limit, self._request.max_per_file)
            child = opened.enter_context(Child(self._ripgrep.start_marking([fd for _, fd in by_name.values()], most)))
            for name, marks in group_marks(child.read_records(b"\n", lambda: self._clock.is_over)):
                shown += self._send_file(*by_name[name], itertools.islice(marks, min(most, limit - shown)))
                if shown >= limit or self._page.is_full:
                    return shown
            if child.was_cut_off:
                self._is_partial = True
        return shown

    def _send_file(self, match: _Match, fd: int, marks: Iterable[Mark]) -> int:
        text = read_text(fd)
        printer = FilePrinter(self._page, self._start.show(match.path), text, self._request.before, self._request.after)
        # PCRE2 gets a replacement character for each byte that is not UTF-8, so its offsets are larger.
        printer.print_marks(find_offsets(text, marks) if self._pattern.needs_pcre else marks)
        self._context.writer.send("lines", self._page.take())
        self._shown += printer.matches
        self._shown_files += printer.matches > 0
        return printer.matches

    def fields(self) -> dict[str, object]:
        """Return the fields of the done event."""
        return {
            "is_file": self._start.file is not None,
            "matches": sum(match.count for match in self._matches),
            "files": len(self._matches),
            "shown": self._shown,
            "shown_files": self._shown_files,
            "cut": self._page.is_full,
            "cut_lines": self._page.cut_lines,
            "searched": len(self._survey.files),
            "ignored": self._survey.ignored,
            "large": len(self._survey.large),
            "large_names": build_names(map(self._named, self._survey.large)),
            "binary": len(self._binary),
            "binary_names": build_names(map(self._named, sorted(self._binary))),
            "unreadable": len(self._unreadable),
            "unreadable_names": build_names(map(self._named, sorted(self._unreadable))),
            "bad_rules": build_names(map(os.fsencode, self._bad_rules)),
            "partial": self._is_partial,
        }

    def _named(self, path: bytes) -> bytes:
        return self._start.shown + path


def _split(files: list[bytes]) -> Iterator[list[bytes]]:
    """Yield the files in lists that fit into the arguments of one program."""
    size = 0
    part: list[bytes] = []
    for path in files:
        if size + len(path) > _MAX_ARGUMENTS_BYTES:
            yield part
            size, part = 0, []
        # The kernel also counts a pointer for each argument.
        size += len(path) + 16
        part.append(path)
    if part:
        yield part
