"""A session's tools as LangChain tools, with the real library on a real stack: schemas, results, failures, approvals,
cancels, and other threads.
"""

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tests.support.stack.stack import Stack, commands_in
from tests.support.stack.waiting import SOON_S, wait_until, wait_until_async
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.approvals import ApprovalRequest, AutoApprover, CallbackApprover, Decision
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytest.importorskip("langchain_core")

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from toolcrew.orchestrator.adapters.langchain import PoolTool, as_langchain_tools

pytestmark = pytest.mark.stack


@pytest.fixture
async def tools(client: ToolClient, session: Session) -> dict[str, PoolTool]:
    return {tool.name: tool for tool in await as_langchain_tools(client, session, approver=AutoApprover())}


def build_tool_call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a tool call in the format of a model's message."""
    return {"type": "tool_call", "id": "call_1", "name": name, "args": arguments}


async def test_every_tool_of_the_tenant_has_its_exact_schema(client: ToolClient, tools: dict[str, PoolTool]) -> None:
    specs = {spec.name: spec for spec in await client.tools()}
    assert tools.keys() == specs.keys()
    assert all(isinstance(tool, BaseTool) for tool in tools.values())
    for name, tool in tools.items():
        assert tool.args_schema == specs[name].parameters
        # The model receives this function definition, which must match the schema without additions.
        sent = convert_to_openai_tool(tool)["function"]
        assert sent["parameters"]["properties"] == specs[name].parameters["properties"]
        assert sent["description"] == specs[name].description


async def test_a_tool_call_gives_a_tool_message_with_the_metadata_as_artifact(tools: dict[str, PoolTool]) -> None:
    message = await tools["bash_tool"].ainvoke(build_tool_call("bash_tool", command="echo hello; exit 3"))
    assert isinstance(message, ToolMessage)
    assert (message.status, message.tool_call_id, message.name) == ("success", "call_1", "bash_tool")
    assert str(message.content).splitlines()[:2] == ["hello", "[exit code 3]"]
    assert message.artifact["metadata"]["exit_code"] == 3
    assert message.artifact["clocks"]["run_s"] > 0
    json.dumps(message.artifact)


async def test_a_failure_is_a_tool_message_with_status_error_and_the_error_text(
    session: Session, tools: dict[str, PoolTool]
) -> None:
    message = await tools["read_tool"].ainvoke(build_tool_call("read_tool", file_path="/workspace/none.txt"))
    ours = await session.call("read_tool", {"file_path": "/workspace/none.txt"})
    assert (message.status, message.content) == ("error", ours.text())
    assert message.artifact["error_code"] == ErrorCode.FILE_NOT_FOUND
    # Without a call there is no message for the result.
    assert await tools["read_tool"].ainvoke({"file_path": "/workspace/none.txt"}) == ours.text()


@pytest.mark.parametrize("wrong", [float("nan"), object()], ids=["not a number", "invalid JSON"])
async def test_arguments_that_cannot_be_encoded_are_an_error_for_the_model(
    tools: dict[str, PoolTool], wrong: object
) -> None:
    message = await tools["bash_tool"].ainvoke(build_tool_call("bash_tool", command="true", timeout=wrong))
    assert (message.status, message.artifact["error_code"]) == ("error", "INVALID_ARGUMENTS")
    assert "timeout" in message.content


async def test_a_call_that_needs_approval_is_requested_and_a_refusal_is_reported(
    client: ToolClient, session: Session
) -> None:
    requests: list[ApprovalRequest] = []

    def refuse(request: ApprovalRequest) -> Decision:
        requests.append(request)
        return Decision(False, "not on a Monday")

    (write,) = await as_langchain_tools(client, session, ["write_tool"], approver=CallbackApprover(refuse))
    message = await write.ainvoke(build_tool_call("write_tool", file_path="/workspace/a.txt", content="x"))
    assert (message.status, message.artifact["error_code"]) == ("error", "PERMISSION_DENIED")
    assert "not on a Monday" in message.content
    assert [request.call.arguments["file_path"] for request in requests] == ["/workspace/a.txt"]
    with pytest.raises(ToolFailure):
        await session.read_file("/workspace/a.txt")


async def test_cancelling_in_another_loop_stops_the_call_in_the_sandbox(
    stack: Stack, session: Session, tools: dict[str, PoolTool]
) -> None:
    await session.call("bash_tool", {"command": "true"})
    container = await stack.container_of(session)

    async def give_up() -> None:
        task = asyncio.create_task(tools["bash_tool"].ainvoke({"command": "sleep 655"}))
        await wait_until_async(lambda: "sleep 655" in commands_in(container).values(), SOON_S, "the command runs")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.to_thread(lambda: asyncio.run(give_up()))
    await wait_until_async(lambda: "sleep 655" not in commands_in(container).values(), SOON_S, "the command is gone")


async def test_invoke_in_the_event_loop_of_the_client_is_refused_instead_of_hanging(tools: dict[str, PoolTool]) -> None:
    with pytest.raises(RuntimeError, match="use ainvoke"):
        tools["bash_tool"].invoke({"command": "true"})


async def test_names_select_tools_and_an_unknown_name_is_refused(client: ToolClient, session: Session) -> None:
    assert [tool.name for tool in await as_langchain_tools(client, session, ["read_tool", "bash_tool"])] == [
        "bash_tool",
        "read_tool",
    ]
    with pytest.raises(ToolFailure, match="has no tool 'bash'") as raised:
        await as_langchain_tools(client, session, ["bash"])
    assert "bash_tool" in raised.value.metadata["nearest"]


async def test_a_langgraph_tool_node_runs_the_tools_in_parallel(tools: dict[str, PoolTool]) -> None:
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    graphs = pytest.importorskip("langgraph.graph")
    graph = graphs.StateGraph(graphs.MessagesState)
    graph.add_node("tools", prebuilt.ToolNode(list(tools.values())))
    graph.add_edge(graphs.START, "tools")
    calls = [
        {"id": "a", "name": "bash_tool", "args": {"command": "echo one"}},
        {"id": "b", "name": "read_tool", "args": {"file_path": "/workspace/none"}},
        {"id": "c", "name": "bash_tool", "args": {"wrong": 1}},
    ]
    result = await graph.compile().ainvoke({"messages": [AIMessage("", tool_calls=calls)]})
    first, second, third = result["messages"][1:]
    assert (first.tool_call_id, first.content, first.status) == ("a", "one\n", "success")
    assert (second.tool_call_id, second.status, second.artifact["error_code"]) == ("b", "error", "FILE_NOT_FOUND")
    assert (third.tool_call_id, third.status, third.artifact["error_code"]) == ("c", "error", "INVALID_ARGUMENTS")


def test_a_program_without_a_loop_invokes_tools_through_a_thread(stack: Stack) -> None:
    with open_in_thread(stack) as (_, tools, _):
        message = tools["bash_tool"].invoke(build_tool_call("bash_tool", command="echo plain"))
    assert (message.content, message.status) == ("plain\n", "success")
    with pytest.raises(RuntimeError, match="the event loop of its client has ended"):
        tools["bash_tool"].invoke(build_tool_call("bash_tool", command="true"))


def test_ctrl_c_during_a_synchronous_invoke_stops_the_call_in_the_sandbox(stack: Stack) -> None:
    with open_in_thread(stack) as (portal, tools, session):
        portal.call(session.call, "bash_tool", {"command": "true"})
        container = portal.call(stack.container_of, session)

        def interrupt() -> None:
            wait_until(lambda: "sleep 657" in commands_in(container).values(), SOON_S, "the command runs")
            os.kill(os.getpid(), signal.SIGINT)

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            tools["bash_tool"].invoke({"command": "sleep 657"})
        interrupter.join()
        wait_until(lambda: "sleep 657" not in commands_in(container).values(), SOON_S, "the command is gone")


@contextlib.contextmanager
def open_in_thread(stack: Stack) -> Iterator[tuple[BlockingPortal, dict[str, PoolTool], Session]]:
    """Open a session in a thread, as docs/integrations.md shows for programs without their own event loop."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(ToolClient.connect(stack.redis_url)) as client,
        portal.wrap_async_context_manager(portal.call(client.open_session)) as session,
    ):
        tools = portal.call(as_langchain_tools, client, session)
        yield portal, {tool.name: tool for tool in tools}, session
