"""Tools and results as MCP clients see them."""

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from toolcrew.contract.calls import Spill, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.mcp.calls import OUTPUT_SCHEMA, build_answer, build_hints, build_tool
from toolcrew.workers.tools.builtin import build_registry

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
def test_mcp_hints_follow_the_tool_spec(fields: dict[str, object], hints: tuple[bool | None, ...]) -> None:
    built = build_hints(spec(**fields))
    assert (built.read_only_hint, built.destructive_hint, built.idempotent_hint, built.open_world_hint) == hints


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
def test_structured_result_matches_the_output_schema(result: ToolResult) -> None:
    reply = build_answer(result, "s1")
    Draft202012Validator(OUTPUT_SCHEMA).validate(reply.structured_content)
    assert reply.structured_content["text"] == result.text()
    assert reply.is_error is not result.success
    assert reply.meta == {"toolcrew/session": "s1"}


def test_built_in_tools_are_published_unchanged() -> None:
    for tool_spec in build_registry().specs():
        tool = build_tool(tool_spec).model_dump(mode="json", by_alias=True)
        assert (tool["inputSchema"], tool["description"]) == (tool_spec.parameters, tool_spec.description)


def test_redis_address_is_not_sent_to_the_client() -> None:
    reply = build_answer(ToolResult.failed(CALL, ErrorCode.BROKER_UNAVAILABLE, "redis://10.0.0.1 refused"), None)
    assert "10.0.0.1" not in reply.model_dump_json()
    assert "try again" in reply.structured_content["text"]


@pytest.mark.parametrize(
    "options", ["--http 0 --tenant acme", "--http 0 --session s", "--origin https://a", "--host ::"]
)
def test_conflicting_serve_mcp_options_are_refused(options: str) -> None:
    done = CliRunner().invoke(app, ["serve", "mcp", *options.split()])
    assert done.exit_code == 2
    assert "only" in done.stderr
