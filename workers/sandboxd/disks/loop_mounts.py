"""Mounts of file system images. Each mount has one loop device, which the kernel frees with the last mount.

Invariant: a file never has two loop devices if one of them can write, because this would corrupt the file. The lock of
an image (`try_lock`) belongs to its open file, and the loop device keeps this file open. So the lock is held exactly as
long as the device exists: in any mount namespace, after the death of any process, and after the image was deleted or
renamed. Only the holder of the lock creates a device. Read-only devices share the lock.
"""

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

from toolcrew.workers.sandboxd.disks.mount_api import LIBC, NODEV, NOSUID, RDONLY, check, open_context

_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_READ_ONLY = 1
_AUTOCLEAR = 4
_DIRECT_IO = 16
"""Flag that avoids a second cache of the image's pages. A file system without direct I/O ignores the flag."""
_CONFIG = struct.Struct("=II 5Q 4I 64s 64s 32s 2Q 64x")  # struct loop_config of linux/loop.h
_TRIES = 64

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
# discard: space that the sandbox frees becomes free on the host. noinit_itable: the inode table is a hole of the image
# and reads as zeros.
_OPTIONS = b"discard,noinit_itable,errors=remount-ro"


def try_lock(image: int, *, shared: bool = False) -> bool:
    """Try to lock the image for this open file, without waiting. Return False if a loop device or another open file has
    the lock; with `shared`, only if it is locked for writing. Raises OSError.
    """
    try:
        fcntl.flock(image, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def mount_image(image: int, place: Path) -> None:
    """Mount the ext4 image with nosuid and nodev. The image must be locked and open for writing. Afterwards only the
    mount holds the device and the lock.

    Raises OSError; nothing is then left behind.
    """
    device, path = _attach(image, place, _AUTOCLEAR | _DIRECT_IO)
    try:
        check(
            LIBC.mount(os.fsencode(path), os.fsencode(place), b"ext4", ctypes.c_ulong(NOSUID | NODEV), _OPTIONS), path
        )
    finally:
        os.close(device)


def attach_read_only(image: int, label: Path) -> int:
    """Return the descriptor of a read-only loop device over the image, which must be locked. The device keeps the lock.
    The kernel frees the device when the descriptor is closed and the last mount is removed. Raises OSError.
    """
    return _attach(image, label, _AUTOCLEAR | _DIRECT_IO | _READ_ONLY)[0]


def mount_read_only(device: int) -> int:
    """Return the descriptor of a new detached mount (in no mount table) of a device. Raises OSError."""
    with open_context("ext4") as context:
        context.set("source", os.readlink(f"/proc/self/fd/{device}"))
        context.set("ro")
        return context.mount(NOSUID | NODEV | RDONLY)


def unmount(place: Path) -> bool:
    """Remove every mount at `place` now. A container that uses the file system keeps its own mount. Returns False if
    there was no mount. Raises OSError.
    """
    was_mounted = False
    while True:
        try:
            check(LIBC.umount2(os.fsencode(place), _MNT_DETACH | _UMOUNT_NOFOLLOW), str(place))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return was_mounted
            raise
        was_mounted = True


def _attach(image: int, place: Path, flags: int) -> tuple[int, str]:
    """Open a loop device over the image. The kernel frees the device when it is closed here and not
    mounted anywhere.
    """
    label = os.fsencode(place)[-63:]
    config = _CONFIG.pack(image, 0, 0, 0, 0, 0, 0, 0, 0, 0, flags, label, b"", b"", 0, 0)
    for _ in range(_TRIES):
        path = f"/dev/loop{_find_free()}"
        device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, _LOOP_CONFIGURE, config)
        except OSError as error:
            os.close(device)
            if error.errno == errno.EBUSY:  # another process was quicker
                continue
            raise OSError(error.errno, error.strerror, path) from None
        return device, path
    raise OSError(errno.EBUSY, "other processes took every free loop device", "/dev/loop-control")


def _find_free() -> int:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    finally:
        os.close(control)
