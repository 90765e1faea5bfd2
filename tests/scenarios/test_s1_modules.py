"""Rows S1-22 to S1-35 of the scenarios: every name that the document lists, its module in this project, and its kind.
The document's three TypeScript files are these modules: types.ts is toolcrew.contract.registry, toolcrew.contract.calls and
toolcrew.orchestrator.dialects.decisions; registry.ts and runner.ts are toolcrew.orchestrator.sdk.tool_loop. Functions are written in
snake_case.
"""

import contextlib
import json
from importlib import import_module
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.records.builders import build_call, build_spec
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.registry import Tool, ToolRegistry
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.sdk import tool_loop
from toolcrew.orchestrator.sdk.tool_loop import (
    TOOL_DECISION_SCHEMA,
    ContextEngine,
    ToolDecisionOutput,
    ToolLoopDeps,
    build_tool_system_prompt,
    create_output_controller,
    create_tool_registry,
    execute_tool_call,
    parse_tool_decision,
    run_tool_loop,
)

MODULES = [
    ("S1-23", "Tool", "toolcrew.contract.registry"),
    ("S1-24", "ToolCall", "toolcrew.contract.calls"),
    ("S1-25", "ToolResult", "toolcrew.contract.calls"),
    ("S1-26", "ToolDecisionOutput", "toolcrew.orchestrator.dialects.decisions"),
    ("S1-27", "ToolRegistry", "toolcrew.contract.registry"),
    ("S1-28", "TOOL_DECISION_SCHEMA", "toolcrew.orchestrator.dialects.decisions"),
    ("S1-30", "create_tool_registry", "toolcrew.orchestrator.sdk.tool_loop"),
    ("S1-32", "build_tool_system_prompt", "toolcrew.orchestrator.dialects.json_decision"),
    ("S1-33", "parse_tool_decision", "toolcrew.orchestrator.dialects.decisions"),
    ("S1-34", "execute_tool_call", "toolcrew.orchestrator.sdk.tool_loop"),
    ("S1-35", "run_tool_loop", "toolcrew.orchestrator.sdk.tool_loop"),
]
LOOP_NAMES = [home for home in MODULES if home[1] not in ("Tool", "ToolCall", "ToolResult", "ToolRegistry")]
FORMS = [{"tool": "get_weather", "arguments": {"city": "Beijing"}}, {"tool": None, "reply": "Warm."}, {"tool": "now"}]


def echo() -> dict[str, Any]:
    return {
        "name": "echo",
        "description": "Say it again",
        "parameters": build_spec().parameters,
        "execute": lambda args: args["text"],
    }


@pytest.mark.parametrize(("row", "name", "home"), MODULES, ids=[f"{row} {name}" for row, name, _ in MODULES])
def test_s1_22_to_35_every_name_is_in_its_module(row: str, name: str, home: str) -> None:
    found = getattr(import_module(home), name)
    assert getattr(found, "__module__", home) == home, row


def test_s1_22_the_names_of_types_ts_are_types_and_one_schema() -> None:
    assert all(isinstance(kind, type) for kind in (Tool, ToolCall, ToolResult, ToolDecisionOutput, ToolRegistry))
    assert isinstance(TOOL_DECISION_SCHEMA, dict)


def test_s1_23_a_tool_has_a_spec_and_a_handler() -> None:
    tool = create_tool_registry([echo()]).get("echo")
    assert isinstance(tool, Tool)
    assert (tool.name, tool.spec.description, callable(tool.handler)) == ("echo", "Say it again", True)


def test_s1_24_a_tool_call_is_an_id_a_name_and_arguments() -> None:
    assert ToolCall(id="c1", name="echo", arguments={"text": "a"}).model_dump() == {
        "id": "c1",
        "name": "echo",
        "arguments": {"text": "a"},
    }


def test_s1_25_a_tool_result_contains_call_success_and_output() -> None:
    result = ToolResult(call_id="c1", name="echo", success=True, output="a")
    assert (result.call_id, result.name, result.success, result.output, result.error) == ("c1", "echo", True, "a", None)


def test_s1_26_a_decision_is_a_tool_with_arguments_or_a_reply() -> None:
    call, reply = ToolDecisionOutput("echo", {"text": "a"}), ToolDecisionOutput(None, {}, "Warm.")
    assert (call.tool, call.arguments, call.reply) == ("echo", {"text": "a"}, None)
    assert (reply.tool, reply.reply) == (None, "Warm.")


def test_s1_27_a_registry_of_the_loop_stores_its_tools_in_a_tool_registry() -> None:
    registry = create_tool_registry([echo()])
    assert isinstance(registry.registry, ToolRegistry)
    assert len(registry.registry) == 1


@pytest.mark.parametrize("decision", FORMS, ids=["call", "reply", "call without arguments"])
def test_s1_28_the_schema_accepts_both_forms(decision: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(TOOL_DECISION_SCHEMA)
    assert Draft202012Validator(TOOL_DECISION_SCHEMA).is_valid(decision)


@pytest.mark.parametrize(
    "other", [{}, {"tool": 5}, {"tool": ""}, {"tool": None}, {"reply": "x"}, {"tool": "a", "arguments": "b"}, "text"]
)
def test_s1_28_the_schema_rejects_every_other_value(other: Any) -> None:
    assert not Draft202012Validator(TOOL_DECISION_SCHEMA).is_valid(other)


def test_s1_29_the_registry_module_exports_create_tool_registry() -> None:
    assert "create_tool_registry" in tool_loop.__all__


async def test_s1_30_a_registry_registers_gets_lists_and_executes_by_name() -> None:
    registry = create_tool_registry()
    registry.register(echo())
    found = registry.get("echo")
    assert found is not None
    assert registry.get("nothing") is None
    assert registry.list() == [found.spec]
    result = await registry.execute("echo", {"text": "a"})
    assert (result.success, result.output) == (True, "a")
    assert (await registry.execute("nothing", {})).error == "Tool not found: nothing"


@pytest.mark.parametrize(("name", "home"), [(name, home) for _, name, home in LOOP_NAMES])
def test_s1_31_the_loop_module_exports_every_part_of_a_loop(name: str, home: str) -> None:
    assert name in tool_loop.__all__
    assert getattr(tool_loop, name) is getattr(import_module(home), name)


def test_s1_32_the_system_prompt_of_the_loop_is_built_from_the_list_of_tools() -> None:
    specs = create_tool_registry([echo()]).list()
    prompt = build_tool_system_prompt(specs)
    assert "echo: Say it again" in prompt
    assert prompt in JsonDecisionDialect().build_system("Be brief.", specs)
    assert "No tools are currently available" in build_tool_system_prompt([])


@pytest.mark.parametrize(
    "text",
    ['{"tool": "echo", "arguments": {}}', ' \n{"tool": "echo", "arguments": {}} ', '```json\n{"tool": "echo"}\n```'],
)
def test_s1_33_a_decision_is_parsed_from_the_whole_reply(text: str) -> None:
    assert parse_tool_decision(text) == ToolDecisionOutput("echo", {})


@pytest.mark.parametrize(
    "decision",
    [
        *FORMS,
        {},
        {"tool": 5},
        {"tool": None},
        {"reply": "x"},
        {"tool": "a", "arguments": "b"},
        {"tool": None, "reply": "x", "a": 1},
    ],
)
def test_s1_17_and_33_the_parser_validates_by_the_schema(decision: dict[str, Any]) -> None:
    is_valid = Draft202012Validator(TOOL_DECISION_SCHEMA).is_valid(decision)
    with contextlib.nullcontext() if is_valid else pytest.raises(ValueError):
        assert parse_tool_decision(json.dumps(decision)).tool == decision["tool"]


async def test_s1_34_a_parsed_call_is_executed_and_a_failure_is_a_result() -> None:
    registry = create_tool_registry([echo()])
    assert (await execute_tool_call(registry, build_call(text="a"))).output == "a"
    refused = await execute_tool_call(registry, build_call(text=5))
    assert (refused.success, refused.error) == (False, "echo: parameter 'text' must be string, not integer 5")


async def test_s1_35_the_loop_connects_gateway_context_engine_and_output_controller() -> None:
    engine = ContextEngine()
    deps = ToolLoopDeps(
        lambda messages: '{"tool": null, "reply": "Warm."}', create_tool_registry(), engine, create_output_controller()
    )
    result = await run_tool_loop(deps, "s1", "How is it?")
    assert result.reply == "Warm."
    assert [message["role"] for message in engine.messages("s1")] == ["user", "assistant"]
