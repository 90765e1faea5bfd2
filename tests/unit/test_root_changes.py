"""The list of changes at the beginning of an archive, and the reading of the layers of an overlay."""

import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from tests.stack import missing
from workers.sandboxd.archives.root_changes import encode_changes, split_changes
from workers.sandboxd.disks import changes as changes_module
from workers.sandboxd.disks.changes import RootChanges, list_changes

IMAGE = f"sha256:{'0a' * 32}"


async def split_into_chunks(data: bytes, step: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


@given(st.binary(), st.binary(), st.binary(), st.integers(1, 3000))
async def test_encoded_changes_are_split_from_the_archive(
    replaced: bytes, removed: bytes, archive: bytes, step: int
) -> None:
    data = encode_changes(RootChanges(IMAGE, b"", replaced, removed)) + archive

    changes, rest, size = await split_changes(split_into_chunks(data, step), len(data))

    assert changes == RootChanges(IMAGE, b"", replaced, removed)
    assert (b"".join([chunk async for chunk in rest]), size) == (archive, len(archive))


@given(st.binary(max_size=2000))
async def test_archive_without_changes_is_left_unchanged(data: bytes) -> None:
    changes, rest, size = await split_changes(split_into_chunks(data, 700), len(data))

    assert changes is None
    assert (b"".join([chunk async for chunk in rest]), size) == (data, len(data))


async def test_truncated_list_of_changes_is_refused() -> None:
    data = encode_changes(RootChanges(IMAGE, b"", b"./x\0" * 1000, b""))
    with pytest.raises(SandboxUnavailable):
        await split_changes(split_into_chunks(data[:2000], 700), len(data))


@pytest.fixture
def layers(tmp_path: Path) -> list[Path]:
    """Two layers as an overlay leaves them: the second is below the first."""
    if os.geteuid() != 0:
        missing("whiteouts are made by root: run the tests as root")
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    for layer in (upper, lower):
        (layer / "etc").mkdir(parents=True)
        (layer / "tmp").mkdir()
    return [upper, lower]


def find_changes(layers: list[Path]) -> tuple[set[str], set[str], set[str]]:
    with ExitStack() as stack:
        fds = [os.open(layer, os.O_PATH | os.O_DIRECTORY) for layer in layers]
        for fd in fds:
            stack.callback(os.close, fd)
        changes = list_changes(IMAGE, fds)
    return tuple(  # type: ignore[return-value]
        {os.fsdecode(name) for name in names.split(b"\0")[:-1]}
        for names in (changes.folders, changes.replaced, changes.removed)
    )


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
    (upper / "tmp/scratch").touch()

    replaced = {f"./etc/{name}" for name in ("new", "old", "back", "pipe", "link")}
    assert find_changes(layers) == ({"./etc"}, replaced, {"./etc/gone"})


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


def test_oversized_list_of_changes_is_refused(layers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "MAX_LIST_BYTES", 4000)
    for number in range(100):
        (layers[0] / "etc" / f"file-{number}").touch()
    with pytest.raises(ToolFailure) as refused:
        find_changes(layers)
    assert refused.value.code is ErrorCode.FILE_TOO_LARGE
