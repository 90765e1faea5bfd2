"""write_text of a running guest: encodings, modes, changes since the last read, and the state after a failed write."""

import os
import stat

import pytest

from tests.support.guest.guest_harness import Done, Guest, needs_namespace

pytestmark = needs_namespace


@pytest.fixture
def guest(shared_guest: Guest) -> Guest:
    shared_guest.run(f"chmod -R u+rwx .; rm -rf ./* ./.[!.]*; rm -rf {shared_guest.output}/.state")
    return shared_guest


def write(guest: Guest, path: str, text: str, mode: str = "overwrite", **fields: object) -> Done:
    return guest.request(
        "write_text", text.encode(), **{"path": path, "mode": mode, "max_bytes": 32768, "timeout_s": 10, **fields}
    )


def output_of(done: Done) -> str:
    return done.bytes_of("file").decode()


def content(guest: Guest, path: str) -> bytes:
    return (guest.workspace / path).read_bytes()


def test_an_overwrite_returns_the_diff_and_keeps_the_file_mode(guest: Guest) -> None:
    write(guest, "f", "one\ntwo\nthree\n")
    (guest.workspace / "f").chmod(0o751)
    done = write(guest, "f", "one\n2\nthree\n")
    assert output_of(done) == "@@ -1,3 +1,3 @@\n one\n-two\n+2\n three"
    assert (done["created"], stat.S_IMODE((guest.workspace / "f").stat().st_mode)) == (False, 0o751)
    assert output_of(write(guest, "f", "one\n2\nthree\n")) == "[the file had this content already]"
    assert [path.name for path in guest.workspace.iterdir()] == ["f"]


def test_a_long_diff_is_cut_after_60_lines_with_a_note(guest: Guest) -> None:
    write(guest, "f", "".join(f"old {number}\n" for number in range(500)))
    lines = output_of(write(guest, "f", "".join(f"new {number}\n" for number in range(500)))).splitlines()
    assert (len(lines), lines[-1]) == (61, "[diff cut: more lines changed than are shown; see the file with read_tool]")


@pytest.mark.parametrize(
    ("old", "codec", "bom"),
    [
        ("名前\r\n日本語のテキスト、これは長い文章です。\r\n", "cp932", b""),
        ("中文内容，这是一个测试文件。\n", "gb18030", b""),
        ("caf\u00e9 cr\u00e8me br\u00fbl\u00e9e\n", "latin-1", b""),
        ("wide\n", "utf-16-le", b"\xff\xfe"),
        ("wide\n", "utf-16-be", b"\xfe\xff"),
        ("marked\n", "utf-8", b"\xef\xbb\xbf"),
    ],
)
def test_an_overwrite_keeps_the_encoding_and_byte_order_mark(guest: Guest, old: str, codec: str, bom: bytes) -> None:
    (guest.workspace / "f").write_bytes(bom + old.encode(codec))
    os.chmod(guest.workspace / "f", 0o666)
    new = old + old[:3]
    done = write(guest, "f", new)
    assert content(guest, "f") == bom + new.encode(codec)
    assert (done["encoding"], "own encoding" in output_of(done)) == (codec, True)


def test_a_requested_encoding_is_used_or_refused(guest: Guest) -> None:
    assert write(guest, "f", "é\n", encoding="latin-1")["encoding"] == "iso8859-1"
    assert content(guest, "f") == b"\xe9\n"
    assert write(guest, "g", "日", encoding="latin-1").code == "INVALID_ARGUMENTS"
    assert write(guest, "g", "x", encoding="base64").code == "INVALID_ARGUMENTS"
    assert not (guest.workspace / "g").exists()


def test_append_keeps_the_encoding_and_reports_a_missing_line_end(guest: Guest) -> None:
    (guest.workspace / "f").write_bytes(b"\xff\xfe" + "one".encode("utf-16-le"))
    os.chmod(guest.workspace / "f", 0o666)
    done = write(guest, "f", "+two\n", "append")
    assert content(guest, "f") == b"\xff\xfe" + "one+two\n".encode("utf-16-le")
    assert output_of(done) == "[the file did not end with a line end: the text went on in its last line]"
    assert (write(guest, "f", "x", "append")["written"], output_of(write(guest, "new", "x", "append"))) == (2, "")


def test_changed_line_ends_are_reported_without_a_diff(guest: Guest) -> None:
    guest.run(r"printf 'a\r\nb\r\n' > f")
    assert output_of(write(guest, "f", "a\nb\n")) == "[line ends: the file had CRLF, the content has LF]"


def test_a_placeholder_comment_is_written_with_a_warning(guest: Guest) -> None:
    text = "def f():\n    pass\n# ... rest of the code stays the same ...\n"
    assert "[warning: line 3 of the content looks like a placeholder" in output_of(write(guest, "f.py", text))
    assert content(guest, "f.py") == text.encode()
    assert "warning" not in output_of(write(guest, "f.py", text + "x = 1\n")), "it was in the file before"


def test_metadata_changes_and_own_writes_do_not_make_a_file_stale(guest: Guest) -> None:
    write(guest, "f", "one\n")
    guest.run("touch -d 2001-01-01 f; chmod 600 f; cat f > g; mv g f")
    assert write(guest, "./f", "two\n").code is None
    write(guest, "f", "three\n", "append")
    guest.request("write_file", b"raw\n", path="f", mode="overwrite", timeout_s=10)
    assert write(guest, "f", "four\n").code is None


def test_all_spellings_of_a_path_share_one_snapshot(guest: Guest) -> None:
    guest.run("mkdir -p d/e; ln -s d/f link")
    write(guest, "d/e/../f", "one\n")
    guest.run("echo two > d/f")
    assert write(guest, "link", "x").code == "STALE_FILE"
    assert write(guest, str(guest.workspace / "d" / "f"), "x").code is None


def test_an_append_to_a_changed_file_reports_it_and_the_file_stays_stale(guest: Guest) -> None:
    write(guest, "f", "one\n")
    guest.run("echo theirs >> f")
    assert output_of(write(guest, "f", "ours\n", "append")) == (
        "[the file had been changed by something else since this session last read or wrote it; see it with read_tool]"
    )
    assert write(guest, "f", "x\n").code == "STALE_FILE"
    assert content(guest, "f") == b"one\ntheirs\nours\n"


def test_unencodable_text_is_not_appended_and_an_overwrite_uses_utf_8(guest: Guest) -> None:
    guest.run(rb"printf 'caf\351 cr\350me\n' > f")
    before = content(guest, "f")
    assert write(guest, "f", "日", "append").code == "INVALID_ARGUMENTS"
    assert write(guest, "f", "é", "append", encoding="utf-8").code == "INVALID_ARGUMENTS"
    for body in (b"\xff", b"\xed\xa0\x80"):
        done = guest.request("write_text", body, path="f", mode="overwrite", max_bytes=8192, timeout_s=10)
        assert done.code == "INVALID_ARGUMENTS", "it is no UTF-8"
    assert content(guest, "f") == before
    done = write(guest, "f", "日本\n")
    assert (content(guest, "f"), done["encoding"]) == ("日本\n".encode(), "utf-8")
    assert "written as utf-8: the file was latin-1" in output_of(done)


def test_a_binary_or_huge_file_is_overwritten_without_a_diff(guest: Guest) -> None:
    guest.run("truncate -s 1000G huge")
    done = write(guest, "huge", "small\n")
    assert (content(guest, "huge"), "too large to compare" in output_of(done)) == (b"small\n", True)
    guest.run("head -c 100 /dev/zero > f")
    assert output_of(write(guest, "f", "text\n")) == "[the old content, 100 bytes, was not text: no diff]"
    guest.run("head -c 100 /dev/zero > g")
    assert write(guest, "g", "text\n", "append").code == "BINARY_FILE"


def test_a_file_in_an_unwritable_folder_is_written_in_place(guest: Guest) -> None:
    guest.run("mkdir d; echo long old content > d/f; chmod 555 d")
    assert write(guest, "d/f", "new\n").code is None
    assert content(guest, "d/f") == b"new\n"


@pytest.mark.parametrize(("encoding", "text"), [("ascii", "é"), ("no-such", "a")])
def test_a_failed_write_removes_the_folders_it_created(guest: Guest, encoding: str, text: str) -> None:
    assert write(guest, "new/deep/f", text, encoding=encoding).code == "INVALID_ARGUMENTS"
    assert list(guest.workspace.iterdir()) == []
