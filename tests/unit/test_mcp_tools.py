"""Tools and results as MCP clients see them."""

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from contract.calls import Spill, ToolCall, ToolResult
from contract.errors import ErrorCode
from contract.specs import ToolSpec
from orchestrator.command import app
from orchestrator.mcp.calls import OUTPUT_SCHEMA, build_answer, build_hints, build_tool
from workers.tools.builtin import build_registry

CALL = ToolCall(id="c1", name="t")


def spec(**fields: object) -> ToolSpec:
    return ToolSpec.model_validate({"name": "t", "description": "d", "parameters": {"type": "object"}, **fields})


@pytest.mark.parametrize(
    ("fields", "hints"),
    [
        ({"read_only": True}, (True, None, None, False)),
        ({"read_only": True, "pool": "web"}, (True, None, None, True)),
        ({}, (False, True, False, False)),
        ({"idempotent": True}, (False, True, True, False)),
        ({"pool": "tools"}, (False, True, False, True)),
        ({"command_parameter": "command"}, (False, True, False, False)),
        ({"command_parameter": "command", "network": "with some"}, (False, True, False, True)),
    ],
)
def test_hints_say_what_the_spec_says(fields: dict[str, object], hints: tuple[bool | None, ...]) -> None:
    made = build_hints(spec(**fields))
    assert (made.read_only_hint, made.destructive_hint, made.idempotent_hint, made.open_world_hint) == hints


@pytest.mark.parametrize(
    "result",
    [
        ToolResult(call_id="c1", name="t", success=True, output="out", metadata={"exit_code": 0}),
        ToolResult(call_id="c1", name="t", success=True),
        ToolResult(
            call_id="c1", name="t", success=True, output="cut", truncated=True, spill=Spill(path="/output/1", bytes=9)
        ),
        ToolResult.failed(CALL, ErrorCode.TIMEOUT, "too slow", output="so far"),
    ],
)
def test_the_whole_result_is_as_its_schema_promises(result: ToolResult) -> None:
    answer = build_answer(result, "s1")
    Draft202012Validator(OUTPUT_SCHEMA).validate(answer.structured_content)
    assert answer.structured_content["text"] == result.text()
    assert answer.is_error is not result.success
    assert answer.meta == {"toolcrew/session": "s1"}


def test_schemas_of_the_built_in_tools_go_out_word_for_word() -> None:
    for tool_spec in build_registry().specs():
        tool = build_tool(tool_spec).model_dump(mode="json", by_alias=True)
        assert (tool["inputSchema"], tool["description"]) == (tool_spec.parameters, tool_spec.description)


def test_the_address_of_redis_is_hidden() -> None:
    answer = build_answer(ToolResult.failed(CALL, ErrorCode.BROKER_UNAVAILABLE, "redis://10.0.0.1 refused"), None)
    assert "10.0.0.1" not in answer.model_dump_json()
    assert "try again" in answer.structured_content["text"]


@pytest.mark.parametrize(
    "options", ["--http 0 --tenant acme", "--http 0 --session s", "--origin https://a", "--host ::"]
)
def test_options_that_mean_nothing_together_are_refused(options: str) -> None:
    done = CliRunner().invoke(app, ["serve", "mcp", *options.split()])
    assert done.exit_code == 2
    assert "only" in done.stderr
