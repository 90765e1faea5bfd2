"""MCP servers over stdio, one process per call: the driver with real good and bad processes, and the worker's
handling of any output of a sandbox.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from contract.errors import ErrorCode, ToolFailure
from tests.guest_exec import build_printed, run_here
from tests.stack import ROOT
from workers.mcp import sandbox_server
from workers.mcp.answers import build_outcome
from workers.mcp.sandbox_server import SandboxServer
from workers.mcp.settings import StdioEntry
from workers.sandbox_client import GuestResponse

REFUSING = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"jsonrpc": "2.0", "id": json.loads(line)["id"], "error": {"code": 1, "message": "not today"}}), flush=True)
"""
PEER = str(ROOT / "tests" / "mcp_stdio_peer.py")


def _server(how: str = "good", **fields: Any) -> SandboxServer:
    entry = StdioEntry(**{"command": sys.executable, "args": (PEER, how), "network": "none", "idle_s": 0, **fields})
    return SandboxServer("peer", entry, stands_alone=True)


def _call(server: SandboxServer, tool: str = "echo", timeout_s: float = 30.0, **arguments: Any) -> str:
    result = server.call_tool(run_here, tool, arguments, "/workspace", timeout_s)
    return str(result["content"][0]["text"])


def _failure(how: str, timeout_s: float = 30.0) -> ToolFailure:
    with pytest.raises(ToolFailure) as caught:
        _call(_server(how), timeout_s=timeout_s, text="x")
    return caught.value


# Real processes


@pytest.mark.parametrize(("how", "alone"), [("good", True), ("old", False)])
def test_servers_of_both_revisions_work(how: str, alone: bool) -> None:
    server = _server(how)
    server.stands_alone = None
    assert [tool["name"] for tool in server.list_tools(run_here, 30)] == ["echo", "where", "count"]
    assert server.stands_alone is alone
    assert _call(server, text="h\u00e9 \U0001f600") == "h\u00e9 \U0001f600"


def test_a_server_that_does_not_answer_what_it_does_not_know_is_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_server, "PROBE_S", 1.0)
    server = _server("mute")
    server.stands_alone = None
    assert len(server.list_tools(run_here, 30)) == 3
    assert server.stands_alone is False


def test_a_refused_initialization_is_reported() -> None:
    server = _server("old", args=("-c", REFUSING))
    server.stands_alone = False
    with pytest.raises(ToolFailure, match=r"refused to begin \(.*not today") as caught:
        _call(server, text="x")
    assert caught.value.code is ErrorCode.HTTP_ERROR


def test_it_has_the_environment_and_the_folder_that_the_file_says() -> None:
    assert _call(_server(env={"LEVEL": SecretStr("7")}, cwd="/usr"), "where") == "/usr 7"


@pytest.mark.parametrize("how", ["shouts", "lies", "asks"])
def test_noise_beside_the_answer_does_not_matter(how: str) -> None:
    assert _call(_server(how), text="still") == "still"


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("dies", ErrorCode.HTTP_ERROR, "exit code 7: out of luck\ufffd[2J"),
        ("floods", ErrorCode.FILE_TOO_LARGE, "sent more than"),
        ("floods_lines", ErrorCode.FILE_TOO_LARGE, "sent more than"),
        ("gone", ErrorCode.HTTP_ERROR, "refused tools/call: Unknown tool: echo"),
        ("forges", ErrorCode.HTTP_ERROR, "violates the protocol"),
    ],
)
def test_a_bad_server_is_reported(how: str, code: ErrorCode, message: str) -> None:
    failure = _failure(how)
    assert failure.code is code
    assert message in failure.message


def test_a_silent_server_is_ended_at_the_limit() -> None:
    failure = _failure("hangs", timeout_s=2.0)
    assert failure.code is ErrorCode.TIMEOUT
    assert "check them before you repeat the call" in failure.message


def test_a_missing_program_is_reported() -> None:
    with pytest.raises(ToolFailure, match="add the server to the image") as caught:
        _call(_server(command="/nonexistent/server"))
    assert caught.value.code is ErrorCode.CONFIG_MISSING


@pytest.mark.parametrize(("network", "is_refused"), [("none", True), ("session", False)])
def test_where_the_session_has_network_only_those_run_that_may(network: str, is_refused: bool) -> None:
    def run(request: Mapping[str, Any], body: bytes) -> GuestResponse:
        environment = {"http_proxy": "http://127.0.0.1:3128"}
        done = subprocess.run(
            [sys.executable, *request["argv"][1:]],
            input=body,
            capture_output=True,
            timeout=60,
            check=False,
            env=environment,
        )
        return build_printed(done.stdout, done.stderr)

    server = _server(network=network)
    if not is_refused:
        assert server.call_tool(run, "echo", {"text": "on"}, "/workspace", 30)["content"][0]["text"] == "on"
        return
    with pytest.raises(ToolFailure) as caught:
        server.call_tool(run, "echo", {"text": "on"}, "/workspace", 30)
    assert caught.value.code is ErrorCode.SECURITY_REFUSED


# What a sandbox may say


@pytest.mark.parametrize(
    "answer",
    [b"", b"{", b"[]", b"7", b"{}", b'{"reply": []}', b'{"reply": 7}', b'{"reply": {"jsonrpc": "2.0", "id": 4, "result": {}}}',
     b'{"reply": {"a": 1}}', b'{"failure": 7}', b'{"failure": {"a": []}, "detail": [1]}', b"[" * 100_000],
)  # fmt: skip
def test_an_answer_that_is_none_is_a_failure_of_the_server(answer: bytes) -> None:
    def run(request: Mapping[str, Any], body: bytes) -> GuestResponse:
        return build_printed(
            b"noise\n" + json.loads(body)["mark"].encode() + b" not at the line's begin" + _framed(body, answer)
        )

    with pytest.raises(ToolFailure) as caught:
        _server().call_tool(run, "echo", {}, "/workspace", 30)
    assert caught.value.code is ErrorCode.HTTP_ERROR


def _framed(body: bytes, answer: bytes) -> bytes:
    return b"\n" + json.loads(body)["mark"].encode() + b" " + answer + b"\n"


def test_more_output_than_was_kept_is_never_read_as_an_answer() -> None:
    def run(request: Mapping[str, Any], body: bytes) -> GuestResponse:
        response = build_printed(_framed(body, b'{"reply": {}}'))
        return GuestResponse({**response.done, "streams": {"stdout": {"total": 10**9}}}, response.streams)

    with pytest.raises(ToolFailure) as caught:
        _server().call_tool(run, "echo", {}, "/workspace", 30)
    assert caught.value.code is ErrorCode.FILE_TOO_LARGE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: (
        st.lists(part)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "data", "isError", "resource", "uri"]), part)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["content", "structuredContent", "isError", "resultType"]), JSON))
def test_whatever_a_result_holds_is_an_outcome_or_a_failure_of_the_server(result: dict[str, Any]) -> None:
    try:
        shown = build_outcome("peer", "mcp__peer__echo", result).output
    except ToolFailure as failure:
        shown = failure.message
    assert shown
    assert "\x1b" not in shown
