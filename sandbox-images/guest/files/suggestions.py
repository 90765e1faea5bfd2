"""Suggest existing paths for a path that does not exist.

A search of limited size and time looks for similar names in the folders that may be read.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque

from guest.commands.shell_state import read_folder
from guest.failures import FILE_NOT_FOUND, Failure, encode_text, printable
from guest.paths import KERNEL_FOLDERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest.paths import GuestPaths

MAX_SUGGESTIONS = 5
MAX_ENTRIES = 20_000
MAX_S = 0.3
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_ENTERED = frozenset((b".git", b".hg", b".svn", b"__pycache__"))
_MAX_SHOWN = 240
# Number of entries between two checks of the time limit.
_STRIDE = 128


def missing_file(path: str, paths: GuestPaths) -> Failure:
    """Return the failure for a path that does not exist.

    The message names the path, the working directory and up to five similar paths.
    """
    cwd = read_folder(paths)
    tried = os.path.normpath(os.path.join(cwd, encode_text(path, "'path'")))
    search = _Search(tried, paths)
    similar = [_shown_from(cwd, path) for path in search.run()]
    hint = f"{_shorten(escaped(tried))}: no such file or directory; the working directory is {_shorten(escaped(cwd))}"
    hint += f"; did you mean {_join(similar)}?" if similar else "; no name like it was found"
    if not search.is_complete:
        hint += f" (among the first {search.seen} entries)"
    return Failure(FILE_NOT_FOUND, hint)


def escaped(name: bytes) -> str:
    """Return a path as one line of text. Characters that are not printable appear as escapes."""
    text = printable(name)
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


class _Search:
    """Search for names similar to the last name of `tried`.

    The search starts in the directory of `tried`. Then it walks each root from the top down.
    """

    def __init__(self, tried: bytes, paths: GuestPaths) -> None:
        self._paths = paths
        self._parts = [part for part in tried.split(b"/") if part]
        self._likeness = Likeness(_text(self._parts[-1]) if self._parts else "")
        self._give_up_at = time.monotonic() + MAX_S
        self.seen = 0
        self.is_complete = True

    def run(self) -> list[bytes]:
        """Return the similar paths, the most likely first."""
        suggestions: dict[bytes, tuple[object, ...]] = {}
        for root in self._ordered_roots():
            for parent, name, is_folder in self._walk(root):
                judged = self._likeness.judge(_text(name))
                if judged is not None:
                    path = b"/".join((root, *parent, name))
                    suggestions[path] = (*judged, is_folder, -self._shared(root, parent), len(parent), path)
        return sorted(suggestions, key=lambda path: suggestions[path])[:MAX_SUGGESTIONS]

    def _ordered_roots(self) -> list[bytes]:
        tried = b"/" + b"/".join(self._parts)
        return sorted(self._paths.readable, key=lambda root: not (tried + b"/").startswith(root + b"/"))

    def _walk(self, root: bytes) -> Iterator[tuple[list[bytes], bytes, bool]]:
        """Yield (directories below the root, name, is a directory), breadth first. Links are never followed."""
        nearest = self._nearest(root)
        for name, is_folder in self._list(root, nearest):
            yield nearest, name, is_folder
        waiting: deque[list[bytes]] = deque([[]])
        while waiting and self.is_complete:
            parent = waiting.popleft()
            for name, is_folder in self._list(root, parent):
                path = b"/".join((root, *parent, name))
                if is_folder and name not in _NOT_ENTERED and path not in (self._paths.state, *KERNEL_FOLDERS):
                    waiting.append([*parent, name])
                yield parent, name, is_folder

    def _nearest(self, root: bytes) -> list[bytes]:
        """Return the deepest existing directory of the path, as names below the root."""
        parts = [part for part in root.split(b"/") if part]
        below = self._parts[len(parts) : -1] if self._parts[: len(parts)] == parts else []
        try:
            fd, count = _open_deepest(root, below)
        except OSError:
            return []
        os.close(fd)
        return below[:count]

    def _list(self, root: bytes, parent: list[bytes]) -> Iterator[tuple[bytes, bool]]:
        if time.monotonic() > self._give_up_at:
            self.is_complete = False
            return
        try:
            fd = _open_folder(root, parent)
        except OSError:
            return
        try:
            # An entry that is removed during the search is no suggestion.
            with contextlib.suppress(OSError), os.scandir(fd) as entries:
                for entry in entries:
                    if self.seen >= MAX_ENTRIES or (self.seen % _STRIDE == 0 and time.monotonic() > self._give_up_at):
                        self.is_complete = False
                        return
                    self.seen += 1
                    yield os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)
        finally:
            os.close(fd)

    def _shared(self, root: bytes, parent: list[bytes]) -> int:
        """Return how many directories the tried path and a found path share, counted from both ends."""
        tried, found = self._parts[:-1], [part for part in (*root.split(b"/"), *parent) if part]
        shortest = min(len(tried), len(found))
        front = next((at for at in range(shortest) if tried[at] != found[at]), shortest)
        back = next((at for at in range(shortest - front) if tried[-1 - at] != found[-1 - at]), shortest - front)
        return front + back


class Likeness:
    """Similarity of names to a wanted name.

    A name is similar if it is equal, differs only in case, has a typing error or has another suffix.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._folded = name.casefold()
        self._stem = _stem(self._folded)
        self._slips = 1 if len(name) <= 4 else 2 if len(name) <= 8 else 3
        self._signs = set(self._folded)

    def judge(self, name: str) -> tuple[int, int] | None:
        """Return (kind, distance) of a similar name, or None. Smaller values are more likely."""
        if not self._name:
            return None
        if name == self._name:
            return 0, 0
        folded = name.casefold()
        if folded == self._folded:
            return 1, 0
        distance = self._distance(folded)
        if distance is not None:
            return 2, distance
        return (3, 0) if _stem(folded) == self._stem else None

    def _distance(self, name: str) -> int | None:
        """Return the number of letters to add, remove, change or swap, or None if there are too many differences.

        Names that differ a lot are rejected before the expensive comparison.
        """
        most = self._slips
        if (
            abs(len(name) - len(self._folded)) > most
            or len(self._signs ^ set(name)) > 2 * most
            or len(self._folded) <= most
        ):
            return None
        before: list[int] = []
        last = list(range(len(name) + 1))
        for row, sign in enumerate(self._folded, start=1):
            current = [row]
            for column, other in enumerate(name, start=1):
                cost = min(last[column] + 1, current[-1] + 1, last[column - 1] + (sign != other))
                if row > 1 and column > 1 and sign == name[column - 2] and self._folded[row - 2] == other:
                    cost = min(cost, before[column - 2] + 1)
                current.append(cost)
            if min(current) > most:
                return None
            before, last = last, current
        return last[-1] if last[-1] <= most else None


def _open_folder(root: bytes, parts: list[bytes]) -> int:
    """Open a directory below a root without following links. Raises OSError."""
    fd, count = _open_deepest(root, parts)
    if count < len(parts):
        os.close(fd)
        raise FileNotFoundError
    return fd


def _open_deepest(root: bytes, parts: list[bytes]) -> tuple[int, int]:
    """Open the last existing directory on a path below a root.

    Returns (file descriptor, number of names that lead to the directory). Raises OSError if the root cannot be
    opened.
    """
    fd = os.open(root or b"/", _FOLDER)
    for count, part in enumerate(parts):
        try:
            below = os.open(part, _FOLDER, dir_fd=fd)
        except OSError:
            return fd, count
        os.close(fd)
        fd = below
    return fd, len(parts)


def _stem(name: str) -> str:
    return name[:at] if (at := name.rfind(".")) > 0 else name


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _shown_from(cwd: bytes, path: bytes) -> str:
    return _shorten(escaped(path.removeprefix(cwd + b"/")))


def _shorten(text: str) -> str:
    """Return the path, shortened in the middle if it would take up too much of the message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]} [...] {text[-_MAX_SHOWN // 2 :]}"


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
