"""Rows S4-01 and S4-30 of the scenarios: the tool system as a whole, and the validation of arguments on every path of
a call.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.records.builders import build_call
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.approvals import AutoApprover
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.functions.function_tools import tool
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.local_tools import LocalTools
from toolcrew.orchestrator.sdk.tool_agent import CustomAgent, ToolAgent


@tool(read_only=True)
async def find(query: str, limit: int = 10) -> str:
    """Find something."""
    return f"{limit} of {query}"


@tool(requires_permission=True)
async def remove(path: str) -> str:
    """Remove a file."""
    return f"removed {path}"


async def test_s4_01_tools_are_described_registered_looked_up_filtered_and_gated() -> None:
    refusing, allowing = LocalTools([find, remove]), LocalTools([find, remove], approver=AutoApprover())
    assert [(spec.name, spec.description) for spec in refusing.specs()] == [
        ("find", "Find something."),
        ("remove", "Remove a file."),
    ]
    assert refusing.registry.get("find") is find
    assert [spec.name for spec in refusing.specs(["find"])] == ["find"]
    assert (await refusing.run_call(build_call("remove", path="a"))).error_code is ErrorCode.PERMISSION_DENIED
    assert (await allowing.run_call(build_call("remove", path="a"))).output == "removed a"


async def test_s4_01_a_filtered_tool_is_not_offered_to_the_model() -> None:
    tools = LocalTools([find, remove])
    model = ScriptedModel(["ok"])
    await Agent(model, NativeDialect(), tools.specs(["find"]), tools.run_call).run("tidy up")
    assert [item["function"]["name"] for item in model.requests[0].tools] == ["find"]


@pytest.mark.parametrize(
    ("dialect", "reply"),
    [
        (NativeDialect, Calls([("find", {"limit": "many"})])),
        (TagsDialect, '<tool_action name="find"><limit value="many" /></tool_action>'),
        (JsonDecisionDialect, '{"tool": "find", "arguments": {"limit": "many"}}'),
    ],
    ids=["native", "tags", "json"],
)
async def test_s4_30_every_dialect_validates_arguments_and_the_model_reads_all_errors(
    dialect: Callable[[], Dialect], reply: Any
) -> None:
    tools, results = LocalTools([find]), []

    async def run_call(call: ToolCall) -> ToolResult:
        results.append(await tools.run_call(call))
        return results[-1]

    model = ScriptedModel([reply, '{"tool": null, "reply": "ok"}'])
    await Agent(model, dialect(), tools.specs(), run_call).run("find it")
    assert [result.error_code for result in results] == [ErrorCode.INVALID_ARGUMENTS]
    text = model.requests[1].messages[-1]["content"]
    assert "'query' is required" in text
    assert "parameter 'limit' must be integer" in text


async def test_s4_30_valid_arguments_reach_the_tool_with_the_defaults_of_the_schema() -> None:
    assert (await LocalTools([find]).run_call(build_call("find", query="a"))).output == "10 of a"


async def test_s4_30_calls_of_a_tool_agent_are_validated() -> None:
    model = ScriptedModel([Calls([("find", {"query": 5})]), "ok"])
    await CustomAgent(ToolAgent(model).bind_tools([find])).run("find it")
    assert "parameter 'query' must be string" in model.requests[1].messages[-1]["content"]


async def test_s4_30_a_validator_of_the_tool_refuses_with_details() -> None:
    @tool(
        validators=[lambda arguments: "give a path below /workspace" if arguments["path"].startswith("/etc") else None]
    )
    async def show(path: str) -> str:
        """Show a file."""
        return path

    result = await LocalTools([show]).run_call(build_call("show", path="/etc/passwd"))
    assert (result.success, result.error) == (False, "show: give a path below /workspace")
