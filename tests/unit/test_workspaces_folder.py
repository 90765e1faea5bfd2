"""Workspaces as folders: what is watched, how fairly, and what is found."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from contract.errors import SandboxUnavailable
from tests.workspace_harness import MIB, SMALL, run_as
from workers.sandboxd.disks import folder as folder_module
from workers.sandboxd.disks import workspace_store as store_module
from workers.sandboxd.disks.base import WorkspaceSize
from workers.sandboxd.disks.folder import FolderWorkspaces


async def open_one(workspaces: FolderWorkspaces, name: str, size: WorkspaceSize = SMALL) -> Path:
    async with (await workspaces.make(name, size)).mounted() as mount:
        return Path(mount.bind or "")


@pytest.fixture
def workspaces(tmp_path: Path) -> FolderWorkspaces:
    return FolderWorkspaces(tmp_path, 0)


async def test_too_many_bytes_are_found_and_how_many_they_are(workspaces: FolderWorkspaces) -> None:
    (await open_one(workspaces, "small") / "file").write_bytes(b"x" * MIB)
    (await open_one(workspaces, "big") / "file").write_bytes(b"x" * 5 * MIB)

    overfull = await workspaces.find_overfull()

    assert list(overfull) == ["big"]
    assert overfull["big"] >= 5 * MIB


async def test_a_cancellation_is_one_also_when_what_was_made_will_not_go(
    workspaces: FolderWorkspaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_folder: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store_module, "remove_tree", refuse)
    making = asyncio.ensure_future(workspaces.make("one", SMALL))
    await asyncio.sleep(0)
    with capture_logs() as logs:
        making.cancel()
        await asyncio.wait([making])

    assert making.cancelled()
    assert [line["event"] for line in logs] == ["workspace_creation_not_undone"]
    assert (tmp_path / "one").exists()


async def test_what_no_container_has_had_is_not_counted(workspaces: FolderWorkspaces, tmp_path: Path) -> None:
    files = await open_one(workspaces, "one")
    (files / "file").write_bytes(b"x" * 5 * MIB)

    assert await FolderWorkspaces(tmp_path, 0).find_overfull() == {}


async def test_a_removed_one_is_watched_no_longer(workspaces: FolderWorkspaces) -> None:
    (await open_one(workspaces, "big") / "file").write_bytes(b"x" * 5 * MIB)
    workspace = workspaces.find("big", SMALL)
    assert workspace is not None

    await workspace.remove()

    assert await workspaces.find_overfull() == {}


async def test_a_growing_workspace_stops_no_count(
    workspaces: FolderWorkspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aim: hide from the watch behind a tree that takes longer to count than one look may last."""
    monkeypatch.setattr(folder_module, "WATCH_S", 0.0005)
    monkeypatch.setattr(folder_module, "_SLICE_S", 0.0001)
    huge = await open_one(workspaces, "huge", WorkspaceSize(1024 * MIB, 1_000_000))
    for number in range(1500):
        (huge / f"{number}").mkdir()
    (await open_one(workspaces, "big") / "file").write_bytes(b"x" * 5 * MIB)

    looks = [list(await workspaces.find_overfull()) for _ in range(20)]

    assert ["big"] in looks


async def test_a_link_is_not_a_workspace(workspaces: FolderWorkspaces, tmp_path: Path) -> None:
    files = await open_one(workspaces, "one")
    files.rename(tmp_path / "elsewhere")
    files.symlink_to(tmp_path / "elsewhere")

    assert workspaces.find("one", SMALL) is None


def test_the_sandboxes_own_user_can_run_them_without_being_root() -> None:
    async def live(folder: Path) -> None:
        workspaces = FolderWorkspaces(folder / "workspaces", 0)
        files = await open_one(workspaces, "one")
        (files / "inner").mkdir()
        (files / "inner" / "file").write_bytes(b"x" * 5 * MIB)
        (files / "inner").chmod(0)
        files.chmod(0)

        assert list(await workspaces.find_overfull()) == ["one"]
        files.chmod(0)
        assert await FolderWorkspaces(folder / "workspaces", 0).sweep(set()) == 1

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(live(Path(folder)))

    run_as(1000, work)


async def test_an_unreadable_workspace_is_reported(workspaces: FolderWorkspaces) -> None:
    broken = await open_one(workspaces, "broken")
    broken.rmdir()
    broken.write_text("no folder")
    big = await open_one(workspaces, "big")
    (big / "file").write_bytes(b"x" * 5 * MIB)

    assert list(await workspaces.find_overfull()) == ["big"]
    (big / "file").unlink()
    with pytest.raises(SandboxUnavailable, match="workspace broken cannot be counted"):
        await workspaces.find_overfull()
