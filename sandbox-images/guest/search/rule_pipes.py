"""Named pipes where a rule file is expected. ripgrep opens every rule file and waits for the other end of a pipe."""

from __future__ import annotations

import os
import stat
import time

from guest.search.ignore_rules import RULE_FILES
from guest.search.walk import Walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.paths import GuestPaths
    from guest.search.grep_children import Child
    from guest.search.start import Start

_CHECK_S = 0.5
# Idle threads of a process that waits use less processor time than this between two checks.
_IDLE_TICKS = 5


class RulePipes:
    """Lets a search process continue that waits for pipes: it reads them as empty rule files."""

    def __init__(self, start: Start, paths: GuestPaths) -> None:
        self._start = start
        self._paths = paths
        self._cpu_ticks = 0
        self._check_at = time.monotonic() + _CHECK_S
        self._found: set[bytes] = set()

    @property
    def notes(self) -> list[str]:
        """A note for each pipe, in the form of a problem with a rule file."""
        return [f"{os.fsdecode(path)}: not a regular file, its rules are not applied" for path in sorted(self._found)]

    def release(self, child: Child, is_late: Callable[[], bool]) -> None:
        """Open the other end of all pipes if the process used hardly any processor time since the last check."""
        if time.monotonic() < self._check_at:
            return
        ticks = child.read_cpu_ticks()
        if ticks - self._cpu_ticks < _IDLE_TICKS:
            for depth in range(len(self._start.above)):
                fd = os.open(b"/".join([self._start.root, *self._start.above[:depth]]), os.O_RDONLY | os.O_DIRECTORY)
                self._release_in(fd, b"../" * (len(self._start.above) - depth), os.listdir(fd))
                os.close(fd)
            for folder in Walk(self._start, self._paths, use_rules=False).folders():
                if is_late():
                    return
                self._release_in(folder.fd, os.fsencode(folder.prefix), [entry.name for entry in folder.entries])
        self._cpu_ticks = ticks
        self._check_at = time.monotonic() + _CHECK_S

    def _release_in(self, folder: int, prefix: bytes, names: list[str]) -> None:
        for name in RULE_FILES:
            if name in names:
                self._release_one(folder, prefix, name)

    def _release_one(self, folder: int, prefix: bytes, name: str) -> None:
        try:
            if stat.S_ISFIFO(os.stat(name, dir_fd=folder).st_mode):
                # Without a reader this fails at once. With one, the reader sees the end of the file at the close.
                os.close(os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder))
                self._found.add(prefix + os.fsencode(name))
        except OSError:
            return
