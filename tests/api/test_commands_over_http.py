"""Commands and the MCP server over stdio with nothing but TOOLCREW_URL and TOOLCREW_API_KEY, on a real stack."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from tests.support.cli.command_server import run_toolcrew
from tests.support.mcp.mcp_stack import REVISIONS, SESSION, bash, text_of
from tests.support.stack.api_stack import ApiStack
from tests.support.stack.stack import TOOLCREW, commands_in
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew import ErrorCode

pytestmark = pytest.mark.stack

Run = Callable[..., Any]


def environment_of(api_stack: ApiStack, key: str = "acme") -> dict[str, str]:
    return {"TOOLCREW_URL": api_stack.apis[0].url, "TOOLCREW_API_KEY": api_stack.keys[key]}


@pytest.fixture
def run(api_stack: ApiStack) -> Run:
    """Return a function that runs a command and returns its JSON; `code`: its exit code."""

    def run(*arguments: str, code: int = 0, key: str = "acme") -> Any:
        given = arguments if "--json" in arguments else (*arguments, "--json")
        done = run_toolcrew(api_stack.stack.footprint, *given, environment=environment_of(api_stack, key))
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if done.stdout else done.stderr

    return run


def test_a_tenant_works_in_sessions(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\n")
    session = run("sessions", "open", "--workspace", str(tmp_path / "in"), "--ttl", "600")["id"]
    assert session in [one["id"] for one in run("sessions", "list")["sessions"]]
    assert run("sessions", "exec", "--json", session, "--", "cat", "a.txt")["stdout"] == "one\n"
    assert (
        run("call", "bash_tool", "command=pwd; sleep 0.1", "timeout=20", "--session", session)["output"]
        == "/workspace\n"
    )
    assert run("call", "bash_tool", "timeout=soon", "--session", session, code=1)["error_code"] == "INVALID_ARGUMENTS"
    run("sessions", "ttl", session, "900")
    assert next(one for one in run("sessions", "list")["sessions"] if one["id"] == session)["ttl_s"] == 900
    run("sessions", "copy", str(tmp_path / "in" / "a.txt"), f"{session}:/tmp/b.txt")
    run("sessions", "copy", f"{session}:/tmp/b.txt", str(tmp_path / "b.txt"))
    assert (tmp_path / "b.txt").read_text() == "one\n"
    (fork,) = run("sessions", "fork", session)["sessions"]
    assert set(run("sessions", "close", session, fork)["closed"]) == {session, fork}
    assert run("call", "bash_tool", "command=echo once")["output"] == "once\n"
    calls = run("calls", "list")["calls"]
    assert run("calls", "show", calls[0]["id"])["tool"] == "bash_tool"


def test_a_tenant_reads_tools_usage_and_runs(run: Run) -> None:
    tools = {one["name"]: one["state"] for one in run("tools", "list")["tools"]}
    assert tools["bash_tool"] == "enabled"
    assert run("tools", "show", "bash_tool")["name"] == "bash_tool"
    assert run("tenants", "usage")["tenant"] == "acme"
    assert {one["tenant"] for one in run("runs", "list")["runs"]} <= {"acme"}
    assert run("tools", "disable", "bash_tool", code=3)


@pytest.mark.parametrize(
    "arguments",
    [("hosts", "list"), ("batches", "resume", "b1"), ("approvals", "list"), ("tenants", "list")],
    ids=" ".join,
)
def test_a_command_that_needs_redis_says_so(api_stack: ApiStack, arguments: tuple[str, ...]) -> None:
    done = run_toolcrew(api_stack.stack.footprint, *arguments, environment=environment_of(api_stack))
    assert done.returncode != 0
    assert "TOOLCREW_REDIS_URL" in done.stderr


@asynccontextmanager
async def stdio_client(api_stack: ApiStack, *arguments: str, **options: Any) -> AsyncIterator[Client]:
    env = api_stack.stack.footprint.environment(environment_of(api_stack))
    server = StdioServerParameters(command=TOOLCREW, args=["serve", "mcp", *arguments], env=env)
    async with Client(server, **{"mode": REVISIONS[0], **options}) as client:
        yield client


def find_programs(api_stack: ApiStack, text: str) -> list[str]:
    containers = api_stack.stack.footprint.containers()
    return [command for container in containers for command in commands_in(container).values() if text in command]


async def test_an_mcp_client_over_stdio_uses_the_api(api_stack: ApiStack) -> None:
    pieces: list[str] = []

    async def on_progress(_: float, __: float | None, message: str | None) -> None:
        pieces.append(message or "")

    async with stdio_client(api_stack) as client:
        assert "bash_tool" in [tool.name for tool in (await client.list_tools()).tools]
        first = await bash(client, "cd /tmp; echo kept >/workspace/file")
        assert text_of(await bash(client, "pwd; cat /workspace/file")) == "/tmp\nkept\n"
        shown = await client.call_tool(
            "bash_tool", {"command": "echo begun; sleep 1; echo ended"}, progress_callback=on_progress
        )
        assert text_of(shown) == "begun\nended\n"
        await wait_until_async(lambda: "begun" in "".join(pieces), SOON_S, "the output arrives")
        session = (first.meta or {})[SESSION]
        async with stdio_client(api_stack, "--session", session) as other:
            assert text_of(await bash(other, "cat /workspace/file")) == "kept\n"
        calling = asyncio.ensure_future(bash(client, "sleep 7343"))
        await wait_until_async(lambda: find_programs(api_stack, "sleep 7343"), SOON_S, "the command runs")
        calling.cancel()
        await wait_until_async(lambda: not find_programs(api_stack, "sleep 7343"), SOON_S, "the command ends")
        refused = await client.call_tool("no_such_tool", {})
        assert (refused.structured_content or {})["error_code"] == ErrorCode.TOOL_NOT_FOUND
    async with api_stack.client() as http:
        assert session not in [one["id"] for one in (await http.get("/v1/sessions")).json()["data"]]
