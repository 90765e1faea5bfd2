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


@pytest.mark.parametrize("fields", [{"replaced": -1}, {"replaced": None}, {"encoding": "a b"}, {"created": 1}])
def test_an_answer_that_is_none_costs_the_sandbox(fields: dict[str, Any]) -> None:
    bench = Bench(answer(**fields))
    assert bench.edit(file_path="a", old_string="a", new_string="b").error_code is ErrorCode.SANDBOX_UNAVAILABLE


@pytest.mark.parametrize(
    ("config", "sent"),
    [({}, "none"), ({"edit.tolerance": "whitespace"}, "whitespace"), ({"edit.tolerance": "fuzzy"}, None)],
)
def test_the_tolerance_is_the_runs_setting_and_an_invalid_one_an_error_of_the_operator(
    config: dict[str, Any], sent: str | None
) -> None:
    bench = Bench(answer(), config=config)
    result = bench.edit(file_path="a", old_string="a", new_string="b", expected_count=2)
    assert result.error_code is (None if sent else ErrorCode.CONFIG_MISSING)
    requests = [(request["tolerance"], request["expected_count"]) for request in bench.client.requests]
    assert requests == ([(sent, 2)] if sent else [])
