"""Folders copied into and out of a sandbox. The output is hostile: the code in the sandbox makes the archive."""

import contextlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolcrew.archives import folders
from toolcrew.archives.folders import pack_folder, unpack_archive
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure

Adder = Callable[[tarfile.TarFile], None]


def archive(*adders: Adder) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for add in adders:
            add(tar)
    return buffer.getvalue()


def entry(name: str, data: bytes = b"x", **fields: Any) -> Adder:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for field, value in fields.items():
            setattr(info, field, value)
        tar.addfile(info, io.BytesIO(data))

    return add


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Adder:
    return entry(name, b"", type=kind, linkname=target)


def test_packed_folder_is_unpacked_unchanged(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "new" / "out"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / "é.bin").write_bytes(b"\x00\xff")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("run.sh")
    unpack_archive(pack_folder(source), target)
    assert sorted(path.name for path in target.rglob("*")) == ["deep", "empty", "link", "run.sh", "é.bin"]
    assert (target / "deep" / "é.bin").read_bytes() == b"\x00\xff"
    assert ((target / "link").readlink(), os.access(target / "run.sh", os.X_OK)) == (Path("run.sh"), True)


def test_packing_skips_pipes_and_does_not_follow_links(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (tmp_path / "secret").write_text("hunter2")
    (source / "out").symlink_to(tmp_path / "secret")
    os.mkfifo(source / "pipe")
    data = pack_folder(source)
    assert b"hunter2" not in data
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["out"]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_workspace_that_is_not_a_folder_is_a_config_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a folder"):
        pack_folder(tmp_path / name)


def test_a_workspace_too_large_for_a_blob_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_BLOB_BYTES", 10_000)
    (tmp_path / "a").write_bytes(bytes(20_000))
    with pytest.raises(ConfigError, match="larger than 10000 bytes"):
        pack_folder(tmp_path)


# Archives from a hostile sandbox


@pytest.mark.parametrize("adder", [entry("../outside"), entry("a/../../outside"), entry("/outside")])
def test_entry_name_outside_the_folder_is_refused(tmp_path: Path, adder: Adder) -> None:
    with pytest.raises(ToolFailure) as refused:
        unpack_archive(archive(adder), tmp_path / "deep" / "out")
    assert refused.value.code is ErrorCode.PATH_NOT_ALLOWED


@pytest.mark.parametrize(
    "adders",
    [
        [link("out", "/etc")],
        [link("out", "../..")],
        [link("out", "a/../..")],
        [link("here", "."), link("out", "here/here/../..")],
        [entry("out", b"", type=tarfile.CHRTYPE)],
        [entry("out", b"", type=tarfile.FIFOTYPE)],
    ],
)
def test_links_to_outside_and_devices_are_skipped_and_reported(tmp_path: Path, adders: list[Adder]) -> None:
    skipped = unpack_archive(archive(*adders, entry("kept")), tmp_path / "out")

    assert skipped == ["out"]
    assert {path.name for path in (tmp_path / "out").iterdir()} - {"here"} == {"kept"}


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret"])
def test_hard_link_to_outside_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("mine")
    with pytest.raises(ToolFailure):
        unpack_archive(archive(link("hard", target, tarfile.LNKTYPE)), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_link_below_a_link_cannot_point_outside(tmp_path: Path) -> None:
    deep = [entry("p/q/kept"), link("p/q/r", "../.."), link("p/q/r/s/t", "../../../../etc")]
    unpack_archive(archive(*deep), tmp_path / "out")

    outside = [path for path in (tmp_path / "out").rglob("*") if not path.resolve().is_relative_to(tmp_path / "out")]
    assert outside == []


def test_entry_is_not_written_through_an_earlier_link(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    unpack_archive(archive(link("way", "../victim"), entry("way/file")), tmp_path / "out")
    assert list((tmp_path / "victim").iterdir()) == []


def test_links_too_long_to_resolve_cannot_overwrite_outside_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    component, steps, path, adders = "d" * 247, "abcdefghijklmnop", "", []
    for step in steps:
        adders += [
            entry(os.path.join(path, component), b"", type=tarfile.DIRTYPE, mode=0o755),
            link(os.path.join(path, step), component),
        ]
        path = os.path.join(path, component)
    top = os.path.join("/".join(steps), "l" * 254)
    adders += [
        link(top, "../" * len(steps)),
        link("escape", top + "/../"),
        link("flag", "escape/secret", tarfile.LNKTYPE),
    ]
    adders += [entry("flag", b"stolen"), entry("escape/new", b"planted")]
    with contextlib.suppress(ToolFailure):
        unpack_archive(archive(*adders), tmp_path / "out")
    assert (secret.read_text(), (tmp_path / "new").exists()) == ("mine", False)


def _chain_of_long_names() -> bytes:
    block = tarfile.TarInfo("x")
    block.type, block.size = tarfile.GNUTYPE_LONGNAME, 1
    return (block.tobuf(tarfile.GNU_FORMAT) + b"a".ljust(512, b"\0")) * 1500 + bytes(1024)


BROKEN = {
    "nul": archive(entry("a", pax_headers={"path": "a\0b"})),
    "sparse 0": archive(entry("a", pax_headers={"GNU.sparse.map": "x,y", "GNU.sparse.size": "abc"})),
    "sparse 1": archive(
        entry("a", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "z"})
    ),
    "long names": _chain_of_long_names(),
    "empty": b"",
    "short": b"\0" * 100,
    "garbage": b"garbage" * 1000,
    "long": archive(entry("a" * 5000)),
    "negative": archive(entry("a", pax_headers={"size": "-5"})),
    "file over folder": archive(entry("d/a"), entry("d")),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ToolFailure):
        unpack_archive(data, tmp_path / "out")
