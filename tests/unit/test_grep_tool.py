"""grep_tool: its requests to the guest, and its handling of replies."""

from typing import Any

import pytest

from contract.schema import check_schema, prepare_arguments
from tests.search_answers import ScriptedBench, build_grep_done
from workers.sandbox_client import InvalidGuestAnswer, parse_guest_answer
from workers.tools.base import Outcome
from workers.tools.grep import GREP_TOOL
from workers.tools.text import MAX_LINES, MAX_OUTPUT_BYTES


def run(bench: ScriptedBench, **arguments: Any) -> Outcome:
    prepared, _ = prepare_arguments(GREP_TOOL.spec, {"pattern": "foo", **arguments})
    return GREP_TOOL.handler(prepared, bench)


def request_for(**arguments: Any) -> dict[str, Any]:
    bench = ScriptedBench(b"", build_grep_done())
    run(bench, **arguments)
    return dict(bench.request)


def notes_of(done: dict[str, Any], **arguments: Any) -> list[str]:
    return str(run(ScriptedBench(b"", done), **arguments).output).splitlines()


def test_the_schema_is_one_and_holds_the_defaults() -> None:
    check_schema(GREP_TOOL.spec.parameters)
    request = request_for()
    assert {name: request[name] for name in ("path", "mode", "limit", "before", "after", "max_bytes", "max_lines")} == {
        "path": ".",
        "mode": "content",
        "limit": 100,
        "before": 0,
        "after": 0,
        "max_bytes": MAX_OUTPUT_BYTES,
        "max_lines": MAX_LINES,
    }
    assert not {"include", "exclude", "type", "max_per_file"} & set(request)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"context": 3}, {"before": 3, "after": 3}),
        ({"context": 1, "before": 4}, {"before": 4, "after": 1}),
        ({"-A": 2, "-B": 1, "-i": True}, {"before": 1, "after": 2, "ignore_case": True}),
        ({"-C": 2}, {"before": 2, "after": 2}),
        ({"glob": "*.py", "head_limit": 7}, {"include": "*.py", "limit": 7}),
        ({"include_pattern": "*.js", "dir_path": "src"}, {"include": "*.js", "path": "src"}),
        ({"output_mode": "files", "max_per_file": 2, "type": "py"}, {"mode": "files", "max_per_file": 2, "type": "py"}),
        (
            {"multiline": True, "fixed_strings": True, "include_ignored": True},
            {"multiline": True, "fixed_strings": True, "include_ignored": True},
        ),
    ],
)
def test_arguments_and_their_other_names_reach_the_guest(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    request = request_for(**arguments)
    assert {name: request[name] for name in expected} == expected


def test_lines_and_a_last_line_that_counts() -> None:
    outcome = run(ScriptedBench(b"a:1: foo\n", build_grep_done(matches=1, files=1, shown=1, shown_files=1)))
    assert outcome.output == "a:1: foo\n[1 match in 1 file]"
    assert (outcome.truncated, outcome.metadata["files"]) == (False, 1)


def test_no_match_says_how_much_was_searched() -> None:
    assert notes_of(build_grep_done(searched=12)) == ["[no matches in 12 files searched]"]


@pytest.mark.parametrize(
    ("fields", "arguments", "head"),
    [
        (
            {"shown": 5},
            {"limit": 5},
            "[9 matches in 3 files; showing first 5; raise limit (at most 1000) or narrow pattern, path or include]",
        ),
        (
            {"shown": 3},
            {"max_per_file": 1},
            "[9 matches in 3 files; showing first 3; at most 1 of a file (max_per_file)]",
        ),
        (
            {"shown": 5, "cut": True},
            {},
            (
                "[9 matches in 3 files; showing first 5; the output is full at 2000 lines or 32 KiB: narrow pattern, "
                "path or include]"
            ),
        ),
        (
            {"shown": 8},
            {},
            "[9 matches in 3 files; showing first 8; files changed or were removed during the search: search again]",
        ),
        ({"shown_files": 3}, {"output_mode": "files"}, "[3 files with matches]"),
        (
            {"shown_files": 1},
            {"output_mode": "files", "limit": 1},
            (
                "[3 files with matches; showing first 1 file; raise limit (at most 1000) or narrow pattern, path or "
                "include]"
            ),
        ),
        ({"shown_files": 3}, {"output_mode": "count"}, "[9 matches in 3 files]"),
    ],
)
def test_a_part_is_said_to_be_one_with_the_way_to_the_rest(
    fields: dict[str, Any], arguments: dict[str, Any], head: str
) -> None:
    assert notes_of(build_grep_done(matches=9, files=3, **fields), **arguments) == [head]


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"ignored": 2}, "[2 paths hidden by ignore rules; include_ignored=true searches them]"),
        (
            {"large": 1, "large_names": ["big.bin"]},
            "[not searched: 1 file over 10 MiB: big.bin; give one as path to search it]",
        ),
        (
            {"binary": 3, "binary_names": ["a.o", "b.o"]},
            "[binary, not shown: 3 files that would match: a.o, b.o and 1 more]",
        ),
        ({"unreadable": 1, "unreadable_names": ["shut"]}, "[could not be read: shut]"),
        (
            {"partial": True},
            "[partial: the search reached its limit of time or memory, and there may be more; narrow path or include, "
            "or simplify the pattern]",
        ),
    ],
)
def test_nothing_is_skipped_without_a_word(fields: dict[str, Any], note: str) -> None:
    assert notes_of(build_grep_done(**fields))[1:] == [note]


def test_filters_that_a_file_as_path_leaves_unused_are_named() -> None:
    note = "[include and type not used: path is a file]"
    assert notes_of(build_grep_done(is_file=True), include="*.py", type="py")[1:] == [note]
    assert notes_of(build_grep_done(is_file=True))[1:] == []


def test_cut_lines_and_a_full_output_make_it_truncated() -> None:
    cut = run(ScriptedBench(b"", build_grep_done(matches=1, files=1, shown=1, cut_lines=1)))
    assert (cut.truncated, "[1 line cut to 500 characters around the match" in str(cut.output)) == (True, True)
    assert run(ScriptedBench(b"", build_grep_done(cut=True))).truncated


def test_lines_are_shown_as_they_come() -> None:
    bench = ScriptedBench([b"a:1: foo\nb:", b"2: foo\n"], build_grep_done(), is_watched=True)
    run(bench)
    assert bench.shown == ["a:1: foo\n", "b:2: foo\n"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"matches": -1},
        {"matches": "3"},
        {"binary_names": ["x"] * 11},
        {"large_names": ["x" * 401]},
        {"partial": 1},
    ],
)
def test_an_answer_that_no_guest_of_ours_gives_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidGuestAnswer):
        parse_guest_answer({"op": "grep"}, build_grep_done(**wrong))
