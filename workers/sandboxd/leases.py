"""Lock files that show which sandboxds of a host are alive. They tell the leftovers of a dead sandboxd from the
containers of a living one.

The kernel releases a lock when its process ends for any reason, so no clock is needed. The device and inode number of
the folder are part of a lease. This process cannot check a lease of another folder (of a sandboxd in a container or on
another host), and never treats it as dead.
"""

import fcntl
import os
import secrets
import time
from pathlib import Path

from toolcrew.contract.errors import SandboxUnavailable

_LOOKS = 3
_CHECK_INTERVAL_S = 0.02


class Lease:
    """The lease (lock files) of this process. `take` acquires it, `give_back` releases it."""

    def __init__(self, folder: Path, name: str, file: str, fd: int, name_fd: int) -> None:
        self._folder = folder
        self._file = file
        self._name_file = f"{name}.name"
        self._fds = (fd, name_fd)
        self._domain = _domain_of(folder)

    @classmethod
    def take(cls, folder: Path, name: str) -> "Lease":
        """Acquire the name and a new lease. Raises SandboxUnavailable when a living sandboxd has the name."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name_fd = _lock_with_retries(folder / f"{name}.name")
        if name_fd is None:
            raise SandboxUnavailable(
                f"another sandboxd named '{name}' runs on this host: stop it, or give this one another "
                "TOOLCREW_SANDBOXD_NAME and socket"
            )
        file = f"{name}-{secrets.token_hex(8)}.lease"
        while (fd := _lock(folder / file)) is None:
            pass  # another sandboxd may hold the lock for a moment to test whether the owner lives
        return cls(folder, name, file, fd, name_fd)

    @property
    def label(self) -> str:
        """The label that names the owner of a container."""
        return f"{self._domain}/{self._file}"

    def is_dead(self, label: str) -> bool:
        """Return whether the owner of a container with that label is certainly dead. Return False when this process
        cannot know.
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
            # If the lock can be taken, its owner is dead. The close below releases the lock again.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def forget_dead(self) -> None:
        """Delete the lease files of dead owners. Call this only when all their leftovers are removed."""
        for path in self._folder.glob("*.lease"):
            if self.is_dead(f"{self._domain}/{path.name}"):
                path.unlink(missing_ok=True)
        for path in self._folder.glob("*.name"):
            if (
                fd := _lock(path)
            ) is not None:  # No process uses the name. A process that locks the file now notices that it was deleted.
                path.unlink(missing_ok=True)
                os.close(fd)

    def give_back(self) -> None:
        """Release the name and the lease."""
        for file in (self._file, self._name_file):
            (self._folder / file).unlink(missing_ok=True)
        for fd in self._fds:
            os.close(fd)


def _lock(path: Path) -> int | None:
    """Return a locked descriptor of the file that has that path now, or None when another process holds the lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _is_file_of(fd, path):
            return fd
        os.close(fd)  # the previous holder deleted the file after it was opened here


def _lock_with_retries(path: Path) -> int | None:
    """Call `_lock` a few times, because another sandboxd that tests the name holds the lock for a moment."""
    fd = _lock(path)
    for _ in range(_LOOKS):
        if fd is not None:
            break
        time.sleep(_CHECK_INTERVAL_S)
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
