"""Every name of the requirement documents can be imported and does what its row says (S0-10, S1-22 to S1-41, S4-04,
S4-12 to S4-31).
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.records.builders import build_call, build_context, build_exec_response
from tests.support.records.fakes import FakeSandboxClient
from toolcrew.contract.registry import Tool, ToolRegistry
from toolcrew.orchestrator.models.scripted import ScriptedModel
from toolcrew.orchestrator.sdk.seed_names import (
    ModelGateway,
    createOutputController,
    createToolRegistry,
    runToolLoop,
    tool_schema,
)
from toolcrew.orchestrator.sdk.tool_loop import ContextEngine
from toolcrew.workers import seed_names as worker_names
from toolcrew.workers.tools.base import ToolEnvironment, WorkerResources

TOOLS = {
    "FileReadTool": "read_tool",
    "FileWriteTool": "write_tool",
    "FileEditTool": "edit_tool",
    "BashTool": "bash_tool",
    "GlobTool": "glob_tool",
    "GrepTool": "grep_tool",
}
NAMES = [
    *(("toolcrew.workers.seed_names", name) for name in (*TOOLS, "BuiltInToolsRegistry", "SkillsSandboxExecutor")),
    *(
        ("toolcrew.orchestrator.sdk.seed_names", name)
        for name in (
            *(
                "ToolContext",
                "tool_schema",
                "ModelGateway",
                "createToolRegistry",
                "createOutputController",
                "buildToolSystemPrompt",
            ),
            *("parseToolDecision", "executeToolCall", "runToolLoop", "generateToolPrompt"),
        )
    ),
    *(
        ("toolcrew", name)
        for name in ("ReActStrategy", "ReActOptions", "ToolRegistry", "ToolAgent", "CustomAgent", "LLMClient")
    ),
    *(
        ("toolcrew", name)
        for name in ("AIMessage", "ToolMessage", "convert_to_openai_tool", "run_tool_loop", "generate_tool_prompt")
    ),
    ("toolcrew.orchestrator.sdk.tool_loop", "TOOL_DECISION_SCHEMA"),
    ("toolcrew.orchestrator.sdk.tool_loop", "ToolDecisionOutput"),
    ("toolcrew.contract.calls", "ToolCall"),
    ("toolcrew.contract.calls", "ToolResult"),
    ("toolcrew", "ModelAdapter"),
]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_every_documented_name_is_importable(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is not None


def test_the_page_of_names_explains_every_documented_name() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "names.md").read_text()
    own_page = {"TOOL_DECISION_SCHEMA", "ToolDecisionOutput", "ToolCall", "ToolResult", "ModelAdapter"}
    assert {name for _, name in NAMES if f"`{name}`" not in page} - own_page == set()


@pytest.mark.parametrize(("alias", "name"), TOOLS.items())
def test_s4_04_17_to_31_a_documented_tool_has_name_description_and_schema(alias: str, name: str) -> None:
    tool: Tool[Any] = getattr(worker_names, alias)
    assert (tool.name, bool(tool.description), tool.parameters["type"]) == (name, True, "object")
    assert tool_schema(tool) == tool.parameters
    assert worker_names.BuiltInToolsRegistry().get(name) is tool


def test_s4_04_and_22_a_documented_tool_is_executed_with_arguments_and_context() -> None:
    sandbox: Any = FakeSandboxClient(build_exec_response(b"Linux\n", exit_code=3))
    bench = ToolEnvironment(build_call("bash_tool"), build_context(), WorkerResources({}, client=sandbox))
    outcome = worker_names.BashTool.execute({"command": "uname"}, bench)
    assert (outcome.metadata["stdout"], outcome.metadata["exit_code"]) == ("Linux\n", 3)


def test_s0_10_the_registry_of_built_in_tools_is_a_tool_registry() -> None:
    assert isinstance(worker_names.BuiltInToolsRegistry(), ToolRegistry)


async def test_s1_39_to_41_the_program_of_the_document_runs_with_the_gateway_of_the_product() -> None:
    registry = createToolRegistry()
    registry.register(
        {
            "name": "get_weather",
            "description": "Get current weather for a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "execute": lambda args: {"temp": 22, "city": args["city"]},
        }
    )
    gateway = ModelGateway(
        ScriptedModel(
            ['{"tool": "get_weather", "arguments": {"city": "Beijing"}}', '{"tool": null, "reply": "22 degrees."}']
        )
    )
    deps = {
        "chat": gateway.chat,
        "contextEngine": ContextEngine(),
        "outputController": createOutputController(),
        "toolRegistry": registry,
    }
    result = await runToolLoop(deps, "s1", "What's the weather in Beijing?", {"maxToolRounds": 5})
    assert result.reply == "22 degrees."
