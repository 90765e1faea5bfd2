"""Ranges of host ids for the user namespaces of sandboxes.

Every sandbox gets a range of its own, so that its user ids differ from those of the host and of other sandboxes. The
sandboxds of a host lock blocks of ranges, so no two of them use the same range.
"""

import fcntl
import os
import subprocess
from pathlib import Path
from typing import Final

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.mounts import ID_RANGE

FIRST_ID: Final = 0x4000_0000
"""First host id of all ranges. It is above the ids of users, of the user namespaces of users, and of systemd's
containers.
"""
_BLOCK_RANGES: Final = 512
_BLOCKS: Final = 31


class IdRanges:
    """The id ranges of this process. All sandboxds of the host lock blocks in `folder`. Raises SandboxUnavailable when
    all blocks are taken.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock, block = _lock_block(folder)
        first = FIRST_ID + block * _BLOCK_RANGES * ID_RANGE
        self._free = [first + index * ID_RANGE for index in reversed(range(_BLOCK_RANGES))]
        self._namespaces: dict[int, int] = {}

    def take(self) -> int:
        """Return the first host id of a free range. Raises SandboxUnavailable."""
        if not self._free:
            raise SandboxUnavailable(
                f"this sandboxd has {_BLOCK_RANGES} sandboxes, and no more ids for users: lower TOOLCREW_MAX_SANDBOXES"
            )
        return self._free.pop()

    def give_back(self, base: int) -> None:
        """Free a range. All processes of its sandbox must have ended."""
        self._free.append(base)

    def namespace(self, base: int) -> int:
        """Return the descriptor of a user namespace that maps the ids of files to that range. The caller must not close
        it. Blocks for some milliseconds at the first use of a range. Raises OSError.
        """
        if base not in self._namespaces:
            self._namespaces[base] = _open_namespace(base)
        return self._namespaces[base]

    def close(self) -> None:
        for fd in (*self._namespaces.values(), self._lock):
            os.close(fd)


def id_map(base: int, own: int) -> str:
    """Return the id map of a user namespace for files. `own`: the user or group of this process. Without it in the map,
    this process could create no files, and an overlay with these ids would silently be read-only.
    """
    return f"0 {base} {ID_RANGE}\n{ID_RANGE} {own} 1\n"


def _lock_block(folder: Path) -> tuple[int, int]:
    for block in range(_BLOCKS):
        fd = os.open(folder / f"{block}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return fd, block
    raise SandboxUnavailable(f"{_BLOCKS} sandboxds of this host use all ranges of user ids: stop some")


def _open_namespace(base: int) -> int:
    # A namespace needs a child process while its map is written. Start a program for this, because a plain fork of a
    # process with threads may hang.
    holder = subprocess.Popen(
        ["unshare", "--user", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        if holder.stdout.read(1) != b"\n":
            raise OSError(f"unshare --user ended with {holder.wait()}")
        for kind, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            Path(f"/proc/{holder.pid}/{kind}").write_text(id_map(base, own), encoding="ascii")
        fd = os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        holder.kill()
    return fd
