"""A session's tools in the OpenAI Agents SDK, with the SDK's Runner and scripted model, on a real stack."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.stack.stack import Stack, commands_in
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.orchestrator.approvals import AutoApprover, CallbackApprover, Decision
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytest.importorskip("agents")

from agents import Agent, FunctionTool, RunConfig, Runner, RunResult, RunState, ToolCallOutputItem
from agents.testing import ScriptedModel, assistant_message, function_call

from toolcrew.orchestrator.adapters.openai_agents import as_agents_tools, is_strict

pytestmark = pytest.mark.stack
QUIET = RunConfig(tracing_disabled=True)
WRITE = {"file_path": "/workspace/a.txt", "content": "written"}


def play(tools: list[FunctionTool], *calls: tuple[str, Any], answer: str = "done") -> "Agent[None]":
    """Return an agent whose model requests these calls in one reply and then answers."""
    items = [function_call(name, arguments, call_id=f"call_{number}") for number, (name, arguments) in enumerate(calls)]
    return Agent(name="worker", model=ScriptedModel([items, [assistant_message(answer)]]), tools=list(tools))


async def run(agent: "Agent[None]") -> RunResult:
    return await Runner.run(agent, "Do it.", run_config=QUIET)


def outputs(result: RunResult) -> list[ToolCallOutputItem]:
    return [item for item in result.new_items if isinstance(item, ToolCallOutputItem)]


def read_by_model(agent: "Agent[None]") -> list[str]:
    """Return the outputs in the model's next request."""
    model = agent.model
    assert isinstance(model, ScriptedModel)
    assert model.last_call is not None
    sent = model.last_call.input
    assert not isinstance(sent, str)
    return [
        str(item["output"]) for item in sent if isinstance(item, dict) and item.get("type") == "function_call_output"
    ]


async def test_every_tool_of_the_tenant_has_its_exact_schema(client: ToolClient, session: Session) -> None:
    specs = {spec.name: spec for spec in await client.tools()}
    tools = await as_agents_tools(client, session)
    assert [tool.name for tool in tools] == sorted(specs)
    for tool in tools:
        assert (tool.params_json_schema, tool.description) == (
            specs[tool.name].parameters,
            specs[tool.name].description,
        )
        # The tools have optional parameters, which the strict form does not support.
        assert tool.strict_json_schema is False


def test_a_schema_is_strict_only_if_it_meets_all_rules() -> None:
    strict = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert is_strict(strict)
    assert not is_strict({**strict, "required": []})
    assert not is_strict({key: value for key, value in strict.items() if key != "additionalProperties"})
    assert not is_strict({**strict, "additionalProperties": True})


async def test_a_run_of_the_sdk_calls_tools_in_the_sandbox_and_keeps_their_metadata(
    client: ToolClient, session: Session
) -> None:
    agent = play(await as_agents_tools(client, session), ("bash_tool", {"command": "echo hello; exit 3"}))
    result = await run(agent)
    [read] = read_by_model(agent)
    assert (result.final_output, read.splitlines()[:2]) == ("done", ["hello", "[exit code 3]"])
    (item,) = outputs(result)
    assert item.custom_data["metadata"]["exit_code"] == 3
    json.dumps(item.custom_data)


async def test_failures_are_reported_to_the_model_and_the_agent_continues(client: ToolClient, session: Session) -> None:
    calls = [
        ("read_tool", {"file_path": "/workspace/none"}),
        ("bash_tool", {"comand": "ls"}),
        ("bash_tool", '{"command": '),
    ]
    agent = play(await as_agents_tools(client, session), *calls)
    result = await run(agent)
    missing, misspelt, broken = read_by_model(agent)
    assert missing == (await session.call("read_tool", {"file_path": "/workspace/none"})).text()
    assert misspelt == (await session.call("bash_tool", {"comand": "ls"})).text()
    assert broken.startswith("Error [INVALID_ARGUMENTS]: bash_tool: ")
    codes = [item.custom_data["error_code"] for item in outputs(result)]
    assert codes == [ErrorCode.FILE_NOT_FOUND, ErrorCode.INVALID_ARGUMENTS, ErrorCode.INVALID_ARGUMENTS]
    assert result.final_output == "done"


async def test_a_configured_approver_decides(client: ToolClient, session: Session) -> None:
    refuse = CallbackApprover(lambda request: Decision(False, "not on a Monday"))
    agent = play(await as_agents_tools(client, session, ["write_tool"], approver=refuse), ("write_tool", WRITE))
    await run(agent)
    assert "not on a Monday" in read_by_model(agent)[0]
    agent = play(await as_agents_tools(client, session, ["write_tool"], approver=AutoApprover()), ("write_tool", WRITE))
    await run(agent)
    assert await session.read_file("/workspace/a.txt") == b"written"


async def test_a_run_with_sdk_approvals_stops_and_continues_after_an_approval(
    client: ToolClient, session: Session
) -> None:
    agent = play(
        await as_agents_tools(client, session, asks_by_run=True),
        ("write_tool", WRITE),
        ("bash_tool", {"command": "echo free"}),
    )
    stopped = await run(agent)
    assert [item.name for item in stopped.interruptions] == ["write_tool"]
    with pytest.raises(ToolFailure):
        await session.read_file("/workspace/a.txt")
    # Through a file or a queue, as between two processes.
    state = await RunState.from_string(agent, stopped.to_state().to_string())
    state.approve(state.get_interruptions()[0])
    result = await Runner.run(agent, state, run_config=QUIET)
    assert (result.final_output, await session.read_file("/workspace/a.txt")) == ("done", b"written")


async def test_no_approval_is_requested_for_a_call_that_is_refused_anyway(client: ToolClient, session: Session) -> None:
    agent = play(
        await as_agents_tools(client, session, asks_by_run=True),
        ("bash_tool", {"command": "rm -rf /"}),
        ("write_tool", {"path": 1}),
    )
    result = await run(agent)
    assert result.interruptions == []
    assert [item.custom_data["error_code"] for item in outputs(result)] == [
        ErrorCode.SECURITY_REFUSED,
        ErrorCode.INVALID_ARGUMENTS,
    ]


async def test_a_call_without_an_approval_of_the_run_is_refused(client: ToolClient, session: Session) -> None:
    """The attacker's aim: run a tool whose approval question was removed on the way."""
    (write,) = await as_agents_tools(client, session, ["write_tool"], asks_by_run=True)
    write.needs_approval = False
    agent = play([write], ("write_tool", WRITE))
    await run(agent)
    assert read_by_model(agent)[0].startswith("Error [PERMISSION_DENIED]: write_tool was not run")


async def test_cancelling_the_run_stops_the_call_in_the_sandbox(
    stack: Stack, client: ToolClient, session: Session
) -> None:
    await session.call("bash_tool", {"command": "true"})
    container = await stack.container_of(session)
    task = asyncio.create_task(
        run(play(await as_agents_tools(client, session), ("bash_tool", {"command": "sleep 656"})))
    )
    await wait_until_async(lambda: "sleep 656" in commands_in(container).values(), SOON_S, "the command runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_async(lambda: "sleep 656" not in commands_in(container).values(), SOON_S, "the command is gone")


async def test_an_approver_together_with_sdk_approvals_is_refused(client: ToolClient, session: Session) -> None:
    with pytest.raises(ConfigError, match="asks_by_run"):
        await as_agents_tools(client, session, approver=AutoApprover(), asks_by_run=True)
