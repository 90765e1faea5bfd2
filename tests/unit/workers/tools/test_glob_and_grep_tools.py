"""glob_tool and grep_tool: their requests to the guest, and their handling of replies."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.guest.search_answers import ScriptedBench, build_glob_done, build_grep_done
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import InvalidGuestAnswer
from toolcrew.contract.schema import prepare_arguments
from toolcrew.workers.tools.base import Outcome
from toolcrew.workers.tools.glob import GLOB_TOOL
from toolcrew.workers.tools.grep import GREP_TOOL
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES


def run_grep(environment: ScriptedBench, **arguments: Any) -> Outcome:
    prepared, _ = prepare_arguments(GREP_TOOL.spec, {"pattern": "foo", **arguments})
    return GREP_TOOL.handler(prepared, environment)


def run_glob(environment: ScriptedBench, **arguments: Any) -> Outcome:
    prepared, _ = prepare_arguments(GLOB_TOOL.spec, {"pattern": "*.py", **arguments})
    return GLOB_TOOL.handler(prepared, environment)


def notes_of(done: dict[str, Any], **arguments: Any) -> list[str]:
    return str(run_grep(ScriptedBench(b"", done), **arguments).output).splitlines()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"context": 3}, {"before": 3, "after": 3}),
        ({"context": 1, "before": 4}, {"before": 4, "after": 1}),
        ({"-A": 2, "-B": 1, "-i": True}, {"before": 1, "after": 2, "ignore_case": True}),
        ({"-C": 2}, {"before": 2, "after": 2}),
        ({"-C": 2.0, "path": None, "include": None, "-i": None}, {"before": 2, "path": "."}),
        ({"glob": "*.py", "head_limit": 7}, {"include": "*.py", "limit": 7}),
        ({"include_pattern": "*.js", "dir_path": "src"}, {"include": "*.js", "path": "src"}),
        ({"output_mode": "files", "max_per_file": 2, "type": "py"}, {"mode": "files", "max_per_file": 2, "type": "py"}),
        (
            {"multiline": True, "fixed_strings": True, "include_ignored": True},
            {"multiline": True, "fixed_strings": True, "include_ignored": True},
        ),
    ],
)
def test_arguments_and_aliases_are_sent_to_the_guest(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    environment = ScriptedBench(b"", build_grep_done())
    run_grep(environment, **arguments)
    assert {name: environment.request[name] for name in expected} == expected


@pytest.mark.parametrize("alias", ["dir_path", "directory"])
def test_glob_accepts_parameter_aliases(alias: str) -> None:
    environment = ScriptedBench(b"", build_glob_done())
    run_glob(environment, **{alias: "src", "max_results": 5})
    assert (environment.request["path"], environment.request["limit"]) == ("src", 5)


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
def test_a_partial_result_names_the_limit_and_how_to_see_more(
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
def test_skipped_files_are_reported(fields: dict[str, Any], note: str) -> None:
    assert notes_of(build_grep_done(**fields))[1:] == [note]


def test_filters_unused_for_a_file_path_are_named() -> None:
    note = "[include and type not used: path is a file]"
    assert notes_of(build_grep_done(is_file=True), include="*.py", type="py")[1:] == [note]
    assert notes_of(build_grep_done(is_file=True))[1:] == []
    assert notes_of(build_grep_done(searched=12)) == ["[no matches in 12 files searched]"]


def test_cut_lines_and_a_full_output_set_truncated() -> None:
    cut = run_grep(ScriptedBench(b"", build_grep_done(matches=1, files=1, shown=1, cut_lines=1)))
    assert (cut.truncated, "[1 line cut to 500 characters around the match" in str(cut.output)) == (True, True)
    assert run_grep(ScriptedBench(b"", build_grep_done(cut=True))).truncated


@pytest.mark.parametrize(
    "fields",
    [{"matches": -1}, {"matches": "3"}, {"binary_names": ["x"] * 11}, {"large_names": ["x" * 401]}, {"partial": 1}],
)
def test_a_malformed_guest_reply_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidGuestAnswer):
        run_grep(ScriptedBench(b"", build_grep_done(**fields)))


@pytest.mark.parametrize(("search", "done"), [(run_grep, build_grep_done()), (run_glob, build_glob_done())])
def test_complete_lines_are_shown_as_they_arrive(search: Callable[..., Outcome], done: dict[str, Any]) -> None:
    environment = ScriptedBench([b"one\ntw", b"o\nthr", b"ee\n"], done, is_watched=True)
    search(environment)
    assert environment.shown == ["one\n", "two\n", "three\n"]
    unwatched = ScriptedBench(b"one\n", done)
    search(unwatched)
    assert unwatched.shown == []


@pytest.mark.parametrize(
    ("fields", "arguments", "note"),
    [
        ({"ignored": 3}, {}, "[3 paths hidden by ignore rules; include_ignored=true searches them]"),
        ({"unreadable": 1}, {}, "[1 folder could not be read, or lie too deep]"),
        (
            {"partial": True},
            {},
            "[partial: the search reached its limit of time or memory, and there may be more; narrow pattern or path]",
        ),
        ({}, {"pattern": "/workspace/*", "path": "src"}, "[path was not used: the pattern is absolute]"),
    ],
)
def test_paths_omitted_by_a_glob_are_reported(fields: dict[str, Any], arguments: dict[str, Any], note: str) -> None:
    outcome = run_glob(ScriptedBench(b"", build_glob_done(**fields)), **arguments)
    assert str(outcome.output).splitlines() == ["[0 of 0; newest first]", note]


@pytest.mark.parametrize(("run", "done"), [(run_grep, build_grep_done), (run_glob, build_glob_done)])
def test_the_hints_of_the_guest_are_shown(run: Callable[..., Outcome], done: Callable[..., dict[str, Any]]) -> None:
    outcome = run(ScriptedBench(b"", done(hints=["first hint", "second"])))
    assert str(outcome.output).splitlines()[-2:] == ["[first hint]", "[second]"]


def test_a_limited_or_full_glob_output_is_reported() -> None:
    limited = run_glob(ScriptedBench(b"a\n", build_glob_done(total=7, shown=1)), limit=1)
    assert str(limited.output).endswith("[1 of 7; newest first; raise limit (at most 2000) or narrow the pattern]")
    at_maximum = run_glob(ScriptedBench(b"a\n", build_glob_done(total=7000, shown=2000)), limit=2000)
    assert str(at_maximum.output).endswith("[2000 of 7000; newest first; narrow the pattern]")
    full_output = run_glob(ScriptedBench(b"a\n", build_glob_done(total=7, shown=1, cut=True)))
    assert (full_output.truncated, "the output is full at 32 KiB" in str(full_output.output)) == (True, True)


def test_a_lone_surrogate_in_a_pattern_is_an_invalid_argument() -> None:
    with pytest.raises(ToolFailure) as refused:
        run_glob(ScriptedBench(b"", build_glob_done()), pattern="\ud800*")
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


def test_output_without_a_viewer_is_not_shown_and_is_bounded() -> None:
    environment = ScriptedBench([b"x" * MAX_OUTPUT_BYTES, b"y" * 1000], build_glob_done())
    outcome = run_glob(environment)
    assert environment.shown == []
    assert "y" not in str(outcome.output).splitlines()[0].replace("[0 of 0; newest first]", "")


def test_each_match_of_glob_is_shown_once_and_the_result_is_sorted() -> None:
    pieces = [("found", b"a\nb"), ("found", b"\n"), ("lines", b"c\nb\na\n")]
    environment = ScriptedBench(pieces, build_glob_done(total=3, shown=3), is_watched=True)
    assert str(run_glob(environment).output).startswith("c\nb\na\n")
    assert environment.shown == ["a\n", "b\n", "c\n"]
    assert environment.request["live_bytes"] == MAX_OUTPUT_BYTES
    quiet = ScriptedBench(b"", build_glob_done())
    run_glob(quiet)
    assert "live_bytes" not in quiet.request


def test_a_guest_that_sends_matches_without_end_costs_bounded_memory() -> None:
    environment = ScriptedBench(
        [("found", b"x" * 100_000), ("found", b"y\n" * 100_000)], build_glob_done(), is_watched=True
    )
    run_glob(environment)
    assert sum(map(len, environment.shown)) <= MAX_OUTPUT_BYTES
