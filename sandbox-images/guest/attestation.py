"""What PID 1 can say of its sandbox as it stands: who lives in it, what lies in it, and what its image has. Nothing is
forked for it.
"""

from __future__ import annotations

import os
import sys

from guest.failures import check_fields
from guest.paths import PROGRAMS, GuestPaths
from guest.processes import read_processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set
    from typing import Any


MOST_ENTRIES = 1000
"""A folder's entries are counted up to here."""
_MOUNTS = b"/proc/self/mounts"
_SHARED_MEMORY = b"/dev/shm"


def attest(header: dict[str, Any], paths: GuestPaths, spared: Set[int], jobs: int) -> dict[str, object]:
    """The fields of the done event. `spared`: supervisors that wait for a call; `jobs`: how many run. Raises Failure
    and OSError.
    """
    check_fields(header)
    others = [
        process for process in read_processes().values() if process.pid != os.getpid() and process.pid not in spared
    ]
    return {
        "processes": sum(process.alive for process in others),
        "zombies": sum(not process.alive for process in others),
        "jobs": jobs,
        "entries": {
            "workspace": _count_entries(paths.workspace),
            "tmp": _count_entries(paths.roots[1]),
            "output": _count_entries(paths.output),
            "shm": _count_entries(_SHARED_MEMORY),
        },
        "workspace": _measure(paths.workspace),
        "python": list(sys.version_info[:3]),
        "programs": sorted(name for name, paths in PROGRAMS.items() if any(os.access(path, os.X_OK) for path in paths)),
    }


def _count_entries(folder: bytes) -> int:
    """Of the folder itself, hidden ones included, at most MOST_ENTRIES, which one that may not be read counts as; 0
    where there is none.
    """
    count = 0
    try:
        with os.scandir(folder) as entries:
            for _ in entries:
                count += 1
                if count >= MOST_ENTRIES:
                    break
    except FileNotFoundError:  # some runtimes have no /dev/shm
        return 0
    except PermissionError:  # a workspace that was not mounted, and is no reason to tell nothing of the rest
        return MOST_ENTRIES
    return count


def _measure(folder: bytes) -> dict[str, object]:
    """Room of the file system, free or not. `inodes` is 0 where it has no number of them."""
    room = os.statvfs(folder)
    return {"bytes": room.f_blocks * room.f_frsize, "inodes": room.f_files, "type": _find_type(folder)}


def _find_type(folder: bytes) -> str:
    """The file system that is mounted at the folder or nearest above it."""
    with open(_MOUNTS, "rb") as file:
        mounts = [line.split(b" ") for line in file]
    best, found = b"", b"?"
    for _, point, kind, *_ in mounts:
        # The last of several at one place hides the others.
        if len(point) >= len(best) and (folder + b"/").startswith(point.rstrip(b"/") + b"/"):
            best, found = point, kind
    return found.decode("ascii", "replace")
