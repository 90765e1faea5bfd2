"""Searches that would find nothing because a pattern or a path means something else to its writer, or was skipped."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest.search_harness import Harness


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


TEXT = 'foo\nbar\nfoobar()\na[0].b\n  the word here\nx/y "q"\nC:\\dir\nuseState(null)\naaa\n*ptr = f(x);\nprice $5\n'


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        (r"foo$\|^bar", [1, 2]),
        (r"\(fooba\)r", [3]),
        (r"the\+ word", [5]),
        (r"fooo\?b", [3]),
        (r"a\{3\}", [9]),
        (r"\<word\>", [5]),
        (r"\<word\> \(here\|there\)", [5]),
        (r"foobar()", [3]),
        (r"f(.*);", [10]),
        (r"useState(null)", [8]),
        (r"a[0].b", [4]),
        (r"price $5", [11]),
        (r"x\/y", [6]),
        (r"\"q\"", [6]),
        (r"[\/]y", [6]),
        (r"\\bword\\b", [5]),
        (r"use\\w+", [8]),
        (r"C:\dir", [7]),
    ],
)
def test_a_pattern_in_another_writing_finds_what_its_writer_meant(
    harness: Harness, pattern: str, lines: list[int]
) -> None:
    harness.make("a.txt", TEXT)
    harness.make("b.txt", "nothing\n")
    for path in (".", "a.txt"):
        found = harness.grep(pattern, path=path)
        assert [int(line.split(":")[1]) for line in found.lines] == lines
        assert found["matches"] == len(lines)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        (r"foo$\|^bar", "foo$|^bar"),
        (r"useState(null)", r"useState\(null\)"),
        (r"a[0].b", "fixed_strings=true"),
        (r"\\bword\\b", r"\bword\b"),
    ],
)
def test_the_result_says_how_the_pattern_was_read(harness: Harness, pattern: str, hint: str) -> None:
    harness.make("a.txt", TEXT)
    assert [hint in text for text in harness.grep(pattern)["hints"]] == [True]


@pytest.mark.parametrize(
    ("pattern", "fixed"), [("foo", False), (r"\(null\)", False), (r"foo|bar", False), ("a[0]", True)]
)
def test_a_pattern_that_matches_as_it_is_written_is_not_read_in_another_way(
    harness: Harness, pattern: str, fixed: bool
) -> None:
    harness.make("a.txt", TEXT)
    assert harness.grep(pattern, fixed_strings=fixed)["hints"] == []


def test_a_regular_expression_that_is_searched_as_plain_text_is_read_as_one(harness: Harness) -> None:
    harness.make("a.txt", TEXT)
    found = harness.grep("^foo|^bar", fixed_strings=True)
    assert (len(found.lines), len(found["hints"])) == (3, 1)


def test_matches_in_another_case_are_counted_and_not_shown(harness: Harness) -> None:
    harness.make("a.txt", TEXT)
    found = harness.grep("FOOBAR")
    assert (found.lines, found["matches"]) == ([], 0)
    assert ["ignore_case=true" in hint for hint in found["hints"]] == [True]


def test_a_pattern_that_matches_nothing_in_any_reading_gets_no_hint(harness: Harness) -> None:
    harness.make("a.txt", TEXT)
    assert harness.grep(r"absent\|missing(x)")["hints"] == []


NAMES = ["app/[slug]/page.tsx", "app/(group)/page.tsx", "app/{a}/page.tsx", "app/[[...rest]]/page.tsx", "src/main.py"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("app/[slug]/*.tsx", ["app/[slug]/page.tsx"]),
        ("**/[slug]/page.tsx", ["app/[slug]/page.tsx"]),
        ("app/[[...rest]]/*", ["app/[[...rest]]/page.tsx"]),
        ("app/(group)/*.tsx", ["app/(group)/page.tsx"]),
        ("app/{a}/*.tsx", ["app/{a}/page.tsx"]),
        ("app/[s]*/*", []),
        ("/WORKSPACE/app/[slug]/*", ["app/[slug]/page.tsx"]),
        ("./app/[slug]/*.tsx", ["app/[slug]/page.tsx"]),
        (r"src\*.py", ["src/main.py"]),
        (r"app\[slug]\*.tsx", ["app/[slug]/page.tsx"]),
    ],
)
def test_a_glob_finds_folders_whose_names_have_special_characters(
    harness: Harness, pattern: str, names: list[str]
) -> None:
    for name in NAMES:
        harness.make(name)
    absolute = pattern.replace("/WORKSPACE", str(harness.workspace))
    assert sorted(harness.glob(absolute).lines) == sorted(names)


@pytest.mark.parametrize(
    ("include", "path", "names"),
    [
        ("app/[slug]/*.tsx", ".", ["app/[slug]/page.tsx"]),
        ("[slug]/*.tsx", "app", ["app/[slug]/page.tsx"]),
        ("app/[slug]/*.tsx", "app", ["app/[slug]/page.tsx"]),
        ("app/{a}/*.tsx", ".", ["app/{a}/page.tsx"]),
        ("./src/*.py", ".", ["src/main.py"]),
        ("src/*.py", "src", ["src/main.py"]),
        ("/WORKSPACE/src/*.py", ".", ["src/main.py"]),
        ("/WORKSPACE/src/**", "src", ["src/main.py"]),
        ("*.py, (group)/*.tsx", "app", ["app/(group)/page.tsx"]),
    ],
)
def test_include_selects_the_files_that_its_writer_meant(
    harness: Harness, include: str, path: str, names: list[str]
) -> None:
    for name in NAMES:
        harness.make(name, "hit\n")
    found = harness.grep("hit", include=include.replace("/WORKSPACE", str(harness.workspace)), path=path, mode="files")
    assert sorted(found.lines) == sorted(names)


@pytest.mark.parametrize("include", ["py", "*.py *.ts", "*.py|*.ts", r".*\.py$", "src", "*.@(py|ts)", r"src\*.py"])
def test_a_search_whose_filters_select_no_file_says_how_to_write_them(harness: Harness, include: str) -> None:
    harness.make("src/main.py", "hit\n")
    found = harness.grep("hit", include=include)
    assert (found["searched"], ["*.py" in hint for hint in found["hints"]]) == (0, [True])


@pytest.mark.parametrize(
    ("pattern", "fields", "hint"),
    [
        ("readme.md", {}, "README.md"),
        ("SRC/*.PY", {}, "SRC"),
        ("src", {}, "src"),
        ("s*", {}, "folder/**"),
        ("main.py", {"kind": "dir"}, "src/main.py"),
        ("nowhere/*.py", {}, "nowhere"),
        ("*.@(py|md)", {}, "extended glob"),
        (r".*\.py$", {}, "regular expression"),
        ("**/.git/config", {}, "does not enter"),
        ("main.py *.md", {}, "commas"),
        ("link/main.py", {"path": "other"}, "link"),
    ],
)
def test_an_empty_glob_result_says_why(harness: Harness, pattern: str, fields: dict[str, Any], hint: str) -> None:
    harness.make("src/main.py")
    harness.make("README.md")
    harness.make("other/x")
    (harness.workspace / "other" / "link").symlink_to(harness.workspace / "src")
    found = harness.glob(pattern, **fields)
    assert found["total"] == 0 or hint == "link"
    assert hint == "link" or any(hint in text for text in found["hints"])


def test_links_that_were_not_followed_are_named_if_nothing_is_found(harness: Harness) -> None:
    harness.make("real/a.py", "hit\n")
    (harness.workspace / "work").mkdir()
    (harness.workspace / "work" / "linked").symlink_to(harness.workspace / "real")
    for found in (harness.glob("**/a.py", path="work"), harness.grep("hit", path="work")):
        assert ["work/linked" in hint for hint in found["hints"]] == [True]
    assert harness.grep("hit", path="work/linked").lines == ["real/a.py:1: hit"]


def test_a_pattern_that_repeats_the_path_is_searched_from_the_working_folder(harness: Harness) -> None:
    harness.make("src/main.py")
    found = harness.glob("src/*.py", path="src")
    assert (found.lines, len(found["hints"])) == (["src/main.py"], 1)
    os.mkdir(harness.workspace / "lib")
    assert harness.glob("src/*.py", path="lib").lines == []


def test_hints_are_single_short_lines(harness: Harness) -> None:
    harness.make("a\nb/X" + "y" * 200, "X")
    hints = harness.glob("x" + "y" * 200)["hints"] + harness.grep("é" * 4000 + r"\|X")["hints"]
    assert hints
    assert [hint for hint in hints if "\n" in hint or len(hint) > 400] == []
