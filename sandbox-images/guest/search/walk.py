"""Walk over all names below a directory with descriptors. Links are never followed, and only directories are opened."""

from __future__ import annotations

import os

from guest.paths import KERNEL_FOLDERS
from guest.search.ignore_rules import RuleChain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest.paths import GuestPaths
    from guest.search.start import Start

VCS_NAMES = frozenset((".git", ".hg", ".svn"))
"""Directories that a walk never enters, unless the search starts inside."""
MAX_DEPTH = 400
"""Maximum depth of a walk. Deeper folders are reported as unreadable."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """Directory of a walk.

    `fd` is open while the caller processes the folder. `prefix` is the path below the start, with a slash at the end,
    or empty. `is_ignored`: a rule hides the whole folder.
    """

    __slots__ = ("_chain", "_full", "entries", "fd", "is_ignored", "prefix")

    def __init__(
        self, fd: int, prefix: str, full: bytes, entries: list[os.DirEntry[str]], chain: RuleChain, is_ignored: bool
    ) -> None:
        self.fd = fd
        self.prefix = prefix
        self.entries = entries
        self.is_ignored = is_ignored
        self._chain = chain
        self._full = full

    def hides(self, entry: os.DirEntry[str]) -> bool:
        """Return whether a rule hides an entry or this whole folder."""
        if self.is_ignored or self._chain.is_empty:
            return self.is_ignored
        name = entry.name.encode("utf-8", "surrogateescape")
        return self._chain.hides(self._full + name, name, entry.is_dir(follow_symlinks=False))


class Walk:
    """Walk over a directory tree.

    After the walk, `unreadable` has the directories that could not be read, and `bad_rules` has the rule files with
    invalid rules.

    `is_start_ignored`: a rule above the start hides the start. The request names the start explicitly, so the rules
    above are then not applied.
    """

    def __init__(self, start: Start, paths: GuestPaths, use_rules: bool) -> None:
        self._start = start
        self.use_rules = use_rules
        # Names in the start folder that a search leaves out: the kernel's files, and what the guest stores.
        self.kept_out = frozenset[str]()
        if start.real == b"/":
            self.kept_out = frozenset(os.fsdecode(name[1:]) for name in (*KERNEL_FOLDERS, paths.output))
        elif start.real == os.path.realpath(paths.output):
            self.kept_out = frozenset((os.fsdecode(os.path.relpath(paths.state, paths.output)),))
        self.unreadable: list[str] = []
        self.bad_rules: list[str] = []
        self.is_start_ignored = False
        self._base = b"".join(part + b"/" for part in start.above)
        self._chain = self._rules_above() if use_rules else RuleChain()

    def folders(self) -> Iterator[Folder]:
        """Yield every directory, the start first.

        The caller must finish with a folder before it asks for the next one.
        """
        # One item per level: the open directory, its prefix, its rules, and the subdirectories to visit as (name, is
        # ignored).
        levels: list[tuple[int, str, RuleChain, list[tuple[str, bool]]]] = []
        try:
            fd = os.dup(self._start.fd)
            # The descriptor is in `levels` before the folder is read, so that the `finally` clause closes it after
            # any error.
            levels.append((fd, "", self._chain, []))
            folder, chain = self._enter(fd, "", self._chain, False)
            yield folder
            levels[0] = (fd, "", chain, self._find_below(folder))
            while levels:
                fd, prefix, chain, pending = levels[-1]
                if not pending:
                    os.close(levels.pop()[0])
                    continue
                name, is_ignored = pending.pop()
                below = f"{prefix}{name}/"
                child = self._open(fd, name, below, len(levels))
                if child is None:
                    continue
                levels.append((child, below, chain, []))
                folder, chain = self._enter(child, below, chain, is_ignored)
                yield folder
                levels[-1] = (child, below, chain, self._find_below(folder))
        finally:
            for level in levels:
                os.close(level[0])

    def _open(self, fd: int, name: str, below: str, depth: int) -> int | None:
        if depth >= MAX_DEPTH:
            self.unreadable.append(below)
            return None
        try:
            return os.open(name, _DIRECTORY, dir_fd=fd)
        except OSError:
            self.unreadable.append(below)
            return None

    def _enter(self, fd: int, prefix: str, chain: RuleChain, is_ignored: bool) -> tuple[Folder, RuleChain]:
        try:
            with os.scandir(fd) as scanner:
                entries = list(scanner)
        except OSError:
            self.unreadable.append(prefix)
            entries = []
        full = self._base + os.fsencode(prefix)
        if self.use_rules and not is_ignored:
            chain = self._add_rules(chain, fd, full, {entry.name for entry in entries if entry.name.startswith(".")})
        left_out = VCS_NAMES if prefix else VCS_NAMES | self.kept_out
        return Folder(
            fd, prefix, full, [entry for entry in entries if entry.name not in left_out], chain, is_ignored
        ), chain

    def _find_below(self, folder: Folder) -> list[tuple[str, bool]]:
        names = []
        for entry in folder.entries:
            if entry.is_dir(follow_symlinks=False):
                names.append((entry.name, folder.hides(entry)))
        return names

    def _add_rules(self, chain: RuleChain, fd: int, full: bytes, names: set[str]) -> RuleChain:
        if not names:
            return chain
        chain, errors = chain.enter(fd, full, names)
        for error in errors:
            self.bad_rules.append(f"{os.fsdecode(full)}{error.message}")
        return chain

    def _rules_above(self) -> RuleChain:
        """Return the rules of the directories above the start, or no rules if they hide the start."""
        chain, full = RuleChain(), b""
        fd = os.open(self._start.root, _DIRECTORY)
        try:
            for part in self._start.above:
                chain = self._add_rules(chain, fd, full, {name for name in os.listdir(fd) if name.startswith(".")})
                full += part
                if chain.hides(full, part, True):
                    self.is_start_ignored = True
                    return RuleChain()
                full += b"/"
                fd, above = os.open(part, _DIRECTORY, dir_fd=fd), fd
                os.close(above)
        except OSError:
            # A directory was moved or access was removed. The rules that were read so far apply.
            return chain
        finally:
            os.close(fd)
        return chain
