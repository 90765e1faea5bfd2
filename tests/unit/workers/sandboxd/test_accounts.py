"""The user database that sandboxes of an image get."""

import io
import os
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import docker.errors
import pytest
from docker import APIClient

from toolcrew.workers.sandboxd.runtime.accounts import (
    MAX_BYTES,
    complete_group,
    complete_passwd,
    read_accounts,
    read_file,
)

ROOT = b"root:x:0:0:root:/root:/bin/sh\n"


def fields(text: bytes | None, number: int) -> list[list[bytes]]:
    lines = [line.split(b":") for line in (text or b"").splitlines()]
    return [line for line in lines if line[2:3] == [b"%d" % number]]


def test_an_image_without_users_gets_root_and_the_user_of_the_sandbox() -> None:
    (user,) = fields(complete_passwd(b""), 1000)
    assert (user[0], user[3], user[5]) == (b"sandbox", b"1000", b"/home/sandbox")
    assert fields(complete_passwd(b""), 0)[0][5] == b"/root"
    assert [fields(complete_group(b""), gid)[0][0] for gid in (0, 1000)] == [b"root", b"sandbox"]


@pytest.mark.parametrize("end", [b"", b"+::::::\n", b"no line of passwd\n", b"a:x:\n", b"\xff\n"])
def test_entries_are_added_to_those_of_the_image(end: bytes) -> None:
    completed = complete_passwd(ROOT + end)
    assert completed is not None
    assert completed.startswith(ROOT + end)
    assert len(fields(completed, 1000)) == len(fields(completed, 0)) == 1


def test_a_last_line_without_an_end_stays_whole() -> None:
    assert len(fields(complete_passwd(ROOT.rstrip()), 1000)) == 1


def test_a_user_of_the_image_keeps_its_name_and_gets_the_home_of_the_sandbox() -> None:
    node, whole = b"node:x:1000:1000::/home/node:/bin/sh\n", b"node:x:1000:1000::/home/sandbox:/bin/sh\n"
    assert complete_passwd(ROOT + node) == ROOT + whole
    assert complete_passwd(ROOT + whole) is None
    assert complete_group(b"root:x:0:\nnode:x:1000:\n") is None


def test_the_name_of_another_user_is_not_taken() -> None:
    completed = complete_passwd(ROOT + b"sandbox:x:7:7::/:/bin/sh\n")
    assert [line[0] for line in fields(completed, 1000)] == [b"sandbox_"]


class ImageFiles:
    """An engine that answers only `get_archive`. `read`: number of chunks that were taken from it."""

    def __init__(self, **members: tuple[bytes, bytes] | None) -> None:
        self.members = members
        self.read = 0

    def get_archive(self, container: str, path: str) -> tuple[Iterator[bytes], dict[str, Any]]:
        member = self.members.get(path.rpartition("/")[2])
        if member is None:
            raise docker.errors.NotFound("no such file")
        return self.stream(*member), {}

    def stream(self, kind: bytes, content: bytes) -> Iterator[bytes]:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            info = tarfile.TarInfo("passwd")
            info.type, info.size = kind, len(content)
            archive.addfile(info, io.BytesIO(content))
        for at in range(0, len(packed.getvalue()), 8192):
            self.read += 1
            yield packed.getvalue()[at : at + 8192]


def read(engine: ImageFiles) -> Any:
    return read_accounts(cast(APIClient, engine), "container")


def test_files_that_the_image_does_not_have_are_made() -> None:
    assert fields(read(ImageFiles()).passwd, 1000)
    assert fields(read(ImageFiles(passwd=(tarfile.REGTYPE, ROOT))).passwd, 0)[0][6] == b"/bin/sh"


def test_root_inside_keeps_the_homes_of_the_image() -> None:
    own = ROOT + b"user:x:1000:1000::/home/user:/bin/bash\n"
    accounts = read(ImageFiles(passwd=(tarfile.REGTYPE, own)))
    assert fields(accounts.passwd, 1000)[0][5] == b"/home/sandbox"
    assert "passwd" not in dict(accounts.items(is_root=True))
    missing = dict(read(ImageFiles(passwd=(tarfile.REGTYPE, ROOT))).items(is_root=True))
    assert fields(missing["passwd"], 1000)[0][5] == b"/home/sandbox"


def test_links_and_large_files_of_an_image_stay_as_they_are() -> None:
    for kind in (tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
        assert read(ImageFiles(passwd=(kind, b""))).passwd is None
    large = ImageFiles(passwd=(tarfile.REGTYPE, b"x" * (MAX_BYTES * 50)))
    assert read(large).passwd is None
    assert large.read < 20


def test_only_regular_files_below_the_folder_are_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for folder in (root / "etc", tmp_path / "outside"):
        folder.mkdir(parents=True)
        (folder / "passwd").write_bytes(b"x")
    (root / "etc" / "large").write_bytes(b"x" * (MAX_BYTES + 1))
    (root / "etc" / "most").write_bytes(b"x" * MAX_BYTES)
    (root / "etc" / "link").symlink_to(tmp_path / "outside" / "passwd")
    (root / "etc" / "inner").symlink_to("passwd")
    (root / "folder").symlink_to("../outside")
    os.mkfifo(root / "etc" / "pipe")
    fd = os.open(root, os.O_PATH)
    try:
        read = partial(read_file, fd)
        assert read("/etc/passwd") == b"x"
        assert read("/etc/most") == b"x" * MAX_BYTES
        assert read("/etc/missing") == read("/missing/passwd") == b""
        for path in ("/etc/large", "/etc/link", "/etc/inner", "/folder/passwd", "/etc/pipe", "/etc"):
            assert read(path) is None, path
        assert read("/../outside/passwd") == b""
    finally:
        os.close(fd)
