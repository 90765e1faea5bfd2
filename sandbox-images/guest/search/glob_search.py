"""Handle glob requests: find names below a directory that match a pattern, the newest first."""

from __future__ import annotations

import os
import stat

from guest.failures import (
    FILE_NOT_FOUND,
    INVALID_ARGUMENTS,
    INVALID_PATTERN,
    NOT_A_DIRECTORY,
    PATH_NOT_ALLOWED,
    Failure,
)
from guest.files.suggestions import escaped
from guest.search.clock import ENTRIES_A_CHECK, Clock
from guest.search.glob_patterns import MAX_PATTERN_CHARS, BadGlob, Glob, compile_any, expand_braces, has_magic
from guest.search.names import build_names
from guest.search.start import Start, open_folder
from guest.search.walk import Folder, Walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.paths import GuestPaths
    from guest.search.glob_patterns import Match
    from guest.search.requests import GlobRequest
    from guest.supervisors import ReportWriter, RequestContext


def glob(request: GlobRequest, context: RequestContext) -> dict[str, object]:
    """Send the matching paths, one per line.

    Raises Failure for an invalid pattern, and for a path that does not exist or is not allowed.
    """
    clock = Clock(context.watch, request.timeout_s)
    pattern = GlobPattern(request.pattern, request.kind, request.path)
    finder = _Finder(request, pattern, clock)
    above = open_folder(pattern.path, context.paths)
    literal, name = pattern.open_literal(above, context.paths)
    if literal is not None:
        finder.add_literal(literal, name, context.paths)
    start = pattern.open_start(above, context.paths)
    if pattern.failure is not None and not finder.has_literal:
        raise pattern.failure
    if start is not None and pattern.failure is None:
        finder.walk(start, context.paths)
    return finder.send(request.limit, request.max_bytes, context.writer)


# A link counts as a file, even if its target is a directory. Links are listed and never followed.
_KINDS: dict[str, Callable[[os.DirEntry[str]], bool]] = {
    "file": lambda entry: entry.is_file(follow_symlinks=False) or entry.is_symlink(),
    "dir": lambda entry: entry.is_dir(follow_symlinks=False),
    "any": lambda _: True,
}
_MODES = {"file": (stat.S_IFREG, stat.S_IFLNK), "dir": (stat.S_IFDIR,)}


class GlobPattern:
    """Parsed pattern and the directory that it is relative to.

    `kind` is the kind of entry to match. A slash at the end of the pattern selects directories.
    """

    def __init__(self, text: str, kind: str, path: str) -> None:
        """Parse the pattern. Raises Failure if the text is empty, too long, or contains NUL or `..`."""
        if not text.strip() or "\0" in text or len(text) > MAX_PATTERN_CHARS:
            raise Failure(
                INVALID_PATTERN,
                f"the pattern must have 1 to {MAX_PATTERN_CHARS} characters and no NUL; **/* matches every file",
            )
        if ".." in text.split("/"):
            raise Failure(PATH_NOT_ALLOWED, "a pattern cannot go up with '..': give the directory to search as path")
        self.kind = "dir" if text.endswith("/") else kind
        self.is_absolute = text.startswith("/")
        self.path = "/" if self.is_absolute else path
        self.text = text.strip("/") or "**"
        # The error in the pattern. It is not raised yet, because the text may still be the literal name of an
        # existing file.
        self.failure: Failure | None = None
        try:
            # An absolute pattern with one part does not match at any depth.
            self._globs = [Glob(part, any_depth=not self.is_absolute) for part in expand_braces(self.text)]
        except BadGlob as error:
            self._globs = []
            self.failure = error.as_failure("the pattern", text)
        self._prefix = self._find_prefix()
        if self.is_absolute:
            self.path = "/" + "/".join(self._prefix)

    def _find_prefix(self) -> list[str]:
        """Return the leading literal parts that all alternatives share. The walk can start there."""
        heads = [glob.parts[:-1] if not glob.name_only else [] for glob in self._globs]
        prefix = []
        for parts in zip(*heads):
            if len(set(parts)) > 1 or has_magic(parts[0]):
                break
            prefix.append(parts[0])
        return prefix

    def open_start(self, above: Start, paths: GuestPaths) -> Start | None:
        """Open the directory to walk, or return None if the literal parts of the pattern do not exist.

        Raises Failure.
        """
        return above if self.is_absolute else _open_below(self.path, self._prefix, above, paths)

    def open_literal(self, above: Start, paths: GuestPaths) -> tuple[Start | None, str]:
        """Open the directory for the pattern read as a literal path. Raises Failure.

        Returns (directory or None if it does not exist, name in the directory).
        """
        *parts, name = self.text.split("/")
        return _open_below(self.path, parts[len(self._prefix) :] if self.is_absolute else parts, above, paths), name

    def matchers(self) -> tuple[Match | None, Match | None]:
        """Return a function that tests names and a function that tests paths below the start. Raises Failure.

        A function is None if no alternative of the pattern needs it.
        """
        skip = len(self._prefix)
        globs = [Glob("/".join(glob.parts[skip:]), any_depth=False) if skip else glob for glob in self._globs]
        by_name, by_path = (
            [glob.regex for glob in globs if glob.name_only],
            [glob.regex for glob in globs if not glob.name_only],
        )
        return compile_any(by_name, "the pattern"), compile_any(by_path, "the pattern")


def _open_below(path: str, parts: list[str], above: Start, paths: GuestPaths) -> Start | None:
    """Open the directory `parts` below `path`, which is open as `above`.

    Returns None if it does not exist. Raises Failure.
    """
    if not parts:
        return above
    try:
        return open_folder("/".join((path.rstrip("/"), *parts)), paths, may_miss=True)
    except Failure as failure:
        if failure.code in (FILE_NOT_FOUND, NOT_A_DIRECTORY, INVALID_ARGUMENTS):
            return None
        raise


class _Finder:
    """Matches of one request, and counts of what was left out."""

    def __init__(self, request: GlobRequest, pattern: GlobPattern, clock: Clock) -> None:
        self._use_rules = not request.include_ignored
        self._kind = pattern.kind
        self._clock = clock
        self._by_name, self._by_path = pattern.matchers()
        # The tuples sort newest first, then by path.
        self._found: list[tuple[int, bytes]] = []
        self._literal: bytes | None = None
        self._ignored = 0
        self._unreadable = 0
        self._bad_rules: list[str] = []
        self._is_partial = False

    def add_literal(self, folder: Start, name: str, paths: GuestPaths) -> None:
        """Add the entry whose name is literally the pattern.

        Such an entry matches even if the pattern contains special characters or a rule ignores the entry.
        """
        try:
            status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        except OSError:
            return
        if os.path.join(folder.real, os.fsencode(name)) == os.path.realpath(paths.state):
            return
        if self._kind == "any" or stat.S_IFMT(status.st_mode) in _MODES[self._kind]:
            self._literal = folder.shown + os.fsencode(name)
            self._found.append((-status.st_mtime_ns, self._literal))

    @property
    def has_literal(self) -> bool:
        return self._literal is not None

    def walk(self, start: Start, paths: GuestPaths) -> None:
        walk = Walk(start, paths, self._use_rules)
        for folder in walk.folders():
            self._look_at(folder, start.shown + os.fsencode(folder.prefix))
            if self._clock.is_over:
                self._is_partial = True
                break
        self._unreadable = len(walk.unreadable)
        self._bad_rules = walk.bad_rules

    def _look_at(self, folder: Folder, shown: bytes) -> None:
        by_name, by_path, is_wanted, prefix = self._by_name, self._by_path, _KINDS[self._kind], folder.prefix
        for number, entry in enumerate(folder.entries, 1):
            if not number % ENTRIES_A_CHECK and self._clock.is_over:
                return
            name = entry.name
            if not ((by_name and by_name(name)) or (by_path and by_path(prefix + name))):
                continue
            if not is_wanted(entry):
                continue
            path = shown + name.encode("utf-8", "surrogateescape")
            if path == self._literal:
                continue
            if folder.hides(entry):
                self._ignored += 1
            else:
                self._add(folder.fd, name, path)

    def _add(self, fd: int, name: str, path: bytes) -> None:
        try:
            changed = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime_ns
        except OSError:
            # The entry was removed after it was listed.
            return
        self._found.append((-changed, path))

    def send(self, limit: int, max_bytes: int, writer: ReportWriter) -> dict[str, object]:
        """Send the first matches. Returns the fields of the done event."""
        self._found.sort()
        lines, remaining_bytes = [], max_bytes
        for _, path in self._found[:limit]:
            line = f"{escaped(path)}\n".encode()
            remaining_bytes -= len(line)
            if remaining_bytes < 0:
                break
            lines.append(line)
        writer.send("lines", b"".join(lines))
        return {
            "total": len(self._found),
            "shown": len(lines),
            "cut": remaining_bytes < 0,
            "ignored": self._ignored,
            "unreadable": self._unreadable,
            "partial": self._is_partial,
            "bad_rules": build_names(map(os.fsencode, self._bad_rules)),
        }
