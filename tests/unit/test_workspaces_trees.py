"""Deleting and counting trees that a hostile user made."""

import contextlib
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workspace_harness import MIB, run_as
from workers.sandboxd.disks.base import WorkspaceSize
from workers.sandboxd.disks.trees import TreeCount, remove_tree

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


def test_a_tree_that_is_deeper_than_any_path_is_deleted_with_few_descriptors(tree_in_memory: Path) -> None:
    dig(tree_in_memory, DEEP)

    remove_tree(tree_in_memory)

    assert not tree_in_memory.exists()


def test_links_are_deleted_and_what_they_lead_to_stays(tree: Path, tmp_path: Path) -> None:
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


def test_a_folder_that_is_itself_a_link_is_not_followed(tree: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tree)

    with pytest.raises(NotADirectoryError):
        remove_tree(link)

    assert tree.is_dir()


def test_odd_names_and_special_files_are_deleted(tree: Path) -> None:
    for name in (b"\xff\xfe", b"new\nline", b"-rf", b"x" * 255, b"\x1b[31m"):
        os.mkdir(os.path.join(os.fsencode(tree), name))
        (Path(os.fsdecode(os.path.join(os.fsencode(tree), name))) / "file").write_text("")
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "socket"))

    remove_tree(tree)

    assert not tree.exists()


def test_the_sandboxes_own_user_can_delete_and_count_folders_without_rights() -> None:
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


def test_a_folder_that_cannot_be_read_at_all_counts_as_too_much() -> None:
    def work() -> None:
        assert count(folder).is_over

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "foreign").mkdir(mode=0o700)
        run_as(1000, work)


def test_bytes_are_those_on_disk_and_inodes_all_but_the_folder_itself(tree: Path) -> None:
    (tree / "a").mkdir()
    (tree / "a" / "file").write_bytes(b"x" * MIB)
    with (tree / "sparse").open("wb") as file:
        file.truncate(100 * MIB)

    counted = count(tree)

    assert MIB <= counted.bytes < 2 * MIB
    assert counted.inodes == 3
    assert not counted.is_over


def test_a_file_with_two_names_counts_once(tree: Path) -> None:
    (tree / "file").write_bytes(b"x" * MIB)
    os.link(tree / "file", tree / "same")

    assert count(tree).inodes == 1


def test_links_are_counted_and_not_followed(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * MIB)
    (tree / "link").symlink_to(tmp_path)

    counted = count(tree)

    assert counted.inodes == 1
    assert counted.bytes < MIB


def test_a_count_ends_at_several_times_the_files_that_are_allowed(tree: Path) -> None:
    for number in range(100):
        (tree / str(number)).touch()

    counted = count(tree, WorkspaceSize(MIB, 10))

    assert counted.is_over
    assert counted.inodes == 40


def test_what_is_over_weighs_more_the_more_it_holds_also_when_its_files_are_empty(tree: Path) -> None:
    held = []
    for number in range(11, 14):
        for name in range(number):
            (tree / str(name)).touch()
        held.append(count(tree, WorkspaceSize(MIB, 10)).held_bytes)

    assert held == [MIB * 11 // 10, MIB * 12 // 10, MIB * 13 // 10]


def test_a_chain_deeper_than_any_path_is_counted_with_one_descriptor(tree_in_memory: Path) -> None:
    dig(tree_in_memory, DEEP)

    assert count(tree_in_memory).inodes == DEEP


def test_what_is_gone_is_counted_to_the_end(tmp_path: Path) -> None:
    assert count(tmp_path / "nothing").bytes == 0


def test_a_count_in_slices_is_the_same_and_keeps_no_descriptor(tree: Path) -> None:
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
def test_a_tree_that_is_moved_about_cannot_lead_the_count_outside(tree: Path, tmp_path: Path, seed: int) -> None:
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
