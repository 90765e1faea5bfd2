"""Mounts by descriptor (the mount API of Linux 5.2 and later), for the root file system of a sandbox.

A mount made here is detached: it is in no mount table until `attach`, and the kernel frees it when its last descriptor
is closed. Mounts are attached only in a mount namespace that one thread has (`enter_private_namespace`). So a process
that is killed at any point leaves no mount on the host.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from toolcrew.workers.sandboxd.disks.mount_api import LIBC, NODEV, NOSUID, RDONLY, check

T = TypeVar("T")

_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40
_RESOLVE_NO_XDEV, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 1, 2, 4, 0x10
_MOUNT_POINT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IDMAP = 0x100000
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_MNT_DETACH = 2
_OVERLAY_OPTIONS: Final[Mapping[str, str]] = {"redirect_dir": "off", "metacopy": "off", "index": "off"}
"""Set explicitly, because some kernels have other defaults. With redirects, root of a sandbox could rename folders of
the image, such as the mount points that sandboxd makes.
"""
ROOTS: Final = Path("/mnt")
"""Folder in a private namespace under which the root file systems of sandboxes are mounted."""
ID_RANGE: Final = 65_536
"""Number of user and group ids of one sandbox."""
_PAGE: Final = 4096
"""Maximum size of the options of a mount, with a zero at the end."""


def clone_tree(path: str | Path, attributes: int = 0, id_map: int | None = None) -> int:
    """Return the descriptor of a new mount of a folder, without the mounts below it. `id_map`: a user namespace
    (`IdRanges.namespace`) that maps the owners of the files. Raises OSError.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    fd = check(LIBC.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags), str(path))
    try:
        set_attributes(fd, attributes, id_map)
    except BaseException:
        os.close(fd)
        raise
    return fd


def set_attributes(mount: int, attributes: int, id_map: int | None = None) -> None:
    """Set attributes of a detached mount, and map its ids. Raises OSError."""
    flags = attributes | (_IDMAP if id_map is not None else 0)
    values = struct.pack("QQQQ", flags, 0, _MS_PRIVATE, id_map or 0)
    check(LIBC.syscall(_MOUNT_SETATTR, mount, b"", _AT_EMPTY_PATH, values, len(values)), "mount_setattr")


def mount_overlay(
    lower: Sequence[str | int],
    id_map: int | None,
    upper: tuple[int, int] | None = None,
    options: Mapping[str, str] | None = None,
) -> int:
    """Return the descriptor of an overlay over the folders of `lower`, the top one first: paths, which are mapped by
    `id_map`, or descriptors of folders, which are used as they are. `upper`: descriptors of the folder for changes and
    of the work folder, both below one mount; without it, the overlay is read-only. `options` replace
    `_OVERLAY_OPTIONS`.

    Linux before 6.13 takes only paths as layers, and before 6.15 only folders of attached mounts. So all descriptors
    must be of attached mounts, and this must run in a private namespace. Raises OSError.
    """
    with attached_together([], "layers") as place:
        names = []
        for number, folder in enumerate(lower):
            if isinstance(folder, int):
                names.append(_path_of(folder))
                continue
            layer = clone_tree(folder, RDONLY, id_map)
            try:
                names.append(_attach_at(layer, place / str(number)))
            finally:
                os.close(layer)
        settings = {"lowerdir": ":".join(names), **_OVERLAY_OPTIONS, **(options or {})}
        if upper is not None:
            settings |= {"upperdir": _path_of(upper[0]), "workdir": _path_of(upper[1])}
        text = ",".join(f"{name}={value}" for name, value in settings.items()).encode()
        # The kernel reads one page and would ignore the rest.
        if len(text) >= _PAGE:
            raise OSError(errno.E2BIG, f"an image and its forks have too many layers ({len(names)}) for one mount")
        top = place / "top"
        top.mkdir()
        flags = ctypes.c_ulong(NOSUID | NODEV | (RDONLY if upper is None else 0))
        check(LIBC.mount(b"toolcrew", os.fsencode(top), b"overlay", flags, text), "overlay")
        return clone_tree(top)


def _path_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _attach_at(mount: int, place: Path) -> str:
    place.mkdir()
    _move(mount, _AT_FDCWD, os.fsencode(place), 0)
    return str(place)


@contextmanager
def attached_together(mounts: Sequence[int], name: str) -> Iterator[Path]:
    """Attach detached mounts below a new folder of a private namespace inside the block, so that folders of them can be
    layers of an overlay. Yield the folder, below which more can be attached. One call of the kernel detaches all, as
    each call waits for all processors.
    """
    place = ROOTS / name
    place.mkdir()
    try:
        check(LIBC.mount(b"none", os.fsencode(place), b"tmpfs", ctypes.c_ulong(0), b"mode=711,size=1m"), str(place))
        with _unmounted(place):
            for number, mount in enumerate(mounts):
                _attach_at(mount, place / str(number))
            yield place
    finally:
        place.rmdir()


@contextmanager
def attached(mount: int, place: Path) -> Iterator[None]:
    """Attach a detached mount to a folder of this process inside the block, with the mounts below it. No program of a
    sandbox may be able to change the path `place`.
    """
    _move(mount, _AT_FDCWD, os.fsencode(place), 0)
    with _unmounted(place):
        yield


@contextmanager
def _unmounted(place: Path) -> Iterator[None]:
    try:
        yield
    finally:
        check(LIBC.umount2(os.fsencode(place), _MNT_DETACH), str(place))


def attach_below(mount: int, root: int, folder: str) -> None:
    """Attach a detached mount to a folder below the attached mount `root`. Programs of a sandbox may have changed the
    tree: a link on the way, or a folder of another mount, is an error. Raises OSError.
    """
    fd = open_below(root, folder)
    try:
        _move(mount, fd, b"", _MOVE_MOUNT_T_EMPTY_PATH)
    finally:
        os.close(fd)


def open_below(root: int, path: str, flags: int = _MOUNT_POINT) -> int:
    """Return a descriptor of a path below the mount `root`. A link on the way, or another mount, is an error. Raises
    OSError.
    """
    resolve = _RESOLVE_IN_ROOT | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_XDEV
    how = struct.pack("QQQ", flags, 0, resolve)
    return check(LIBC.syscall(_OPENAT2, root, os.fsencode(path), how, len(how)), path)


def _move(mount: int, parent: int, path: bytes, flags: int) -> None:
    flags |= _MOVE_MOUNT_F_EMPTY_PATH
    check(LIBC.syscall(_MOVE_MOUNT, mount, b"", parent, path, flags), path.decode(errors="replace") or "move_mount")


def run_in_private_namespace(work: Callable[[], T], needed: Sequence[Path] = ()) -> T:
    """Run `work` in a new thread after `enter_private_namespace`, and return its result. Raises OSError."""

    def run() -> T:
        enter_private_namespace(needed)
        return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def enter_private_namespace(needed: Sequence[Path]) -> None:
    """Move this thread into a mount namespace of its own, in which only mounts that lead to a `needed` path, /proc,
    /sys, devices and control groups exist. Programs that the thread starts are in the same namespace.

    All other mounts are removed, because a copy would keep the file system of a workspace or container in use after its
    removal. If an engine has masked parts of /proc or /sys, the kernel would refuse to mount these in a sandbox. Raises
    OSError.
    """
    check(LIBC.unshare(_CLONE_NEWNS), "unshare")
    check(LIBC.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "/")
    for place in reversed(list_mounts()):
        is_needed = any(path == place or place in path.parents for path in (*needed, *_KERNEL_FOLDERS))
        if not is_needed and not any(place.is_relative_to(folder) for folder in _WHOLE_FOLDERS):
            LIBC.umount2(os.fsencode(place), _MNT_DETACH)
    # On the host, root of a sandbox is another user, which may not enter the folders of sandboxd.
    check(LIBC.mount(b"none", os.fsencode(ROOTS), b"tmpfs", ctypes.c_ulong(0), b"mode=711,size=1m"), str(ROOTS))
    # On a host with both versions of control groups, crun works only if it sees version 1 alone.
    unified = Path("/sys/fs/cgroup/unified")
    if unified.is_dir():
        check(LIBC.mount(b"none", os.fsencode(unified), b"tmpfs", ctypes.c_ulong(0), None), str(unified))


_WHOLE_FOLDERS = (Path("/dev"), Path("/sys/fs/cgroup"))
_KERNEL_FOLDERS = (Path("/proc"), Path("/sys"), *_WHOLE_FOLDERS)


def list_mounts() -> list[Path]:
    """Return the mount points that this thread sees, in the order in which they were mounted."""
    lines = Path("/proc/thread-self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    # The kernel writes spaces and some other characters as octal numbers.
    return [Path(line.split(" ")[4].encode().decode("unicode_escape")) for line in lines]
