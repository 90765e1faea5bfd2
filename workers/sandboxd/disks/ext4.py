"""ext4 images that hold a workspace of a given size. An image is made once per size, copied for each workspace, and
checked before it is mounted.
"""

import errno
import os
import secrets
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.base import FILES, UID, WorkspaceSize, make_folders
from toolcrew.workers.sandboxd.disks.loop_mounts import mount_image, try_lock, unmount
from toolcrew.workers.sandboxd.disks.trees import remove_tree

log = structlog.get_logger(__name__)

_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_WORK = ".work-"
_BLOCK = 4096
_MAX_INODES_A_GROUP = 8 * _BLOCK
_RESERVED_INODES = 10
_TOOL_S = 60.0
_RELEASE_S = 10.0
_TRIES = 8
# All features are listed, so that the host's configuration cannot change them. No journal: it would cost space and
# time, and a workspace is checked before its next mount after a host failure.
_FEATURES = (
    "none,extents,dir_index,filetype,sparse_super,large_file,huge_file,flex_bg,metadata_csum,dir_nlink,extra_isize,"
    "ext_attr"
)
_EXTENDED = "lazy_itable_init=1,nodiscard"

_SUPERBLOCK = 1024
_MAGIC = 0xEF53
_CLEAN = 1

_CORRECTED = 1 | 2
_UNCORRECTED = 4


class Templates:
    """Empty ext4 images, one per size, in a private folder. Each is copied for new workspaces. Methods block and may
    run in any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def copy(self, size: WorkspaceSize, target: Path) -> None:
        """Create a sparse file with an empty file system at `target`. Raises OSError, and SandboxUnavailable when an
        image of that size cannot be made.
        """
        template = self._folder / f"ext4-2-{size.bytes}-{size.inodes}"
        with self._lock:
            if not template.exists():
                self._make(template, size)
        copy_sparse(template, target)

    def _make(self, template: Path, size: WorkspaceSize) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with open_work(self._folder) as work:
            make_image(work / "image", work / "mount", size)
            fd = os.open(work / "image", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            # Rename only after fsync: a template under its final name is complete, even after a crash.
            (work / "image").rename(template)


@contextmanager
def open_work(folder: Path) -> Iterator[Path]:
    """Yield a private folder below `folder` in which to make an image. Raises OSError."""
    work = folder / f"{_WORK}{secrets.token_hex(8)}"
    work.mkdir(mode=0o700)
    try:
        yield work
    finally:
        _clear(work)


def clear_work(folder: Path) -> None:
    """Delete the unfinished work of killed processes below `folder`, including mounts. Raises OSError."""
    for work in folder.glob(f"{_WORK}*"):
        _clear(work)


def _clear(work: Path) -> None:
    unmount(work / "mount")
    remove_tree(work)


def make_image(image: Path, place: Path, size: WorkspaceSize) -> None:
    """Make an image with empty folders (base.FOLDERS), in which files can use at least `size`, and little more. The
    image is mounted for a moment at `place`, a folder that this function creates.

    Raises OSError; also SandboxUnavailable when mkfs.ext4 is missing or fails.
    """
    place.mkdir(mode=0o700)
    data_blocks = -(-size.bytes // _BLOCK)
    data_blocks += max(4, data_blocks // 256)  # space for the block lists (metadata) of large files
    blocks, inodes = data_blocks + size.inodes // 16 + 8, size.inodes + _RESERVED_INODES
    for _ in range(_TRIES):
        _format(image, blocks, inodes)
        with _mounted(image, place):
            (place / "lost+found").rmdir()
            make_folders(place)
            file_system = os.statvfs(place)
        missing_blocks, missing_inodes = data_blocks - file_system.f_bavail, size.inodes - file_system.f_favail
        if missing_blocks <= 0 and missing_inodes <= 0:
            return
        blocks += max(0, missing_blocks) + max(0, missing_blocks) // 32
        inodes += max(0, missing_inodes)
    raise SandboxUnavailable(
        f"mkfs.ext4 cannot make a file system for {size.bytes} bytes and {size.inodes} files: use other sizes"
    )


def is_clean(image: int) -> bool:
    """Return whether the image was unmounted cleanly. The image must not be mounted now. Raises OSError, also when
    the file is not an ext4 image.
    """
    magic, state = struct.unpack("<HH", os.pread(image, 4, _SUPERBLOCK + 0x38).ljust(4, b"\0"))
    if magic != _MAGIC:
        raise OSError(errno.EUCLEAN, "it is not an ext4 image")
    return bool(state == _CLEAN)


def repair(image: Path) -> None:
    """Repair the file system after a crash of the host. A file that was being created may lose its name; the file is
    then in `lost+found`, and the damage is logged.

    Raises SandboxUnavailable.
    """
    status, output = _run("e2fsck", "-p", str(image))
    if status & ~_CORRECTED == _UNCORRECTED:
        log.warning("workspace_damaged", image=str(image), output=output)
        status, output = _run("e2fsck", "-y", str(image))
    if status & ~_CORRECTED:
        raise SandboxUnavailable(
            f"the file system of {image} was damaged when the host crashed, and e2fsck cannot repair it ({output}): "
            "open a new session"
        )


def clear_lost_and_found(top: Path) -> None:
    """Remove the folder `lost+found` that a repair has made in a mounted image. If the folder has files that lost their
    names, it becomes a folder of the sandbox's user in the workspace instead.

    Raises OSError.
    """
    found = top / "lost+found"
    try:
        if found.lstat().st_uid == 0:
            found.rmdir()
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            os.chown(found, UID, UID, follow_symlinks=False)
            found.rename(top / FILES / "workspace" / f"lost+found.{secrets.token_hex(4)}")
        elif error.errno != errno.ENOENT:
            raise


def find_tool(name: str) -> str | None:
    """Return the path of a program, or None when it is not installed."""
    return shutil.which(name, path=_PATH) or shutil.which(name)


def _format(image: Path, blocks: int, inodes: int) -> None:
    with image.open("wb") as file:
        file.truncate(blocks * _BLOCK)
    groups = max(-(-blocks // _MAX_INODES_A_GROUP), -(-inodes // _MAX_INODES_A_GROUP))
    blocks_a_group = max(256, min(_MAX_INODES_A_GROUP, -(-blocks // groups // 8) * 8))
    options = ["-q", "-F", "-b", str(_BLOCK), "-I", "256", "-m", "0", "-g", str(blocks_a_group), "-N", str(inodes)]
    status, output = _run("mkfs.ext4", *options, "-O", _FEATURES, "-E", _EXTENDED, str(image))
    if status != 0:
        raise SandboxUnavailable(f"mkfs.ext4 failed with status {status}: {output}; check the disk of this host")


def _run(name: str, *arguments: str) -> tuple[int, str]:
    """Run a program of e2fsprogs, and return its status and output."""
    program = find_tool(name)
    if program is None:
        raise SandboxUnavailable(f"{name} is missing: install e2fsprogs")
    try:
        ended = subprocess.run(
            [program, *arguments],
            env={"PATH": _PATH, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TOOL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SandboxUnavailable(
            f"{name} did not end in {_TOOL_S:g} s: check whether the disk of this host is overloaded"
        ) from None
    return ended.returncode, " ".join(ended.stdout.decode(errors="replace").split())[-500:]


@contextmanager
def _mounted(image: Path, place: Path) -> Iterator[None]:
    """Mount an image inside the block. Afterwards no loop device holds it."""
    fd = _open_released(image)
    try:
        mount_image(fd, place)
    finally:
        os.close(fd)
    try:
        _check_lock_is_kept(image)
        yield
    finally:
        unmount(place)
        os.close(_open_released(image))


def _check_lock_is_kept(image: Path) -> None:
    fd = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        if try_lock(fd):
            raise SandboxUnavailable(
                "loop devices of this kernel do not keep the lock of their file: use tmpfs or folder workspaces"
            )
    finally:
        os.close(fd)


def _open_released(image: Path) -> int:
    """Wait until no loop device holds the image, then open and lock it.

    When another thread starts a program, the new process has copies of all open files between its fork and its exec. So
    the lock of a closed file may be held for a moment, and longer on a busy host.
    """
    fd = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    until = time.monotonic() + _RELEASE_S
    try:
        while not try_lock(fd):
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, f"in use by another process for {_RELEASE_S:g} s", str(image))
            time.sleep(0.001)
    except BaseException:
        os.close(fd)
        raise
    return fd


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a sparse file and keep its holes. Raises OSError."""
    from_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        to_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copy_data(from_fd, to_fd)
        finally:
            os.close(to_fd)
    finally:
        os.close(from_fd)


def copy_data(from_fd: int, to_fd: int) -> None:
    """Copy the data of an open file into an empty one, and keep the holes. Raises OSError."""
    os.ftruncate(to_fd, os.fstat(from_fd).st_size)
    for start, end in _extents(from_fd):
        _copy_range(from_fd, to_fd, start, end)


def _extents(fd: int) -> Iterator[tuple[int, int]]:
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


def _copy_range(from_fd: int, to_fd: int, start: int, end: int) -> None:
    while start < end:
        data = os.pread(from_fd, min(end - start, 1 << 20), start)
        if not data:
            raise OSError(errno.EIO, "the file became shorter")
        start += os.pwrite(to_fd, data, start)
