"""glob_tool: its requests to the guest, and its handling of replies."""

from typing import Any

import pytest

from contract.errors import ErrorCode, ToolFailure
from contract.schema import prepare_arguments
from tests.search_answers import ScriptedBench, build_glob_done
from workers.tools.base import Outcome
from workers.tools.glob import GLOB_TOOL
from workers.tools.search_notes import count, name_some
from workers.tools.text import MAX_OUTPUT_BYTES


def run(bench: ScriptedBench, **arguments: Any) -> Outcome:
    prepared, _ = prepare_arguments(GLOB_TOOL.spec, {"pattern": "*.py", **arguments})
    return GLOB_TOOL.handler(prepared, bench)


def test_defaults_are_those_of_the_schema() -> None:
    bench = ScriptedBench(b"", build_glob_done())
    run(bench)
    assert bench.request == {
        "op": "glob",
        "pattern": "*.py",
        "path": ".",
        "kind": "file",
        "limit": 100,
        "include_ignored": False,
        "max_bytes": MAX_OUTPUT_BYTES,
        "timeout_s": bench.context.timeout_s,
    }


@pytest.mark.parametrize("alias", ["dir_path", "directory"])
def test_names_of_other_products_are_taken(alias: str) -> None:
    bench = ScriptedBench(b"", build_glob_done())
    run(bench, **{alias: "src", "max_results": 5})
    assert (bench.request["path"], bench.request["limit"]) == ("src", 5)


def test_paths_and_a_last_line_that_counts() -> None:
    outcome = run(ScriptedBench(b"b.py\na.py\n", build_glob_done(total=2, shown=2)))
    assert outcome.output == "b.py\na.py\n[2 of 2; newest first]"
    assert (outcome.truncated, outcome.metadata) == (False, {"total": 2, "shown": 2, "ignored": 0, "partial": False})


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
def test_what_was_left_out_is_said_with_the_next_call(
    fields: dict[str, Any], arguments: dict[str, Any], note: str
) -> None:
    outcome = run(ScriptedBench(b"", build_glob_done(**fields)), **arguments)
    assert str(outcome.output).splitlines() == ["[0 of 0; newest first]", note]


def test_a_limit_and_a_full_output_are_said() -> None:
    limited = run(ScriptedBench(b"a\n", build_glob_done(total=7, shown=1)), limit=1)
    assert str(limited.output).endswith("[1 of 7; newest first; raise limit (at most 2000) or narrow the pattern]")
    most = run(ScriptedBench(b"a\n", build_glob_done(total=7000, shown=2000)), limit=2000)
    assert str(most.output).endswith("[2000 of 7000; newest first; narrow the pattern]")
    full = run(ScriptedBench(b"a\n", build_glob_done(total=7, shown=1, cut=True)))
    assert (full.truncated, "the output is full at 32 KiB" in str(full.output)) == (True, True)


def test_half_a_surrogate_pair_is_the_models_fault() -> None:
    with pytest.raises(ToolFailure) as refused:
        run(ScriptedBench(b"", build_glob_done()), pattern="\ud800*")
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


def test_lines_are_shown_as_they_come_and_only_whole() -> None:
    bench = ScriptedBench([b"one\ntw", b"o\nthr", b"ee\n"], build_glob_done(), is_watched=True)
    run(bench)
    assert bench.shown == ["one\n", "two\n", "three\n"]


def test_nothing_is_shown_without_a_viewer_and_no_more_is_stored_than_requested() -> None:
    bench = ScriptedBench([b"x" * MAX_OUTPUT_BYTES, b"y" * 1000], build_glob_done())
    outcome = run(bench)
    assert bench.shown == []
    assert "y" not in str(outcome.output).splitlines()[0].replace("[0 of 0; newest first]", "")


def test_numbers_and_names_read_as_a_sentence() -> None:
    assert (count(1, "file"), count(2, "file"), count(3, "match")) == ("1 file", "2 files", "3 matches")
    assert (name_some(2, ["a", "b"]), name_some(5, ["a", "b"])) == ("a, b", "a, b and 3 more")
