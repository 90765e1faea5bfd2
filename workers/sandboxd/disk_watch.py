"""Whether the disk under the workspaces still holds what programs write.

Images take their room from the host's disk as they fill, so all of them together may be promised more than there is. On a full disk a
program's write succeeds and is lost later without a word: before that, whatever writes is ended, its workspace kept as it is.
"""

import os
from pathlib import Path


class DiskWatch:
    """`stop_bytes`: with less free than this nothing may write. It goes on only with a quarter more, so that nobody is ended in turns."""

    def __init__(self, folder: Path, stop_bytes: int) -> None:
        self._folder = folder
        self._stop_bytes = stop_bytes
        self._is_short = False

    def find_shortage(self) -> str | None:
        """What is short, as a sentence for the operator; None: there is room."""
        status = os.statvfs(self._folder)
        free = status.f_bavail * status.f_frsize
        self._is_short = free < self._stop_bytes * (1.25 if self._is_short else 1.0)
        if not self._is_short:
            return None
        return f"the disk under the workspaces has only {free} bytes free: make room on this host, or move TOOLCREW_SANDBOXD_STATE to a larger one"
