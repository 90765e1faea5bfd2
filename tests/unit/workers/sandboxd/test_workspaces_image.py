"""Workspaces as ext4 images on real mounts: sizes, the hand-over, and the state after a killed process or a crashed
host.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.sandboxd.workspace_harness import (
    MIB,
    SMALL,
    assert_nothing_left_mounted,
    is_in_use,
    loop_devices_below,
    mounts_below,
    open_images,
)
from tests.support.stack.waiting import SOON_S, until
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks import image
from toolcrew.workers.sandboxd.disks.base import WorkspaceMount, WorkspaceSize
from toolcrew.workers.sandboxd.disks.choice import find_obstacle
from toolcrew.workers.sandboxd.disks.ext4 import find_tool, is_clean
from toolcrew.workers.sandboxd.disks.image import ImageWorkspaces
from toolcrew.workers.sandboxd.disks.loop_mounts import unmount

ROUNDS = 40


@pytest.fixture
def images(tmp_path: Path) -> Iterator[ImageWorkspaces]:
    """Unmount all images at the end, whatever the test did."""
    yield open_images(tmp_path)
    assert_nothing_left_mounted(tmp_path)


async def wait_until_released(image: Path) -> None:
    await until(lambda: not is_in_use(image), SOON_S)


def flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def change(image: Path, command: str) -> None:
    """Change the image below the file system, while no process has it mounted."""
    subprocess.run(
        [find_tool("debugfs") or "debugfs", "-w", "-R", command, str(image)], check=True, capture_output=True
    )


def files_below(mount: WorkspaceMount) -> list[Path]:
    return [path for path in Path(mount.bind or "").rglob("*") if path.is_file()]


def find_fault(folder: Path) -> None:
    """Report an error from the kernel in the file system that is mounted below the folder."""
    (mounted,) = mounts_below(folder)
    fault = Path("/sys/fs/ext4", Path(mounted.split(" - ")[1].split()[1]).name, "trigger_fs_error")
    if not fault.exists():
        pytest.skip("this kernel cannot be made to find a fault")
    fault.write_text("1")


def is_in_order(image: Path) -> bool:
    with image.open("rb") as file:
        return is_clean(file.fileno())


@pytest.mark.parametrize(
    "size",
    [
        WorkspaceSize(MIB, 256),
        WorkspaceSize(MIB, 65_536),
        WorkspaceSize(3 * MIB + 17, 1_000),
        WorkspaceSize(64 * MIB, 65_536),
        WorkspaceSize(256 * MIB, 65_536),
        WorkspaceSize(20 * 1024 * MIB, 1_000_000),
    ],
    ids=lambda size: f"{size.bytes}-{size.inodes}",
)
async def test_image_size_is_a_limit_and_the_file_is_sparse(
    images: ImageWorkspaces, tmp_path: Path, size: WorkspaceSize
) -> None:
    workspace = await images.make("one", size)

    async with workspace.mounted() as mount:
        stats = os.statvfs(mount.bind or "")

    assert size.bytes <= stats.f_bavail * stats.f_frsize <= size.bytes * 1.05
    assert size.inodes <= stats.f_favail <= size.inodes * 1.05
    assert (tmp_path / "one" / "disk").stat().st_blocks * 512 < MIB
    await wait_until_released(tmp_path / "one" / "disk")


async def test_file_of_the_full_size_fits_and_freed_space_is_returned(images: ImageWorkspaces, tmp_path: Path) -> None:
    workspace = await images.make("one", WorkspaceSize(32 * MIB, 256))
    image = tmp_path / "one" / "disk"

    async with workspace.mounted() as mount:
        file = Path(mount.bind or "") / "file"
        file.write_bytes(b"x" * 32 * MIB)
        flush(file)
        full = image.stat().st_blocks * 512
        with pytest.raises(OSError, match="No space left"):
            (file.parent / "more").write_bytes(b"x" * MIB)
        file.unlink()
        (file.parent / "more").unlink()

    await wait_until_released(image)
    assert full >= 32 * MIB
    assert image.stat().st_blocks * 512 < MIB


async def test_mount_waits_until_the_image_is_released(images: ImageWorkspaces, tmp_path: Path) -> None:
    created = await images.make("one", SMALL)
    workspace = replace(created, release_s=0.05)
    async with created.mounted() as mount:
        open_folder = os.open(mount.bind or "", os.O_RDONLY)  # as a container's mount does, it outlives ours

    with pytest.raises(SandboxUnavailable, match="still mounted"):
        async with workspace.mounted():
            pass
    os.close(open_folder)

    async with workspace.mounted() as mount:
        assert mount.bind is not None
    await wait_until_released(tmp_path / "one" / "disk")


async def test_image_is_not_mounted_twice_concurrently(images: ImageWorkspaces, tmp_path: Path) -> None:
    """Two loop devices over one image would corrupt it."""
    workspace = await images.make("one", SMALL)

    async with workspace.mounted():
        with pytest.raises(SandboxUnavailable, match="another container"):
            async with workspace.mounted():
                pass
        assert len(loop_devices_below(tmp_path)) == 1
    await wait_until_released(tmp_path / "one" / "disk")


async def test_cancelled_mount_leaves_no_mount(images: ImageWorkspaces, tmp_path: Path) -> None:
    workspace = await images.make("one", SMALL)

    async def hold() -> None:
        async with workspace.mounted():
            await asyncio.Event().wait()

    for pauses in range(0, 40, 3):
        holding = asyncio.ensure_future(hold())
        for _ in range(pauses):
            await asyncio.sleep(0.0005)
        holding.cancel()
        await asyncio.wait([holding])
        assert mounts_below(tmp_path) == []
    await wait_until_released(tmp_path / "one" / "disk")


@pytest.mark.parametrize("step", ["attach_read_only", "mount_read_only"])
async def test_cancelled_layer_mount_leaves_no_loop_device(
    images: ImageWorkspaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    await images.make("layer", SMALL)
    has_begun, may_end = threading.Event(), threading.Event()
    run: Callable[..., int] = getattr(image, step)

    def run_late(*arguments: object) -> int:
        has_begun.set()
        assert may_end.wait(SOON_S)
        return run(*arguments)

    monkeypatch.setattr(image, step, run_late)
    mounting = asyncio.ensure_future(images.mount_layer("layer", SOON_S))
    await asyncio.to_thread(has_begun.wait, SOON_S)
    mounting.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await mounting

    await images.remove("layer")

    await until(lambda: loop_devices_below(tmp_path) == [], SOON_S)


async def test_mount_point_without_a_mount_is_read_only(images: ImageWorkspaces, tmp_path: Path) -> None:
    """The attacker's aim: to fill the host's disk from a sandbox whose workspace is not mounted."""
    await images.make("one", SMALL)

    place = (tmp_path / "one" / "mount").stat()

    assert (place.st_uid, place.st_mode & 0o777) == (0, 0o500)


HOLDER = """
import asyncio, sys
from pathlib import Path
from toolcrew.workers.sandboxd.disks.image import ImageWorkspaces
from toolcrew.workers.sandboxd.disks.base import WorkspaceSize

async def main():
    workspace = ImageWorkspaces(Path(sys.argv[1]), 0).find("one", WorkspaceSize(4194304, 512))
    async with workspace.mounted() as mount:
        (Path(mount.bind) / "file").write_text("kept")
        print("mounted", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.contextmanager
def kill_mount_holder(folder: Path) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"mounted\n"
        holder.send_signal(signal.SIGKILL)
    assert mounts_below(folder) != []
    yield


async def test_files_of_a_killed_sandboxd_mount_are_kept(images: ImageWorkspaces, tmp_path: Path) -> None:
    await images.make("one", SMALL)
    with kill_mount_holder(tmp_path):
        workspace = open_images(tmp_path).find("one", SMALL)

    assert workspace is not None
    assert mounts_below(tmp_path) == []
    async with workspace.mounted() as mount:
        assert (Path(mount.bind or "") / "file").read_text() == "kept"
    await wait_until_released(tmp_path / "one" / "disk")


async def test_mount_of_a_killed_sandboxd_is_removed_by_the_sweep(images: ImageWorkspaces, tmp_path: Path) -> None:
    await images.make("one", SMALL)
    with kill_mount_holder(tmp_path):
        assert await open_images(tmp_path).sweep(set()) == 1

    assert not (tmp_path / "one").exists()


async def test_unfinished_template_is_removed_at_the_next_start(images: ImageWorkspaces, tmp_path: Path) -> None:
    work_folder = tmp_path / ".work-of-before"
    work_folder.mkdir()
    mount_memory(work_folder / "mount")

    assert find_obstacle(tmp_path, 0) is None

    assert not work_folder.exists()


def mount_memory(place: Path) -> None:
    """Mount a disk of 2 MiB."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)], check=True)


async def test_image_is_checked_after_a_host_crash(images: ImageWorkspaces, tmp_path: Path) -> None:
    workspace = await images.make("one", SMALL)
    image, damaged = tmp_path / "one" / "disk", tmp_path / "as-the-crash-left-it"
    async with workspace.mounted() as mount:
        file = Path(mount.bind or "") / "file"
        file.write_text("kept")
        flush(file)
        flush(file.parent)
        shutil.copyfile(image, damaged)
    await wait_until_released(image)
    assert is_in_order(image)
    assert not is_in_order(damaged)
    damaged.rename(image)

    async with workspace.mounted() as mount:
        assert (Path(mount.bind or "") / "file").read_text() == "kept"
        assert sorted(os.listdir(mount.bind or "")) == ["file", "files"]  # a repair adds nothing
    await wait_until_released(image)


async def test_files_found_by_a_repair_belong_to_the_sandbox_user(images: ImageWorkspaces, tmp_path: Path) -> None:
    workspace = await images.make("one", SMALL)
    image = tmp_path / "one" / "disk"
    async with workspace.mounted() as mount:
        (Path(mount.bind or "") / "file").write_text("kept")
    await wait_until_released(image)
    # The state after a crash: the file reached the disk, and its name did not.
    change(image, "unlink file")
    change(image, "set_super_value state 0")

    async with workspace.mounted() as mount:
        (file,) = files_below(mount)
        assert file.parent.parent == Path(mount.bind or "") / "files/workspace"
        assert (file.parent.name[:10], file.parent.stat().st_uid, file.read_text()) == ("lost+found", 1000, "kept")
    await wait_until_released(image)


async def test_image_that_became_read_only_is_repaired(images: ImageWorkspaces, tmp_path: Path) -> None:
    workspace = await images.make("one", SMALL)
    async with workspace.mounted() as mount:
        find_fault(tmp_path)
        with pytest.raises(OSError, match="Read-only file system"):
            (Path(mount.bind or "") / "file").write_text("x")
    await wait_until_released(tmp_path / "one" / "disk")

    async with workspace.mounted() as mount:
        (Path(mount.bind or "") / "file").write_text("x")
    await wait_until_released(tmp_path / "one" / "disk")


@pytest.mark.parametrize(
    ("start", "expected"),
    [(0, "not an ext4 image"), (1024 + 0x28, "cannot be mounted")],
    ids=["all of it", "files a group"],
)
async def test_damaged_image_is_refused(images: ImageWorkspaces, tmp_path: Path, start: int, expected: str) -> None:
    workspace = await images.make("one", SMALL)
    with (tmp_path / "one" / "disk").open("r+b") as file:
        file.seek(start)
        file.write(bytes(8192 if start == 0 else 4))

    with pytest.raises(SandboxUnavailable, match=expected):
        async with workspace.mounted():
            pass


@pytest.mark.parametrize("trick", ["symlink", "hard link", "folder", "gone"])
async def test_replaced_image_file_is_not_mounted(images: ImageWorkspaces, tmp_path: Path, trick: str) -> None:
    workspace = await images.make("one", SMALL)
    image = tmp_path / "one" / "disk"
    if trick == "hard link":
        os.link(image, tmp_path / "other")
    else:
        image.rename(tmp_path / "other")
    if trick == "symlink":
        image.symlink_to(tmp_path / "other")
    if trick == "folder":
        image.mkdir()

    with pytest.raises(SandboxUnavailable):
        async with workspace.mounted():
            pass


async def test_many_workspaces_leave_no_mount_loop_device_or_file(images: ImageWorkspaces, tmp_path: Path) -> None:
    await (await images.make("first", SMALL)).remove()
    before = sorted(os.listdir(tmp_path))

    async def live(number: int) -> None:
        workspace = await images.make(f"round-{number}", SMALL)
        async with workspace.mounted() as mount:
            (Path(mount.bind or "") / "file").write_text("x")
        await workspace.remove()

    for start in range(0, ROUNDS, 5):
        await asyncio.gather(*(live(number) for number in range(start, start + 5)))

    assert sorted(os.listdir(tmp_path)) == before
    await asyncio.to_thread(assert_nothing_left_mounted, tmp_path)


async def test_nearly_full_host_refuses_a_new_workspace(images: ImageWorkspaces, tmp_path: Path) -> None:
    full = ImageWorkspaces(tmp_path, host_free_bytes=1 << 60)

    with pytest.raises(SandboxUnavailable, match="free space on the host"):
        await full.make("one", SMALL)

    assert not (tmp_path / "one").exists()


async def test_full_host_disk_is_reported_and_leaves_nothing(images: ImageWorkspaces, tmp_path: Path) -> None:
    small = tmp_path / "disk"
    mount_memory(small)
    try:
        workspaces = ImageWorkspaces(small / "workspaces", 0)
        await (await workspaces.make("first", SMALL)).remove()
        _fill(small / "ballast")

        with pytest.raises(SandboxUnavailable, match="the host's disk is full"):
            await workspaces.make("one", SMALL)

        assert workspaces.find("one", SMALL) is None
    finally:
        unmount(small)


def _fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as ballast:  # until there is no more room
        while True:
            ballast.write(bytes(4096))
