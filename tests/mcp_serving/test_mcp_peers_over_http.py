"""Tools of external MCP servers over HTTP: the tools of real servers are found and called, and limits hold against
faulty servers.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from socket import socket
from typing import Any

import pytest
from pydantic import SecretStr

from tests.support.guest.guest_exec import open_local_sandbox
from tests.support.mcp.mcp_peers import TOOL, build_client, legacy, modern, open_raw_peer, open_sdk_peer, reply_to
from tests.support.stack.stack import ROOT
from tests.support.web.web_servers import answer, open_web_server, redirect, run_tool
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.registry import ToolRegistry
from toolcrew.contract.settings import WebSettings
from toolcrew.workers.mcp import sandbox_server
from toolcrew.workers.mcp.http_tools import build_http_sources
from toolcrew.workers.mcp.http_transport import ANSWER_BYTES
from toolcrew.workers.mcp.sandbox_server import SandboxServer
from toolcrew.workers.mcp.server_registry import ServerRegistry
from toolcrew.workers.mcp.settings import HttpEntry, StdioEntry
from toolcrew.workers.tools.base import WorkerRegistry, WorkerTool
from toolcrew.workers.web.limits import Deadline


@pytest.fixture(scope="module", params=[False, True], ids=["streams", "json"])
def peer(request: pytest.FixtureRequest) -> Iterator[str]:
    with open_sdk_peer(json_response=request.param) as url:
        yield url


def _load(url: str, **fields: Any) -> dict[str, WorkerTool]:
    return _discover({"peer": HttpEntry(url=url, **{"private": True, **fields})})


def _discover(entries: dict[str, HttpEntry]) -> dict[str, WorkerTool]:
    registry: WorkerRegistry = ToolRegistry()
    ServerRegistry(registry, build_http_sources(entries, WebSettings()), 600, 4).list_due_servers()
    return {spec.name: tool for spec in registry.specs() if (tool := registry.get(spec.name)) is not None}


def _deadline() -> Deadline:
    return Deadline(20)


def _failure(work: Any) -> ToolFailure:
    with pytest.raises(ToolFailure) as caught:
        work()
    return caught.value


# Good servers


def test_tools_of_a_server_are_found_and_called(peer: str) -> None:
    tools = _load(peer, tenants=("acme",))
    assert sorted(tools) == ["mcp__peer__add", "mcp__peer__refuse", "mcp__peer__show"]
    spec = tools["mcp__peer__add"].spec
    assert (spec.pool, spec.tenants, spec.requires_permission, spec.dangerous, spec.read_only) == (
        "tools",
        ("acme",),
        True,
        True,
        False,
    )
    result = run_tool(tools["mcp__peer__add"], a=2, b=40)
    assert result.success
    assert "\n42\n" in str(result.output)
    assert str(result.output).startswith("[untrusted text of the MCP server peer")


def test_the_hints_of_a_trusted_server_are_used(peer: str) -> None:
    spec = _load(peer, trust="trusted")["mcp__peer__add"].spec
    assert (spec.read_only, spec.idempotent, spec.requires_permission, spec.dangerous) == (True, True, False, False)


def test_a_failing_tool_is_a_failure_with_printable_text(peer: str) -> None:
    result = run_tool(_load(peer)["mcp__peer__refuse"])
    assert (result.success, result.error_code) == (False, ErrorCode.HTTP_ERROR)
    assert "no such thing" in str(result.output)
    assert "\x1b" not in str(result.output)


def test_a_server_of_an_earlier_revision_is_initialized_and_its_session_deleted() -> None:
    with open_raw_peer(legacy, session="s-1") as server:
        way = build_client(server.url(host="127.0.0.1"))
        assert way.list_tools(_deadline()) == [TOOL]
        assert way.call_tool("echo", {"text": "hi"}, _deadline()).result["content"][0]["text"] == "hi"
        methods = [request.split(" ")[0] for request in server.requests]
        assert methods == ["POST"] * 4 + ["DELETE"] + ["POST"] * 3 + ["DELETE"], (
            "asked once which revision, greeted for each use"
        )
        assert (server.header("mcp-session-id"), server.header("mcp-protocol-version")) == ("s-1", "2025-06-18")


def test_the_sdk_server_works_with_the_initialize_handshake(peer: str) -> None:
    way = build_client(peer)
    way.is_sessionless = False
    assert [tool["name"] for tool in way.list_tools(_deadline())] == ["add", "refuse", "show"]
    assert way.call_tool("add", {"a": 2, "b": 40}, _deadline()).result["content"][0]["text"] == "42"


@pytest.mark.parametrize("alone", [None, True, False])
def test_the_sdk_server_works_over_stdio_in_every_revision(alone: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # A server that starts more slowly is taken for one of an earlier revision.
    monkeypatch.setattr(sandbox_server, "PROBE_S", 60.0)
    run = ("-c", "from tests.support.mcp.mcp_peers import build_peer; build_peer().run('stdio')")
    entry = StdioEntry(command=sys.executable, args=run, network="none", env={"PYTHONPATH": SecretStr(str(ROOT))})
    way = SandboxServer("peer", entry, alone)
    with open_local_sandbox() as box:
        assert [tool["name"] for tool in way.list_tools(box.run, 60)] == ["add", "refuse", "show"]
        assert way.is_sessionless is (alone is not False)
        for number in range(2):
            assert way.call_tool(box.run, "add", {"a": 2, "b": number}, "/workspace", 60)["content"][0]["text"] == str(
                2 + number
            )
        assert box.ops.count("job_start") == 1


def test_configured_headers_are_sent_with_every_request() -> None:
    with open_raw_peer(modern) as server:
        way = build_client(server.url(host="127.0.0.1"), headers={"Authorization": "Bearer k"})
        way.call_tool("ech\u00f6", {}, _deadline())
        assert server.header("authorization") == "Bearer k"
        assert server.header("authorization", 0) == "Bearer k"
        assert (server.header("mcp-method"), server.header("mcp-name")) == ("tools/call", "=?base64?ZWNow7Y=?=")


def test_a_server_that_replaces_a_failing_one_is_probed_again() -> None:
    with open_raw_peer(modern) as server:
        way, itself = build_client(server.url(host="127.0.0.1")), server.replies["*"]
        server.replies["*"] = answer("no upstream", 404)
        _failure(lambda: way.list_tools(_deadline()))
        server.replies["*"] = itself
        assert way.list_tools(_deadline()) == [TOOL]


# Bad servers


def test_an_unreachable_server_loses_only_its_own_tools(peer: str) -> None:
    entries = {"gone": HttpEntry(url="http://127.0.0.1:9/mcp", private=True), "peer": HttpEntry(url=peer, private=True)}
    assert [name.split("__")[1] for name in _discover(entries)] == ["peer"] * 3


@pytest.mark.parametrize("as_stream", [False, True])
def test_a_silent_server_is_abandoned_at_the_time_limit(as_stream: bool) -> None:
    head = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\n: still there\n\n" if as_stream else b""
    with open_web_server() as server:

        def hang(connection: socket) -> None:
            connection.sendall(head)
            server.ending.wait(60)

        server.replies["*"] = hang
        failure = _failure(lambda: build_client(server.url(host="127.0.0.1")).list_tools(Deadline(0.5)))
    assert failure.code is ErrorCode.TIMEOUT


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 X\r\nx-", b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\n\r\n"]
)
def test_a_server_that_sends_byte_by_byte_is_abandoned_at_the_time_limit(head: bytes) -> None:
    with open_web_server() as server:

        def drip(connection: socket) -> None:
            connection.sendall(head)
            with contextlib.suppress(OSError):
                while not server.ending.wait(0.02):
                    connection.sendall(b"H" if not head else b" ")

        server.replies["*"] = drip
        failure = _failure(lambda: build_client(server.url(host="127.0.0.1")).list_tools(Deadline(0.5)))
    assert failure.code in (ErrorCode.TIMEOUT, ErrorCode.NETWORK_ERROR)


def test_a_stream_that_continues_after_the_answer_is_not_waited_for() -> None:
    with open_web_server() as server:

        def answer_and_stay(connection: socket) -> None:
            message = json.dumps(modern(json.loads(server.bodies[-1])))
            connection.sendall(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\n")
            connection.sendall(f"event: message\ndata: {message}\n\n".encode())
            server.ending.wait(60)

        server.replies["*"] = answer_and_stay
        assert build_client(server.url(host="127.0.0.1")).list_tools(Deadline(30)) == [TOOL]


@pytest.mark.parametrize(
    "line", [b"data: x\n\n", b"x" * 65536, b'data: {"jsonrpc":"2.0","method":"notifications/message"}\n\n']
)
def test_an_endless_event_stream_is_cut_at_a_limit(line: bytes) -> None:
    with open_web_server() as server:

        def flood(connection: socket) -> None:
            connection.sendall(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\n")
            while not server.ending.is_set():
                connection.sendall(line * 100)

        server.replies["*"] = flood
        failure = _failure(lambda: build_client(server.url(host="127.0.0.1")).list_tools(_deadline()))
    assert failure.code in (ErrorCode.FILE_TOO_LARGE, ErrorCode.HTTP_ERROR)


def test_a_truncated_answer_is_reported_as_an_unknown_outcome() -> None:
    def call(request: dict[str, Any]) -> bytes:
        return answer(b'{"jsonrpc"', 200, "application/json", content_length="5000")

    with open_raw_peer(lambda request: modern(request, call)) as server:
        failure = _failure(lambda: build_client(server.url(host="127.0.0.1")).call_tool("echo", {}, _deadline()))
    assert failure.code is ErrorCode.NETWORK_ERROR
    assert "may or may not have acted" in failure.message


@pytest.mark.parametrize(
    "lie",
    [
        lambda request: {"jsonrpc": "2.0", "id": 99, "result": {}},
        lambda request: {"jsonrpc": "2.0", "id": True, "result": {}},
        lambda request: {"jsonrpc": "1.0", "id": request["id"], "result": {}},
        lambda request: reply_to(request, []),
        lambda request: [reply_to(request, {})],
        lambda request: answer(b"{", 200, "application/json"),
        lambda request: answer(b"[" * 100_000, 200, "application/json"),
        lambda request: answer(b'{"jsonrpc":"2.0","id":2,"result":{"n":NaN}}', 200, "application/json"),
        lambda request: answer(b"\xff\xfe", 200, "application/json"),
        lambda request: reply_to(request, {"content": 7}),
        lambda request: reply_to(request, {"resultType": "input_required"}),
    ],
)
def test_an_invalid_answer_is_a_failure_that_names_the_server(lie: Any) -> None:
    with open_raw_peer(lambda request: modern(request, lie)) as server:
        tool = _load(server.url(host="127.0.0.1"))["mcp__peer__echo"]
        result = run_tool(tool)
    assert (result.success, result.error_code) == (False, ErrorCode.HTTP_ERROR)
    assert "MCP server peer" in str(result.error)


def test_the_error_text_of_a_server_is_quoted_in_printable_characters() -> None:
    def gone(request: dict[str, Any]) -> Any:
        return {
            "jsonrpc": "2.0",
            "id": request["id"],
            "error": {"code": -32602, "message": "Unknown tool\x1b[2J: echo"},
        }

    with open_raw_peer(lambda request: modern(request, gone)) as server:
        result = run_tool(_load(server.url(host="127.0.0.1"))["mcp__peer__echo"])
    assert "refused tools/call: Unknown tool\ufffd[2J: echo" in str(result.error)


def test_tools_and_pages_of_a_list_are_limited() -> None:
    many = [{**TOOL, "name": f"t{n}"} for n in range(500)]
    with open_raw_peer(lambda request: modern(request, tools=many)) as server:
        assert len(_load(server.url(host="127.0.0.1"))) == 200

    def endless(request: dict[str, Any]) -> Any:
        return (
            reply_to(request, {"tools": [TOOL], "nextCursor": "on"})
            if request["method"] == "tools/list"
            else modern(request)
        )

    with open_raw_peer(endless) as server:
        assert _load(server.url(host="127.0.0.1")) == {}
        assert len(server.requests) == 21


def test_long_text_is_cut_and_marked() -> None:
    def much(request: dict[str, Any]) -> Any:
        return reply_to(
            request,
            {"content": [{"type": "text", "text": "line\n" * 100_000}], "structuredContent": {"x": "y" * 100_000}},
        )

    with open_raw_peer(lambda request: modern(request, much), as_stream=True) as server:
        result = run_tool(_load(server.url(host="127.0.0.1"))["mcp__peer__echo"])
    assert result.truncated
    assert len(str(result.output)) < 64 * 1024
    assert result.metadata["structured_dropped_bytes"] > 100_000
    assert str(result.output).rstrip().splitlines()[-1].startswith("[Cut: ")


def test_an_answer_above_the_size_limit_is_refused() -> None:
    def huge(request: dict[str, Any]) -> Any:
        return reply_to(request, {"content": [{"type": "text", "text": "x" * (ANSWER_BYTES + 1)}]})

    with open_raw_peer(lambda request: modern(request, huge)) as server:
        result = run_tool(_load(server.url(host="127.0.0.1"))["mcp__peer__echo"])
    assert result.error_code is ErrorCode.FILE_TOO_LARGE


# Allowed targets of connections


def test_redirects_are_not_followed() -> None:
    with open_web_server() as secret, open_web_server({"*": redirect(secret.url(host="127.0.0.1"), 307)}) as server:
        failure = _failure(lambda: build_client(server.url(host="127.0.0.1")).list_tools(_deadline()))
        assert secret.requests == []
    assert "redirects, which is not followed" in failure.message


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1"])
def test_a_public_name_that_resolves_to_a_private_address_is_refused(address: str) -> None:
    way = build_client("https://tools.example/mcp", {"tools.example": [[address]]}, private=False)
    assert _failure(lambda: way.list_tools(_deadline())).code is ErrorCode.SECURITY_REFUSED


def test_the_address_of_every_request_is_checked_again() -> None:
    way = build_client("https://tools.example/mcp", {"tools.example": [["198.51.101.1"], ["127.0.0.1"]]}, private=False)
    way.is_sessionless = True
    way.resolver.resolve("tools.example", _deadline(), 1)
    assert _failure(lambda: way.call_tool("echo", {}, _deadline())).code is ErrorCode.SECURITY_REFUSED


def test_an_error_message_contains_no_key() -> None:
    with open_raw_peer(lambda request: 401) as server:
        failure = _failure(
            lambda: build_client(
                server.url(host="127.0.0.1"), headers={"Authorization": "Bearer s3cr3t-key"}
            ).list_tools(_deadline())
        )
    assert "s3cr3t" not in f"{failure.message} {failure.metadata}"
    assert "headers in TOOLCREW_MCP_SERVERS" in failure.message


def test_an_upgraded_server_is_probed_again_by_the_next_call() -> None:
    state = {"handler": legacy}
    with open_raw_peer(lambda request: state["handler"](request)) as server:
        way = build_client(server.url(host="127.0.0.1"))
        way.list_tools(_deadline())
        state["handler"] = _reply_modern_only
        _failure(lambda: way.call_tool("echo", {}, _deadline()))
        assert way.call_tool("echo", {"text": "new"}, _deadline()).result["content"][0]["text"] == "new"


def _reply_modern_only(request: dict[str, Any]) -> Any:
    if request["method"] == "initialize":
        return {
            "jsonrpc": "2.0",
            "id": request["id"],
            "error": {"code": -32022, "message": "no", "data": {"supported": ["2026-07-28"]}},
        }
    return modern(request)
