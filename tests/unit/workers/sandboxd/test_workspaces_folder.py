"""The choice of the workspace kind, workspaces as folders, and hostile trees: counted and deleted."""

import asyncio
import contextlib
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.sandboxd.workspace_harness import MIB, SMALL, require_images, run_as
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks import choice, ext4
from toolcrew.workers.sandboxd.disks import folder as folder_module
from toolcrew.workers.sandboxd.disks import workspace_store as store_module
from toolcrew.workers.sandboxd.disks.base import FILES, WorkspaceSize
from toolcrew.workers.sandboxd.disks.choice import LARGEST_TMPFS_BYTES, WantedKind, choose_workspaces
from toolcrew.workers.sandboxd.disks.folder import FolderWorkspaces
from toolcrew.workers.sandboxd.disks.trees import TreeCount, remove_tree


async def open_one(workspaces: FolderWorkspaces, name: str, size: WorkspaceSize = SMALL) -> Path:
    async with (await workspaces.make(name, size)).mounted() as mount:
        return Path(mount.bind or "") / FILES


@pytest.fixture
def workspaces(tmp_path: Path) -> FolderWorkspaces:
    return FolderWorkspaces(tmp_path, 0)


async def test_overfull_workspace_is_found_with_its_size(workspaces: FolderWorkspaces) -> None:
    (await open_one(workspaces, "small") / "file").write_bytes(b"x" * MIB)
    (await open_one(workspaces, "big") / "file").write_bytes(b"x" * 5 * MIB)

    overfull = await workspaces.find_overfull()

    assert list(overfull) == ["big"]
    assert overfull["big"] >= 5 * MIB


async def test_cancelled_creation_stays_cancelled_when_removal_fails(
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


async def test_unopened_workspace_is_not_counted(workspaces: FolderWorkspaces, tmp_path: Path) -> None:
    files = await open_one(workspaces, "one")
    (files / "file").write_bytes(b"x" * 5 * MIB)

    assert await FolderWorkspaces(tmp_path, 0).find_overfull() == {}


async def test_removed_workspace_is_not_counted(workspaces: FolderWorkspaces) -> None:
    (await open_one(workspaces, "big") / "file").write_bytes(b"x" * 5 * MIB)
    workspace = workspaces.find("big", SMALL)

    await workspace.remove()

    assert await workspaces.find_overfull() == {}


async def test_huge_workspace_does_not_block_the_count_of_others(
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


async def test_symlink_is_not_a_workspace(workspaces: FolderWorkspaces, tmp_path: Path) -> None:
    files = await open_one(workspaces, "one")
    files.rename(tmp_path / "elsewhere")
    files.symlink_to(tmp_path / "elsewhere")

    assert workspaces.find("one", SMALL) is None


def test_workspaces_work_as_the_sandbox_user_without_root() -> None:
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
    remove_tree(broken)
    broken.write_text("no folder")
    big = await open_one(workspaces, "big")
    (big / "file").write_bytes(b"x" * 5 * MIB)

    assert list(await workspaces.find_overfull()) == ["big"]
    (big / "file").unlink()
    with pytest.raises(SandboxUnavailable, match="workspace broken cannot be counted"):
        await workspaces.find_overfull()


@pytest.fixture
def without_mkfs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choice, ext4):
        monkeypatch.setattr(module, "find_tool", lambda _name: None)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)


def test_images_are_chosen_if_mountable_and_the_trial_leaves_nothing(tmp_path: Path) -> None:
    require_images()

    chosen = choose_workspaces("auto", tmp_path / "state", 1 << 40, 0)

    assert (chosen.workspaces.kind, chosen.note) == ("image", None)
    assert list((tmp_path / "state" / "workspaces").iterdir()) == []


@pytest.mark.usefixtures("without_mkfs")
@pytest.mark.parametrize(
    ("size", "kind"), [(MIB, "tmpfs"), (LARGEST_TMPFS_BYTES, "tmpfs"), (LARGEST_TMPFS_BYTES + 1, "folder")]
)
def test_without_images_small_workspaces_are_tmpfs_and_large_ones_folders(tmp_path: Path, size: int, kind: str) -> None:
    chosen = choose_workspaces("auto", tmp_path, size, 0)

    assert chosen.workspaces.kind == kind
    assert chosen.note.startswith("no disk images ")


@pytest.mark.usefixtures("as_user")
def test_requested_image_workspaces_are_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="sandboxd is not root"):
        choose_workspaces("image", tmp_path, MIB, 0)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("requested", ["auto", "folder"])
def test_user_without_access_to_sandbox_files_gets_no_folder_workspaces(tmp_path: Path, requested: WantedKind) -> None:
    with pytest.raises(SandboxUnavailable, match="cannot delete files that sandboxes write"):
        choose_workspaces(requested, tmp_path, LARGEST_TMPFS_BYTES + 1, 0)


@pytest.mark.parametrize("requested", ["tmpfs", "folder"])
def test_requested_weaker_workspace_kind_is_used_with_a_note(tmp_path: Path, requested: WantedKind) -> None:
    chosen = choose_workspaces(requested, tmp_path, MIB, 0)

    assert chosen.workspaces.kind == requested
    assert chosen.note is not None


@pytest.mark.usefixtures("without_mkfs")
def test_missing_mkfs_program_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another obstacle comes first where sandboxd is not root")
    with pytest.raises(SandboxUnavailable, match="install e2fsprogs"):
        choose_workspaces("image", tmp_path, MIB, 0)


def test_symlink_as_the_workspaces_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "workspaces").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(SandboxUnavailable, match="must be a folder"):
        choose_workspaces("folder", tmp_path, MIB, 0)


DEEP = 5200
WIDE = WorkspaceSize(1024 * MIB, 100_000)


def dig(folder: Path, levels: int) -> None:
    """Create a chain of folders that is longer than any path."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def count(folder: Path, most: WorkspaceSize = WIDE) -> TreeCount:
    counted = TreeCount(folder, most)
    while not counted.advance(time.monotonic() + 1.0):
        pass
    return counted


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


@pytest.fixture
def tree_in_memory() -> Iterator[Path]:
    """A folder in memory, if the host has one, where thousands of folders are created quickly."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    yield folder
    remove_tree(folder)


def test_tree_deeper_than_path_max_is_deleted(tree_in_memory: Path) -> None:
    dig(tree_in_memory, DEEP)

    remove_tree(tree_in_memory)

    assert not tree_in_memory.exists()


def test_symlinks_are_deleted_and_their_targets_kept(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (tree / "folder").symlink_to(outside)
    (tree / "up").symlink_to("..")
    (tree / "inner").mkdir()
    (tree / "inner" / "file").symlink_to(outside / "file")

    remove_tree(tree)

    assert not tree.exists()
    assert (outside / "file").read_text() == "kept"


def test_symlink_as_the_root_of_a_tree_is_not_followed(tree: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tree)

    with pytest.raises(NotADirectoryError):
        remove_tree(link)

    assert tree.is_dir()


def test_unusual_names_and_special_files_are_deleted(tree: Path) -> None:
    for name in (b"\xff\xfe", b"new\nline", b"-rf", b"x" * 255, b"\x1b[31m"):
        os.mkdir(os.path.join(os.fsencode(tree), name))
        (Path(os.fsdecode(os.path.join(os.fsencode(tree), name))) / "file").write_text("")
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "socket"))

    remove_tree(tree)

    assert not tree.exists()


def test_sandbox_user_can_count_and_delete_folders_without_permissions() -> None:
    def work() -> None:
        folder = Path(tempfile.mkdtemp())
        hidden = folder / "tree" / "a" / "hidden"
        (hidden / "b").mkdir(parents=True)
        (hidden / "b" / "file").write_bytes(b"x" * MIB)
        for locked in (hidden / "b", hidden, hidden.parent):
            locked.chmod(0)

        assert count(folder / "tree").bytes >= MIB
        for locked in (hidden / "b", hidden, hidden.parent):
            locked.chmod(0)
        remove_tree(folder)

        assert not folder.exists()

    run_as(1000, work)


def test_unreadable_folder_counts_as_overfull() -> None:
    def work() -> None:
        assert count(folder).is_over

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "foreign").mkdir(mode=0o700)
        run_as(1000, work)


def test_count_uses_disk_bytes_and_unique_inodes(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 2 * MIB)
    (tree / "link").symlink_to(tmp_path)
    (tree / "link to a file").symlink_to(tmp_path / "big")
    (tree / "a").mkdir()
    (tree / "a" / "file").write_bytes(b"x" * MIB)
    os.link(tree / "a" / "file", tree / "same")
    with (tree / "sparse").open("wb") as file:
        file.truncate(100 * MIB)

    counted = count(tree)

    assert MIB <= counted.bytes < 2 * MIB
    assert counted.inodes == 5
    assert not counted.is_over


def test_count_stops_at_a_multiple_of_the_inode_limit(tree: Path) -> None:
    for number in range(100):
        (tree / str(number)).touch()

    counted = count(tree, WorkspaceSize(MIB, 10))

    assert counted.is_over
    assert counted.inodes == 40


def test_excess_inodes_increase_the_held_bytes(tree: Path) -> None:
    held_bytes = []
    for number in range(11, 14):
        for name in range(number):
            (tree / str(name)).touch()
        held_bytes.append(count(tree, WorkspaceSize(MIB, 10)).counted_bytes)

    assert held_bytes == [MIB * 11 // 10, MIB * 12 // 10, MIB * 13 // 10]


def test_tree_deeper_than_path_max_is_counted(tree_in_memory: Path) -> None:
    dig(tree_in_memory, DEEP)

    assert count(tree_in_memory).inodes == DEEP


def test_deep_tree_is_counted_in_slices_in_linear_time(tree_in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aim: a chain of folders that is never counted to its end, so that its size has no limit."""
    dig(tree_in_memory, DEEP)
    counted, opened, real = TreeCount(tree_in_memory, WIDE), 0, os.open

    def count_open(*arguments: Any, **options: Any) -> int:
        nonlocal opened
        opened += 1
        return real(*arguments, **options)

    monkeypatch.setattr(os, "open", count_open)
    while not counted.advance(0.0):
        assert opened < 100 * DEEP
    assert counted.inodes == DEEP


def test_tree_that_is_too_deep_is_overfull(tree_in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.workers.sandboxd.disks.trees.MAX_DEPTH", 50)
    dig(tree_in_memory, 49)
    assert not count(tree_in_memory).is_over
    (tree_in_memory / "d" / "x").mkdir()
    dig(tree_in_memory / "d" / "x", 60)
    assert count(tree_in_memory).is_over


def test_tree_whose_folders_move_all_the_time_is_overfull(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aim: a count that begins at the top after every folder."""
    for number in range(100):
        (tree / "a/b/c/d/e" / str(number)).mkdir(parents=True)
    counted, real = TreeCount(tree, WorkspaceSize(1024 * MIB, 40)), TreeCount._open_child
    counted_all = TreeCount(tree, WorkspaceSize(1024 * MIB, 200))

    def moved_away(self: TreeCount, name: str) -> int | None:
        return None if name == ".." else real(self, name)

    monkeypatch.setattr(TreeCount, "_open_child", moved_away)
    assert counted.advance(time.monotonic() + SOON_S)
    assert counted.is_over
    assert counted._opened_again < 400
    assert counted_all.advance(time.monotonic() + SOON_S)
    assert (counted_all.is_over, counted_all.inodes) == (False, 105)


def test_missing_tree_counts_zero_bytes(tmp_path: Path) -> None:
    assert count(tmp_path / "nothing").bytes == 0


def test_count_in_slices_is_equal_and_keeps_no_descriptor(tree: Path) -> None:
    for number in range(30):
        (tree / f"{number}" / "inner").mkdir(parents=True)
        (tree / f"{number}" / "inner" / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    counted, slices = TreeCount(tree, WIDE), 1

    while not counted.advance(0.0):
        slices += 1
        assert len(os.listdir("/proc/self/fd")) == before

    assert counted.inodes == 90
    assert slices > 30


@pytest.mark.parametrize("seed", range(20))
def test_moved_folders_cannot_lead_the_count_outside_the_tree(tree: Path, tmp_path: Path, seed: int) -> None:
    """Aim: have sandboxd read the host's folders by moving the one it stands in upwards."""
    for number in range(100):
        (tmp_path / f"outside-{number}").touch()
    chance = random.Random(seed)
    deep = [tree / "a", tree / "a/b", tree / "a/b/c", tree / "a/b/c/d", tree / "e"]
    deep[3].mkdir(parents=True)
    deep[4].mkdir()
    counted = TreeCount(tree, WIDE)

    for number in range(500):
        if counted.advance(0.0):
            break
        source = chance.choice([path for path, _, _ in os.walk(tree)][1:])
        target = chance.choice([path for path, _, _ in os.walk(tree)])
        with contextlib.suppress(OSError):  # some moves make no sense
            os.rename(source, f"{target}/moved-{number}")

    assert counted.advance(time.monotonic() + 5)
    assert counted.inodes < 60
