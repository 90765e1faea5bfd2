"""The list of changes at the beginning of an archive, and the reading of the layers of an overlay."""

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stack.stack import missing
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.archives.root_changes import (
    ArchiveHead,
    ArchiveReader,
    pack_with_head,
    read_archive_head,
)
from toolcrew.workers.sandboxd.disks import changes as changes_module
from toolcrew.workers.sandboxd.disks.changes import MAX_LIST_BYTES, list_changes
from toolcrew.workers.sandboxd.disks.trees import remove_tree

IMAGE = f"sha256:{'0a' * 32}"


async def split_into_chunks(data: bytes, step: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


def build_archive(head: ArchiveHead, replaced: bytes = b"", packed: bytes = b"", removed: bytes = b"") -> bytes:
    return head.encode() + replaced + bytes(head.padding) + packed + removed


@given(st.binary(), st.binary(), st.binary(), st.integers(1, 3000))
async def test_the_parts_of_an_archive_are_read_in_order(
    replaced: bytes, removed: bytes, packed: bytes, step: int
) -> None:
    head = ArchiveHead(IMAGE, len(replaced), len(removed))
    data = build_archive(head, replaced, packed, removed)
    reader = ArchiveReader(split_into_chunks(data, step))

    assert await read_archive_head(reader) == head
    assert head.count_packed(len(data)) == len(packed)
    assert await reader.read(len(replaced)) == replaced
    await reader.skip(head.padding)
    assert await reader.read(len(packed)) == packed
    assert b"".join([piece async for piece in reader.take_rest()]) == removed


@given(st.binary(max_size=2000))
async def test_archive_without_a_head_is_refused(data: bytes) -> None:
    with pytest.raises(SandboxUnavailable):
        await read_archive_head(ArchiveReader(split_into_chunks(data, 700)))


@pytest.mark.parametrize(
    "head",
    [
        ArchiveHead(IMAGE, MAX_LIST_BYTES + 1),
        ArchiveHead(IMAGE, 0, MAX_LIST_BYTES + 1),
        ArchiveHead(None, 10),
        ArchiveHead(None, 0, 10),
        ArchiveHead("sha256:0"),
    ],
)
async def test_head_with_impossible_fields_is_refused(head: ArchiveHead) -> None:
    with pytest.raises(SandboxUnavailable):
        await read_archive_head(ArchiveReader(split_into_chunks(head.encode(), 700)))


async def test_a_program_cannot_write_the_head_of_its_archive(tmp_path: Path) -> None:
    """The first member of what a sandbox packs is never read as the head, whatever it is."""
    forged = build_archive(ArchiveHead(IMAGE, 3, 0), b"./a")
    archive = b"".join([chunk async for chunk in pack_with_head(None, split_into_chunks(forged, 700))])
    reader = ArchiveReader(split_into_chunks(archive, 700))

    head = await read_archive_head(reader)

    assert head == ArchiveHead(None)
    await reader.skip(head.padding)
    assert b"".join([piece async for piece in reader.take_rest()]) == forged


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[list[Path]]:
    """Two layers as an overlay leaves them: the second is below the first."""
    if os.geteuid() != 0:
        missing("whiteouts are made by root: run the tests as root")
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    for layer in (upper, lower):
        (layer / "etc").mkdir(parents=True)
    yield [upper, lower]
    for layer in (upper, lower):
        remove_tree(layer)  # pytest cannot remove very deep folders


@contextmanager
def opened(folders: Sequence[Path]) -> Iterator[list[int]]:
    fds = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in folders]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def find_changes(layers: Sequence[Path]) -> tuple[set[str], set[str], set[str]]:
    with opened(layers) as fds:
        lists = changes_module.find_changes(fds)
    return tuple({os.fsdecode(name) for name in names.split(b"\0")[:-1]} for names in lists)  # type: ignore[return-value]


def whiteout(path: Path) -> None:
    os.mknod(path, 0o20000, 0)


def test_upper_layer_decides_about_each_name(layers: list[Path]) -> None:
    upper, lower = layers
    (upper / "etc/new").touch()
    (lower / "etc/old").touch()
    whiteout(upper / "etc/gone")
    (lower / "etc/gone").touch()
    (upper / "etc/back").touch()
    whiteout(lower / "etc/back")
    os.mknod(upper / "etc/pipe", 0o10600)
    (upper / "etc/link").symlink_to("/etc/passwd")
    (upper / "tmp").mkdir()
    (upper / "tmp/scratch").touch()

    replaced = {f"./etc/{name}" for name in ("new", "old", "back", "pipe", "link")} | {"./tmp/scratch"}
    assert find_changes(layers) == ({"./etc", "./tmp"}, replaced, {"./etc/gone"})


def test_opaque_folder_is_replaced_whole(layers: list[Path]) -> None:
    upper, lower = layers
    for layer, place in ((upper, "new"), (upper, "over-a-whiteout"), (lower, "hidden"), (upper, "merged")):
        (layer / "etc" / place / "deep").mkdir(parents=True)
    os.setxattr(upper / "etc/new", "trusted.overlay.opaque", b"y")
    whiteout(lower / "etc/over-a-whiteout")
    whiteout(upper / "etc/hidden")
    (upper / "etc/merged/deep/file").touch()

    folders = {"./etc", "./etc/merged", "./etc/merged/deep"}
    assert find_changes(layers) == (
        folders,
        {"./etc/new", "./etc/over-a-whiteout", "./etc/merged/deep/file"},
        {"./etc/hidden"},
    )


def test_symlink_in_place_of_a_folder_is_not_followed(layers: list[Path], tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").touch()
    (layers[0] / "var").symlink_to(tmp_path / "outside")
    (layers[1] / "var").mkdir()

    assert find_changes(layers) == ({"./etc"}, {"./var"}, set())


def make_chain(top: Path, depth: int) -> int:
    """Make `depth` folders inside each other, and return a descriptor of the last one."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        above, fd = fd, os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(above)
    return fd


async def list_all(layers: Sequence[Path], folder: Path) -> tuple[bytes, bytes]:
    with opened(layers) as fds:
        async with list_changes(IMAGE, fds, folder, "acme") as changes:
            packed = b"".join([piece async for piece in changes.read_packed()])
            return packed, b"".join([piece async for piece in changes.read_removed()])


async def test_changes_are_listed_by_a_process_into_a_file(layers: list[Path], tmp_path: Path) -> None:
    (layers[0] / "etc/new").touch()
    whiteout(layers[0] / "etc/gone")

    assert await list_all(layers, tmp_path) == (b"./etc\0./etc/new\0", b"./etc/gone\0")
    assert sorted(os.listdir(tmp_path)) == ["lower", "upper"]


async def test_names_that_no_program_can_open_are_refused(layers: list[Path], tmp_path: Path) -> None:
    os.close(make_chain(layers[0] / "etc", 2100))
    with pytest.raises(ToolFailure) as refused:
        await list_all(layers, tmp_path)
    assert refused.value.code is ErrorCode.FILE_TOO_LARGE


def test_oversized_list_of_changes_is_refused(layers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "MAX_LIST_BYTES", 4000)
    for number in range(100):
        (layers[0] / "etc" / f"file-{number}").touch()
    with pytest.raises(changes_module.TooLarge):
        find_changes(layers)


def count_opens(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    count, real = 0, os.open

    def counting(*arguments: Any, **options: Any) -> int:
        nonlocal count
        count += 1
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", counting)
        work()
    return count


def test_the_cost_of_a_list_is_linear_in_the_depth(layers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(make_chain(layers[0] / "etc", 700))
    os.close(make_chain(layers[1] / "etc", 700))

    assert count_opens(lambda: find_changes(layers), monkeypatch) < 700 * 12


def test_a_folder_that_is_moved_during_the_listing_is_left(layers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    upper = layers[0]
    (upper / "etc/a/b/c").mkdir(parents=True)
    (upper / "etc/a/last").touch()
    (upper / "usr/new").mkdir(parents=True)
    real = changes_module.FolderCursor.leave

    def leave(cursor: changes_module.FolderCursor) -> None:
        if cursor.depth == 4:  # in etc/a/b/c
            (upper / "etc/a/b").rename(upper / "etc/b")
        real(cursor)

    monkeypatch.setattr(changes_module.FolderCursor, "leave", leave)
    folders, replaced, _ = find_changes(layers)
    assert {"./etc/a/b", "./usr/new"} <= folders
    assert "./etc/a/last" in replaced
