"""The attestation: PID 1's report about the state of the sandbox (processes, files, free space).

The report forks no process.
"""

from __future__ import annotations

import os

from guest.fields import check_fields
from guest.paths import GuestPaths
from guest.processes import find_entered, read_processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set
    from typing import Any


MAX_ENTRIES = 1000
"""Limit of the entries that are counted in a folder."""
_MOUNTS = b"/proc/self/mounts"
_SHARED_MEMORY = b"/dev/shm"


def attest(
    header: dict[str, Any], paths: GuestPaths, idle_pids: Set[int], jobs: int, stream_servers: Set[int]
) -> dict[str, object]:
    """Return the report as the fields of the done event (the answer to the request). Raises RequestFailure and OSError.

    `idle_pids`: pids of supervisors that wait for a call; they are not counted. `jobs`: number of running jobs.
    `stream_servers`: pids of stream servers that PID 1 has forked. Their processes count as jobs.
    """
    check_fields(header)
    table = read_processes()
    others = [process for process in table.values() if process.pid != os.getpid() and process.pid not in idle_pids]
    servers = stream_servers | {process.pid for process in find_entered(table)}
    return {
        "processes": sum(process.alive for process in others),
        "zombies": sum(not process.alive for process in others),
        "jobs": jobs + sum(process.alive and process.parent in servers for process in others),
        "entries": {
            "workspace": _count_entries(paths.workspace),
            "tmp": _count_entries(paths.roots[1]),
            "output": _count_entries(paths.output),
            "shm": _count_entries(_SHARED_MEMORY),
        },
        "workspace": _measure(paths.workspace),
    }


def _count_entries(folder: bytes) -> int:
    """Return the number of entries in the folder, including hidden entries, at most MAX_ENTRIES.

    Return 0 when the folder does not exist, and MAX_ENTRIES when the folder cannot be read.
    """
    count = 0
    try:
        with os.scandir(folder) as entries:
            for _ in entries:
                count += 1
                if count >= MAX_ENTRIES:
                    break
    except FileNotFoundError:  # Some runtimes have no /dev/shm.
        return 0
    except PermissionError:  # The workspace is not mounted. Report the limit; the rest of the report is still useful.
        return MAX_ENTRIES
    return count


def _measure(folder: bytes) -> dict[str, object]:
    """Return the size and type of the folder's file system. `inodes` is 0 when the file system has no inode limit."""
    file_system = os.statvfs(folder)
    return {
        "bytes": file_system.f_blocks * file_system.f_frsize,
        "inodes": file_system.f_files,
        "type": _find_type(folder),
    }


def _find_type(folder: bytes) -> str:
    """Return the type of the file system that is mounted at the folder, or at the nearest folder above."""
    with open(_MOUNTS, "rb") as file:
        mounts = [line.split(b" ") for line in file]
    longest, file_system_type = b"", b"?"
    for _, mount_point, kind, *_ in mounts:
        # When several file systems are mounted at one folder, the last one hides the others.
        if len(mount_point) >= len(longest) and (folder + b"/").startswith(mount_point.rstrip(b"/") + b"/"):
            longest, file_system_type = mount_point, kind
    return file_system_type.decode("ascii", "replace")
