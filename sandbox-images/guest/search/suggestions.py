"""Suggests similar existing paths for a path that does not exist.

ripgrep lists the files of the folders that may be read, for a limited time. Their names are compared with the wanted
name.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import time
import unicodedata

from guest.commands.shell_state import read_folder
from guest.failures import FILE_NOT_FOUND, RequestFailure
from guest.fields import encode_text, escaped
from guest.search.child import Child
from guest.search.ripgrep import list_all_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest.paths import GuestPaths

MAX_SUGGESTIONS = 5
MAX_ENTRIES = 20_000
MAX_S = 0.3
_MIN_RATIO = 0.7
# Names whose lengths differ by more than this are not compared.
_MAX_LENGTH_DIFFERENCE = 3
_MAX_SHOWN = 240


def missing_file(path: str, paths: GuestPaths) -> RequestFailure:
    """Return the failure for a path that does not exist.

    The message names the path, the working directory and up to five similar paths.
    """
    cwd = read_folder(paths)
    tried = os.path.normpath(paths.absolute(encode_text(path, "'path'"), cwd))
    with contextlib.suppress(OSError):
        target = os.readlink(tried)
        return RequestFailure(
            FILE_NOT_FOUND,
            f"{_shorten(escaped(tried))}: a link to {_shorten(escaped(target))}, which does not exist",
        )
    missing_name = _MissingName(tried)
    for found in _list_candidates(tried, paths):
        missing_name.compare(found)
    similar = [_shorten(escaped(found.removeprefix(cwd + b"/"))) for found in missing_name.ranked()]
    hint = f"{_shorten(escaped(tried))}: no such file or directory; the working directory is {_shorten(escaped(cwd))}"
    hint += f"; did you mean {_join(similar)}?" if similar else "; no name like it was found"
    if missing_name.has_look_alike:
        hint += (
            " Its name only looks the same, because it has other characters: rename it with bash_tool, with * for them"
        )
    return RequestFailure(FILE_NOT_FOUND, hint)


class _MissingName:
    """The missing name, and the similar paths that were found so far."""

    def __init__(self, tried: bytes) -> None:
        self._folders = tried.split(b"/")[:-1]
        self._name = os.fsdecode(os.path.basename(tried))
        self._folded = self._name.casefold()
        self._stem = os.path.splitext(self._folded)[0]
        self._matcher = difflib.SequenceMatcher(None, b=self._folded, autojunk=False)
        self._similar: dict[bytes, tuple[object, ...]] = {}
        self._form = unicodedata.normalize("NFKC", self._name)
        self.has_look_alike = False

    def compare(self, path: bytes) -> None:
        """Add a path if its name is equal, differs only in case, has a typing error or has another suffix."""
        judged = self._judge(os.fsdecode(os.path.basename(path)))
        if judged is not None:
            folders = path.split(b"/")[:-1]
            self._similar[path] = (*judged, -self._count_shared(folders), len(folders), path)

    def ranked(self) -> list[bytes]:
        """Return the most likely paths, the best first."""
        return sorted(self._similar, key=lambda path: self._similar[path])[:MAX_SUGGESTIONS]

    def _judge(self, name: str) -> tuple[int, float] | None:
        if not self._name:
            return None
        if name == self._name:
            return 0, 0.0
        if not name.isascii() and unicodedata.normalize("NFKC", name) == self._form:
            self.has_look_alike = True
            return 1, 0.0
        folded = name.casefold()
        if folded == self._folded:
            return 1, 0.0
        if abs(len(folded) - len(self._folded)) <= _MAX_LENGTH_DIFFERENCE:
            self._matcher.set_seq1(folded)
            if self._matcher.real_quick_ratio() >= _MIN_RATIO and self._matcher.quick_ratio() >= _MIN_RATIO:
                ratio = self._matcher.ratio()
                if ratio >= _MIN_RATIO:
                    return 2, -ratio
        return (3, 0.0) if os.path.splitext(folded)[0] == self._stem else None

    def _count_shared(self, folders: list[bytes]) -> int:
        """Return how many folders the requested path and a found path share at their starts and at their ends."""
        front = _count_equal(self._folders, folders)
        return front + _count_equal(self._folders[front:][::-1], folders[front:][::-1])


def _count_equal(parts: list[bytes], others: list[bytes]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(parts, others)))


def _list_candidates(tried: bytes, paths: GuestPaths) -> Iterator[bytes]:
    """Yield the paths in the deepest existing folder of the path `tried`, then all files below the readable roots, and
    their folders.
    """
    # The root b"" (the whole file system) is too large to be searched; only the deepest existing folder is listed.
    readable = [os.path.realpath(root) if root else root for root in paths.readable]
    folder = os.path.realpath(os.path.dirname(tried))
    while not os.path.isdir(folder) and len(folder) > 1:
        folder = os.path.dirname(folder)
    # Check the folder: a link may lead out of the roots, and the guest's own data must not be shown.
    if any((folder + b"/").startswith(root + b"/") for root in readable):
        with contextlib.suppress(OSError):
            yield from (
                path for name in os.listdir(folder)[:MAX_ENTRIES] if (path := os.path.join(folder, name)) != paths.state
            )
    until = time.monotonic() + MAX_S
    folders: set[bytes] = set()
    with Child(list_all_files(paths.ripgrep, [root for root in readable if root])) as child:
        for count, path in enumerate(child.read_records(b"\0", lambda: time.monotonic() > until)):
            if count == MAX_ENTRIES:
                return
            if path.startswith(paths.state + b"/"):
                continue
            yield path
            folder = os.path.dirname(path)
            while folder not in folders and folder not in readable:
                folders.add(folder)
                yield folder
                folder = os.path.dirname(folder)


def _shorten(text: str) -> str:
    """Return the path, shortened in the middle if it would take up too much of the message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]} [...] {text[-_MAX_SHOWN // 2 :]}"


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
