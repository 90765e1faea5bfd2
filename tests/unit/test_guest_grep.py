"""grep of the guest: returned lines, their order, and the notice about omitted results."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.guest_harness import GUEST_PARENT, Done, Guest, needs_namespace
from tests.search_harness import Harness
from tests.waiting import wait_until

assert GUEST_PARENT
from guest.search.grep_lines import MAX_LINE_CHARS, cut_line  # noqa: E402


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_totals_are_exact_whatever_the_limit(harness: Harness) -> None:
    for number in range(8):
        harness.make(f"f{number}", "hit\n" * (number + 1))
    found = harness.grep("hit", limit=10)
    assert (found["matches"], found["files"], found["shown"], found["shown_files"]) == (36, 8, 10, 2)
    assert found.lines[8:] == ["f6:1: hit", "f6:2: hit"]
    few = harness.grep("hit", max_per_file=1)
    assert (few["matches"], few["shown"], few.lines[0]) == (36, 8, "f7:1: hit")


def test_lines_around_a_match_are_marked_otherwise_and_groups_parted(harness: Harness) -> None:
    harness.make("b", "one\nhit\n")
    harness.make("a", "".join(f"{number}\n" if number % 5 else "hit\n" for number in range(1, 12)))
    found = harness.grep("hit", before=1, after=2)
    assert found.lines == [
        *("a-4- 4", "a:5: hit", "a-6- 6", "a-7- 7", "--", "a-9- 9", "a:10: hit", "a-11- 11"),
        *("--", "b-1- one", "b:2: hit"),
    ]
    joined = harness.grep("hit", before=2, after=2, path="a")
    assert joined.lines == [
        f"a{'-:'[text == 'hit']}{n}{'-:'[text == 'hit']} {text}"
        for n, text in zip(range(3, 12), ["3", "4", "hit", "6", "7", "8", "9", "hit", "11"], strict=True)
    ]


def test_files_and_counts_instead_of_lines(harness: Harness) -> None:
    harness.make("a", "x\nx\n")
    harness.make("b", "x\n")
    assert harness.grep("x", mode="files").lines == ["b", "a"]
    assert harness.grep("x", mode="count").lines == ["b:1", "a:2"]
    cut = harness.grep("x", mode="files", limit=1)
    assert (cut.lines, cut["files"], cut["shown_files"]) == (["b"], 2, 1)


def test_nothing_is_left_out_without_a_word(harness: Harness) -> None:
    harness.make(".gitignore", "*.log\nout/\n")
    for name in ("a.log", "out/b", "out/c/d"):
        harness.make(name, "hit\n")
    harness.make("binary", b"\0\1hit\n")
    harness.make("wide.txt", "hit wide\n".encode("utf-16"))
    harness.make("large", b"hit\n" + b"x" * (10 << 20))
    found = harness.grep("hit")
    assert found.lines == ["wide.txt:1: hit wide"]
    assert (found["ignored"], found["binary"], found["large"]) == (2, 1, 1)
    assert (found["binary_names"], found["large_names"]) == (["binary"], ["large"])
    assert harness.grep("hit", include_ignored=True, mode="files")["files"] == 4


@pytest.mark.parametrize(("pattern", "lines"), [("hit", ["small:1: hit"]), ("nowhere", [])])
def test_a_file_that_would_take_all_time_is_left_out(harness: Harness, pattern: str, lines: list[str]) -> None:
    harness.make("small", "hit\n")
    os.truncate(harness.make("endless", "hit\n"), 1 << 40)
    found = harness.grep(pattern)
    assert found.lines == lines
    assert (found["large_names"], found["files"], found["partial"]) == (["endless"], len(lines), False)


def test_a_file_that_is_named_is_searched_whatever_it_is(harness: Harness) -> None:
    harness.make(".gitignore", "*\n")
    harness.make("large.log", (b"x" * 1023 + b"\n") * (11 << 10) + b"hit\n")
    found = harness.grep("hit", path="large.log", include="*.py")
    assert (found.lines, found["is_file"]) == ([f"large.log:{(11 << 10) + 1}: hit"], True)


@pytest.mark.parametrize(
    ("how", "expected"),
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
def test_which_files_are_searched(harness: Harness, how: dict[str, Any], expected: set[str]) -> None:
    for name in ("a.py", "src/b.py", "src/deep/c.py", "src/e.js", "test/d.py", "README.md", "Makefile"):
        harness.make(name)
    assert set(harness.grep("x", mode="files", **how).lines) == expected


def test_what_is_filtered_out_by_name_does_not_count_as_ignored(harness: Harness) -> None:
    harness.make(".gitignore", "*.log\n")
    harness.make("a.log")
    harness.make("a.py")
    found = harness.grep("none", include="*.py")
    assert (found["ignored"], found["searched"]) == (0, 1)
    assert harness.grep("x", type="nonsense").code == "INVALID_ARGUMENTS"
    assert harness.grep("x", exclude="[a").code == "INVALID_PATTERN"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "foo(",
            (
                "at character 4: unclosed group; the pattern was 'foo('; if it is meant literally, retry with "
                "fixed_strings=true"
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
        ("(?<=a+)b", "lookbehind assertion is not fixed length"),
    ],
)
def test_a_pattern_that_is_none_says_why_and_where(harness: Harness, pattern: str, message: str) -> None:
    harness.make("a")
    found = harness.grep(pattern)
    assert found.code == "INVALID_PATTERN"
    assert message in str(found.failure)
    assert "fixed_strings" not in str(harness.grep("^\\w+(").failure), "it does not look literal"


@pytest.mark.parametrize("pattern", ["(?<=a)b", "a(?!c)", "(a)\\1?b", "(?P<x>a)(?P=x)?b", "(?>a)b"])
def test_look_around_and_references_are_understood(harness: Harness, pattern: str) -> None:
    harness.make("f", "ab\nzz\n")
    assert harness.grep(pattern).lines == ["f:1: ab"]


def test_a_catastrophic_pattern_is_ended_in_time(harness: Harness) -> None:
    harness.make("f", "a" * 40 + "!\n")
    started = time.monotonic()
    # The first pattern takes unlimited time to match, the second to compile.
    for pattern in ("(?=a)(a+)+$", "(?=a)" + "[ -\U0010fff0]" * 4000):
        assert harness.grep(pattern, ignore_case=True, timeout_s=0.6).code == "TIMEOUT"
    assert time.monotonic() - started < 30  # a machine may be busy; a search that is not stopped runs for hours


def test_what_was_found_in_time_is_given_and_said_to_be_a_part(harness: Harness) -> None:
    harness.make("slow", "a" * 40 + "!\n")
    harness.make("a-quick", "hit a\n")
    # The walk lists names as the directory has them: one of the two orders finds something.
    found = harness.grep("(?=h)hit|(?=a)(a+)+$", timeout_s=1)
    assert found.code == "TIMEOUT" or (found["partial"], found.lines) == (True, ["a-quick:1: hit a"])


@pytest.mark.parametrize("use_openat2", [True, False])
def test_links_are_not_followed(harness: Harness, use_openat2: bool) -> None:
    harness.make("d/e/a", "root:x\n")
    (harness.workspace / "passwd").symlink_to("/etc/passwd")
    (harness.workspace / "etc").symlink_to("/etc")
    found = harness.grep("root:", use_openat2=use_openat2)
    assert found.lines == ["d/e/a:1: root:x"]
    assert harness.grep("root:", path="passwd").code == "PATH_NOT_ALLOWED"
    os.mkfifo(harness.workspace / "pipe")
    assert harness.grep("root:", path="pipe").code == "NOT_A_REGULAR_FILE"


def test_names_that_would_break_the_format_are_shown_as_escapes(harness: Harness) -> None:
    for name in (b"two\nlines", b"latin-\xe9", b"a:1: b"):
        harness.make(name, "hit\nhit two\n")
    for multiline in (False, True):
        found = harness.grep("hit", multiline=multiline)
        assert set(found.lines) == {
            f"{name}:{line}" for name in ("two\\nlines", "latin-\\xe9", "a:1: b") for line in ("1: hit", "2: hit two")
        }
        assert found["matches"] == 6


def test_a_match_over_several_lines_shows_each(harness: Harness) -> None:
    harness.make("a", "def f(\n    x,\n\n):\n    pass\n")
    found = harness.grep("f\\(.*?\\):", multiline=True, after=1)
    assert found.lines == ["a:1: def f(", "a:2:     x,", "a:3: ", "a:4: ):", "a-5-     pass"]
    assert found["matches"] == 4


def test_long_lines_are_cut_around_the_match(harness: Harness) -> None:
    harness.make("min.js", "文" * 5000 + "needle" + "x" * 5000 + "\n" + "needle\n")
    found = harness.grep("needle", before=0)
    text = found.lines[0].removeprefix("min.js:1: ")
    assert (len(text), text.index("needle"), text[0], text[-1]) == (MAX_LINE_CHARS + 2, 251, "…", "…")
    assert (found["cut_lines"], found.lines[1]) == (1, "min.js:2: needle")


def test_output_ends_at_a_whole_line_when_its_budget_is_used_up(harness: Harness) -> None:
    harness.make("a", "hit\n" * 100)
    found = harness.grep("hit", max_bytes=35)
    assert (found.lines, found["shown"], found["matches"], found["cut"]) == (
        ["a:1: hit", "a:2: hit", "a:3: hit"],
        3,
        100,
        True,
    )
    assert harness.grep("hit", max_lines=2)["shown"] == 2


def test_settings_of_ripgrep_in_the_workspace_change_nothing(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    config = harness.make("rc", "--max-count=1\n--hidden\n--glob=!a\n")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(config))
    harness.make("a", "hit\nhit\n")
    assert harness.grep("hit", include="a")["matches"] == 2


def test_the_guests_own_memory_is_not_searched(harness: Harness) -> None:
    (harness.output / "long.txt").write_text("hit\n")
    (harness.output / ".state" / "folder").write_text("hit\n")
    found = harness.grep("hit", path=str(harness.output))
    assert found.lines == [f"{harness.output}/long.txt:1: hit"]
    assert harness.grep("hit", path=f"{harness.output}/.state/folder").code == "PATH_NOT_ALLOWED"


@given(st.text(max_size=1200), st.integers(1, 1300))
def test_a_line_cut_keeps_whole_characters_and_the_place_of_the_match(line: str, at: int) -> None:
    line = line.replace("\n", "")
    prefix = line[:at]
    is_cut, text = cut_line(line.encode("utf-8", "replace"), len(prefix.encode("utf-8", "replace")) + 1)
    line = line.encode("utf-8", "replace").decode()
    inner = text[text.startswith("…") and is_cut : len(text) - (text.endswith("…") and is_cut)]
    assert len(text) <= MAX_LINE_CHARS + 2
    assert re.sub("…", "", inner) in re.sub("…", "", line)
    assert is_cut == (len(line) > MAX_LINE_CHARS) or not is_cut


# through a running guest


FIELDS = {"path": ".", "mode": "content", "limit": 100, "max_bytes": 30_000, "max_lines": 2000, "timeout_s": 10}


def ask(guest: Guest, pattern: str, **fields: Any) -> Done:
    return guest.request("grep", pattern=pattern, **{**FIELDS, **fields})


@needs_namespace
def test_a_running_guest_leaves_nothing_running_after_a_search_a_limit_and_a_cancel(shared_guest: Guest) -> None:
    shared_guest.run(
        "chmod -R u+rwx .; rm -rf ./*; printf 'hit\\n' >a; printf '%040d!\\n' 0 | tr 0 a >b; mkdir shut; echo hit >shut/x; echo hit >unread; chmod 0 "
        "shut unread"
    )
    done = ask(shared_guest, "hit", exclude="b")
    assert done.bytes_of("lines") == b"a:1: hit\n"
    assert (done["unreadable"], sorted(done["unreadable_names"])) == (2, ["shut", "unread"])
    assert ask(shared_guest, "(?=a)(a+)+$", timeout_s=0.5, include="b").code == "TIMEOUT"
    started = shared_guest.start("grep", pattern="(?=a)(a+)+$", **{**FIELDS, "include": "b"})
    wait_until(lambda: len(shared_guest.others()) >= 2, 20, "the search runs", 0.005)
    shared_guest.send({"id": started, "op": "cancel"})
    assert shared_guest.finish(started).code == "CANCELLED"
    assert shared_guest.wait_alone()


@needs_namespace
def test_what_cannot_be_read_is_reported_whole_and_is_no_fault_of_the_pattern(shared_guest: Guest) -> None:
    shared_guest.run(
        "mkdir -p t/s w; cd t; for n in {1..2000}; do : >name-that-takes-some-space-$n; done; : >$'two\nlines'; : "
        ">s/no.py; chmod 0 *"
    )
    shared_guest.run("chmod 0 t/s; chmod 600 w")
    done = ask(shared_guest, "hit", path="t", include="*[0-9s]")
    assert (done["unreadable"], done["searched"]) == (2002, 2001)
    assert ask(shared_guest, "hit", path="t", include="two*")["unreadable_names"] == ["t/s", "t/two\\nlines"]
    assert ask(shared_guest, "hit", path="w").code == "PERMISSION_DENIED"
    shared_guest.run("chmod 700 t/s; rm -r t w")


@needs_namespace
def test_a_search_whose_reader_does_not_read_waits_and_stays_small(shared_guest: Guest) -> None:
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
