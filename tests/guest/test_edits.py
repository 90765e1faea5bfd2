"""edit_text of a running guest: matching, replacing, output, and refusals."""

import json
import os
import stat

import pytest

from tests.support.guest.guest_harness import GUEST_PARENT, Done, Guest, needs_namespace

assert GUEST_PARENT

pytestmark = needs_namespace


@pytest.fixture
def guest(shared_guest: Guest) -> Guest:
    shared_guest.run(f"rm -rf ./* ./.[!.]*; rm -rf {shared_guest.output}/.state")
    return shared_guest


def write_file(guest: Guest, data: bytes, path: str = "f") -> None:
    (guest.workspace / path).write_bytes(data)
    owner = guest.workspace.stat()
    os.chown(guest.workspace / path, owner.st_uid, owner.st_gid)


def content(guest: Guest, path: str = "f") -> bytes:
    return (guest.workspace / path).read_bytes()


def edit(guest: Guest, *edits: tuple[str, str] | tuple[str, str, bool], path: str = "f", **fields: object) -> Done:
    names = ("old_string", "new_string", "replace_all")
    body = json.dumps([dict(zip(names, parts, strict=False)) for parts in edits]).encode()
    return guest.request("edit_text", body, **{"path": path, "max_bytes": 32768, "timeout_s": 10, **fields})


def output_of(done: Done) -> str:
    return done.bytes_of("file").decode()


def error_message(done: Done) -> str:
    return str(done["error"]["message"])


def test_the_output_shows_the_edited_lines(guest: Guest) -> None:
    write_file(guest, b"x" * 200_000 + b"\nhere\n" + b"y" * 200_000, "long")
    assert [text[:7] for text in output_of(edit(guest, ("here", "there"), path="long")).splitlines()] == [
        "1\txxxxx",
        "2\tthere",
        "3\tyyyyy",
    ]
    write_file(guest, b"b\n" + b"-\n" * 20 + b"a\n")
    assert output_of(edit(guest, ("a", "b"))).splitlines() == ["19\t-", "20\t-", "21\t-", "22\tb"]


def test_an_ambiguous_match_is_refused_with_its_lines(guest: Guest) -> None:
    write_file(guest, b"aaa")
    assert edit(guest, ("aa", "b")).code == "AMBIGUOUS_MATCH", "an occurrence may overlap itself"
    assert edit(guest, ("aa", "b", True))["replaced"] == 1
    write_file(guest, b"x = 1\n" * 12)
    done = edit(guest, ("x = 1", "y"))
    assert done.code == "AMBIGUOUS_MATCH"
    assert "occurs 12 times, at lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and more;" in error_message(done)
    assert "replace_all=true" in error_message(done)
    assert content(guest) == b"x = 1\n" * 12


@pytest.mark.parametrize(("expected", "code"), [(3, None), (1, "AMBIGUOUS_MATCH"), (4, "AMBIGUOUS_MATCH")])
def test_a_wrong_expected_count_is_refused(guest: Guest, expected: int, code: str | None) -> None:
    write_file(guest, b"a a a")
    assert edit(guest, ("a", "b"), expected_count=expected).code == code
    assert content(guest) == (b"b b b" if code is None else b"a a a")


def test_a_failed_edit_of_a_list_undoes_all_and_is_named(guest: Guest) -> None:
    write_file(guest, b"one\ntwo\n")
    done = edit(guest, ("one", "1"), ("absent text", "x"))
    assert (done.code, "edit 2 of 2: " in error_message(done)) == ("NO_MATCH", True)
    assert content(guest) == b"one\ntwo\n"
    assert "before an earlier edit of this call changed it" in error_message(edit(guest, ("one", "1"), ("one", "x")))


@pytest.mark.parametrize(
    ("before", "edits", "after"),
    [
        (b"a\r\nb\r\nc\r\n", [("a\nb", "1\n2\n3")], b"1\r\n2\r\n3\r\nc\r\n"),
        (b"a\r\nb\r\na\r\nb\r\n", [("a\nb\n", "x\ny\n", True)], b"x\r\ny\r\nx\r\ny\r\n"),
        (b"a\r\nb\r\n", [("a\nb", "1\n2"), ("2\n", "3\n4\n")], b"1\r\n3\r\n4\r\n"),
        (b"a\r\nb\n", [("a\nb\n", "1\n2\n")], b"1\r\n2\n"),
        (b"a\r\nb\na\nb\r\n", [("a\nb", "1\n2", True)], b"1\r\n2\n1\n2\r\n"),
        (b"x\r\na\r\nb\n", [("a", "1\n2")], b"x\r\n1\r\n2\r\nb\n"),
        (b"x\r\na\nb\n", [("a", "1\n2")], b"x\r\n1\n2\nb\n"),
        (b"x\r\na", [("a", "1\n2")], b"x\r\n1\r\n2"),
        (b"a\r\nb", [("a\r\nb", "1\r\n2")], b"1\r\n2"),
        (b"a\nb\r\n", [("b\r\n", "c\n")], b"a\nc\r\n"),
        (b"a\n\r\nb\r\n", [("\n\n", "\n")], b"a\nb\r\n"),
    ],
)
def test_lf_matches_crlf_and_the_replacement_keeps_the_line_ends(
    guest: Guest, before: bytes, edits: list[tuple[str, str]], after: bytes
) -> None:
    write_file(guest, before)
    assert edit(guest, *edits).code is None
    assert content(guest) == after


def test_lf_matches_both_line_ends_and_crlf_only_crlf(guest: Guest) -> None:
    write_file(guest, b"a\r\nb\na\nb\n")
    assert edit(guest, ("a\nb", "x")).code == "AMBIGUOUS_MATCH"
    write_file(guest, b"a\nb\r\n")
    assert edit(guest, ("a\r\nb", "x")).code == "NO_MATCH", "CRLF in the arguments is meant"


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_wide_encodings_are_edited_by_their_characters(guest: Guest, codec: str) -> None:
    bom = "\ufeff".encode(codec)
    write_file(guest, bom + "a\r\n日本😀 text\r\n".encode(codec))
    assert edit(guest, ("日本😀 text\n", "中\nb\n"))["encoding"] == codec
    assert content(guest) == bom + "a\r\n中\r\nb\r\n".encode(codec)


def test_a_match_within_a_two_byte_character_is_ignored(guest: Guest) -> None:
    # 0x5C, a backslash, is the second byte of both.
    text = "ソースコード表示\\機能、これは日本語です。\n"
    write_file(guest, text.encode("cp932"))
    assert edit(guest, ("\\", "/"))["encoding"] == "cp932"
    assert content(guest) == text.replace("\\", "/").encode("cp932")


def test_a_character_outside_the_file_encoding_is_refused(guest: Guest) -> None:
    write_file(guest, b"caf\xe9 cr\xe8me name\n")
    done = edit(guest, ("name", "日"))
    assert (done.code, "encoding=utf-8" in error_message(done)) == ("INVALID_ARGUMENTS", True)
    assert "[written as latin-1, which is a guess" in output_of(edit(guest, ("café", "thé")))
    assert content(guest) == b"th\xe9 cr\xe8me name\n"


def test_an_empty_old_string_only_creates_or_fills_a_file(guest: Guest) -> None:
    done = edit(guest, ("", "one\n"), ("one", "1"), path="d/new")
    assert (done["created"], content(guest, "d/new")) == (True, b"1\n")
    assert (edit(guest, ("", "x"), path="d/new").code, content(guest, "d/new")) == ("INVALID_ARGUMENTS", b"1\n")
    write_file(guest, b"")
    assert (edit(guest, ("", "filled")).code, content(guest)) == (None, b"filled")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b"[]", b"[1]", b"[" * 100_000, b"\xff"),
        b'[{"old_string": "a"}]',
        b'[{"old_string": "a", "new_string": 1}]',
        b'[{"old_string": "a", "new_string": "b", "count": 1}]',
        b'[{"old_string": "\\ud800", "new_string": "b"}]',
    ],
)
def test_a_body_that_is_not_a_list_of_edits_is_refused(guest: Guest, body: bytes) -> None:
    write_file(guest, b"a")
    assert guest.request("edit_text", body, path="f", max_bytes=8192, timeout_s=10).code == "INVALID_ARGUMENTS"
    assert content(guest) == b"a"


def test_links_and_hard_links_are_preserved_by_an_edit(guest: Guest) -> None:
    guest.run("echo old > a; chmod 751 a; ln a b; ln -s a link")
    assert edit(guest, ("old", "new"), path="link").code is None
    assert (content(guest, "b"), (guest.workspace / "link").is_symlink()) == (b"new\n", True)
    assert stat.S_IMODE((guest.workspace / "a").stat().st_mode) == 0o751


def test_an_edit_of_a_file_changed_by_another_process_reports_the_change(guest: Guest) -> None:
    edit(guest, ("", "one\ntwo\n"))
    guest.run("echo three >> f")
    output = output_of(edit(guest, ("one", "1")))
    assert "[the file had been changed by something else" in output
    assert output.endswith("that change was:]\n@@ -1,2 +1,3 @@\n one\n two\n+three")
    assert "changed by something else" not in output_of(edit(guest, ("two", "2")))


def test_a_change_during_the_read_of_a_file_is_detected(guest: Guest) -> None:
    write_file(guest, b"one\ntwo\n")
    guest.request("read_text", path="f", offset=1, limit=9, max_bytes=8192, timeout_s=9)
    record = next(path for path in (guest.output / ".state" / "files").iterdir() if path.name != "ledger")
    assert record.stat().st_mtime_ns == (guest.workspace / "f").stat().st_ctime_ns, (
        "not when it was noted, which is later"
    )
    (guest.workspace / "f").write_bytes(b"one\n2\n")
    assert "+2" in output_of(edit(guest, ("one", "1")))


@pytest.mark.parametrize("max_bytes", [8192, 32768])
def test_a_long_diff_of_another_process_is_cut_with_a_note(guest: Guest, max_bytes: int) -> None:
    edit(guest, ("", "one\n"))
    guest.run("seq -f '%0200.0f' 300 >> f")
    done = edit(guest, ("one", "1"), max_bytes=max_bytes)
    assert "the edit matched all the same" in output_of(done)
    assert output_of(done).endswith(" read the file with read_tool]")
    assert len(done.bytes_of("file")) <= max_bytes


def test_an_edit_that_breaks_the_syntax_is_kept_with_a_note(guest: Guest) -> None:
    write_file(guest, b"x = (1)\n", "a.py")
    note = output_of(edit(guest, ("(1)", "(1"), path="a.py")).splitlines()[-1]
    assert note.startswith("[note: the file is no valid Python any more: line 1: ")
    write_file(guest, b'{"a": 1}', "a.json")
    assert "no valid JSON any more" in output_of(edit(guest, ("1", "1,"), path="a.json"))
    write_file(guest, b"a = \n", "a.toml")
    done = edit(guest, ("a", "b"), path="a.toml")
    assert "no valid TOML, as before" in output_of(done) or guest.request("attest")["python"] < [3, 11]
    assert content(guest, "a.toml") == b"b = \n"


def test_a_whitespace_tolerant_match_must_be_enabled_and_unique(guest: Guest) -> None:
    write_file(guest, b"def f():\r\n\treturn 1  \r\n\r\ndef g():\r\n    pass\r\n")
    assert edit(guest, ("  return 1", "    return 2")).code == "NO_MATCH"
    done = edit(guest, ("def f():\n  return 1\n", "def f():\n    return 2\n"), tolerance="whitespace")
    assert "matched only without the blanks around its lines" in output_of(done)
    assert content(guest) == b"def f():\r\n    return 2\r\n\r\ndef g():\r\n    pass\r\n"
    write_file(guest, b" a\n  a\n")
    assert edit(guest, ("   a", "b"), tolerance="whitespace").code == "NO_MATCH"


@pytest.mark.parametrize("line", [1, 2, 20_000, 39_999, 40_000])
def test_an_edit_in_a_large_file_is_shown_with_its_line_numbers(guest: Guest, line: int) -> None:
    write_file(guest, b"".join(b"line %d\n" % number for number in range(1, 40_001)))
    output = output_of(edit(guest, (f"line {line}\n", "new\nnewer\n"))).splitlines()
    before = [f"{number}\tline {number}" for number in range(max(1, line - 3), line)]
    after = [f"{number + 1}\tline {number}" for number in range(line + 1, min(40_000, line + 3) + 1)]
    assert output == [*before, f"{line}\tnew", f"{line + 1}\tnewer", *after]


def test_a_long_new_text_is_shown_by_its_start_and_end(guest: Guest) -> None:
    write_file(guest, b"here\n" + b"tail\n")
    output = output_of(edit(guest, ("here", "\n".join(f"n{number}" for number in range(500))))).splitlines()
    assert (output[0], output[-1], len(output)) == ("1\tn0", "501\ttail", 47)
    assert output[23] == "[lines 24-478 not shown; see them with read_tool offset=24 limit=455]"


def test_replies_stay_within_max_bytes_for_long_lines(guest: Guest) -> None:
    write_file(guest, ("😀" * 5000 + "x\n").encode() * 200)
    done = edit(guest, ("x", "y", True), max_bytes=8192)
    assert len(done.bytes_of("file")) <= 8192
    assert "see it with read_tool" in output_of(done)
