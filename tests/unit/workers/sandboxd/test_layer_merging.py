"""Merging the folders of layers into one, at any depth."""

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.stack.stack import missing
from toolcrew.workers.sandboxd.disks import folder_cursor
from toolcrew.workers.sandboxd.disks.folder_cursor import FolderCursor, MovedTooOften
from toolcrew.workers.sandboxd.disks.merging import Merge
from toolcrew.workers.sandboxd.disks.trees import remove_tree

DEPTH = 300


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        missing("whiteouts are made by root: run the tests as root")
    for name in ("upper", "lower", "target"):
        (tmp_path / name).mkdir()
    yield tmp_path
    for name in ("upper", "lower", "target"):
        remove_tree(tmp_path / name)  # pytest cannot remove very deep folders


def merge(place: Path, sources: Sequence[str] = ("upper", "lower")) -> None:
    fds = [os.open(place / name, os.O_RDONLY) for name in (*sources, "target")]
    try:
        Merge(fds[:-1], fds[-1]).run()
    finally:
        for fd in fds:
            os.close(fd)


def make_chain(top: Path, depth: int) -> Path:
    """Make `depth` folders inside each other, and return the last one."""
    place = top.joinpath(*["d"] * depth)
    place.mkdir(parents=True)
    return place


def test_deep_folders_of_both_layers_are_merged(place: Path) -> None:
    upper, lower = make_chain(place / "upper", DEPTH), make_chain(place / "lower", DEPTH)
    (upper / "new").write_text("new")
    (lower / "old").write_text("old")
    os.utime(lower, ns=(1, 2_000))
    os.utime(upper, ns=(1, 3_000))
    os.utime(place / "upper", ns=(1, 4_000))

    merge(place)

    last = (place / "target").joinpath(*["d"] * DEPTH)
    assert {path.name: path.read_text() for path in last.iterdir()} == {"new": "new", "old": "old"}
    assert last.stat().st_mtime_ns == 3_000
    assert (place / "target").stat().st_mtime_ns == 4_000
    assert os.listdir(place / "target") == ["d"]


def test_the_cost_of_a_merge_is_linear_in_the_depth(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_chain(place / "upper", DEPTH)
    make_chain(place / "lower", DEPTH)
    count, real = 0, os.open

    def counting(path: object, *arguments: object, **options: object) -> int:
        nonlocal count
        count += 1
        return real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", counting)
    merge(place)
    assert count < DEPTH * 20


def test_the_depth_costs_no_descriptors(place: Path) -> None:
    make_chain(place / "upper", DEPTH)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Other tests of this process have descriptors too.
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + DEPTH // 2, before[1]))
    try:
        merge(place, ["upper"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_tree_that_is_too_deep_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_cursor, "MAX_DEPTH", 10)
    make_chain(place / "upper", 11)
    with pytest.raises(OSError, match="more than 10 folders inside each other"):
        merge(place)


def test_names_of_one_file_stay_one_file(place: Path) -> None:
    """Names in several folders, of which one is hidden by the upper layer, and links to the same link."""
    for folder in ("a", "b", "c"):
        (place / "lower" / folder).mkdir()
    (place / "lower/a/one").write_text("x")
    for name in ("b/two", "c/three", "hidden"):
        os.link(place / "lower/a/one", place / "lower" / name)
    os.mknod(place / "upper/hidden", 0o20000, 0)
    (place / "lower/a/link").symlink_to("/nowhere")
    os.link(place / "lower/a/link", place / "lower/b/link", follow_symlinks=False)

    merge(place)

    target = place / "target"
    assert sorted(os.listdir(target)) == ["a", "b", "c", "hidden"]
    assert {(target / name).stat().st_ino for name in ("a/one", "b/two", "c/three")} == {
        (target / "a/one").stat().st_ino
    }
    assert (target / "a/one").stat().st_nlink == 3
    assert os.readlink(target / "b/link") == "/nowhere"
    assert (target / "b/link").lstat().st_nlink == 2
    assert os.stat(target / "hidden").st_rdev == 0


def test_a_cursor_whose_folder_was_moved_returns_to_a_folder_of_its_path(place: Path) -> None:
    (place / "upper/a/b/c").mkdir(parents=True)
    top = os.open(place / "upper", os.O_RDONLY)
    cursor = FolderCursor(top)
    try:
        for name in ("a", "b", "c"):
            cursor.enter(name)
        (place / "upper/a").rename(place / "upper/other")
        (place / "upper/other/b/c").rename(place / "upper/c")
        cursor.leave()
        assert (cursor.depth, os.fstat(cursor.fd).st_ino) == (0, (place / "upper").stat().st_ino)
    finally:
        cursor.close()
        os.close(top)


def visit_moving(cursor: FolderCursor, top: Path, names: list[str]) -> None:
    """Visit 100 folders, each of which a program moves to the top meanwhile."""
    for number in range(100):
        moving = top / "/".join(names) / "moving"
        moving.mkdir()
        cursor.enter("moving")
        moving.rename(top / f"moved-{number}")
        cursor.leave()


def test_folders_that_move_all_the_time_end_a_walk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aim: a walk that begins at the top after every folder."""
    monkeypatch.setattr("toolcrew.workers.sandboxd.disks.folder_cursor.MAX_FOUND_AGAIN", 100)
    names = [str(number) for number in range(20)]
    (place / "upper" / "/".join(names)).mkdir(parents=True)
    top = os.open(place / "upper", os.O_RDONLY)
    cursor = FolderCursor(top)
    try:
        for name in names:
            cursor.enter(name)
        with pytest.raises(MovedTooOften):
            visit_moving(cursor, place / "upper", names)
        assert len(os.listdir(place / "upper")) < 10
    finally:
        cursor.close()
        os.close(top)


def test_a_cursor_follows_no_link(place: Path) -> None:
    (place / "upper/link").symlink_to("/etc")
    top = os.open(place / "upper", os.O_RDONLY)
    cursor = FolderCursor(top)
    try:
        with pytest.raises(OSError, match="link"):
            cursor.enter("link")
        assert cursor.depth == 0
    finally:
        cursor.close()
        os.close(top)
