"""The contract of every kind of workspace towards sandboxd."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sandboxd.workspace_harness import SMALL, mounts_below, open_images
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.base import FILES, FOLDERS, Workspaces
from toolcrew.workers.sandboxd.disks.folder import FolderWorkspaces
from toolcrew.workers.sandboxd.disks.tmpfs import TmpfsWorkspaces

Open = Callable[[], Workspaces]
"""Opens workspaces in the same folder each time, as a new sandboxd does."""
KEPT = ("image", "folder")


def opener(kind: str, folder: Path) -> Open:
    if kind == "image":
        return lambda: open_images(folder)
    return (lambda: FolderWorkspaces(folder, 0)) if kind == "folder" else TmpfsWorkspaces


@pytest.fixture(params=["image", "folder", "tmpfs"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(request.param, tmp_path / "workspaces")


@pytest.fixture(params=KEPT)
def persistent(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(request.param, tmp_path / "workspaces")


async def write(workspaces: Workspaces, name: str, text: str) -> None:
    workspace = await workspaces.make(name, SMALL)
    async with workspace.mounted() as mount:
        assert mount.bind is not None
        (Path(mount.bind) / "file").write_text(text)


async def test_a_workspace_has_its_name_size_and_kind(opened: Open) -> None:
    workspaces = opened()

    workspace = await workspaces.make("one", SMALL)

    assert (workspace.name, workspace.size, workspace.kind) == ("one", SMALL, workspaces.kind)


async def test_only_a_workspace_that_outlives_its_container_is_a_host_path(opened: Open) -> None:
    workspace = await opened().make("one", SMALL)

    async with workspace.mounted() as mount:
        assert (mount.bind is not None) == workspace.outlives_container


async def test_a_workspace_is_hashable(opened: Open) -> None:
    workspace = await opened().make("one", SMALL)

    assert {workspace} == {workspace}


async def test_a_new_workspace_is_empty_and_belongs_to_the_sandbox_user(persistent: Open) -> None:
    workspace = await persistent().make("one", SMALL)

    async with workspace.mounted() as mount:
        assert mount.bind is not None
        files = Path(mount.bind) / FILES
        owners = {name: os.stat(files / name).st_uid for name in os.listdir(files)}
        assert owners == {"workspace": 1000, "tmp": 0, "home": 1000}
        assert [stat.S_IMODE(os.stat(files / name).st_mode) for name in FOLDERS] == [0o755, 0o1777, 0o700]
        assert [os.listdir(files / name) for name in FOLDERS] == [[], [], []]


async def test_a_new_sandboxd_finds_a_workspace_by_name_and_size(opened: Open) -> None:
    workspace = await opened().make("one", SMALL)

    found = opened().find("one", SMALL)

    assert found == workspace


async def test_files_are_present_at_the_next_mount(persistent: Open) -> None:
    await write(persistent(), "one", "kept")

    found = persistent().find("one", SMALL)

    assert found is not None
    async with found.mounted() as mount:
        assert (Path(mount.bind or "") / "file").read_text() == "kept"


async def test_a_removed_workspace_is_not_found_and_can_be_removed_again(persistent: Open) -> None:
    workspaces = persistent()
    workspace = await workspaces.make("one", SMALL)

    await workspace.remove()
    await workspace.remove()

    assert workspaces.find("one", SMALL) is None


async def test_concurrent_remove_and_sweep_of_a_workspace_raise_no_error(persistent: Open) -> None:
    workspaces = persistent()
    for round_ in range(10):
        workspace = await workspaces.make(f"w{round_}", SMALL)
        async with workspace.mounted() as mount:
            assert mount.bind is not None
            for number in range(100):
                (Path(mount.bind) / str(number)).touch()
        await asyncio.gather(workspace.remove(), workspaces.sweep(set()), workspace.remove(), workspaces.sweep(set()))
        assert workspaces.find(workspace.name, SMALL) is None


async def test_the_name_of_a_removed_workspace_can_be_reused_and_is_empty(persistent: Open) -> None:
    workspaces = persistent()
    await write(workspaces, "one", "secret")
    found = workspaces.find("one", SMALL)
    assert found is not None
    await found.remove()

    workspace = await workspaces.make("one", SMALL)

    async with workspace.mounted() as mount:
        assert os.listdir(mount.bind or "") == [FILES]


async def test_a_name_in_use_is_refused_and_its_files_stay(persistent: Open) -> None:
    workspaces = persistent()
    await write(workspaces, "one", "kept")

    with pytest.raises(SandboxUnavailable, match="choose another name"):
        await workspaces.make("one", SMALL)

    assert workspaces.find("one", SMALL) is not None


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp", ".templates", "a\n", "ä", "x" * 129])
async def test_a_name_that_leads_outside_the_folder_is_refused(persistent: Open, name: str) -> None:
    workspaces = persistent()

    with pytest.raises(ValueError, match="is not a valid workspace name"):
        await workspaces.make(name, SMALL)
    with pytest.raises(ValueError, match="is not a valid workspace name"):
        workspaces.find(name, SMALL)


async def test_a_sweep_deletes_only_files_without_an_owner(persistent: Open) -> None:
    await write(persistent(), "owned", "kept")
    await write(persistent(), "stray", "gone")
    workspaces = persistent()

    assert await workspaces.sweep({"owned"}) == 1

    assert workspaces.find("owned", SMALL) is not None
    assert workspaces.find("stray", SMALL) is None


async def test_a_sweep_of_a_missing_folder_finds_nothing(opened: Open) -> None:
    assert await opened().sweep(set()) == 0


async def test_a_sweep_spares_workspaces_created_meanwhile(persistent: Open) -> None:
    workspaces = persistent()
    await write(workspaces, "stray", "gone")

    _, swept, _ = await asyncio.gather(
        workspaces.make("before", SMALL), workspaces.sweep(set()), workspaces.make("after", SMALL)
    )

    assert swept == 1
    assert workspaces.find("before", SMALL) is not None
    assert workspaces.find("after", SMALL) is not None


async def test_a_cancelled_creation_leaves_nothing(persistent: Open, tmp_path: Path) -> None:
    workspaces = persistent()
    making = asyncio.ensure_future(workspaces.make("one", SMALL))
    await asyncio.sleep(0)

    making.cancel()
    await asyncio.wait([making])

    assert making.cancelled()
    assert workspaces.find("one", SMALL) is None
    assert mounts_below(tmp_path) == []


async def test_a_cancelled_creation_with_a_used_name_keeps_the_existing_workspace(persistent: Open) -> None:
    workspaces = persistent()
    await write(workspaces, "one", "kept")
    making = asyncio.ensure_future(workspaces.make("one", SMALL))
    await asyncio.sleep(0)

    making.cancel()
    await asyncio.wait([making])

    assert workspaces.find("one", SMALL) is not None


async def test_only_the_sandboxd_user_can_enter_the_folders(persistent: Open, tmp_path: Path) -> None:
    await persistent().make("one", SMALL)

    assert [(tmp_path / path).stat().st_mode & 0o777 for path in ("workspaces", "workspaces/one")] == [0o700, 0o700]


async def test_an_empty_workspace_is_below_its_limit(opened: Open) -> None:
    workspaces = opened()
    workspace = await workspaces.make("one", SMALL)
    async with workspace.mounted():
        assert await workspaces.find_overfull() == {}
