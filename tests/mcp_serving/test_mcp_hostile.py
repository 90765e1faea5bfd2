"""Hostile requests to MCP over HTTP: without a key, from a web page, too large, or not a valid message."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.mcp.mcp_stack import McpStack, bash, new_session, open_mcp_process, text_of
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.orchestrator.sdk.client import ToolClient

pytestmark = pytest.mark.stack

REVISION = "2026-07-28"
ACCEPT = "application/json, text/event-stream"


@pytest.fixture
async def line(mcp_stack: McpStack) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {mcp_stack.keys['acme']}", "Accept": ACCEPT}
    async with httpx.AsyncClient(base_url=mcp_stack.servers[0].url, headers=headers, timeout=SOON_S) as opened:
        yield opened


def message(method: str, **params: Any) -> dict[str, Any]:
    about = {"io.modelcontextprotocol/protocolVersion": REVISION, "io.modelcontextprotocol/clientCapabilities": {}}
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": about}}


def headers_of(value: dict[str, Any]) -> dict[str, str]:
    named = {"Mcp-Name": str(value["params"]["name"])} if "name" in value["params"] else {}
    return {"MCP-Protocol-Version": REVISION, "Mcp-Method": value["method"], **named}


async def ask(
    line: httpx.AsyncClient, method: str, path: str = "/mcp", headers: dict[str, str] | None = None, **params: Any
) -> httpx.Response:
    result = message(method, **params)
    return await line.post(path, json=result, headers={**headers_of(result), **(headers or {})})


async def test_a_plain_http_client_gets_an_answer(line: httpx.AsyncClient) -> None:
    answer = await ask(line, "tools/call", name="bash_tool", arguments={"command": "echo hi"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["result"]["content"][0]["text"] == "hi\n"


async def test_a_request_without_a_valid_key_is_answered_401(mcp_stack: McpStack, line: httpx.AsyncClient) -> None:
    wrong = mcp_stack.keys["acme"][:-1] + ("A" if mcp_stack.keys["acme"][-1] != "A" else "B")
    for value in ("", "Bearer", "Bearer nonsense", f"Bearer {wrong}", f"Basic {mcp_stack.keys['acme']}"):
        answer = await ask(line, "tools/list", headers={"Authorization": value})
        assert answer.status_code == 401, answer.text
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert answer.json()["code"] == "UNAUTHENTICATED"


async def test_a_request_with_a_foreign_origin_or_host_is_refused(mcp_stack: McpStack, line: httpx.AsyncClient) -> None:
    for origin in (
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example:80",
        "file://",
        "http://[",
    ):
        answer = await ask(line, "tools/list", headers={"Origin": origin})
        assert answer.status_code == 403, origin
    for name in ("evil.example", "evil.example:80", "127.0.0.1@evil.example", ""):
        assert (await ask(line, "tools/list", headers={"Host": name})).status_code == 403, name
    own = await ask(line, "tools/list", headers={"Origin": mcp_stack.servers[0].url})
    assert own.status_code == 200, own.text


async def test_a_huge_body_is_refused_without_using_memory(mcp_stack: McpStack, line: httpx.AsyncClient) -> None:
    before = mcp_stack.servers[0].memory_bytes()
    huge = await ask(line, "tools/call", name="bash_tool", arguments={"command": "x" * (64 * 1024 * 1024)})
    assert huge.status_code == 413, huge.text
    assert huge.json()["code"] == "BODY_TOO_LARGE"

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * (1024 * 1024)

    assert (await line.post("/mcp", content=pieces(), headers={"Content-Type": "application/json"})).status_code == 413
    assert mcp_stack.servers[0].memory_bytes() - before < 48 * 1024 * 1024


@pytest.mark.parametrize("revision", [REVISION, "2025-11-25", "nonsense", None])
async def test_an_invalid_message_is_answered_with_a_client_error(
    line: httpx.AsyncClient, revision: str | None
) -> None:
    headers = {"Content-Type": "application/json", **({"MCP-Protocol-Version": revision} if revision else {})}
    for body in (
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff",
        b"[" * 100_000,
        b'{"jsonrpc":"2.0","id":1}',
        b'{"id":' + b"9" * 5000 + b"}",
    ):
        answer = await line.post("/mcp", content=body, headers=headers)
        assert 400 <= answer.status_code < 500, (body[:40], answer.status_code, answer.text)
    assert (
        await line.post("/mcp", content=b"x=1", headers={**headers, "Content-Type": "text/plain"})
    ).status_code == 400
    for method in ("GET", "DELETE", "PUT"):
        assert (await line.request(method, "/mcp", headers=headers)).status_code == 405


async def test_invalid_arguments_are_reported(line: httpx.AsyncClient) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    for hostile in (
        [],
        "x",
        {"command": deep},
        {"command": 3},
        {"command": "x", "timeout": -1},
        {"command": "\ud800"},
        {"\ud800": 1},
    ):
        result = message("tools/call", name="bash_tool", arguments=hostile)
        answer = await line.post(
            "/mcp", content=json.dumps(result), headers={**headers_of(result), "Content-Type": "application/json"}
        )
        reply = answer.json()
        assert reply.get("error", {}).get("code") != -32603, reply
        assert "error" in reply or reply["result"]["isError"], reply
    nan = json.dumps(message("tools/call", name="bash_tool", arguments={"command": "x", "timeout": float("nan")}))
    result = message("tools/call", name="bash_tool")
    answer = await line.post("/mcp", content=nan, headers={**headers_of(result), "Content-Type": "application/json"})
    assert answer.json().get("error", {}).get("code") != -32603, answer.text
    assert "error" in answer.json() or answer.json()["result"]["isError"]


async def test_invalid_session_names_and_paths_are_reported(line: httpx.AsyncClient) -> None:
    for path, status in (("/mcp/..%2fx", 404), ("/mcp/" + "x" * 65, 404), ("/mcp/a/b", 404), ("/other", 404)):
        assert (await ask(line, "tools/list", path)).status_code == status, path
    fields = message("tools/call", name="bash_tool", arguments={"command": "true"})
    for named in (3, "", "x" * 65, ["x"], "a/b", "new\n"):
        fields["params"]["_meta"]["toolcrew/session"] = named
        answer = (await line.post("/mcp", json=fields, headers=headers_of(fields))).json()
        assert answer["result"]["isError"], answer
        assert "not a session name" in answer["result"]["content"][0]["text"]
    missing = await ask(line, "tools/call", "/mcp/neverwas", name="bash_tool", arguments={"command": "true"})
    assert missing.json()["result"]["structuredContent"]["error_code"] == "SESSION_NOT_FOUND"


async def test_a_client_that_disconnects_ends_its_command(mcp_stack: McpStack, line: httpx.AsyncClient) -> None:
    for number, revision in enumerate((REVISION, "2025-11-25")):
        command = f"sleep 735{number}"
        fields = message("tools/call", name="bash_tool", arguments={"command": command})
        if revision != REVISION:
            del fields["params"]["_meta"]
        calling = asyncio.ensure_future(
            line.post("/mcp", json=fields, headers={**headers_of(fields), "MCP-Protocol-Version": revision})
        )
        await wait_until_async(lambda: mcp_stack.find_programs(command), SOON_S, "the command runs")  # noqa: B023  # this round
        calling.cancel()
        await wait_until_async(lambda: not mcp_stack.find_programs(command), SOON_S, "the command ends")  # noqa: B023


async def test_a_session_that_was_closed_elsewhere_is_reported_as_not_found(mcp_stack: McpStack) -> None:
    async with mcp_stack.client() as client, mcp_stack.client(replica=1) as other:
        session = await new_session(client)
        assert text_of(await bash(other, "echo hi", session)) == "hi\n"
        async with ToolClient.connect(mcp_stack.stack.redis_url, tenant="acme") as sdk:
            await (await sdk.session(session)).close()
        for one in (client, other):
            missing = await bash(one, "echo hi", session)
            assert missing.structured_content["error_code"] == "SESSION_NOT_FOUND"


async def test_a_stopping_server_ends_running_calls_after_its_grace_period(mcp_stack: McpStack) -> None:
    with open_mcp_process(mcp_stack.stack) as server:
        fields = message("tools/call", name="bash_tool", arguments={"command": "sleep 7361", "timeout": 500})
        headers = {**headers_of(fields), "Authorization": f"Bearer {mcp_stack.keys['acme']}", "Accept": ACCEPT}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=SOON_S) as line:
            calling = asyncio.ensure_future(line.post("/mcp", json=fields))
            await wait_until_async(lambda: mcp_stack.find_programs("sleep 7361"), SOON_S, "the command runs")
            server.process.send_signal(signal.SIGTERM)
            await wait_until_async(lambda: server.process.poll() is not None, SOON_S, server.log)
            await asyncio.gather(calling, return_exceptions=True)
        assert server.process.returncode == 0, server.log()
        await wait_until_async(lambda: not mcp_stack.find_programs("sleep 7361"), SOON_S, "the command ends")


async def test_pages_of_an_allowed_origin_may_call(mcp_stack: McpStack) -> None:
    with open_mcp_process(mcp_stack.stack, "--origin", "https://chat.example") as server:
        headers = {"Authorization": f"Bearer {mcp_stack.keys['acme']}", "Accept": ACCEPT}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=SOON_S) as line:
            for origin, status in (
                ("https://chat.example", 200),
                ("https://chat.example:8443", 403),
                ("http://chat.example", 403),
            ):
                assert (await ask(line, "tools/list", headers={"Origin": origin})).status_code == status, origin
            request = {
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, mcp-method, content-type",
            }
            before = await line.options(
                "/mcp", headers={"Authorization": "", "Origin": "https://chat.example", **request}
            )
            assert (before.status_code, before.headers["Access-Control-Allow-Origin"]) == (200, "https://chat.example")
            answer = await ask(line, "tools/list", headers={"Origin": "https://chat.example"})
            assert answer.headers["Access-Control-Allow-Origin"] == "https://chat.example"
            other = await line.options(
                "/mcp", headers={"Authorization": "", "Origin": "https://evil.example", **request}
            )
            assert "Access-Control-Allow-Origin" not in other.headers
