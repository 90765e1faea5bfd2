"""Replacement of a file by a new version: no temporary file remains, even where an unnamed file cannot be created."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest.guest_harness import GUEST_PARENT

assert GUEST_PARENT

from guest.confinement import DirectoryEntry, find_entry  # noqa: E402
from guest.failures import RequestFailure  # noqa: E402
from guest.files import versions  # noqa: E402
from guest.files.versions import BytesContent, Version, open_old  # noqa: E402
from guest.paths import GuestPaths  # noqa: E402


class CallTimeout:
    """Ends the call at a given check, or never."""

    def __init__(self, checks: int = 1 << 30) -> None:
        self._checks = checks

    def check(self) -> None:
        self._checks -= 1
        if self._checks < 0:
            raise RequestFailure("TIMEOUT", "over")


@pytest.fixture(params=["nameless", "named"])
def entry(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectoryEntry]:
    real_open = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no nameless files here")
        return real_open(path, flags, *rest, **options)

    if request.param == "named":
        monkeypatch.setattr(versions.os, "open", refuse)
    (tmp_path / "o").mkdir()
    opened = find_entry("f", GuestPaths((os.fsencode(tmp_path),), os.fsencode(tmp_path / "o")))
    yield opened
    opened.close()


def version(entry: DirectoryEntry, content: bytes, checks: int = 1 << 30) -> Version:
    timeout: Any = CallTimeout(checks)
    return Version(entry, BytesContent(content), timeout)


def list_files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.is_file())


def test_a_file_is_created_and_replaced(entry: DirectoryEntry, tmp_path: Path) -> None:
    version(entry, b"one").create()
    version(entry, b"two").replace(open_old(entry, os.O_RDWR), is_known=True)
    assert (list_files(tmp_path), (tmp_path / "f").read_bytes()) == (["f"], b"two")


def test_an_interrupted_replacement_keeps_only_the_old_file(entry: DirectoryEntry, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(RequestFailure, match="over"):
        version(entry, bytes(1_000_000), checks=2).replace(open_old(entry, os.O_RDWR))
    old = open_old(entry, os.O_RDWR | os.O_APPEND)
    assert old is not None
    with pytest.raises(RequestFailure, match="over"):
        version(entry, bytes(1_000_000), checks=2).append(old)
    assert (list_files(tmp_path), (tmp_path / "f").read_bytes()) == (["f"], b"old")


def test_a_file_created_concurrently_is_not_replaced(entry: DirectoryEntry, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"theirs")
    for write in (version(entry, b"ours").create, lambda: version(entry, b"ours").replace(None, is_known=True)):
        with pytest.raises(RequestFailure) as refused:
            write()
        assert refused.value.code == "FILE_EXISTS"
    assert (list_files(tmp_path), (tmp_path / "f").read_bytes()) == (["f"], b"theirs")


@pytest.mark.parametrize("change", ["append", "swap", "edit"])
def test_a_file_changed_since_it_was_opened_is_not_replaced(entry: DirectoryEntry, tmp_path: Path, change: str) -> None:
    (tmp_path / "f").write_bytes(b"former")
    os.utime(tmp_path / "f", (1, 1))
    old = open_old(entry, os.O_RDWR)
    if change == "swap":
        (tmp_path / "f").unlink()
    with (tmp_path / "f").open("r+b" if change == "edit" else "ab") as file:
        file.write(b"theirs")
    with pytest.raises(RequestFailure) as refused:
        version(entry, b"ours").replace(old, is_known=True)
    assert refused.value.code == "STALE_FILE"
    assert (list_files(tmp_path), b"theirs" in (tmp_path / "f").read_bytes()) == (["f"], True)


def test_a_concurrently_removed_folder_is_reported_as_not_found(entry: DirectoryEntry, tmp_path: Path) -> None:
    missing = find_entry("gone/f", GuestPaths((os.fsencode(tmp_path),), os.fsencode(tmp_path / "o")), make_parents=True)
    (tmp_path / "gone").rmdir()
    for write in (version(missing, b"ours").create, lambda: version(missing, b"ours").replace(None)):
        with pytest.raises(RequestFailure) as refused:
            write()
        assert refused.value.code == "FILE_NOT_FOUND"
    missing.close()
