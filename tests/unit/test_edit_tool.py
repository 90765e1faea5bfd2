"""edit_tool: the forms of a call, the requests to the guest, and the handling of replies."""

import json
from typing import Any

import pytest

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from tests.builders import build_context
from tests.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from workers.sandbox_client import GuestResponse
from workers.tools.builtin import build_registry
from workers.tools.text import MAX_OUTPUT_BYTES

REGISTRY = build_registry()


class Bench:
    """The tool over a scripted guest."""

    def __init__(self, *answers: Any, **context: Any) -> None:
        self.client = FakeSandboxClient(*answers)
        self._context = build_context(**context)
        self._executor = build_executor(
            REGISTRY, self.client, MemoryLedger(), MemoryBlobs(), {"host": "h1", "queue": "host.h1.b00t"}
        )

    def edit(self, **arguments: Any) -> ToolResult:
        call = ToolCall(id="call-1", name="edit_tool", arguments=arguments)
        return self._executor.execute(call, self._context)


def answer(text: bytes = b"1\tnew", **fields: Any) -> GuestResponse:
    done = {"created": False, "size": 4, "mode_bits": 0o644, "replaced": 1, "encoding": "utf-8"}
    return GuestResponse({**done, **fields}, {"file": text})


def test_one_edit_is_a_list_of_one() -> None:
    bench = Bench(answer(), timeout_s=7)
    result = bench.edit(file_path="a", old_string="é", new_string="e")
    assert result.output == "replaced 1 in a\n1\tnew"
    assert result.metadata == {"size_bytes": 4, "created": False, "replaced": 1, "encoding": "utf-8"}
    assert json.loads(bench.client.bodies[0]) == [{"old_string": "é", "new_string": "e", "replace_all": False}]
    assert bench.client.requests == [
        {"op": "edit_text", "path": "a", "tolerance": "none", "max_bytes": MAX_OUTPUT_BYTES, "timeout_s": 7}
    ]


def test_several_edits_and_the_count_go_as_they_are() -> None:
    edits = [{"old_string": "a", "new_string": "b"}, {"old_string": "b", "new_string": "c", "replace_all": True}]
    bench = Bench(answer(replaced=3), answer())
    assert str(bench.edit(file_path="a", edits=edits).output).startswith("replaced 3 in a\n")
    assert json.loads(bench.client.bodies[0]) == [{**edits[0], "replace_all": False}, edits[1]]
    bench = Bench(answer())
    bench.edit(file_path="a", old_string="a", new_string="b", expected_count=2)
    assert bench.client.requests[0]["expected_count"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"old_string": "a"},
        {"new_string": "a"},
        {"edits": []},
        {"edits": [{"old_string": "a"}]},
        {"edits": [{"old_string": "a", "new_string": "b", "count": 1}]},
        {"edits": [{"old_string": "a", "new_string": "b"}] * 101},
        {"edits": [{"old_string": "a", "new_string": "b"}], "old_string": "a"},
        {"edits": [{"old_string": "a", "new_string": "b"}], "replace_all": True},
        {"edits": [{"old_string": "a", "new_string": "b"}], "expected_count": 1},
        {"old_string": "a", "new_string": "b", "expected_count": 0},
        {"old_string": "a", "new_string": "b", "replace_all": "yes"},
        {"old_string": "a", "new_string": "\udc00"},
    ],
)
def test_a_call_that_is_neither_form_is_refused_before_anything_is_sent(arguments: dict[str, Any]) -> None:
    bench = Bench()
    assert bench.edit(file_path="a", **arguments).error_code is ErrorCode.INVALID_ARGUMENTS
    assert bench.client.requests == []


def test_names_of_other_agents_are_taken_within_edits_and_reported() -> None:
    edits = [
        {"oldString": "a", "newString": "b"},
        {"old_str": "b", "new_str": "c", "replaceAll": True},
        {"oldString": "x", "newString": "y"},
    ]
    for given, context in ((edits, {}), (json.dumps(edits), {"text_arguments": True})):
        bench = Bench(answer(), **context)
        result = bench.edit(path="a", edits=given)
        assert [edit["old_string"] for edit in json.loads(bench.client.bodies[0])] == ["a", "b", "x"]
        used = [
            "path -> file_path",
            "oldString -> old_string",
            "newString -> new_string",
            "old_str -> old_string",
            "new_str -> new_string",
        ]
        assert result.metadata["aliases_used"] == [*used, "replaceAll -> replace_all"]
    twice = [{"oldString": "a", "old_string": "a", "new_string": "b"}]
    assert "'oldString' and 'old_string' mean the same parameter" in str(Bench().edit(file_path="a", edits=twice).error)
    assert (
        Bench().edit(file_path="a", edits=[{"filePath": "a", "old_string": "a", "new_string": "b"}]).error_code
        is ErrorCode.INVALID_ARGUMENTS
    )


@pytest.mark.parametrize(
    ("config", "sent"),
    [({}, "none"), ({"edit.tolerance": "none"}, "none"), ({"edit.tolerance": "whitespace"}, "whitespace")],
)
def test_the_tolerance_is_the_runs_setting(config: dict[str, Any], sent: str) -> None:
    bench = Bench(answer(), config=config)
    bench.edit(file_path="a", old_string="a", new_string="b")
    assert bench.client.requests[0]["tolerance"] == sent


def test_an_invalid_tolerance_is_an_error_of_the_operator() -> None:
    bench = Bench(config={"edit.tolerance": "fuzzy"})
    assert bench.edit(file_path="a", old_string="a", new_string="b").error_code is ErrorCode.CONFIG_MISSING
    assert bench.client.requests == []


@pytest.mark.parametrize(
    "code", ["NO_MATCH", "AMBIGUOUS_MATCH", "NO_CHANGE", "STALE_FILE", "FILE_NOT_FOUND", "BINARY_FILE"]
)
def test_a_failure_of_the_guest_reads_as_it_is(code: str) -> None:
    result = Bench(GuestResponse({"error": {"code": code, "message": "a: words"}})).edit(
        file_path="a", old_string="a", new_string="b"
    )
    assert result.text() == f"Error [{code}]: a: words"


@pytest.mark.parametrize("fields", [{"replaced": -1}, {"replaced": None}, {"encoding": "a b"}, {"created": 1}])
def test_an_answer_that_is_none_costs_the_sandbox(fields: dict[str, Any]) -> None:
    bench = Bench(answer(**fields))
    assert bench.edit(file_path="a", old_string="a", new_string="b").error_code is ErrorCode.SANDBOX_UNAVAILABLE
