"""grep of the guest: returned lines, their order, and the notice about omitted results."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT, HAS_RIPGREP_14, Done, Guest, needs_namespace
from tests.support.guest.search_harness import Harness, LocalContext
from tests.support.stack.waiting import SOON_S, wait_until

assert GUEST_PARENT
from guest.search.grep_lines import MAX_LINE_CHARS, cut_line  # noqa: E402


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_match_totals_are_exact_for_any_limit(harness: Harness) -> None:
    for number in range(8):
        harness.make(f"f{number}", "hit\n" * (number + 1))
    reply = harness.grep("hit", limit=10)
    assert (reply["matches"], reply["files"], reply["shown"], reply["shown_files"]) == (36, 8, 10, 2)
    assert reply.lines[8:] == ["f6:1: hit", "f6:2: hit"]
    limited = harness.grep("hit", max_per_file=1)
    assert (limited["matches"], limited["shown"], limited.lines[0]) == (36, 8, "f7:1: hit")


@pytest.mark.parametrize(("files", "size"), [(600, 2), (3, 3 << 20)], ids=["many files", "large files"])
def test_lines_of_the_newest_file_are_sent_before_the_other_files_are_searched(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, files: int, size: int
) -> None:
    oldest = harness.make("oldest.txt", "nothing here\n" + "x" * size)
    for number in range(files):
        harness.make(f"d/{number}.txt", "nothing\n" + "y" * size)
    harness.make("newest.txt", "hit one\nhit two\n")
    times = oldest.stat()

    def send(context: LocalContext, stream: str, data: bytes) -> None:
        # The file matches only from now on: a search that had read it would not find it.
        if data and not context.sent:
            oldest.write_text("hit three\n" + "x" * size)
            os.utime(oldest, ns=(times.st_atime_ns, times.st_mtime_ns))
        context.sent += data

    monkeypatch.setattr(LocalContext, "send", send)
    found = harness.grep("hit", path=".")
    assert found.lines == ["newest.txt:1: hit one", "newest.txt:2: hit two", "oldest.txt:1: hit three"]
    assert (found["matches"], found["files"], found["shown"], found["shown_files"]) == (3, 2, 3, 2)


@pytest.mark.parametrize("limit", [1, 5, 300, 1000])
def test_early_lines_change_neither_order_nor_counts(harness: Harness, limit: int) -> None:
    for number in range(700):
        harness.make(f"d/{number:03}.txt", "hit\nhit\n" if number % 2 else b"\0hit\n" if number % 10 == 0 else "no\n")
    found = harness.grep("hit", limit=limit, max_lines=1500, max_bytes=1 << 20)
    expected = [f"d/{number:03}.txt:{line}: hit" for number in range(699, 0, -2) for line in (1, 2)]
    assert found.lines == expected[:limit]
    assert found["shown"] == min(limit, 700)
    assert found["matches"] >= 700, "binary files count until their lines would be shown"
    assert len(harness.grep("hit", max_per_file=1, limit=1000, max_lines=1500, max_bytes=1 << 20).lines) == 350


def test_context_lines_are_marked_and_groups_separated(harness: Harness) -> None:
    harness.make("b", "one\nhit\n")
    harness.make("a", "".join(f"{number}\n" if number % 5 else "hit\n" for number in range(1, 12)))
    reply = harness.grep("hit", before=1, after=2)
    assert reply.lines == [
        *("a-4- 4", "a:5: hit", "a-6- 6", "a-7- 7", "--", "a-9- 9", "a:10: hit", "a-11- 11"),
        *("--", "b-1- one", "b:2: hit"),
    ]
    one_group = harness.grep("hit", before=2, after=2, path="a")
    assert one_group.lines == [
        f"a{'-:'[text == 'hit']}{n}{'-:'[text == 'hit']} {text}"
        for n, text in zip(range(3, 12), ["3", "4", "hit", "6", "7", "8", "9", "hit", "11"], strict=True)
    ]


def test_files_and_count_modes_list_no_lines(harness: Harness) -> None:
    harness.make("a", "x\nx\n")
    harness.make("b", "x\n")
    assert harness.grep("x", mode="files").lines == ["b", "a"]
    assert harness.grep("x", mode="count").lines == ["b:1", "a:2"]
    cut_reply = harness.grep("x", mode="files", limit=1)
    assert (cut_reply.lines, cut_reply["files"], cut_reply["shown_files"]) == (["b"], 2, 1)


def test_omitted_files_are_counted_and_named(harness: Harness) -> None:
    harness.make(".gitignore", "*.log\nout/\n")
    for name in ("a.log", "out/b", "out/c/d"):
        harness.make(name, "hit\n")
    harness.make("binary", b"\0\1hit\n")
    harness.make("wide.txt", "hit wide\n".encode("utf-16"))
    harness.make("large", b"hit\n" + b"x" * (10 << 20))
    reply = harness.grep("hit")
    assert reply.lines == ["wide.txt:1: hit wide"]
    assert (reply["ignored"], reply["binary"], reply["large"]) == (2, 1, 1)
    assert (reply["binary_names"], reply["large_names"]) == (["binary"], ["large"])
    assert harness.grep("hit", include_ignored=True, mode="files")["files"] == 4


@pytest.mark.parametrize(("pattern", "lines"), [("hit", ["small:1: hit"]), ("nowhere", [])])
def test_a_huge_file_is_omitted_and_named(harness: Harness, pattern: str, lines: list[str]) -> None:
    harness.make("small", "hit\n")
    os.truncate(harness.make("endless", "hit\n"), 1 << 40)
    reply = harness.grep(pattern)
    assert reply.lines == lines
    assert (reply["large_names"], reply["files"], reply["partial"]) == (["endless"], len(lines), False)


def test_a_file_given_as_path_is_searched_despite_filters(harness: Harness) -> None:
    harness.make(".gitignore", "*\n")
    harness.make("large.log", (b"x" * 1023 + b"\n") * (11 << 10) + b"hit\n")
    reply = harness.grep("hit", path="large.log", include="*.py")
    assert (reply.lines, reply["is_file"]) == ([f"large.log:{(11 << 10) + 1}: hit"], True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"include": "*.py"}, {"a.py", "src/b.py", "src/deep/c.py", "test/d.py"}),
        ({"include": "*.{py,js}"}, {"a.py", "src/b.py", "src/deep/c.py", "src/e.js", "test/d.py"}),
        ({"include": "*.js, *.md"}, {"src/e.js", "README.md"}),
        ({"include": "src/*.py"}, {"src/b.py"}),
        ({"include": "src/**/*.py"}, {"src/b.py", "src/deep/c.py"}),
        ({"include": "/a.py"}, {"a.py"}),
        ({"include": "src/"}, {"src/b.py", "src/deep/c.py", "src/e.js"}),
        ({"include": "*.py,!test"}, {"a.py", "src/b.py", "src/deep/c.py"}),
        ({"include": "*.py", "exclude": "deep,test/*"}, {"a.py", "src/b.py"}),
        ({"exclude": "*.py"}, {"src/e.js", "README.md", "Makefile"}),
        ({"type": "md"}, {"README.md"}),
        ({"type": "make"}, {"Makefile"}),
        ({"type": "py", "exclude": "src"}, {"a.py", "test/d.py"}),
        ({"type": "markdown", "include": "*.py"}, set()),
        ({"type": "python"}, {"a.py", "src/b.py", "src/deep/c.py", "test/d.py"}),
    ],
)
def test_include_exclude_and_type_select_the_searched_files(
    harness: Harness, fields: dict[str, Any], expected: set[str]
) -> None:
    for name in ("a.py", "src/b.py", "src/deep/c.py", "src/e.js", "test/d.py", "README.md", "Makefile"):
        harness.make(name)
    assert set(harness.grep("x", mode="files", **fields).lines) == expected


def test_files_filtered_by_name_do_not_count_as_ignored(harness: Harness) -> None:
    harness.make(".gitignore", "*.log\n")
    harness.make("a.log")
    harness.make("a.py")
    reply = harness.grep("none", include="*.py")
    assert (reply["ignored"], reply["searched"]) == (0, 1)
    assert harness.grep("x", type="nonsense").code == "INVALID_ARGUMENTS"
    assert harness.grep("x", exclude="[a").code == "INVALID_PATTERN"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "foo(",
            (
                f"{'' if HAS_RIPGREP_14 else ' at character 4'}: unclosed group; the pattern was 'foo('; if it is meant "
                "literally, retry with fixed_strings=true"
            ),
        ),
        ("a{2,1}", "at character 2: invalid repetition count range"),
        ("foo(?=", "at character 7: missing closing parenthesis"),
        ("[a", "at character 1: unclosed character class"),
        ("a\nb", "a line end, and no single line matches it: set multiline=true"),
        ("a\\nb", "a line end, and no single line matches it: set multiline=true"),
        ("", "the pattern is empty"),
        ("a\0", "NUL"),
        ("x" * 200_000, "200000 bytes"),
        ("\\p{Nonsense}", "Unicode property not found"),
        ("(?<=a+)b", "lookbehind assertion"),
    ],
)
def test_an_invalid_regex_is_refused_with_its_position(harness: Harness, pattern: str, message: str) -> None:
    harness.make("a")
    reply = harness.grep(pattern)
    assert reply.code == "INVALID_PATTERN"
    assert message in str(reply.failure)
    assert "fixed_strings" not in str(harness.grep("^\\w+(").failure), "it does not look literal"


@pytest.mark.parametrize("pattern", ["(?<=a)b", "a(?!c)", "(a)\\1?b", "(?P<x>a)(?P=x)?b", "(?>a)b"])
def test_lookaround_and_backreferences_are_supported(harness: Harness, pattern: str) -> None:
    harness.make("f", "ab\nzz\n")
    assert harness.grep(pattern).lines == ["f:1: ab"]


def test_a_backtracking_regex_is_stopped_at_the_time_limit(harness: Harness) -> None:
    harness.make("f", "a" * 40 + "!\n")
    started = time.monotonic()
    assert harness.grep("(?=a)(a+)+$", timeout_s=0.6).code == "TIMEOUT"
    # PCRE2 takes unlimited time to compile this pattern, or finds it too large.
    late = harness.grep("(?=a)" + "[ -\U0010fff0]" * 4000, ignore_case=True, timeout_s=0.6)
    assert late.code == "TIMEOUT" or "too large" in str(late.failure)
    assert time.monotonic() - started < 30  # a machine may be busy; a search that is not stopped runs for hours


def test_a_timed_out_search_returns_a_partial_result(harness: Harness) -> None:
    harness.make("slow", "a" * 40 + "!\n")
    harness.make("a-quick", "hit a\n")
    # The walk lists names as the directory has them: one of the two orders finds something.
    reply = harness.grep("(?=h)hit|(?=a)(a+)+$", timeout_s=1)
    assert reply.code == "TIMEOUT" or (reply["partial"], reply.lines) == (True, ["a-quick:1: hit a"])


@pytest.mark.parametrize("use_openat2", [True, False])
def test_grep_does_not_follow_links(harness: Harness, use_openat2: bool) -> None:
    harness.make("d/e/a", "root:x\n")
    (harness.workspace / "passwd").symlink_to("/etc/passwd")
    (harness.workspace / "etc").symlink_to("/etc")
    reply = harness.grep("root:", use_openat2=use_openat2)
    assert reply.lines == ["d/e/a:1: root:x"]
    assert harness.grep("root:", path="passwd").code == "PATH_NOT_ALLOWED"
    os.mkfifo(harness.workspace / "pipe")
    assert harness.grep("root:", path="pipe").code == "NOT_A_REGULAR_FILE"


def test_names_with_line_ends_or_invalid_bytes_are_escaped(harness: Harness) -> None:
    for name in (b"two\nlines", b"latin-\xe9", b"a:1: b"):
        harness.make(name, "hit\nhit two\n")
    for multiline in (False, True):
        reply = harness.grep("hit", multiline=multiline)
        assert set(reply.lines) == {
            f"{name}:{line}" for name in ("two\\nlines", "latin-\\xe9", "a:1: b") for line in ("1: hit", "2: hit two")
        }
        assert reply["matches"] == 6


def test_a_multiline_match_lists_every_line(harness: Harness) -> None:
    harness.make("a", "def f(\n    x,\n\n):\n    pass\n")
    reply = harness.grep("f\\(.*?\\):", multiline=True, after=1)
    assert reply.lines == ["a:1: def f(", "a:2:     x,", "a:3: ", "a:4: ):", "a-5-     pass"]
    assert reply["matches"] == 4


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize(
    ("pattern", "fixed"),
    [
        ("one\ntwo", False),
        (r"one\ntwo", False),
        (r"one\r?\ntwo", False),
        (r"o[^\n]+\n+two", False),
        (r"one$\n^two", False),
        (r"(?=one)one\ntwo", False),
        ("one\ntwo (", True),
        ("one\r\ntwo (", True),
    ],
)
def test_a_multiline_pattern_finds_both_kinds_of_line_ends(
    harness: Harness, pattern: str, fixed: bool, end: str
) -> None:
    harness.make("a", f"zero{end}one{end}two (){end}three{end}")
    reply = harness.grep(pattern, multiline=True, fixed_strings=fixed)
    assert reply.lines == ["a:2: one", "a:3: two ()"]


def test_long_lines_are_cut_around_the_match(harness: Harness) -> None:
    harness.make("min.js", "文" * 5000 + "needle" + "x" * 5000 + "\n" + "needle\n")
    reply = harness.grep("needle", before=0)
    text = reply.lines[0].removeprefix("min.js:1: ")
    assert (len(text), text.index("needle"), text[0], text[-1]) == (MAX_LINE_CHARS + 2, 251, "…", "…")
    assert (reply["cut_lines"], reply.lines[1]) == (1, "min.js:2: needle")


def test_grep_output_above_max_bytes_ends_at_a_line(harness: Harness) -> None:
    harness.make("a", "hit\n" * 100)
    reply = harness.grep("hit", max_bytes=35)
    assert (reply.lines, reply["shown"], reply["matches"], reply["cut"]) == (
        ["a:1: hit", "a:2: hit", "a:3: hit"],
        3,
        100,
        True,
    )
    assert harness.grep("hit", max_lines=2)["shown"] == 2


def test_a_ripgrep_config_file_is_ignored(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    config = harness.make("rc", "--max-count=1\n--hidden\n--glob=!a\n")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(config))
    harness.make("a", "hit\nhit\n")
    assert harness.grep("hit", include="a")["matches"] == 2


def test_grep_does_not_search_the_guest_state(harness: Harness) -> None:
    (harness.output / "long.txt").write_text("hit\n")
    (harness.output / ".state" / "folder").write_text("hit\n")
    reply = harness.grep("hit", path=str(harness.output))
    assert reply.lines == [f"{harness.output}/long.txt:1: hit"]
    assert harness.grep("hit", path=f"{harness.output}/.state/folder").code == "PATH_NOT_ALLOWED"


@given(st.text(max_size=1200), st.integers(1, 1300))
def test_a_cut_line_keeps_whole_characters_around_the_match(line: str, at: int) -> None:
    line = line.replace("\n", "")
    prefix = line[:at]
    is_cut, text = cut_line(line.encode("utf-8", "replace"), len(prefix.encode("utf-8", "replace")) + 1)
    line = line.encode("utf-8", "replace").decode()
    inner = text[text.startswith("…") and is_cut : len(text) - (text.endswith("…") and is_cut)]
    assert len(text) <= MAX_LINE_CHARS + 2
    assert re.sub("…", "", inner) in re.sub("…", "", line)
    assert is_cut == (len(line) > MAX_LINE_CHARS) or not is_cut


FIELDS = {"path": ".", "mode": "content", "limit": 100, "max_bytes": 30_000, "max_lines": 2000, "timeout_s": 10}


def grep(guest: Guest, pattern: str, **fields: Any) -> Done:
    return guest.request("grep", pattern=pattern, **{**FIELDS, **fields})


@needs_namespace
def test_no_process_remains_after_a_search_a_timeout_or_a_cancel(shared_guest: Guest) -> None:
    shared_guest.run(
        "chmod -R u+rwx .; rm -rf ./*; printf 'hit\\n' >a; printf '%040d!\\n' 0 | tr 0 a >b; mkdir shut; echo hit >shut/x; echo hit >unread; chmod 0 "
        "shut unread"
    )
    done = grep(shared_guest, "hit", exclude="b")
    assert done.bytes_of("lines") == b"a:1: hit\n"
    assert (done["unreadable"], sorted(done["unreadable_names"])) == (2, ["shut", "unread"])
    assert grep(shared_guest, "(?=a)(a+)+$", timeout_s=0.5, include="b").code == "TIMEOUT"
    started = shared_guest.start("grep", pattern="(?=a)(a+)+$", **{**FIELDS, "include": "b"})
    wait_until(lambda: len(shared_guest.others()) >= 2, SOON_S, "the search runs", 0.005)
    shared_guest.send({"id": started, "op": "cancel"})
    assert shared_guest.finish(started).code == "CANCELLED"
    assert shared_guest.wait_alone()


@needs_namespace
def test_unreadable_files_are_counted_and_named(shared_guest: Guest) -> None:
    shared_guest.run(
        "mkdir -p t/s w; cd t; for n in {1..2000}; do : >name-that-takes-some-space-$n; done; : >$'two\nlines'; : "
        ">s/no.py; chmod 0 *"
    )
    shared_guest.run("chmod 0 t/s; chmod 600 w")
    done = grep(shared_guest, "hit", path="t", include="*[0-9s]")
    assert (done["unreadable"], done["searched"]) == (2002, 2001)
    assert grep(shared_guest, "hit", path="t", include="two*")["unreadable_names"] == ["t/s", "t/two\\nlines"]
    assert grep(shared_guest, "hit", path="w").code == "PERMISSION_DENIED"
    shared_guest.run("chmod 700 t/s; rm -r t w")


@needs_namespace
def test_a_search_without_a_reader_waits_with_bounded_memory(shared_guest: Guest) -> None:
    line = "hit " + "x" * 480
    shared_guest.run(f"for f in 1 2 3; do for n in {{1..4000}}; do echo '{line}'; done >big$f; done")
    before = shared_guest.resident_bytes()
    shared_guest.start(
        "grep",
        pattern="hit",
        **{
            **FIELDS,
            "include": "big*",
            "limit": 1000,
            "before": 20,
            "after": 20,
            "max_bytes": 64 << 20,
            "max_lines": 1 << 30,
            "timeout_s": 20,
        },
    )
    text = ""
    give_up_at = time.monotonic() + 10
    while text.count("S") < 1 or "R" in text:
        text = "".join(shared_guest.others().values())
        assert time.monotonic() < give_up_at
    assert shared_guest.resident_bytes() - before < 4 << 20
    frame = shared_guest.next_frame()
    assert frame.header["stream"] == "lines"
    assert re.match(rb"big\d:1: hit x", frame.body)
    while shared_guest.next_frame().header["ev"] != "done":
        pass
    assert shared_guest.wait_alone()


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("import\\s+{", "import {x} from 'y'"),
        ("interface{}", "var a interface{} = 1"),
        ("${", "echo ${HOME}"),
        ("{x}", "import {x} from 'y'"),
        ("{.*}", "import {x} from 'y'"),
        ("o{2}", "foo"),
        ("o{2,}", "foo"),
        ("\\p{Lu}OO", "FOO"),
        ("\\x{46}OO", "FOO"),
        ("[{]HOME", "echo ${HOME}"),
        ("\\{HOME", "echo ${HOME}"),
    ],
)
def test_a_brace_that_begins_no_repetition_is_text(harness: Harness, pattern: str, line: str) -> None:
    harness.make("f", f"{line}\nnothing\n")
    found = harness.grep(pattern)
    assert (found.code, found.lines) == (None, [f"f:1: {line}"])


@pytest.mark.parametrize("pattern", ["'hit one'", '"hit one"', "`hit one`", "/hit o.e/", "/hit one/gi"])
def test_quotes_and_slashes_around_a_pattern_are_left_out_if_nothing_matches(harness: Harness, pattern: str) -> None:
    harness.make("f", "hit one\n")
    found = harness.grep(pattern)
    assert found.lines == ["f:1: hit one"]
    assert "around it" in found["hints"][0]
    harness.make("f", f"{pattern}\nhit one\n")
    assert harness.grep(re.escape(pattern)).lines == [f"f:1: {pattern}"]
