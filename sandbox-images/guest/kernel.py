"""What the standard library does not offer: prctl, openat2, inotify, the title and the descriptors of a process."""

from __future__ import annotations

import ctypes
import errno
import os

WRITE_LATER = (errno.EAGAIN, errno.ENOMEM)
"""Error numbers of a write that may succeed later. EAGAIN: the pipe is full.

ENOMEM: the sandbox has no memory for the pipe's next page, until the OOM killer has ended a program.
"""
PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
_MAX_FDS = 4096
_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08

_LIBC = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def set_process_flag(option: int, value: int) -> None:
    """Call prctl with one argument. Raises OSError."""
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def can_trace() -> bool:
    """Return whether the filter of system calls allows ptrace. The call has an unknown request, and does nothing."""
    return _LIBC.ptrace(ctypes.c_long(-1), 0, None, None) == -1 and ctypes.get_errno() != errno.EPERM


def set_title(name: bytes, arguments: bytes) -> None:
    """Replace the name and the command line of this process, which other processes read in /proc. Children inherit
    both. The command line becomes `name`, a blank and `arguments`.

    The command line stays as it is when the kernel does not report where it is, or when it is shorter.
    """
    title = (name + b" " + arguments).rstrip()
    _LIBC.prctl(_PR_SET_NAME, name, 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:
        # The name in brackets may contain blanks. After its bracket, the fields begin with the third one.
        fields = file.read().rpartition(b")")[2].split()
    start, end = (int(fields[48 - 3]), int(fields[49 - 3])) if len(fields) > 49 - 3 else (0, 0)
    if start and end - start > len(title):
        # The kernel reads the arguments from this memory. The bytes after the title must be zero.
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def open_beneath(dir_fd: int, path: bytes, flags: int) -> int:
    """Open `path` below the directory `dir_fd` and return a descriptor. The path cannot lead out of the directory.
    Raises OSError.

    Errors: EXDEV: the path leads out of `dir_fd` or contains an absolute link. ENOSYS or EPERM: the kernel or its
    filter does not allow openat2.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    arguments = (ctypes.c_long(dir_fd), path, ctypes.byref(how), ctypes.c_size_t(24))
    return _check(_LIBC.syscall(ctypes.c_long(_SYS_OPENAT2), *arguments))


def close_descriptors_except(*kept_fds: int | None) -> None:
    """Close every descriptor from 3 upwards, except for these."""
    low = 2
    for fd in sorted(fd for fd in kept_fds if fd is not None and fd > low):
        os.closerange(low + 1, fd)
        low = fd
    os.closerange(low + 1, _MAX_FDS)


def open_inotify() -> int:
    """Return a new inotify descriptor. Raises OSError."""
    return _check(_LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))


def watch_folder(inotify: int, path: bytes, mask: int) -> int:
    """Add a watch and return its number. A folder that is watched already keeps its number. Raises OSError."""
    return _check(_LIBC.inotify_add_watch(inotify, path, ctypes.c_uint32(mask)))


def unwatch_folder(inotify: int, watch: int) -> None:
    """Remove a watch. A watch that the kernel has removed is ignored."""
    _LIBC.inotify_rm_watch(inotify, watch)


def _check(result: int) -> int:
    """Return the result of a call. Raises OSError when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
