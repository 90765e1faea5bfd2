"""What the standard library does not offer: prctl, openat2, and the title of a process."""

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
_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08

_LIBC = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def set_process_flag(option: int, value: int) -> None:
    """Call prctl with one argument. Raises OSError."""
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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
    fd = int(
        _LIBC.syscall(ctypes.c_long(_SYS_OPENAT2), ctypes.c_long(dir_fd), path, ctypes.byref(how), ctypes.c_size_t(24))
    )
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd
