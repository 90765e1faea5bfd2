"""Tools of external MCP servers on a real stack: over HTTP from the worker with network, over stdio inside the
session's sandbox, and only for their tenants.
"""

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any

import pytest
from docker import APIClient

from tests.support.mcp.mcp_peers import TOOL, StatefulServer, modern, open_raw_peer
from tests.support.stack.stack import ROOT, Stack, commands_in, open_stack
from tests.support.stack.waiting import SOON_S, wait_until, wait_until_async
from tests.support.web.web_servers import WebServer
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import catalog_key
from toolcrew.orchestrator.approvals import AutoApprover
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack

SOURCE = (ROOT / "tests" / "support" / "mcp" / "mcp_stdio_peer.py").read_text()


def _stdio(how: str, **fields: Any) -> dict[str, Any]:
    return {"command": "python3", "args": ["-c", SOURCE, how], "network": "none", "timeout_s": 20, **fields}


def _commands(stack: Stack, pattern: str) -> list[str]:
    """Return the matching command lines in sandboxes."""
    commands = [argv for box in stack.footprint.containers() for argv in commands_in(box).values()]
    return [argv for argv in commands if re.search(pattern, argv)]


def _find_leftovers(stack: Stack) -> list[str]:
    """Return the leftovers of servers that should have ended."""
    return _commands(stack, "^sleep 4321|(hangs|dies|forges|leaves)$")


async def test_tools_of_mcp_servers_work_for_their_tenants_and_faulty_servers_fail_alone(
    engine: APIClient, tmp_path: Path
) -> None:
    file = tmp_path / "servers.json"
    with open_raw_peer(modern) as web:
        servers = {
            "web": {"url": web.url(host="127.0.0.1"), "private": True},
            "ours": _stdio("good", env={"LEVEL": "7"}),
            "bolts": _stdio("old", tenants=["bolt"]),
            "hangs": _stdio("hangs", timeout_s=20),
            "dies": _stdio("dies"),
            "forges": _stdio("forges"),
            "leaves": _stdio("leaves", idle_s=0),
            "idles": _stdio("leaves", idle_s=1),
            "missing": {"command": "no-such-program", "network": "none"},
            "away": {"url": "http://127.0.0.1:9/", "private": True},
        }
        file.write_text(json.dumps({"mcpServers": servers}))
        with open_stack(engine, {"TOOLCREW_MCP_SERVERS": str(file)}) as stack, stack.open_redis() as store:
            wait_until(lambda: store.exists(catalog_key("default", "tools")), SOON_S, lambda: stack.log("web"))
            assert stack.log("worker").count("mcp_server_without_tools") == 1
            assert stack.log("web").count("mcp_server_without_tools") == 1
            async with ToolClient.connect(stack.redis_url, tenant="acme") as acme, await acme.open_session() as session:
                named = {spec.name for spec in await acme.tools() if spec.name.startswith("mcp__")}
                assert {"mcp__web__echo", "mcp__ours__echo", "mcp__ours__where", "mcp__hangs__echo"} <= named
                assert not any(name.startswith(("mcp__bolts", "mcp__missing", "mcp__away")) for name in named)

                assert "\nby http\n" in (await session.call("mcp__web__echo", {"text": "by http"})).text()
                assert "\nby stdio\n" in (await session.call("mcp__ours__echo", {"text": "by stdio"})).text()
                assert "\n/workspace 7\n" in (await session.call("mcp__ours__where", {})).text()

                with pytest.raises(ToolFailure, match="Tool not found") as unseen:
                    await acme.tool_state("mcp__bolts__echo")
                assert "bolts" not in str(unseen.value.metadata)
                other = await session.call("mcp__bolts__echo", {"text": "x"})
                result = await session.call("mcp__nuts__echo", {"text": "x"})
                assert (other.error_code, str(other.error).replace("bolts", "nuts")) == (
                    result.error_code,
                    result.error,
                )

                ends = {
                    name: (await session.call(f"mcp__{name}__echo", {"text": "x"})).error_code
                    for name in ("hangs", "dies", "forges")
                }
                assert ends == {
                    "hangs": ErrorCode.TIMEOUT,
                    "dies": ErrorCode.HTTP_ERROR,
                    "forges": ErrorCode.HTTP_ERROR,
                }
                assert (await session.call("mcp__leaves__echo", {"text": "x"})).success
                assert (await session.call("mcp__idles__echo", {"text": "x"})).success
                await wait_until_async(lambda: not _find_leftovers(stack), SOON_S, lambda: str(_find_leftovers(stack)))
                assert "\nstill\n" in (await session.call("mcp__ours__echo", {"text": "still"})).text()
            async with ToolClient.connect(stack.redis_url, tenant="bolt") as bolt, await bolt.open_session() as session:
                assert "mcp__bolts__echo" in {spec.name for spec in await bolt.tools()}
                assert "\nmine\n" in (await session.call("mcp__bolts__echo", {"text": "mine"})).text()


async def test_the_calls_of_a_session_share_one_session_at_a_stateful_server_until_the_session_ends(
    engine: APIClient, tmp_path: Path
) -> None:
    file, server = tmp_path / "servers.json", StatefulServer()
    with open_raw_peer(server) as web:
        server.web = web
        file.write_text(json.dumps({"mcpServers": {"web": {"url": web.url(host="127.0.0.1"), "private": True}}}))
        settings = {"TOOLCREW_MCP_SERVERS": str(file)}
        with open_stack(engine, settings) as stack, stack.open_redis() as store:
            wait_until(lambda: store.exists(catalog_key("default", "tools")), SOON_S, lambda: stack.log("web"))

            async def note(session: Session, text: str) -> str:
                return (await session.call("mcp__web__echo", {"text": text})).text()

            async with (
                ToolClient.connect(stack.redis_url, approver=AutoApprover()) as client,
                await client.open_session() as session,
                await client.open_session() as other,
            ):
                for text in "abcd":
                    last = await note(session, text)
                assert "\na b c d\n" in last
                assert "\nx\n" in await note(other, "x")
                sessions = {text: name for name, texts in server.texts.items() for text in texts}
                await session.close()
                await wait_until_async(lambda: _ended(web) == [sessions["a"]], SOON_S, lambda: stack.log("web"))
                assert "\nx y\n" in await note(other, "y")


def _ended(web: WebServer) -> list[str | None]:
    """Return the sessions that were ended after a call used them."""
    used = {web.header("mcp-session-id", at) for at, body in enumerate(web.bodies) if b'"tools/call"' in body}
    deleted = [at for at, request in enumerate(web.requests) if request.startswith("DELETE")]
    return [name for at in deleted if (name := web.header("mcp-session-id", at)) in used]


async def test_a_session_keeps_its_mcp_servers_and_a_cancelled_call_ends_its_own(
    engine: APIClient, tmp_path: Path
) -> None:
    file, began, closed = tmp_path / "servers.json", threading.Event(), threading.Event()
    with open_raw_peer(modern) as web:
        servers = {
            "web": {"url": web.url(host="127.0.0.1"), "private": True},
            "ours": _stdio("good"),
            "hangs": _stdio("hangs", timeout_s=60),
            "clings": _stdio("clings"),
        }
        file.write_text(json.dumps({"mcpServers": servers}))
        with open_stack(engine, {"TOOLCREW_MCP_SERVERS": str(file)}) as stack, stack.open_redis() as store:
            wait_until(lambda: store.exists(catalog_key("default", "tools")), SOON_S, lambda: stack.log("web"))
            async with (
                ToolClient.connect(stack.redis_url) as client,
                await client.open_session() as session,
                await client.open_session() as other,
            ):
                assert (await session.call("mcp__clings__echo", {"text": "x"})).error_code is ErrorCode.HTTP_ERROR
                assert len(_commands(stack, "clings$")) == 1
                leftover_at = time.monotonic()

                assert [_number((await session.call("mcp__ours__count", {})).text()) for _ in range(3)] == [1, 2, 3]
                both = await asyncio.gather(*(session.call("mcp__ours__echo", {"text": "x"}) for _ in range(2)))
                assert all(result.success for result in both)
                assert _number((await other.call("mcp__ours__count", {})).text()) == 1

                command = await session.call("bash_tool", {"command": "echo on"})
                assert command.success
                assert command.kill is None
                assert "the MCP server ours" in (await session.call("bash_tool", {"action": "list"})).text()

                hanging = asyncio.ensure_future(session.call("mcp__hangs__echo", {"text": "x"}))
                await wait_until_async(lambda: _commands(stack, "hangs$"), SOON_S, "the server did not start")
                hanging.cancel()
                await wait_until_async(
                    lambda: not _commands(stack, "hangs$"), SOON_S, lambda: str(_commands(stack, "hangs$"))
                )
                assert (await session.call("mcp__hangs__where", {})).success

                # Only its age distinguishes a leftover from a starting server.
                await wait_until_async(lambda: time.monotonic() > leftover_at + 11, SOON_S, "the leftover is old")
                assert _number((await session.call("mcp__clings__count", {})).text()) == 1
                assert len(_commands(stack, "clings$")) == 1

                web.replies["*"] = _build_waiter(began, closed)
                waiting = asyncio.ensure_future(session.call("mcp__web__echo", {"text": "x"}))
                await wait_until_async(began.is_set, SOON_S, "the call did not come")
                assert not closed.is_set()
                waiting.cancel()
                await wait_until_async(closed.is_set, SOON_S, "the connection is still open")


def _number(text: str) -> int:
    """Return the number of the call within its server process."""
    found = re.search(r"^(\d+) \d+$", text, re.MULTILINE)
    assert found, text
    return int(found[1])


def _build_waiter(began: threading.Event, closed: threading.Event) -> Callable[[socket], None]:
    """Return a handler that never answers and that signals the end of the connection."""

    def wait(connection: socket) -> None:
        began.set()
        connection.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            connection.recv(1)
        closed.set()

    return wait


async def test_mcp_servers_that_appear_or_change_are_adopted_at_run_time(engine: APIClient, tmp_path: Path) -> None:
    file, source = tmp_path / "servers.json", {"tools": [TOOL]}
    with open_raw_peer(lambda request: modern(request, tools=source["tools"])) as web:
        down = web.replies.pop("*")
        late = {"command": "/workspace/../tmp/late", "network": "none"}
        file.write_text(
            json.dumps({"mcpServers": {"web": {"url": web.url(host="127.0.0.1"), "private": True}, "late": late}})
        )
        with open_stack(engine, {"TOOLCREW_MCP_SERVERS": str(file), "TOOLCREW_MCP_REFRESH_S": "2"}) as stack:
            async with ToolClient.connect(stack.redis_url) as client, await client.open_session() as session:
                assert "mcp__web__echo" not in {spec.name for spec in await client.tools()}
                assert (await session.call("mcp__web__echo", {"text": "x"})).error_code is not None

                web.replies["*"] = down
                await _wait_until_offered(client, {"mcp__web__echo"})
                assert "\nnow\n" in (await session.call("mcp__web__echo", {"text": "now"})).text()

                source["tools"] = [{**TOOL, "name": "other"}]
                await _wait_until_offered(client, {"mcp__web__other"})
                for text in ("one", "two", "three"):
                    assert f"\n{text}\n" in (await session.call("mcp__web__other", {"text": text})).text()
                assert (await session.call("mcp__web__echo", {"text": "x"})).error_code is ErrorCode.TOOL_NOT_FOUND
                assert stack.log("worker").count("mcp_server_without_tools") > 1


async def _wait_until_offered(client: ToolClient, names: set[str]) -> None:
    """Wait until exactly these tools of servers are offered."""

    async def list_offered() -> set[str]:
        return {spec.name for spec in await client.tools() if spec.name.startswith("mcp__")}

    await wait_until_async(list_offered, SOON_S, f"{names} are offered", accepts=lambda offered: offered == names)
