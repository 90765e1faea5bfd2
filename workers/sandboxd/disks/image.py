"""Workspaces as ext4 images. The kernel enforces bytes and inodes, and the files outlive the container."""

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from contract.errors import SandboxUnavailable
from workers.sandboxd.disks.base import Kind, WorkspaceMount, WorkspaceSize
from workers.sandboxd.disks.ext4 import Templates, clear_found, is_clean, repair
from workers.sandboxd.disks.loop_mounts import mount_image, try_lock, unmount
from workers.sandboxd.disks.workspace_store import MOUNT, WorkspaceStore, refused, run_to_end

IMAGE = "image"
TEMPLATES = ".templates"
RELEASE_S = 30.0
"""Time limit in seconds for a removed container to release its workspace."""
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05


@dataclass(frozen=True)
class ImageWorkspace:
    """A workspace in `<folder>/<name>/image`, a sparse file that only this user may open, with a folder `mount` next
    to it.

    The mount exists only while a container is created. The running container keeps the file system by its own mount.
    When the container ends, the kernel frees the mount and the loop device. So the death of any process leaves
    nothing behind.
    """

    name: str
    size: WorkspaceSize
    store: WorkspaceStore = field(compare=False, repr=False)
    handing_over: set[str] = field(compare=False, repr=False)
    """Names of this process's workspaces that are mounted for a container now."""
    release_s: float = field(default=RELEASE_S, compare=False, repr=False)

    @property
    def kind(self) -> Kind:
        return "image"

    @property
    def outlives_container(self) -> bool:
        return True

    @asynccontextmanager
    async def mounted(self) -> AsyncIterator[WorkspaceMount]:
        place = self.store.of(self.name)
        if self.name in self.handing_over:
            raise SandboxUnavailable(
                f"workspace {self.name} is being given to another container: try again when that has been made"
            )
        # A second start would remove the mount of the first start before the first container has it.
        self.handing_over.add(self.name)
        try:
            # A sandboxd that was killed at this point may have left its mount.
            await run_to_end(lambda: _unmount(place))
            image = await self._open_released(place / IMAGE)
            try:
                await run_to_end(lambda: _mount(image, place))
                yield WorkspaceMount(str(place / MOUNT))
            finally:
                await run_to_end(lambda: _unmount(place))
        finally:
            self.handing_over.discard(self.name)

    async def remove(self) -> None:
        await self.store.remove(self.name)

    async def _open_released(self, image: Path) -> int:
        """Open and lock the image when no container holds it. Raises SandboxUnavailable."""
        fd = _open_image(image)
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self.release_s, _FIRST_PAUSE_S
        try:
            # The kernel sends no event when a loop device is freed.
            while not try_lock(fd):
                if loop.time() >= until:
                    raise SandboxUnavailable(
                        f"workspace {self.name} is still mounted {self.release_s:g} s after its container should have "
                        "ended: find the process that holds it with `findmnt` and `losetup`, end it, and try again"
                    )
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        except BaseException:
            os.close(fd)
            raise
        return fd


class ImageWorkspaces:
    """Images below `folder`. The images are sparse, so their total size may exceed the disk. No image is created
    while the disk has less than `host_free_bytes` free.
    """

    def __init__(self, folder: Path, host_free_bytes: int) -> None:
        self._store = WorkspaceStore(folder, host_free_bytes)
        self._templates = Templates(folder / TEMPLATES)
        self._handing_over: set[str] = set()

    @property
    def kind(self) -> Kind:
        return "image"

    @property
    def is_hard(self) -> bool:
        return True

    async def make(self, name: str, size: WorkspaceSize) -> ImageWorkspace:
        await self._store.make(name, lambda place: self._fill(place, size))
        return self._build_workspace(name, size)

    def find(self, name: str, size: WorkspaceSize) -> ImageWorkspace | None:
        place = self._store.of(name)
        if not (place / IMAGE).is_file():
            return None
        if name not in self._handing_over:
            _unmount(place)
        return self._build_workspace(name, size)

    async def sweep(self, keep: Set[str]) -> int:
        return await self._store.sweep(keep)

    async def find_overfull(self) -> Mapping[str, int]:
        return {}

    def _build_workspace(self, name: str, size: WorkspaceSize) -> ImageWorkspace:
        return ImageWorkspace(name, size, self._store, self._handing_over)

    def _fill(self, place: Path, size: WorkspaceSize) -> None:
        # No user may write there: a container whose start missed the mount would fill the host's disk.
        (place / MOUNT).mkdir(mode=0o500)
        unfinished = place / f"{IMAGE}.new"
        self._templates.copy(size, unfinished)
        unfinished.rename(place / IMAGE)


def _open_image(image: Path) -> int:
    try:
        fd = os.open(image, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SandboxUnavailable(
            f"the image of workspace {image.parent.name} is missing: its session's files are lost, open a new session"
        ) from None
    except OSError as error:
        raise refused(f"the image of workspace {image.parent.name} cannot be opened", error) from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1:
        return fd
    os.close(fd)
    raise SandboxUnavailable(
        f"{image} is not the file that sandboxd made there: another process changed its folder; open a new session"
    )


def _mount(image: int, place: Path) -> None:
    """Mount the locked image, after a repair if the last unmount was not clean. Closes the descriptor; from then on
    the mount holds the lock.
    """
    try:
        was_clean = is_clean(image)
        if not was_clean:
            repair(place / IMAGE)
        mount_image(image, place / MOUNT)
        if not was_clean:
            clear_found(place / MOUNT)
    except OSError as error:
        raise refused(f"workspace {place.name} cannot be mounted", error) from error
    finally:
        os.close(image)


def _unmount(place: Path) -> None:
    try:
        unmount(place / MOUNT)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise SandboxUnavailable(
                f"what is mounted at {place / MOUNT} cannot be unmounted: run sandboxd as root"
            ) from error
        raise refused(f"workspace {place.name} cannot be unmounted", error) from error
