"""Workspaces as ext4 images. The kernel enforces bytes and inodes, and the files outlive the container.

Invariant: an image has one writer, and no reader while it has a writer. The lock of the image file ensures this
(loop_mounts.py). The invariant does not depend on data in the memory of this process, so it also holds after kill -9.

A workspace may lie over frozen workspaces, its layers: the runtime mounts them as an overlay, and changes go to the
image of the workspace. A frozen image is never written again. A layer is kept while a session refers to it
(sessions.py).
"""

import asyncio
import contextlib
import errno
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakValueDictionary

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.disks.base import FILES, Kind, Workspace, WorkspaceMount, WorkspaceSize
from toolcrew.workers.sandboxd.disks.children import run_child
from toolcrew.workers.sandboxd.disks.ext4 import Templates, clear_lost_and_found, copy_sparse, is_clean, repair
from toolcrew.workers.sandboxd.disks.loop_mounts import (
    attach_read_only,
    mount_image,
    mount_read_only,
    try_lock,
    unmount,
)
from toolcrew.workers.sandboxd.disks.mounts import attached_together, mount_overlay, run_in_private_namespace
from toolcrew.workers.sandboxd.disks.workspace_store import MOUNT, WorkspaceStore, refused, run_to_end

IMAGE = "disk"
"""Earlier images, without FILES, had another name. They are not used."""
TEMPLATES = ".templates"
RELEASE_S = 30.0
"""Time limit in seconds for a removed container to release its workspace."""
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
MAX_LAYERS = 100
_LAYERS_TIMES = 2
"""The layers of a workspace together may have at most this multiple of its size."""
_MAX_DEVICES = 64
_MERGE_S = 600.0
_MERGING = "toolcrew.workers.sandboxd.disks.merging"
CHANGES = "changes"
"""Folder of a disk with the changes of the root file system, in addition to FILES."""
FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILES_OPTIONS = {"redirect_dir": "on", "metacopy": "off", "index": "off", "xino": "on"}
"""Options of the overlay of FILES: folders of a layer can be renamed; and all files are on one device, as tar and
find expect of a file system. The other two are set because some kernels have other defaults.
"""


@dataclass(frozen=True)
class ImageWorkspace:
    """A workspace in `<folder>/<name>/image`, a sparse file that only this user may open, with a folder `mount` next to
    it.

    The mount exists only while a container is created. The running container keeps the file system by its own mount.
    When the container ends, the kernel frees the mount and the loop device, so nothing remains after the death of any
    process. The image of a workspace over layers is made at its first mount.
    """

    name: str
    size: WorkspaceSize
    owner: "ImageWorkspaces" = field(compare=False, repr=False)
    layers: tuple[str, ...] = ()
    release_s: float = field(default=RELEASE_S, compare=False, repr=False)

    @property
    def kind(self) -> Kind:
        return "image"

    @property
    def outlives_container(self) -> bool:
        return True

    @asynccontextmanager
    async def mounted(self) -> AsyncIterator[WorkspaceMount]:
        place, handing_over = self.owner.store.of(self.name), self.owner.handing_over
        if self.name in handing_over:
            raise SandboxUnavailable(f"workspace {self.name} is being mounted for another container: try again later")
        # Allow one start at a time: a second one would remove the mount before the container of the first one has it.
        handing_over.add(self.name)
        try:
            # A sandboxd that was killed at this point may have left its mount.
            await run_to_end(lambda: _unmount(place))
            if self.layers and not (place / IMAGE).exists():
                await run_to_end(lambda: self.owner.fill(place, self.size))
            async with AsyncExitStack() as stack:
                layers = []
                # Mount the layers before the workspace's own image is locked: layers are shared and mounted quickly, so
                # the lock is held for a shorter time.
                for layer in self.layers:
                    layers.append(await self.owner.mount_layer(layer, self.release_s))
                    stack.callback(os.close, layers[-1])
                image = await _open_released(place / IMAGE, try_lock, self.release_s)
                stack.push_async_callback(run_to_end, lambda: _unmount(place))
                await run_to_end(lambda: _mount(image, place))
                yield WorkspaceMount(str(place / MOUNT), tuple(layers))
        finally:
            handing_over.discard(self.name)

    async def remove(self) -> None:
        await self.owner.remove(self.name)


class ImageWorkspaces:
    """Images below `folder`. The images are sparse, so their total size may exceed the disk. No image is created
    while the disk has less than `host_free_bytes` free.
    """

    def __init__(self, folder: Path, host_free_bytes: int) -> None:
        self.store = WorkspaceStore(folder, host_free_bytes)
        self.handing_over: set[str] = set()
        """Names of the workspaces that this process is mounting for a container now."""
        self._templates = Templates(folder / TEMPLATES)
        self._devices: dict[str, int] = {}
        """Layer -> its loop device. All sandboxes mount the same device, so that they share the kernel's cache."""
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def kind(self) -> Kind:
        return "image"

    @property
    def is_hard(self) -> bool:
        return True

    def stack(self, name: str, below: Workspace) -> ImageWorkspace:
        # Skip a workspace that was never mounted: it has no image and no files of its own.
        layers = (below.name, *below.layers) if self._image(below.name).exists() else below.layers
        # Count allocated blocks and not file sizes, because the images are sparse. Without this limit, a session that
        # forks in a loop would fill the disk.
        layer_bytes = sum(self._image(layer).stat().st_blocks * 512 for layer in layers)
        if layer_bytes > below.size.bytes * _LAYERS_TIMES or len(layers) > MAX_LAYERS:
            raise ToolFailure(
                ErrorCode.NO_SPACE,
                f"this session was forked too often: its forks share {len(layers)} layers with {layer_bytes} bytes, "
                f"and the limits are {MAX_LAYERS} layers and {below.size.bytes * _LAYERS_TIMES} bytes: make a "
                "checkpoint, and open a session from it",
            )
        place = self.store.of(name)
        try:
            place.mkdir(mode=0o700)
            (place / MOUNT).mkdir(mode=0o500)
        except OSError as error:
            raise refused(f"workspace {name} cannot be made", error) from error
        return ImageWorkspace(name, below.size, self, layers)

    async def copy(self, name: str, workspace: ImageWorkspace) -> ImageWorkspace:
        """Return a frozen copy of a workspace. The workspace's container must be paused meanwhile. Raises
        SandboxUnavailable.
        """

        def fill(place: Path) -> None:
            os.sync()  # the image is mounted, and the last changes of its file system may be in memory only
            (place / MOUNT).mkdir(mode=0o500)
            copy_sparse(self._image(workspace.name), place / IMAGE)

        await self.store.make(name, fill)
        return replace(workspace, name=name)

    async def make(self, name: str, size: WorkspaceSize) -> ImageWorkspace:
        await self.store.make(name, lambda place: self._fill_new(place, size))
        return ImageWorkspace(name, size, self)

    def find(self, name: str, size: WorkspaceSize, layers: tuple[str, ...] = ()) -> ImageWorkspace | None:
        place = self.store.of(name)
        if not all(image.is_file() for image in map(self._image, layers or (name,))) or not place.is_dir():
            return None
        # Remove a mount that a killed sandboxd left, because it would keep the image locked. A mount of a start in this
        # process is in use and stays.
        if name not in self.handing_over:
            _unmount(place)
        return ImageWorkspace(name, size, self, layers)

    async def mount_layer(self, name: str, release_s: float) -> int:
        """Return the descriptor of a read-only mount of a frozen workspace. Waits until the last container that could
        write to it has ended. Raises SandboxUnavailable.
        """
        # The children of a fork may start at the same time. Only one of them may create the loop device.
        async with self._opening.setdefault(name, asyncio.Lock()):
            if name not in self._devices:
                image = await _open_released(self._image(name), _try_layer, release_s)
                # `undo` closes a device that no caller receives; it would keep the layer locked until sandboxd ends.
                self._devices[name] = await run_to_end(lambda: _attach_layer(image, self._image(name)), undo=os.close)
                while len(self._devices) > _MAX_DEVICES:
                    # Running sandboxes keep using this device. The next sandbox gets a new one.
                    self._close_device(next(iter(self._devices)))
            # Use a duplicate: the removal of the layer may close the device while it is mounted here.
            device = os.dup(self._devices[name])
        try:
            return await run_to_end(lambda: mount_read_only(device), undo=os.close)
        except OSError as error:
            raise refused(f"the frozen workspace {name} cannot be mounted", error) from error
        finally:
            os.close(device)

    async def merge(self, name: str, layers: Sequence[str], size: WorkspaceSize, *, tenant: str) -> None:
        """Make the frozen workspace `name` with the merged content of frozen workspaces of a tenant, `layers`, the top
        one first. Raises SandboxUnavailable; the new workspace then does not exist.
        """
        merged = await self.make(name, size)
        try:
            async with merged.mounted() as mount, AsyncExitStack() as stack:
                mounts = []
                for layer in layers:
                    mounts.append(await self.mount_layer(layer, RELEASE_S))
                    stack.callback(os.close, mounts[-1])
                await _merge(Path(mount.bind or ""), mounts, tenant=tenant)
        except (OSError, SandboxUnavailable) as error:
            await self.remove(name)
            raise SandboxUnavailable(
                f"{len(layers)} workspaces of forked sessions cannot be merged: {error}; open a new session"
            ) from error

    async def remove(self, name: str) -> None:
        """Delete a workspace. Raises SandboxUnavailable; then try again later."""
        self._close_device(name)
        await self.store.remove(name)

    async def sweep(self, keep: Set[str]) -> int:
        return await self.store.sweep(keep)

    async def find_overfull(self) -> Mapping[str, int]:
        return {}

    def fill(self, place: Path, size: WorkspaceSize) -> None:
        """Make the image of a workspace. Raises SandboxUnavailable."""
        unfinished = place / f"{IMAGE}.new"
        try:
            self.store.check_room()
            unfinished.unlink(missing_ok=True)  # Remove what a killed process may have left.
            self._templates.copy(size, unfinished)
            unfinished.rename(place / IMAGE)
        except OSError as error:
            raise refused(f"workspace {place.name} cannot be made", error) from error

    def _fill_new(self, place: Path, size: WorkspaceSize) -> None:
        # No user may write to the bare mount point: a container without the mount would fill the host's disk.
        (place / MOUNT).mkdir(mode=0o500)
        self.fill(place, size)

    def _image(self, name: str) -> Path:
        return self.store.of(name) / IMAGE

    def _close_device(self, name: str) -> None:
        if (device := self._devices.pop(name, None)) is not None:
            os.close(device)


async def _merge(place: Path, layers: Sequence[int], *, tenant: str) -> None:
    """Merge mounted layers into a new disk. Raises OSError and SandboxUnavailable."""
    with ExitStack() as stack:
        lower = list(open_each(layers, FILES, stack))
        if changed := list(open_each(layers, CHANGES, stack)):
            (place / CHANGES).mkdir()
            await _run_merging(tenant, place / CHANGES, changed)
        # Read the layers through an overlay, because only an overlay finds the content of folders that were renamed in
        # a layer.
        if len(lower) > 1:
            overlay = await run_to_end(lambda: run_in_private_namespace(lambda: _stack(layers)), undo=os.close)
            stack.callback(os.close, overlay)
            lower = [overlay]
        shutil.rmtree(place / FILES)  # The merge makes its own folders, with the attributes of the layers.
        (place / FILES).mkdir()
        await _run_merging(tenant, place / FILES, lower)


def _stack(layers: Sequence[int]) -> int:
    """Return the descriptor of a read-only overlay of the files of layers. Raises OSError."""
    with attached_together(layers, "disks"), ExitStack() as stack:
        return mount_overlay(list(open_each(layers, FILES, stack)), None, options=FILES_OPTIONS)


async def _run_merging(tenant: str, target: Path, sources: Sequence[int]) -> None:
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        await run_child(tenant, _MERGING, (fd, *sources), _MERGE_S)
    except TimeoutError:
        raise SandboxUnavailable(f"the merge was not complete after {_MERGE_S:g} s") from None
    finally:
        os.close(fd)


def open_each(layers: Sequence[int], name: str, stack: ExitStack) -> Iterator[int]:
    """Yield a descriptor of the folder `name` in each layer. A layer whose sandbox never started has no such folder and
    is left out. `stack` closes the descriptors. Raises OSError.
    """
    for layer in layers:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(name, FOLDER_FLAGS, dir_fd=layer)
            stack.callback(os.close, fd)
            yield fd


async def _open_released(image: Path, try_lock: Callable[[int], bool], release_s: float) -> int:
    """Wait until no container holds the image, then open and lock it. Raises SandboxUnavailable."""
    fd = _open_image(image)
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + release_s, _FIRST_PAUSE_S
    try:
        # Try at intervals, because the kernel sends no event when a loop device is freed.
        while not try_lock(fd):
            if loop.time() >= until:
                raise SandboxUnavailable(
                    f"workspace {image.parent.name} is still mounted {release_s:g} s after its container should have "
                    "ended: find the process that holds it with `findmnt` and `losetup`, end it, and try again"
                )
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _try_layer(image: int) -> bool:
    # Try the exclusive lock first: the first reader may have to repair the image. Later readers share the lock.
    return try_lock(image) or try_lock(image, shared=True)


def _attach_layer(image: int, path: Path) -> int:
    """Return a read-only loop device over a locked image. Closes the descriptor."""
    try:
        if not is_clean(image):
            repair(path)
        # Change to a shared lock, so that other processes may read too. `flock` does this by releasing the lock for a
        # moment, in which another process may take it.
        if not try_lock(image, shared=True):
            raise SandboxUnavailable(f"{path} is used by another process: end it, and try again")
        return attach_read_only(image, path)
    except OSError as error:
        raise refused(f"the frozen workspace {path.parent.name} cannot be used", error) from error
    finally:
        os.close(image)


def _open_image(image: Path) -> int:
    try:
        fd = os.open(image, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SandboxUnavailable(
            f"the image of workspace {image.parent.name} is missing: its session's files are lost, open a new session"
        ) from None
    except OSError as error:
        raise refused(f"the image of workspace {image.parent.name} cannot be opened", error) from error
    # Check the descriptor, because the path could lead to another file by now. A file with a second name (hard link) is
    # refused: the image could be written through it while it is mounted.
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
            clear_lost_and_found(place / MOUNT)
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
                f"the file system at {place / MOUNT} cannot be unmounted: run sandboxd as root"
            ) from error
        raise refused(f"workspace {place.name} cannot be unmounted", error) from error
