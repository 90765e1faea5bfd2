"""MCP over stdin and stdout, with the client of the SDK and with raw messages. One connection has one session, and
nothing remains afterwards.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cli.command_server import run_toolcrew
from tests.support.mcp.mcp_stack import REVISIONS, SESSION, ElicitingUser, McpStack, bash, new_session, text_of
from tests.support.stack.stack import TOOLCREW, end_process, read_line
from tests.support.stack.waiting import SOON_S, wait_until, wait_until_async

pytestmark = pytest.mark.stack

DELETE = "rm -rf /srv/build && echo gone"


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_connection_has_one_session_that_ends_with_it(mcp_stack: McpStack, revision: str) -> None:
    async with mcp_stack.stdio_client("--tenant", "acme", mode=revision) as client:
        assert "bash_tool" in [tool.name for tool in (await client.list_tools()).tools]
        first = await bash(client, "cd /tmp; echo kept >/workspace/file")
        assert text_of(await bash(client, "pwd; cat /workspace/file")) == "/tmp\nkept\n"
        session = (first.meta or {})[SESSION]
        assert session in [one["id"] for one in open_sessions(mcp_stack)]
    await wait_until_async(
        lambda: session not in [one["id"] for one in open_sessions(mcp_stack)], SOON_S, "the session goes"
    )


def open_sessions(mcp_stack: McpStack) -> list[dict[str, Any]]:
    stack = mcp_stack.stack
    done = run_toolcrew(
        stack.footprint,
        "sessions",
        "list",
        "--tenant",
        "acme",
        "--json",
        environment={"TOOLCREW_REDIS_URL": stack.redis_url},
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout)["sessions"])


async def test_a_named_session_is_used_and_stays_open(mcp_stack: McpStack) -> None:
    async with mcp_stack.client() as client:
        session = await new_session(client)
        async with mcp_stack.stdio_client("--tenant", "acme", "--session", session) as other:
            await bash(other, "echo there >file")
        assert text_of(await bash(client, "cat file", session)) == "there\n"


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_cancelled_call_leaves_no_process(mcp_stack: McpStack, revision: str) -> None:
    async with mcp_stack.stdio_client("--tenant", "acme", mode=revision) as client:
        calling = asyncio.ensure_future(bash(client, "sleep 7342"))
        await wait_until_async(lambda: mcp_stack.find_programs("sleep 7342"), SOON_S, "the command runs")
        calling.cancel()
        await wait_until_async(lambda: not mcp_stack.find_programs("sleep 7342"), SOON_S, "the command ends")
        assert text_of(await bash(client, "echo alive")) == "alive\n"


@pytest.mark.parametrize("revision", REVISIONS)
async def test_the_user_of_the_client_is_asked_in_every_protocol_revision(mcp_stack: McpStack, revision: str) -> None:
    for person, expected in (
        (ElicitingUser(allow=True), "gone\n"),
        (ElicitingUser(allow=False), "the call was denied"),
    ):
        async with mcp_stack.stdio_client("--tenant", "acme", mode=revision, elicitation_callback=person) as client:
            assert expected in text_of(await bash(client, DELETE))
            assert len(person.questions) == 1


# --- Raw messages
# -----------------------------------------------------------------------------------------------------

HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "by hand", "version": "0"}},
}


class RawClient:
    """A program that serves MCP, and its two pipes."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def send_line(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: Any, number: int = 2) -> dict[str, Any]:
        self.send_line(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode())
        return self.answer()

    def answer(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(read_line(self.process))
        return reply

    def greet(self) -> None:
        self.send_line(json.dumps(HELLO).encode())
        assert self.answer()["result"]["serverInfo"]["name"] == "toolcrew"
        self.send_line(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')


@pytest.fixture
def raw_client(mcp_stack: McpStack) -> Iterator[RawClient]:
    with open_raw_client(mcp_stack) as opened:
        yield opened


@contextlib.contextmanager
def open_raw_client(mcp_stack: McpStack, *arguments: str) -> Iterator[RawClient]:
    process = subprocess.Popen(
        [TOOLCREW, "serve", "mcp", "--tenant", "acme", *arguments],
        env=mcp_stack.stack.footprint.environment({"TOOLCREW_REDIS_URL": mcp_stack.stack.redis_url}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield RawClient(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        end_process(process)


def test_an_invalid_message_is_reported_and_the_connection_continues(raw_client: RawClient) -> None:
    raw_client.greet()
    raw_client.send_line(b"")
    for line in (
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"jsonrpc":"2.0"}',
        b"[" * 100_000,
        b'"' + b"x" * (5 * 1024 * 1024) + b'"',
    ):
        raw_client.send_line(line)
        result = raw_client.answer()
        assert (result.get("id"), result["error"]["code"]) == (None, -32700), result
    assert raw_client.ask("ping", {}, 7) == {"jsonrpc": "2.0", "id": 7, "result": {}}


@pytest.mark.parametrize("is_signal", [True, False], ids=["signal", "closed stdin"])
def test_a_signal_or_a_closed_stdin_ends_the_server_with_its_command(
    raw_client: RawClient, mcp_stack: McpStack, is_signal: bool
) -> None:
    raw_client.greet()
    command = f"sleep 734{int(is_signal)}"
    call = {"name": "bash_tool", "arguments": {"command": command}}
    raw_client.send_line(json.dumps({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": call}).encode())
    wait_until(lambda: mcp_stack.find_programs(command), SOON_S, "the command runs")
    if is_signal:
        # Its stdin stays open. A program that only waits for a line on stdin would not end.
        os.kill(raw_client.process.pid, signal.SIGTERM)
    else:
        assert raw_client.process.stdin is not None
        raw_client.process.stdin.close()
    assert raw_client.process.wait(30) == (128 + signal.SIGTERM if is_signal else 0)
    wait_until(lambda: not mcp_stack.find_programs(command), SOON_S, "the command ends")


async def test_a_closed_stdin_ends_the_command_in_a_named_session(mcp_stack: McpStack) -> None:
    async with mcp_stack.client() as client:
        session = await new_session(client)
        with open_raw_client(mcp_stack, "--session", session) as raw_client:
            raw_client.greet()
            call = {"name": "bash_tool", "arguments": {"command": "sleep 7345"}}
            raw_client.send_line(
                json.dumps({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": call}).encode()
            )
            await wait_until_async(lambda: mcp_stack.find_programs("sleep 7345"), SOON_S, "the command runs")
            assert raw_client.process.stdin is not None
            raw_client.process.stdin.close()
            await wait_until_async(lambda: raw_client.process.poll() is not None, SOON_S, "the program ends")
            await wait_until_async(lambda: not mcp_stack.find_programs("sleep 7345"), SOON_S, "the command ends")
        assert text_of(await bash(client, "echo alive", session)) == "alive\n"
