"""Shared parts of workspace tests: kinds of workspaces in a folder, the kernel's mounts, and code that runs as
another user.
"""

import functools
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stack.stack import missing
from toolcrew.workers.sandboxd.disks.base import WorkspaceSize
from toolcrew.workers.sandboxd.disks.choice import find_obstacle
from toolcrew.workers.sandboxd.disks.image import ImageWorkspaces
from toolcrew.workers.sandboxd.disks.loop_mounts import try_lock

MIB = 1024 * 1024
SMALL = WorkspaceSize(4 * MIB, 512)


@functools.cache
def _obstacle() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        return find_obstacle(Path(folder), 0)


def require_images() -> None:
    """Skip the test if images cannot be mounted. Where everything must be present, fail the test instead."""
    obstacle = _obstacle()
    if obstacle is not None:
        missing(f"no workspaces of the kind image: {obstacle}")


def open_images(folder: Path, host_free_bytes: int = 0) -> ImageWorkspaces:
    require_images()
    return ImageWorkspaces(folder, host_free_bytes)


def mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith(f"{folder}/")]


def loop_devices_below(folder: Path) -> list[str]:
    """Return the files below `folder` that a loop device has open."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            text = backing.read_text().strip()
        except OSError:  # the file was removed in the meantime
            continue
        found += [text] if text.startswith(f"{folder}/") else []
    return found


def assert_nothing_left_mounted(folder: Path, within_s: float = 10.0) -> None:
    """Fail if a mount below `folder` exists now, or if a loop device remains at the deadline. The kernel frees a loop
    device some time after the last unmount and sends no event.
    """
    assert mounts_below(folder) == []
    until = time.monotonic() + within_s
    while loop_devices_below(folder) and time.monotonic() < until:
        time.sleep(0.002)
    assert loop_devices_below(folder) == []


def is_in_use(image: Path) -> bool:
    """Return whether a loop device or another process holds the image's lock."""
    fd = os.open(image, os.O_RDONLY)
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def run_as(uid: int, work: Callable[[], None]) -> None:
    """Run `work` in a child process of that user. A failure fails the test."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            work()
            status = 0
        except BaseException:  # noqa: BLE001  # the child's copy of pytest must never continue from here
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
