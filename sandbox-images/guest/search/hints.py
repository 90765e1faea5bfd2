"""Hints for a search that found nothing: what it has not looked at, and how to look there."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat

from guest.search.names import build_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from guest.search.glob_patterns import Globs

EXPLAIN_GLOBS = "{}. A glob is like *.py, src/**/*.ts or {{a,b}}.js; put commas between several; folder/** is all in it"
_OTHER_WRITING = re.compile(r"^!|\[\[:|[@+!?*]\(|[|^$]|\.\*|\{[^{},]*\.\.[^{},]*\}|\S\s+\*")
"""Parts of negations, of classes, of extended globs, of regular expressions, of ranges, and of lists with blanks."""
MAX_ENTRIES = 20_000
_HISTORY = (".git", ".hg", ".svn")


def explain_links(links: list[bytes]) -> Iterator[str]:
    """Yield a hint on the links that a search did not follow."""
    if links:
        names = ", ".join(build_names(sorted(links)[:3]))
        yield f"{len(links)} links were not followed, such as {names}: give one as path"


def find_links(is_late: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the links to folders below the current directory, among its first MAX_ENTRIES entries."""
    pending, remaining = [b""], MAX_ENTRIES
    while pending and remaining > 0 and not is_late():
        folder = pending.pop()
        with contextlib.suppress(OSError), os.scandir(folder or b".") as entries:
            for entry in itertools.islice(entries, remaining):
                remaining -= 1
                if entry.is_symlink() and entry.is_dir():
                    yield folder + entry.name
                elif entry.is_dir(follow_symlinks=False) and os.fsdecode(entry.name) not in _HISTORY:
                    pending.append(folder + entry.name + b"/")


def explain_pattern(pattern: str) -> Iterator[str]:
    """Yield hints on a glob pattern that is written as other programs write patterns."""
    if _OTHER_WRITING.search(pattern):
        yield EXPLAIN_GLOBS.format("the pattern is no regular expression and no extended glob")
    if any(part in _HISTORY for part in pattern.split("/")):
        yield f"a search does not enter {', '.join(_HISTORY)}: give such a folder as path"


class NearMisses:
    """Entries that a glob pattern does not match only because of their case or kind, or an ignore rule. `wanted`: the
    types of files that the search looks for (None: all), if ignore rules hide some.
    """

    def __init__(self, globs: Globs, kind: str, wanted: tuple[int, ...] | None) -> None:
        self._globs = globs
        self._any_case = globs.ignoring_case()
        self._kind = kind
        self._wanted = wanted
        self._ignored: list[bytes] = []
        self._other_case: list[bytes] = []
        self._other_kind: list[bytes] = []
        self.links: list[bytes] = []

    def add(self, path: bytes, shown: bytes) -> None:
        """Compare an entry below the start of the search."""
        name = os.fsdecode(path)
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            return
        if stat.S_ISLNK(mode) and os.path.isdir(path):
            self.links.append(shown)
        if self._globs.match(name):
            is_wanted = self._wanted is None or stat.S_IFMT(mode) in self._wanted
            (self._ignored if is_wanted else self._other_kind).append(shown)
        elif self._any_case.match(name):
            self._other_case.append(shown)

    def hints(self) -> Iterator[str]:
        if self._ignored:
            names = ", ".join(build_names(sorted(self._ignored)[:3]))
            yield f"ignore rules hide {len(self._ignored)} matches, such as {names}: set include_ignored=true"
        if self._other_kind:
            names = ", ".join(build_names(sorted(self._other_kind)[:3]))
            entries = "folders or other entries" if self._kind == "file" else "files"
            more = "; folder/** lists the files in a folder" if self._kind == "file" else ""
            yield f"{len(self._other_kind)} {entries} match, such as {names}: set type=any{more}"
        if self._other_case:
            names = ", ".join(build_names(sorted(self._other_case)[:3]))
            yield f"{len(self._other_case)} entries match in another case: {names}"
        yield from explain_links(self.links)
