"""Volumes of one sandboxd in folders: the guest and the skills, where no Docker engine keeps volumes.

Every process has a folder of its own for its volumes. It holds a lock on the folder, which the kernel releases when the
process ends for any reason. The next process removes the folders whose lock is free.
"""

import fcntl
import os
import secrets
import shutil
import tarfile
from pathlib import Path
from typing import IO

from toolcrew.contract.errors import SandboxUnavailable


class FolderVolumes:
    """The volumes of this process below `folder`. The methods block and raise SandboxUnavailable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own: Path | None = None
        self._lock = -1

    def make(self, name: str) -> Path:
        """Create an empty volume, and return its folder."""
        try:
            path = self._open() / name
            path.mkdir(mode=0o755)
        except OSError as error:
            raise _build_error(error) from error
        return path

    def path(self, name: str) -> Path:
        """Return the folder of a volume."""
        if self._own is None or not (self._own / name).is_dir():
            raise SandboxUnavailable(f"the volume {name} in {self.folder} was removed: restart sandboxd")
        return self._own / name

    def unpack(self, name: str, archive: IO[bytes]) -> None:
        """Unpack folders and files of a tar archive, which this process has packed, into a volume. Each name in the
        archive begins with the name of the folder at which the volume is mounted.
        """
        try:
            with tarfile.open(fileobj=archive) as packed:
                for member in packed:
                    self._write(packed, member, self.path(name).joinpath(*member.name.split("/")[1:]))
        except OSError as error:
            raise _build_error(error) from error

    def _write(self, packed: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        content = packed.extractfile(member)
        if content is None:
            path.mkdir(exist_ok=True)
            path.chmod(member.mode)
            return
        # A sandbox that reads the file meanwhile sees the old content or the new one.
        unfinished = self._open() / "unfinished"
        with unfinished.open("wb") as file:
            shutil.copyfileobj(content, file)
        unfinished.chmod(member.mode)
        unfinished.rename(path)

    def remove(self, name: str) -> None:
        """Remove a volume. A missing volume is ignored."""
        if self._own is not None:
            shutil.rmtree(self._own / name, ignore_errors=True)

    def close(self) -> None:
        """Remove all volumes of this process."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            os.close(self._lock)
            self._own = None

    def _open(self) -> Path:
        """Return the folder of this process. The first call makes it, and removes those of dead processes."""
        if self._own is None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Without this lock, another process could remove a folder between its creation and its lock.
            making = _lock(self.folder, fcntl.LOCK_EX)
            try:
                for folder in self.folder.iterdir():
                    _remove_dead(folder)
                own = self.folder / secrets.token_hex(8)
                own.mkdir(mode=0o711)
                self._lock = _lock(own, fcntl.LOCK_EX)
                self._own = own
            finally:
                os.close(making)
        return self._own


def _remove_dead(folder: Path) -> None:
    try:
        lock = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _lock(folder: Path, operation: int) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, operation)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _build_error(error: Exception) -> SandboxUnavailable:
    return SandboxUnavailable(f"a volume of sandboxd cannot be written: {error}; check the disk of its state folder")
