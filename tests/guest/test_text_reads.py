"""read_text of a running guest: pages of any file, in any encoding, of any size."""

import glob
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest.guest_harness import GUEST_PARENT, Done, Guest, needs_namespace
from tests.support.guest.search_harness import Harness, LocalContext

assert GUEST_PARENT
from guest.failures import RequestFailure  # noqa: E402
from guest.files import text_reads  # noqa: E402
from guest.files.requests import ReadTextRequest  # noqa: E402
from guest.files.sha256 import new_digest  # noqa: E402
from guest.files.snapshots import Snapshot, recall  # noqa: E402
from guest.paths import GuestPaths  # noqa: E402

pytestmark = needs_namespace

CHINESE = "中文测试文件,包含一些常见的汉字。\n第二行\n"


@pytest.fixture
def guest(shared_guest: Guest) -> Guest:
    shared_guest.run(f"rm -rf ./* ./.[!.]* {shared_guest.output}/* {shared_guest.output}/.state/files")
    return shared_guest


def read(guest: Guest, path: str, **fields: Any) -> Done:
    defaults = {"offset": 1, "limit": 2000, "max_bytes": 30_000, "timeout_s": 10}
    return guest.request("read_text", path=path, **{**defaults, **fields})


def make(guest: Guest, name: str, content: bytes) -> Path:
    path = guest.workspace / name
    path.write_bytes(content)
    path.chmod(0o666)
    return path


def recall_snapshot(guest: Guest, path: Path) -> Snapshot | None:
    return recall(GuestPaths((bytes(guest.workspace), bytes(guest.tmp)), bytes(guest.output)), bytes(path))


def test_the_requested_lines_are_sent_and_all_lines_counted(guest: Guest) -> None:
    path = make(guest, "n", b"".join(b"%d\n" % number for number in range(1, 500_001)) + b"no newline")
    done = read(guest, "n", offset=250_000, limit=3)
    assert done.bytes_of("file") == b"250000\n250001\n250002\n"
    assert (done["lines"], done["is_counted"], done["count"], done["is_out_of_room"]) == (500_001, True, 3, False)
    assert (done["final_newline"], done["newline"], done["encoding"]) == (False, "lf", "utf-8")
    assert (done["size"], done["kind"]) == (path.stat().st_size, "text")


def test_an_offset_or_column_past_the_end_reports_the_valid_range(guest: Guest) -> None:
    make(guest, "empty", b"")
    done = read(guest, "empty")
    assert (done["lines"], done["count"], done["size"], done.bytes_of("file")) == (0, 0, 0, b"")
    assert read(guest, "empty", offset=2).code == "OFFSET_OUT_OF_RANGE"
    make(guest, "f", "one\nzwölf\n".encode())
    done = read(guest, "f", offset=3)
    assert (done.code, done["error"]["lines"]) == ("OFFSET_OUT_OF_RANGE", 2)
    assert "has 2 lines, none at 3; offset can be 1 to 2" in done["error"]["message"]
    assert read(guest, "f", offset=2, column=5).bytes_of("file") == b"f\n"
    assert (
        "line 2 has 5 characters, none at 6; column can be 1 to 5"
        in read(guest, "f", offset=2, column=6)["error"]["message"]
    )


def test_a_line_of_50_mb_is_read_by_columns(guest: Guest) -> None:
    make(guest, "big", b"x" * 50_000_000 + b"end\nnext\n")
    done = read(guest, "big")
    assert (done.bytes_of("file"), done["cuts"]) == (b"x" * 2000 + b"\nnext\n", [[1, 2000, 50_000_003]])
    last = read(guest, "big", limit=1, column=49_999_999)
    assert (last.bytes_of("file"), last["cuts"]) == (b"xxend\n", [])


@pytest.mark.parametrize(
    ("codec", "mark", "expected_codec"),
    [
        ("utf-8", b"\xef\xbb\xbf", "utf-8"),
        ("utf-16-le", b"\xff\xfe", "utf-16-le"),
        ("utf-16-be", b"\xfe\xff", "utf-16-be"),
        ("utf-32-be", b"\0\0\xfe\xff", "utf-32-be"),
        ("gb18030", b"", "gb18030"),
    ],
)
def test_a_file_of_any_encoding_is_sent_as_utf_8(guest: Guest, codec: str, mark: bytes, expected_codec: str) -> None:
    make(guest, "f", mark + CHINESE.encode(codec))
    done = read(guest, "f")
    assert done.bytes_of("file").decode() == CHINESE
    assert (done["encoding"], done["has_bom"], done["is_guess"], done["is_damaged"]) == (
        expected_codec,
        bool(mark),
        not mark,
        False,
    )


def test_a_file_is_read_in_the_requested_encoding(guest: Guest) -> None:
    make(guest, "f", b"\0\xff\n" + bytes(range(128, 256)) * 100)
    done = read(guest, "f", encoding="latin-1")
    assert (done.bytes_of("file").decode()[:3], done["encoding"]) == ("\0ÿ\n", "iso8859-1")
    codecs = ("iso2022_jp", "iso2022_kr", "utf-7", "hz", "cp037", "utf-32")
    assert {read(guest, "f", encoding=name).code for name in codecs} <= {None, "INVALID_ARGUMENTS"}


def test_a_character_at_a_block_boundary_is_decoded_completely(guest: Guest) -> None:
    for shift in range(4):
        make(guest, "f", b"x" * (262_144 - 2 - shift) + b"\n" + "😀😀\n".encode())
        done = read(guest, "f", offset=2)
        assert (done.bytes_of("file").decode(), done["is_guess"]) == ("😀😀\n", False)


def test_damaged_utf_8_is_shown_and_marked(guest: Guest) -> None:
    make(guest, "f", CHINESE.encode() + b"\xff\n" + "中".encode()[:2])
    done = read(guest, "f")
    assert (done.bytes_of("file").decode(), done["encoding"], done["is_damaged"]) == (
        CHINESE + "\ufffd\n\ufffd\n",
        "utf-8",
        True,
    )
    assert read(guest, "f", limit=2)["is_damaged"] is False


def test_a_binary_file_is_described_and_not_sent(guest: Guest) -> None:
    make(guest, "prog", b"\x7fELF\x02\x01\x01\0" + b"x" * 100_000)
    make(guest, "p.png", b"\x89PNG\r\n\x1a\n" + bytes(36))
    make(guest, "d.pdf", b"%PDF-1.7\n")
    refused, picture, document = (read(guest, name) for name in ("prog", "p.png", "d.pdf"))
    assert (refused.code, refused["error"]["size"], refused.bytes_of("file")) == ("BINARY_FILE", 100_008, b"")
    assert refused["error"]["message"] == "prog: not text but an ELF program or library, 100008 bytes"
    assert (picture["kind"], picture["type"], picture["size"]) == ("image", "a PNG image", 44)
    assert (document["kind"], document.bytes_of("file")) == ("document", b"")


def test_a_sparse_file_of_1_tb_is_answered_quickly(guest: Guest) -> None:
    make(guest, "text", b"".join(b"%d\n" % number for number in range(5000)))
    guest.run("truncate -s 1T hole text")
    assert read(guest, "hole").code == "BINARY_FILE"
    started = time.monotonic()
    done = read(guest, "text", limit=3)
    assert (done.bytes_of("file"), done["is_counted"], done["lines"]) == (b"0\n1\n2\n", False, 5001)
    endless = read(guest, "text", offset=5000)
    ((line, cut_at, length),) = endless["cuts"]
    assert (line, cut_at, endless["is_counted"], endless["count"], length > 50_000_000) == (5001, 2000, False, 2, True)
    assert time.monotonic() - started < 30


def test_a_large_read_uses_bounded_memory(guest: Guest) -> None:
    make(guest, "big", b"x" * 60_000_000)
    assert read(guest, "big")["lines"] == 1
    # The supervisor waits for its next call.
    (pid,) = guest.others()
    peak = int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    assert peak < 40_000_000


def test_a_folder_lists_its_first_hundred_names(guest: Guest) -> None:
    guest.run("mkdir d d/sub; for n in $(seq -w 1 150); do : > d/f$n; done; : > $'d/a\\nb'")
    done = read(guest, "d")
    names = done.bytes_of("file").decode().splitlines()
    assert (done["kind"], done["count"], done["entries"], len(names)) == ("directory", 100, 152, 100)
    assert names[:3] == ["a\\nb", "f001", "f002"]
    assert "d/" in read(guest, ".").bytes_of("file").decode().splitlines()
    assert read(guest, "d/sub")["entries"] == 0
    long_name = "n" * 250
    guest.run(f"mkdir long; for n in $(seq 1 100); do : > long/{long_name}$n; done")
    assert len(read(guest, "long", max_bytes=8192).bytes_of("file")) <= 8192


def test_the_output_folder_is_read_and_its_state_is_not_listed(guest: Guest) -> None:
    (guest.output / "long.txt").write_text("spilled\n")
    (guest.output / "long.txt").chmod(0o644)
    make(guest, "f", b"so that something is remembered\n")
    read(guest, "f")
    assert read(guest, str(guest.output / "long.txt")).bytes_of("file") == b"spilled\n"
    assert read(guest, str(guest.output)).bytes_of("file") == b"long.txt\n"


@pytest.mark.parametrize("name", [b"-rf", b"a\nb", b"\xff\xfe", b" ", "中文".encode(), b"'\"$(id)"])
def test_a_file_of_any_name_is_read(guest: Guest, name: bytes) -> None:
    with open(os.path.join(bytes(guest.workspace), name), "wb") as file:
        file.write(b"here\n")
    assert read(guest, name.decode("utf-8", "surrogateescape")).bytes_of("file") == b"here\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": 0}, {"limit": 0}, {"column": 0}, {"max_bytes": 8191}, {"max_bytes": 1 << 21}, {"offset": True},
        {"limit": "5"}, {"limit": 10**30}, {"encoding": 5}, {"mode": "r"},
    ],
)  # fmt: skip
def test_an_invalid_read_field_is_refused(guest: Guest, fields: dict[str, Any]) -> None:
    make(guest, "f", b"x\n")
    assert read(guest, "f", **fields).code == "INVALID_ARGUMENTS"


def test_a_read_stores_a_snapshot_only_of_suitable_files(guest: Guest) -> None:
    """The whole file under its own path; of a large file the digest; nothing of a huge, refused or spilled file."""
    wide, large = b"\xff\xfe" + CHINESE.encode("utf-16-le"), os.urandom(1 << 20).hex().encode()
    path = make(guest, "f", b"a\nb\nc\n")
    guest.run("mkdir d; ln -s ../f d/link")
    for content, data in ((b"a\nb\nc\n", b"a\nb\nc\n"), (wide, wide), (large, None)):
        path.write_bytes(content)
        read(guest, "d/../d/link", limit=1)
        snapshot = recall_snapshot(guest, path)
        assert snapshot is not None
        assert (snapshot.digest, snapshot.data) == (hashlib.sha256(content).digest(), data)
    path.write_bytes(b"x" * (33 << 20))
    read(guest, "f")
    assert recall_snapshot(guest, path) is None, "it is not compared with what it was"
    binary, spilled = make(guest, "b", b"\0\0"), guest.output / "spilled"
    spilled.write_text("x\n")
    spilled.chmod(0o644)
    assert read(guest, "b").code == "BINARY_FILE"
    assert read(guest, str(spilled))["lines"] == 1
    assert [recall_snapshot(guest, binary), recall_snapshot(guest, spilled)] == [None, None]


@pytest.mark.parametrize("size", [0, 1, 100, (1 << 20) - 1, 1 << 20])
def test_the_file_digest_is_sha256(size: int) -> None:
    data = os.urandom(size)
    digest = new_digest()
    digest.update(data)
    assert digest.digest() == hashlib.sha256(data).digest()


PYTHONS = {sys.executable}.union(
    *(
        glob.glob(os.path.expanduser(pattern))
        for pattern in ("~/.pyenv/versions/3.9.*/bin/python3", "~/.pyenv/versions/3.1[0-9].*/bin/python3")
    )
)


@pytest.mark.parametrize("python", sorted(PYTHONS))
def test_the_file_digest_does_not_import_hashlib(python: str) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from guest.files.sha256 import new_digest; new_digest(); "
        "sys.exit('hashlib' in sys.modules)"
    )
    assert subprocess.run([python, "-I", "-S", "-c", code, str(GUEST_PARENT)], timeout=20, check=False).returncode == 0


def test_a_stored_command_output_is_always_read_as_utf_8_text(guest: Guest) -> None:
    spilled = guest.output / "spilled"
    for content, expected in (
        (b"\0\x89PNG\n", "\0\ufffdPNG\n"),
        (CHINESE.encode("gb18030"), None),
        (b"%PDF-\n", "%PDF-\n"),
    ):
        spilled.write_bytes(content)
        spilled.chmod(0o644)
        done = read(guest, str(spilled))
        assert done.bytes_of("file").decode() == (content.decode("utf-8", "replace") if expected is None else expected)
        assert done["encoding"] == "utf-8"


def test_a_line_beyond_the_seek_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reads, "SEEK_BYTES", 1 << 20)
    context: Any = LocalContext(Harness(tmp_path).paths(), "file")
    (tmp_path / "ws" / "f").write_bytes(b"line\n" * 500_000)
    header = {"path": "f", "limit": 1, "max_bytes": 8192, "timeout_s": 5}
    assert text_reads.read_text(ReadTextRequest({**header, "offset": 200_000}), context)["count"] == 1
    with pytest.raises(RequestFailure, match="line 400000 does not begin within its first") as caught:
        text_reads.read_text(ReadTextRequest({**header, "offset": 400_000}), context)
    assert caught.value.code == "FILE_TOO_LARGE"


def test_a_read_works_without_the_snapshot_folder(guest: Guest) -> None:
    make(guest, "f", b"x\n")
    read(guest, "f")
    guest.run(f"rm -rf {guest.output}/.state; : > {guest.output}/.state")
    assert read(guest, "f").bytes_of("file") == b"x\n"
    guest.run(f"rm -rf {guest.output}/.state")


def test_a_name_with_other_characters_that_look_the_same_is_explained(guest: Guest) -> None:
    make(guest, "u\u0308ber.md", b"x")
    done = read(guest, "\u00fcber.md")
    assert done.code == "FILE_NOT_FOUND"
    assert "other characters" in done["error"]["message"]
    assert "other characters" not in read(guest, "uber.md")["error"]["message"]
