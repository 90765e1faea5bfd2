"""What tests of workspaces stand on: kinds of them in a folder, what the kernel has mounted, another user."""

import functools
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stack import missing
from workers.sandboxd.disks.base import WorkspaceSize
from workers.sandboxd.disks.choice import find_obstacle
from workers.sandboxd.disks.image import ImageWorkspaces
from workers.sandboxd.disks.loop_mounts import try_lock

MIB = 1024 * 1024
SMALL = WorkspaceSize(4 * MIB, 512)


@functools.cache
def _obstacle() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        return find_obstacle(Path(folder), 0)


def require_images() -> None:
    """Skip with the reason where images cannot be mounted; where everything must be there, fail."""
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
    """Files below `folder` that a loop device has open."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            text = backing.read_text().strip()
        except OSError:  # it went meanwhile
            continue
        found += [text] if text.startswith(f"{folder}/") else []
    return found


def assert_nothing_left_mounted(folder: Path, within_s: float = 10.0) -> None:
    """No mount below `folder` now; no loop device soon: the kernel frees one after the last mount, and tells nobody."""
    assert mounts_below(folder) == []
    until = time.monotonic() + within_s
    while loop_devices_below(folder) and time.monotonic() < until:
        time.sleep(0.002)
    assert loop_devices_below(folder) == []


def is_in_use(image: Path) -> bool:
    """Whether a loop device, or somebody else, has the image's lock."""
    fd = os.open(image, os.O_RDONLY)
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def run_as(uid: int, work: Callable[[], None]) -> None:
    """Run `work` in a child of that user; its failure is the test's."""
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
        except BaseException:  # noqa: BLE001  # whatever it is, the parent's copy of pytest must not run on in here
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
