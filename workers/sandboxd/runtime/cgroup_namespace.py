"""The control group namespace of sandboxd. With control groups of version 2, the engine gives each container its own
namespace. From there the kernel moves no process into the group of a sandbox.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

from toolcrew.workers.sandboxd.disks.mount_api import LIBC, check

HOST_NAMESPACE: Final = Path("/run/host-cgroupns")
"""Path at which a container of sandboxd has the host's namespace (/proc/1/ns/cgroup of the host)."""
_OWN_NAMESPACE: Final = Path("/proc/thread-self/ns/cgroup")
_HOST_INODE: Final = 0xEFFFFFFB
"""Inode of the first control group namespace (PROC_CGROUP_INIT_INO of the kernel)."""
_CLONE_NEWCGROUP: Final = 0x02000000


def is_in_host_namespace() -> bool:
    return _OWN_NAMESPACE.stat().st_ino == _HOST_INODE


def enter_host_namespace(place: Path = HOST_NAMESPACE) -> None:
    """Move this thread into the host's namespace, if it is at `place`. Call this before other threads start: they
    inherit the namespace. Raises OSError if `place` is not such a namespace.
    """
    if not place.exists() or place.samefile(_OWN_NAMESPACE):
        return
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Without SYS_ADMIN the engine starts the sandboxes, and `find_obstacle` (oci.py) gives the reason.
        with contextlib.suppress(PermissionError):
            check(LIBC.setns(fd, _CLONE_NEWCGROUP), str(place))
    finally:
        os.close(fd)
