"""Initial contents of a session: the kind is detected from the content. Other content is refused before anything is
opened.
"""

import gzip
import io
import os
import subprocess
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.sessions.workspace_files import find_source_kind, load_source
from toolcrew.workers.sandboxd.archives.imports import KINDS


def tar_bytes(mode: str = "w", **options: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, **options) as archive:  # type: ignore[call-overload]
        entry = tarfile.TarInfo("a.txt")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    return buffer.getvalue()


def zip_bytes(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return buffer.getvalue()


def git(folder: Path, *arguments: str) -> None:
    identity = {f"GIT_{role}_{field}": "a@b" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    subprocess.run(["git", *arguments], cwd=folder, env={**os.environ, **identity}, check=True, capture_output=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q", "-b", "trunk")
    for commit in ("first", "second"):
        (folder / "a.txt").write_text(commit)
        git(folder, "add", "a.txt")
        git(folder, "commit", "-q", "-m", commit)
    return folder


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (tar_bytes(), "tar"),
        (tar_bytes(format=tarfile.PAX_FORMAT), "tar"),
        (tar_bytes("w:gz"), "tar.gz"),
        (tar_bytes("w:bz2"), "tar.bz2"),
        (tar_bytes("w:xz"), "tar.xz"),
        (zip_bytes("a"), "zip"),
        (zip_bytes(), "zip"),
        (b"# v2 git bundle\n", "bundle"),
        (b"# v3 git bundle\n", "bundle"),
        (b"# v9 git bundle\n", None),
        (b"\x28\xb5\x2f\xfd zstd", None),
        (b"", None),
        (gzip.compress(b"no tar"), None),
        (gzip.compress(b"no tar" * 1000), None),
        (gzip.compress(bytes(10_240)), "tar.gz"),
        (b"\x1f\x8b", None),
        (b"BZh9", None),
        (b"\xfd7zXZ\x00\x00\x04", None),
        (bytes(10_240), None),
        (b"#!/bin/sh\n", None),
    ],
)
def test_source_kind_is_detected_from_the_content(content: bytes, kind: str | None) -> None:
    assert find_source_kind(content) == kind


@given(st.binary(max_size=1200))
def test_any_bytes_have_a_known_kind_or_none(content: bytes) -> None:
    assert find_source_kind(content) in {*KINDS, None}


def test_v7_tar_is_detected_by_its_checksum() -> None:
    header = bytearray(tar_bytes()[:512])
    header[257:512] = bytes(255)
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    assert find_source_kind(bytes(header)) == "tar"


def test_folder_is_packed_and_archive_is_used_unchanged(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("x")
    (tmp_path / "misnamed.zip").write_bytes(tar_bytes("w:gz"))
    folder, archive = load_source(tmp_path / "folder"), load_source(tmp_path / "misnamed.zip")
    assert (folder.kind, b"a.txt" in folder.content) == ("tar", True)
    assert (archive.kind, archive.content) == ("tar.gz", (tmp_path / "misnamed.zip").read_bytes())


def make_large(path: Path) -> None:
    path.write_bytes(tar_bytes())
    os.truncate(path, MAX_BLOB_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.write_text("hello"), "no supported kind"),
        (make_large, "larger than"),
        (lambda path: path.write_bytes(b"# v2 git bundle\nab HEAD\n"), "truncated or damaged"),
        (lambda path: path.symlink_to(path), "cannot be read"),
    ],
)
def test_invalid_source_is_refused_with_advice(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "it")
    with pytest.raises(ConfigError, match=message) as refused:
        load_source(tmp_path / "it")
    assert any(advice in str(refused.value) for advice in ("give", "make it", "mend"))


def test_bundle_of_a_whole_repository_is_accepted(repository: Path, tmp_path: Path) -> None:
    git(repository, "bundle", "create", str(tmp_path / "it"), "HEAD", "--branches")
    assert load_source(tmp_path / "it").kind == "bundle"


@pytest.mark.parametrize(("parts", "message"), [(["trunk"], "has no HEAD"), (["trunk~1..HEAD"], "part of a history")])
def test_incomplete_bundle_is_refused(parts: list[str], message: str, repository: Path, tmp_path: Path) -> None:
    git(repository, "bundle", "create", str(tmp_path / "it"), *parts)
    with pytest.raises(ConfigError, match=message):
        load_source(tmp_path / "it")


def test_bundle_with_many_short_lines_takes_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "it"
    file.write_bytes(b"# v2 git bundle\n" + b"a\n" * 4_000_000 + b"\n")
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="no HEAD"):
            load_source(file)
        assert tracemalloc.get_traced_memory()[1] < MAX_BLOB_BYTES + 2 * file.stat().st_size
    finally:
        tracemalloc.stop()
