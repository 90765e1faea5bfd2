"""The mount API of Linux 5.2 and later: detached mounts, which are descriptors outside any mount table."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_CLOEXEC = 1
RDONLY: Final = 1
NOSUID: Final = 2
NODEV: Final = 4

LIBC: Final = ctypes.CDLL(None, use_errno=True)


class MountContext:
    """The parameters of a new file system. All methods raise OSError."""

    def __init__(self, fd: int, kind: str) -> None:
        self._fd = fd
        self._kind = kind

    def set(self, key: str, value: str | None = None) -> None:
        """Set a parameter to a text, or as a flag."""
        self._configure(_SET_FLAG if value is None else _SET_STRING, key, value)

    def mount(self, attributes: int) -> int:
        """Return the descriptor of the mount."""
        self._configure(_CREATE, None)
        return check(LIBC.syscall(_FSMOUNT, self._fd, _CLOEXEC, attributes), self._kind)

    def _configure(self, command: int, key: str | None, value: str | None = None) -> None:
        arguments = (key.encode() if key else None, value.encode() if value else None)
        check(LIBC.syscall(_FSCONFIG, self._fd, command, *arguments, 0), f"{self._kind}, {key or 'create'}")


@contextmanager
def open_context(kind: str) -> Iterator[MountContext]:
    """Yield the parameters of a new file system of a kind, such as `ext4`. Raises OSError."""
    fd = check(LIBC.syscall(_FSOPEN, kind.encode(), _CLOEXEC), kind)
    try:
        yield MountContext(fd, kind)
    finally:
        os.close(fd)


def check(result: int, action: str) -> int:
    """Return the result of a system call. Raises OSError for a negative one."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), action)
    return result
