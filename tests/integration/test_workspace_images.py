"""Workspaces as images in real containers: the kernel's limits from inside, and files that outlive their container."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.sandboxd.containers import Box, build_config, open_box
from tests.support.sandboxd.workspace_harness import (
    MIB,
    assert_nothing_left_mounted,
    is_in_use,
    mounts_below,
    open_images,
)
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.base import WorkspaceSize
from toolcrew.workers.sandboxd.disks.image import ImageWorkspace, ImageWorkspaces
from toolcrew.workers.sandboxd.runtime.hardening import SandboxLimits

SIZE = WorkspaceSize(8 * MIB, 300)
pytestmark = pytest.mark.stack
LIMITS = SandboxLimits(workspace_bytes=64 * MIB)  # limit of one file; larger than the image, so that the image refuses


@pytest.fixture
def images(tmp_path: Path) -> Iterator[ImageWorkspaces]:
    yield open_images(tmp_path)
    assert_nothing_left_mounted(tmp_path)


@contextlib.contextmanager
def open_box_with(api: APIClient, bind: str) -> Iterator[Box]:
    """Run a container of the profile with this path as its workspace."""
    host = build_config(api, limits=LIMITS)["HostConfig"]
    mount = {
        "Type": "bind",
        "Source": bind,
        "Target": "/workspace",
        "BindOptions": {"Propagation": "rprivate", "NonRecursive": True},
    }
    tmpfs = {place: options for place, options in host["Tmpfs"].items() if place != "/workspace"}
    with open_box(api, limits=LIMITS, changes={"Mounts": [mount], "Tmpfs": tmpfs}) as box:
        yield box


@contextlib.asynccontextmanager
async def open_started(api: APIClient, workspace: ImageWorkspace) -> AsyncIterator[Box]:
    """Yield a running container that alone has the workspace. The mount of this process is already removed."""
    with contextlib.ExitStack() as stack:
        async with workspace.mounted() as mount:
            box = stack.enter_context(open_box_with(api, f"{mount.bind}/files/workspace"))
        yield box


async def test_a_full_workspace_image_reports_no_space_and_its_files_outlive_the_container(
    engine: APIClient, images: ImageWorkspaces, tmp_path: Path
) -> None:
    workspace = await images.make("one", SIZE)
    async with open_started(engine, workspace) as box:
        assert mounts_below(tmp_path) == []
        assert is_in_use(tmp_path / "one" / "disk")

        whole = box.run(f"head -c {SIZE.bytes} /dev/zero > /workspace/whole && sync /workspace/whole")
        more = box.run("head -c 1000000 /dev/zero > /workspace/more")
        assert (whole.status, more.status) == (0, 1), whole.output
        assert "No space left on device" in more.output
        box.run("rm -f /workspace/*; echo kept > /workspace/kept")

        made = box.run(f"for i in $(seq {SIZE.inodes - 1}); do : > /workspace/f$i || exit 1; done")
        assert made.status == 0, made.output
        many = box.run("for i in $(seq 100); do : > /workspace/g$i || exit 1; done")
        assert "No space left on device" in many.output
        box.run("rm -f /workspace/f* /workspace/g*")

        options = box.run("grep ' /workspace ' /proc/self/mountinfo").output
        assert "nosuid,nodev" in options

    async with open_started(
        engine, workspace
    ) as box:  # at once: the mount waits for the unfinished removal of the first container
        assert box.run("cat /workspace/kept; id -u; ls -A /workspace").output.split() == ["kept", "1000", "kept"]

    await workspace.remove()
    assert not (tmp_path / "one").exists()


async def test_a_workspace_in_use_by_a_container_is_not_mounted_again(
    engine: APIClient, images: ImageWorkspaces, tmp_path: Path
) -> None:
    made = await images.make("one", SIZE)
    again = replace(made, release_s=0.1)
    async with open_started(engine, made) as box:
        with pytest.raises(SandboxUnavailable, match="still mounted"):
            async with again.mounted():
                pass

        assert box.run("echo still > /workspace/file && cat /workspace/file").output.strip() == "still"


async def test_a_workspace_deleted_under_a_running_container_stays_usable_until_its_end(
    engine: APIClient, images: ImageWorkspaces, tmp_path: Path
) -> None:
    workspace = await images.make("one", SIZE)
    async with open_started(engine, workspace) as box:
        assert await images.sweep(set()) == 1

        assert box.run("echo still > /workspace/file && cat /workspace/file").output.strip() == "still"


async def test_a_container_without_its_workspace_mount_cannot_write(engine: APIClient, images: ImageWorkspaces) -> None:
    """Aim: fill the host's disk from a sandbox whose workspace is not mounted."""
    workspace = await images.make("one", SIZE)
    async with workspace.mounted() as mount:
        bind = mount.bind or ""

    with open_box_with(engine, bind) as box:
        assert box.run("echo x > /workspace/file").status != 0
