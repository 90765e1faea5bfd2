"""MCP over HTTP with the client of the SDK: results of tools, ends of calls, and access to sessions, on any replica."""

import asyncio
from typing import Any

import pytest
from mcp import MCPError
from mcp_types import CallToolResult, ElicitResult, InputRequiredResult

from tests.support.cli.command_server import run_toolcrew
from tests.support.mcp.mcp_stack import (
    REVISIONS,
    SESSION,
    ElicitingUser,
    McpStack,
    bash,
    new_session,
    open_mcp_process,
    text_of,
)
from tests.support.stack.stack import Stack
from tests.support.stack.waiting import SOON_S, assert_in_force, wait_until_async
from toolcrew.orchestrator.sdk.client import ToolClient

pytestmark = pytest.mark.stack

DELETE = "rm -rf /srv/build && echo gone"
"""A dangerous command, which needs approval."""


def toolcrew(stack: Stack, *arguments: str) -> str:
    done = run_toolcrew(stack.footprint, *arguments, environment={"TOOLCREW_REDIS_URL": stack.redis_url})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("revision", REVISIONS)
async def test_tools_are_listed_with_their_schemas_and_hints(mcp_stack: McpStack, revision: str) -> None:
    async with mcp_stack.client(mode=revision) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    hints = tools["read_tool"].annotations
    assert hints is not None
    assert (hints.read_only_hint, hints.open_world_hint) == (True, False)
    shell = tools["bash_tool"]
    assert shell.input_schema["properties"]["command"]["type"] == "string"
    assert shell.annotations is not None
    assert (shell.annotations.destructive_hint, shell.annotations.open_world_hint) == (True, False)
    assert not [name for name in tools if name.startswith("session.")]


async def test_disabled_and_forbidden_tools_are_not_listed_and_calls_explain_why(mcp_stack: McpStack) -> None:
    toolcrew(mcp_stack.stack, "tenants", "add", "narrow", "--tools", "bash_tool,glob_tool")
    key = toolcrew(mcp_stack.stack, "keys", "create", "narrow").split("tc_")[1].split()[0]
    mcp_stack.keys["narrow"] = f"tc_{key}"
    toolcrew(mcp_stack.stack, "tools", "disable", "glob_tool", "--tenant", "narrow", "--reason", "being repaired")
    try:
        async with mcp_stack.client("narrow") as client:

            async def is_withdrawn() -> bool:
                return [tool.name for tool in (await client.list_tools()).tools] == ["bash_tool"]

            # The server may have read the switches just before the command changed them.
            await assert_in_force(is_withdrawn)
            assert "being repaired" in text_of(await client.call_tool("glob_tool", {"pattern": "*"}))
            assert "[PERMISSION_DENIED]" in text_of(await client.call_tool("read_tool", {"file_path": "x"}))
    finally:
        toolcrew(mcp_stack.stack, "tools", "enable", "glob_tool", "--tenant", "narrow")
        toolcrew(mcp_stack.stack, "tenants", "remove", "narrow")


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_call_returns_text_for_models_and_the_whole_result_for_programs(
    mcp_stack: McpStack, revision: str
) -> None:
    async with mcp_stack.client(mode=revision) as client:
        done = await bash(client, "echo hello; exit 3")
        assert not done.is_error
        assert text_of(done).startswith("hello\n")
        assert done.structured_content["text"] == text_of(done)
        assert done.structured_content["metadata"]["exit_code"] == 3


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_failed_call_is_a_result_with_the_error_text_for_the_model(mcp_stack: McpStack, revision: str) -> None:
    async with mcp_stack.client(mode=revision) as client:
        unknown = await client.call_tool("bash_toll", {})
        assert unknown.is_error
        assert text_of(unknown) == "Error [TOOL_NOT_FOUND]: Tool not found: bash_toll"
        assert "bash_tool" in unknown.structured_content["metadata"]["nearest"]
        wrong = await client.call_tool("bash_tool", {"comand": "true"})
        assert wrong.is_error
        assert "unknown parameter 'comand'; did you mean 'command'?" in text_of(wrong)
        missing = await client.call_tool("read_tool", {"path": "no-such-file"})
        assert missing.is_error
        assert missing.structured_content["error_code"] == "FILE_NOT_FOUND"
        verb = await client.call_tool("session.exec", {"argv": ["id"]})
        assert verb.is_error
        assert text_of(verb).endswith("Tool not found: session.exec")


@pytest.mark.parametrize("revision", REVISIONS)
async def test_output_is_sent_as_progress_while_the_call_runs(mcp_stack: McpStack, revision: str) -> None:
    pieces, has_begun = list[str](), asyncio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        pieces.append(message or "")
        assert progress == sum(map(len, pieces))
        has_begun.set()

    async with (
        mcp_stack.client(mode=revision) as client,
        ToolClient.connect(mcp_stack.stack.redis_url, tenant="acme") as other,
    ):
        session = await new_session(client)
        # The command continues only after its first output has been received.
        waits = "echo first; until test -e go; do sleep 0.1; done; echo second"
        calling = asyncio.ensure_future(bash(client, waits, session, progress_callback=on_progress))
        async with asyncio.timeout(SOON_S):
            await has_begun.wait()
            assert not calling.done()
            await (await other.session(session)).write_file("go", b"")
            done = await calling
    assert text_of(done) == "first\nsecond\n"
    assert pieces[0] == "first\n"


async def test_a_cancelled_call_leaves_no_process(mcp_stack: McpStack) -> None:
    async with mcp_stack.client() as client:
        session = await new_session(client)
        calling = asyncio.ensure_future(bash(client, "sleep 7341", session))
        await wait_until_async(lambda: mcp_stack.find_programs("sleep 7341"), SOON_S, "the command runs")
        calling.cancel()
        await wait_until_async(lambda: not mcp_stack.find_programs("sleep 7341"), SOON_S, "the command ends")
        # The session must still exist.
        assert text_of(await bash(client, "echo alive", session)) == "alive\n"


async def test_a_session_is_selected_by_path_or_metadata_on_every_replica(mcp_stack: McpStack) -> None:
    async with mcp_stack.client() as client:
        session = await new_session(client)
        await bash(client, "echo kept >file; cd /tmp", session)
    async with mcp_stack.client(replica=1, session=session) as client:
        assert text_of(await bash(client, "pwd; cat /workspace/file")) == "/tmp\nkept\n"
        other = await bash(client, "true", "another1")
        assert other.is_error
        assert "omit one of them" in text_of(other)


async def test_a_session_of_another_tenant_looks_like_an_unknown_session(mcp_stack: McpStack) -> None:
    async with mcp_stack.client() as client:
        session = await new_session(client)
        await bash(client, "echo secret >file", session)
    async with mcp_stack.client("rival") as rival:
        theirs, none = await bash(rival, "cat file", session), await bash(rival, "cat file", "neverwas")
        assert theirs.structured_content["error_code"] == none.structured_content["error_code"] == "SESSION_NOT_FOUND"
        assert text_of(theirs).replace(session, "neverwas") == text_of(none)
    async with mcp_stack.client("rival", session=session) as rival:
        with pytest.raises(MCPError, match="SESSION_NOT_FOUND"):
            await rival.list_tools()


async def test_a_call_that_needs_approval_asks_the_user_of_the_client_and_runs_once(mcp_stack: McpStack) -> None:
    person = ElicitingUser(allow=True)
    async with mcp_stack.client(elicitation_callback=person) as client:
        done = await client.call_tool("bash_tool", {"command": DELETE})
    assert text_of(done) == "gone\n"
    (question,) = person.questions
    assert "rm -rf /srv/build" in question
    assert "WARNING" in question


async def test_a_refusal_or_a_client_without_elicitation_refuses_the_call(mcp_stack: McpStack) -> None:
    for person in (ElicitingUser(allow=False), ElicitingUser(), ElicitingUser(allow="yes")):
        async with mcp_stack.client(elicitation_callback=person) as client:
            assert "was not run: the call was denied" in text_of(await bash(client, DELETE))
            assert len(person.questions) == 1
    for revision in REVISIONS:
        async with mcp_stack.client(mode=revision) as client:
            assert "TOOLCREW_APPROVALS=queue" in text_of(await bash(client, DELETE))


async def ask(
    mcp_stack: McpStack, replica: int, command: str = DELETE, **more: Any
) -> CallToolResult | InputRequiredResult | MCPError:
    """Run one round of a call that needs a user's approval."""
    async with mcp_stack.client(replica=replica, elicitation_callback=ElicitingUser()) as client:
        try:
            return await client.session.call_tool("bash_tool", {"command": command}, allow_input_required=True, **more)
        except MCPError as error:
            return error


async def test_an_approval_is_valid_for_one_call_once_on_any_replica(mcp_stack: McpStack) -> None:
    question = await ask(mcp_stack, 0)
    assert isinstance(question, InputRequiredResult)
    yes = {"approval": ElicitResult(action="accept", content={"allow": True})}
    answer: dict[str, Any] = {"input_responses": yes, "request_state": question.request_state}
    for forged in (
        await ask(mcp_stack, 1, command=DELETE + "; echo more", **answer),
        await ask(mcp_stack, 1, input_responses=yes, request_state="made up"),
    ):
        assert isinstance(forged, MCPError)
        assert "requestState" in str(forged)
    # An answer to a question that was never asked is not accepted.
    assert isinstance(await ask(mcp_stack, 0, input_responses=yes), InputRequiredResult)
    done = await ask(mcp_stack, 1, **answer)
    assert isinstance(done, CallToolResult)
    assert text_of(done) == "gone\n"
    again = await ask(mcp_stack, 0, **answer)
    assert isinstance(again, CallToolResult)
    assert again.is_error, again


async def test_an_approval_for_one_session_is_refused_in_another(mcp_stack: McpStack) -> None:
    async with mcp_stack.client() as client:
        one, other = await new_session(client), await new_session(client)
    yes = {"approval": ElicitResult(action="accept", content={"allow": True})}
    question = await ask(mcp_stack, 0, meta={SESSION: one})
    assert isinstance(question, InputRequiredResult)
    moved = await ask(mcp_stack, 0, meta={SESSION: other}, input_responses=yes, request_state=question.request_state)
    assert isinstance(moved, CallToolResult)
    assert "differ from the approved ones" in text_of(moved)


async def test_no_approval_is_requested_when_the_operator_allows_everything(mcp_stack: McpStack) -> None:
    stack = mcp_stack.stack
    with open_mcp_process(stack, environment={"TOOLCREW_APPROVALS": "auto"}) as server:
        alone = McpStack(stack, (server, server), mcp_stack.keys)
        async with alone.client() as client:
            assert text_of(await bash(client, DELETE)) == "gone\n"
