"""Who lives: a lock file for each sandboxd of a host, so that what a dead one left can be told from what a living one
holds.

A lock of the kernel's goes with its process, at once and whatever killed it; no clock decides. A lease is judged only
by those who see the very same folder (its device and inode number are part of the lease): for a sandboxd in a
container, or on another host, it is none of theirs.
"""

import fcntl
import os
import secrets
import time
from pathlib import Path

from contract.errors import SandboxUnavailable

_LOOKS = 3
_LOOK_S = 0.02


class Lease:
    """This process's own. `take` opens it, `give_back` ends it."""

    def __init__(self, folder: Path, name: str, file: str, fd: int, name_fd: int) -> None:
        self._folder = folder
        self._file = file
        self._name_file = f"{name}.name"
        self._fds = (fd, name_fd)
        self._domain = _domain_of(folder)

    @classmethod
    def take(cls, folder: Path, name: str) -> "Lease":
        """Hold the name and a lease of one's own. Raises SandboxUnavailable when a living sandboxd has the name."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name_fd = _lock_patiently(folder / f"{name}.name")
        if name_fd is None:
            raise SandboxUnavailable(
                f"another sandboxd named '{name}' lives on this host: stop it, or give this one another "
                "TOOLCREW_SANDBOXD_NAME and socket"
            )
        file = f"{name}-{secrets.token_hex(8)}.lease"
        while (fd := _lock(folder / file)) is None:
            pass  # a neighbour's sweep looks whether it is held, for a moment
        return cls(folder, name, file, fd, name_fd)

    @property
    def label(self) -> str:
        """What a container carries of its owner."""
        return f"{self._domain}/{self._file}"

    def is_dead(self, label: str) -> bool:
        """Whether the owner of a container with that label is known to be gone. False for whatever cannot be judged
        from here.
        """
        domain, _, file = label.rpartition("/")
        if domain != self._domain or file == self._file or not file.endswith(".lease") or file.startswith("."):
            return False
        try:
            fd = os.open(self._folder / file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def forget_dead(self) -> None:
        """Delete the files of leases whose owners are gone, once nothing of theirs is left."""
        for path in self._folder.glob("*.lease"):
            if self.is_dead(f"{self._domain}/{path.name}"):
                path.unlink(missing_ok=True)
        for path in self._folder.glob("*.name"):
            if (
                fd := _lock(path)
            ) is not None:  # nobody has the name: whoever takes it meanwhile sees that the file went
                path.unlink(missing_ok=True)
                os.close(fd)

    def give_back(self) -> None:
        """The name is free for another."""
        for file in (self._file, self._name_file):
            (self._folder / file).unlink(missing_ok=True)
        for fd in self._fds:
            os.close(fd)


def _lock(path: Path) -> int | None:
    """A locked descriptor of the file that has that name; None when another holds it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _is_file_of(fd, path):
            return fd
        os.close(fd)  # whoever had it deleted it in between


def _lock_patiently(path: Path) -> int | None:
    """As `_lock`; a neighbour who looks whether the name is free holds it for a moment."""
    fd = _lock(path)
    for _ in range(_LOOKS):
        if fd is not None:
            break
        time.sleep(_LOOK_S)
        fd = _lock(path)
    return fd


def _is_file_of(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _domain_of(folder: Path) -> str:
    status = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{status.st_dev}:{status.st_ino}"
