"""The folder of a sandboxd's workspaces. Each workspace has a private subfolder with its name."""

import asyncio
import errno
import os
import re
import stat
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.loop_mounts import unmount
from toolcrew.workers.sandboxd.disks.trees import remove_tree

log = structlog.get_logger(__name__)

T = TypeVar("T")
MOUNT = "mount"
"""Mount point of the image in the folder of the workspace."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


async def run_to_end(work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Run blocking work in a thread and return its result. When the caller is cancelled, wait for the work, then call
    `undo` with the result, because no caller receives it any more.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        # Ignore an error of the work: the caller must get the cancellation.
        if not running.cancelled() and running.exception() is None and undo is not None:
            try:
                await run_to_end(partial(undo, running.result()))
            except (
                SandboxUnavailable
            ) as error:  # The caller gets the cancellation, and not this error. The next start removes the rest.
                log.error("workspace_creation_not_undone", error=str(error))
        raise


class WorkspaceStore:
    """The folders of all workspaces. The store belongs to one event loop; `make`, `remove` and `sweep` run their file
    operations in threads.
    """

    def __init__(self, folder: Path, host_free_bytes: int) -> None:
        self.folder = folder
        self._host_free_bytes = host_free_bytes
        self._making: set[str] = set()
        # A weak dictionary: the lock of a name exists only while a task uses it.
        self._removing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, name: str) -> Path:
        """Return a workspace's folder, which need not exist. Raises ValueError unless the name consists of letters,
        digits, _ and -.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid workspace name: use 1 to 128 letters, digits, _ and -")
        return self.folder / name

    async def make(self, name: str, fill: Callable[[Path], T]) -> T:
        """Create a folder and fill it with `fill`. Return the result of `fill`. Nothing is left if this fails or the
        caller is cancelled.

        Raises SandboxUnavailable when the disk is nearly full, the name is taken, or the host refuses.
        """
        place = self.of(name)
        if name in self._making:
            raise SandboxUnavailable(f"a workspace {name} is already being made: choose another name")
        self._making.add(name)
        try:
            # A cancelled thread cannot be stopped, so the undo runs after the thread has ended.
            return await run_to_end(lambda: self._open_new(place, fill), undo=lambda _: self._delete(place))
        finally:
            self._making.discard(name)

    def prepare(self) -> None:
        """Create the folder of all workspaces, which only this user may enter. Raises SandboxUnavailable."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise SandboxUnavailable(
                    f"{self.folder} must be a folder of the user that runs sandboxd: remove it, or set another state "
                    "folder"
                )
            self.folder.chmod(0o700)
        except OSError as error:
            raise refused(f"the folder of workspaces {self.folder} cannot be made", error) from error

    def check_room(self) -> None:
        """Raise SandboxUnavailable when the host's disk has too little free space."""
        file_system = os.statvfs(self.folder)
        free = file_system.f_bavail * file_system.f_frsize
        if free < self._host_free_bytes or (file_system.f_files and not file_system.f_favail):
            raise SandboxUnavailable(
                f"the disk of {self.folder} has {free} bytes and {file_system.f_favail} files free, and "
                f"{self._host_free_bytes} bytes must stay free: free space on the host, end sessions, or set "
                "TOOLCREW_HOST_FREE_BYTES"
            )

    async def remove(self, name: str) -> None:
        """Unmount and delete a workspace's folder. A missing folder is ignored. Raises SandboxUnavailable; then try
        again later.
        """
        place = self.of(name)
        # Take the lock: a sweep may find a workspace that a session deletes at the same time.
        async with self._removing.setdefault(name, asyncio.Lock()):
            await run_to_end(lambda: self._delete(place))

    async def sweep(self, keep: Set[str]) -> int:
        """Delete the folders whose names are not in `keep`, except those that are being created. Return the number of
        deleted folders. Raises SandboxUnavailable at the end if some could not be deleted.

        The list is made before the first await, so a workspace that is created later is safe.
        """
        strays = [name for name in self._list_names() if name not in keep and name not in self._making]
        failed: list[str] = []
        for name in strays:
            try:
                await self.remove(name)
            except SandboxUnavailable as error:
                failed.append(str(error))
        if failed:
            raise SandboxUnavailable(
                f"{len(failed)} of {len(strays)} workspaces without an owner could not be deleted; the first: "
                f"{failed[0]}"
            )
        return len(strays)

    def _list_names(self) -> list[str]:
        try:
            with os.scandir(self.folder) as entries:
                return [
                    entry.name
                    for entry in entries
                    if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise refused(f"the folder of workspaces {self.folder} cannot be read", error) from error

    def _open_new(self, place: Path, fill: Callable[[Path], T]) -> T:
        self.prepare()
        try:
            self.check_room()
            place.mkdir(mode=0o700)
        except FileExistsError:
            raise SandboxUnavailable(
                f"there is a workspace at {place} already: choose another name, or remove it"
            ) from None
        except OSError as error:
            raise refused(f"workspace {place.name} cannot be made", error) from error
        try:
            return fill(place)
        except OSError as error:
            self._delete(place)
            raise refused(f"workspace {place.name} cannot be made", error) from error
        except SandboxUnavailable:
            self._delete(place)
            raise

    def _delete(self, place: Path) -> None:
        try:
            unmount(place / MOUNT)
            remove_tree(place)
        except OSError as error:
            raise refused(f"workspace {place.name} cannot be deleted", error) from error


def refused(failure: str, error: OSError) -> SandboxUnavailable:
    """Convert an error of the host to a SandboxUnavailable with advice."""
    next_step = {
        errno.ENOSPC: "the host's disk is full: free space on it",
        errno.EDQUOT: "the quota of sandboxd's user is used up: raise it, or free space",
        errno.EPERM: "run sandboxd as root with the right to mount, or choose another TOOLCREW_SANDBOX_WORKSPACE",
        errno.EACCES: "give sandboxd's user the right to it, or set another state folder",
        errno.EROFS: "set TOOLCREW_SANDBOXD_STATE to a folder on a writable disk",
        errno.ENOENT: (
            "something removed what sandboxd needs there; inside a container, make the host's /dev visible to sandboxd"
        ),
        errno.EMFILE: "raise the limit of open files of sandboxd",
        errno.ENFILE: "raise the host's limit of open files",
    }.get(error.errno or 0, "look at the kernel's log on the host")
    where = f" at {error.filename}" if error.filename else ""
    return SandboxUnavailable(f"{failure}: {error.strerror or error}{where}; {next_step}")
