"""edit_tool: the forms of a call, the requests to the guest, and the handling of replies."""

import json
from typing import Any

import pytest

from tests.support.records.builders import build_context
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.workers.sandbox_client import GuestResponse
from toolcrew.workers.tools.builtin import build_registry

REGISTRY = build_registry()


class EditHarness:
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


def build_response(text: bytes = b"1\tnew", **fields: Any) -> GuestResponse:
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
def test_invalid_arguments_are_refused_before_a_guest_request(arguments: dict[str, Any]) -> None:
    harness = EditHarness()
    assert harness.edit(file_path="a", **arguments).error_code is ErrorCode.INVALID_ARGUMENTS
    assert harness.client.requests == []


def test_parameter_aliases_in_edits_are_accepted_and_reported() -> None:
    edits = [
        {"oldString": "a", "newString": "b"},
        {"old_str": "b", "new_str": "c", "replaceAll": True},
        {"oldString": "x", "newString": "y"},
    ]
    for edits_argument, context in ((edits, {}), (json.dumps(edits), {"text_arguments": True})):
        harness = EditHarness(build_response(), **context)
        result = harness.edit(path="a", edits=edits_argument)
        assert [edit["old_string"] for edit in json.loads(harness.client.bodies[0])] == ["a", "b", "x"]
        aliases = [
            "path -> file_path",
            "oldString -> old_string",
            "newString -> new_string",
            "old_str -> old_string",
            "new_str -> new_string",
        ]
        assert result.metadata["aliases_used"] == [*aliases, "replaceAll -> replace_all"]
    duplicate_names = [{"oldString": "a", "old_string": "a", "new_string": "b"}]
    assert "'oldString' and 'old_string' mean the same parameter" in str(
        EditHarness().edit(file_path="a", edits=duplicate_names).error
    )
    assert (
        EditHarness().edit(file_path="a", edits=[{"filePath": "a", "old_string": "a", "new_string": "b"}]).error_code
        is ErrorCode.INVALID_ARGUMENTS
    )


@pytest.mark.parametrize("fields", [{"replaced": -1}, {"replaced": None}, {"encoding": "a b"}, {"created": 1}])
def test_a_malformed_guest_reply_makes_the_sandbox_unavailable(fields: dict[str, Any]) -> None:
    harness = EditHarness(build_response(**fields))
    assert harness.edit(file_path="a", old_string="a", new_string="b").error_code is ErrorCode.SANDBOX_UNAVAILABLE


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [({}, "none"), ({"edit.tolerance": "whitespace"}, "whitespace"), ({"edit.tolerance": "fuzzy"}, None)],
)
def test_the_tolerance_setting_is_sent_and_an_invalid_one_is_refused(
    config: dict[str, Any], tolerance: str | None
) -> None:
    harness = EditHarness(build_response(), config=config)
    result = harness.edit(file_path="a", old_string="a", new_string="b", expected_count=2)
    assert result.error_code is (None if tolerance else ErrorCode.CONFIG_MISSING)
    requests = [(request["tolerance"], request["expected_count"]) for request in harness.client.requests]
    assert requests == ([(tolerance, 2)] if tolerance else [])
