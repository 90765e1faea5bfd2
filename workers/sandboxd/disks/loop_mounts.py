"""Mounts of file system images. Each mount has one loop device, which the kernel frees with the last mount.

Invariant: a file never has two loop devices, because two devices would corrupt the file. The lock of an image
(`try_lock`) belongs to its open file, and the loop device keeps this file open. So the lock is held exactly as long
as the device exists: in any mount namespace, after the death of any process, and after the image was deleted or
renamed. Only the holder of the lock creates a device.
"""

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_AUTOCLEAR = 4
_DIRECT_IO = 16
"""Flag that avoids a second cache of the image's pages. A file system without direct I/O ignores the flag."""
_CONFIG = struct.Struct("=II 5Q 4I 64s 64s 32s 2Q 64x")  # struct loop_config of linux/loop.h
_TRIES = 64

_MS_NOSUID = 2
_MS_NODEV = 4
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
# discard: space that the sandbox frees becomes free on the host. noinit_itable: the inode table is a hole of the image
# and reads as zeros.
_OPTIONS = b"discard,noinit_itable,errors=remount-ro"

_LIBC = ctypes.CDLL(None, use_errno=True)


def try_lock(image: int) -> bool:
    """Lock the image for this open file without waiting. Returns False if a loop device or another open file has the
    lock. Raises OSError.
    """
    try:
        fcntl.flock(image, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def mount_image(image: int, place: Path) -> None:
    """Mount the ext4 image with nosuid and nodev. The image must be locked and open for writing. Afterwards only the
    mount holds the device and the lock.

    Raises OSError; nothing is then left behind.
    """
    device, path = _attach(image, place)
    try:
        _check(
            _LIBC.mount(
                os.fsencode(path), os.fsencode(place), b"ext4", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), _OPTIONS
            ),
            path,
        )
    finally:
        os.close(device)


def unmount(place: Path) -> bool:
    """Remove every mount at `place` now. A container that uses the file system keeps it. Returns False if there was
    no mount. Raises OSError.
    """
    was_mounted = False
    while True:
        try:
            _check(_LIBC.umount2(os.fsencode(place), _MNT_DETACH | _UMOUNT_NOFOLLOW), str(place))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return was_mounted
            raise
        was_mounted = True


def _attach(image: int, place: Path) -> tuple[int, str]:
    """Open a loop device over the image. The kernel frees the device when it is closed here and not
    mounted anywhere.
    """
    label = os.fsencode(place)[-63:]
    config = _CONFIG.pack(image, 0, 0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR | _DIRECT_IO, label, b"", b"", 0, 0)
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


def _check(result: int, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
