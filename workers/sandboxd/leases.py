"""Lock files that show which sandboxds of a host are alive. The files separate the leftovers of a dead sandboxd from
the containers of a living sandboxd.

The kernel releases a lock when its process ends for any reason, so no clock is needed. The device and inode number of
the folder are part of a lease. A lease of another folder (a sandboxd in a container, or on another host) cannot be
judged here and is never treated as dead.
"""

import fcntl
import os
import secrets
import time
from pathlib import Path

from contract.errors import SandboxUnavailable

_LOOKS = 3
_CHECK_INTERVAL_S = 0.02


class Lease:
    """The lease of this process. `take` acquires it, `give_back` releases it."""

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
            pass  # the sweep of another sandboxd tests the lock for a moment
        return cls(folder, name, file, fd, name_fd)

    @property
    def label(self) -> str:
        """The label that names the owner of a container."""
        return f"{self._domain}/{self._file}"

    def is_dead(self, label: str) -> bool:
        """Return whether the owner of a container with that label is certainly dead. Returns False when this process
        cannot judge it.
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
            # A lock that can be taken has no living owner. The close below releases it again.
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
            ) is not None:  # No process has the name. A process that takes it now notices that the file was deleted.
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
    """Lock like `_lock`, with a few attempts: another sandboxd that tests the name holds the lock for a moment."""
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
