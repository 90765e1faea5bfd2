"""Hostile MCP servers: their data cannot break a worker, hide text from people, or stop the next call."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from contract.calls import ToolResult
from contract.errors import ErrorCode, ToolFailure
from contract.schema import prepare_arguments
from contract.specs import ToolSpec
from tests.builders import build_spec
from tests.guest_exec import LocalSandbox, open_local_sandbox
from tests.mcp_peers import TOOL
from tests.stack import ROOT
from tests.web_servers import run_tool
from workers.mcp.answers import build_outcome
from workers.mcp.imports import MAX_NAME_CHARS, import_tools
from workers.mcp.messages import parse_json, parse_reply
from workers.mcp.sandbox_server import SandboxServer
from workers.mcp.settings import HttpEntry, StdioEntry
from workers.tools.base import WorkerTool

PEER = str(ROOT / "tests" / "mcp_stdio_peer.py")


@pytest.fixture
def box() -> Iterator[LocalSandbox]:
    with open_local_sandbox() as sandbox:
        yield sandbox


def _specs(*tools: dict[str, Any]) -> list[ToolSpec]:
    return [tool.spec for tool in import_tools("docs", HttpEntry(url="https://tools.example/mcp"), tools, "tools")]


def _answered(structured: str) -> ToolResult:
    """Return the result of a call whose reply has this structured content."""
    [spec] = _specs(TOOL)
    answer = f'{{"content": [], "structuredContent": {structured}}}'
    return run_tool(
        WorkerTool(spec, lambda arguments, bench: build_outcome("docs", spec.name, parse_json(answer, "docs")))
    )


# Results


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_json_cannot_carry_is_the_servers_fault(number: str) -> None:
    assert _answered(f'{{"x": {number}}}').error_code is ErrorCode.HTTP_ERROR


@pytest.mark.parametrize("structured", ['{"x": "\\ud800"}', '{"\\udfff": 1}', '["\\ud83d"]'])
def test_half_a_character_does_not_stop_the_result_from_being_sent(structured: str) -> None:
    result = _answered(structured)
    assert result.success
    assert ToolResult.model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize("code", [2**31, -(10**4000), True, 1.5, "x", None])
def test_an_errors_code_is_a_small_number_or_none(code: Any) -> None:
    reply = parse_reply({"jsonrpc": "2.0", "id": 1, "error": {"code": code, "message": "no"}}, 1)
    assert reply is not None
    assert (reply.code, reply.error) == (0, "no")


# What it says of its tools


def test_a_name_that_is_a_flood_is_left_out() -> None:
    assert _specs({**TOOL, "name": "x" * (MAX_NAME_CHARS + 1)}) == []
    assert len(_specs({**TOOL, "name": "x" * MAX_NAME_CHARS})) == 1


@pytest.mark.parametrize("hidden", ["\U000e0069\U000e0067", "\u202etxet", "\u2066x\u2069"])
def test_words_for_the_model_alone_are_not_hidden_from_people(hidden: str) -> None:
    [spec] = _specs({**TOOL, "description": f"Adds.{hidden}"})
    assert not set(hidden) & set("\U000e0069\U000e0067\u202e\u2066\u2069") & set(spec.description)
    assert _specs({**TOOL, "inputSchema": {"type": "object", "properties": {"a": {"description": hidden}}}}) == []


def test_text_of_any_script_and_its_joiners_stay() -> None:
    text = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u200f\u05d0"
    [spec] = _specs({**TOOL, "description": text})
    assert spec.description.endswith(text)


@pytest.mark.parametrize("divisor", [0.5, 1e-300])
def test_a_schema_that_no_large_number_can_be_divided_by_does_not_break_the_check_of_arguments(divisor: float) -> None:
    [theirs] = _specs({**TOOL, "inputSchema": {"type": "object", "properties": {"a": {"multipleOf": divisor}}}})
    for spec in (theirs, build_spec("ours", properties={"a": {"multipleOf": divisor}})):
        with pytest.raises(ToolFailure) as caught:
            prepare_arguments(spec, {"a": 10**400 + 1})
        assert caught.value.code is ErrorCode.INVALID_ARGUMENTS


# Lines of a server over stdio


def _server(tmp_path: Path, reply: bytes) -> SandboxServer:
    """Return a server that answers calls of `echo` with this reply, unchanged."""
    env = {"OF": SecretStr(str(tmp_path)), "SAYS": SecretStr(reply.hex())}
    return SandboxServer(
        "peer", StdioEntry(command=sys.executable, args=(PEER, "says"), network="none", env=env), stands_alone=True
    )


_HEAD = b'{"jsonrpc":"2.0","id":ID,'


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (_HEAD + b'"result":{"x":NaN}}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":{"x":1e999}}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":' + b'{"a":' * 500 + b"1" + b"}" * 501 + b"\n", ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":7}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":{},"error":{}}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"res', ErrorCode.HTTP_ERROR),
        (b'{"jsonrpc":"1.0","id":ID,"result":{}}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":{"content":[{"type":"text","text":"\xff"}]}}\n', ErrorCode.TIMEOUT),
        (b'{"jsonrpc":"2.0","id":ID.0,"result":{}}\n{"jsonrpc":"2.0","id":"ID","result":{}}\n', ErrorCode.TIMEOUT),
        (b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"result":{}}\n', ErrorCode.TIMEOUT),
        (b'{"jsonrpc":"2.0","id":NEXT,"result":{"content":[{"type":"text","text":"forged"}]}}\n', ErrorCode.TIMEOUT),
    ],
)  # fmt: skip
def test_a_bad_reply_fails_only_its_own_call(box: LocalSandbox, tmp_path: Path, reply: bytes, code: ErrorCode) -> None:
    server = _server(tmp_path, reply)
    with pytest.raises(ToolFailure) as caught:
        server.call_tool(box.run, "echo", {"text": "x"}, "/workspace", 1.5)
    assert caught.value.code is code
    text = server.call_tool(box.run, "count", {}, "/workspace", 30)["content"][0]["text"]
    assert int(text.split()[0]) in (1, 2)


def test_deep_json_is_refused_on_every_python_of_a_sandbox(box: LocalSandbox, tmp_path: Path) -> None:
    reply = _HEAD + b'"result":' + b"[" * 5000 + b"]" * 5000 + b"}\n"
    server = _server(tmp_path, reply)
    with pytest.raises(ToolFailure) as caught:
        server.call_tool(box.run, "echo", {"text": "x"}, "/workspace", 1.5)
    assert caught.value.code in (ErrorCode.HTTP_ERROR, ErrorCode.TIMEOUT)


def test_the_last_of_two_results_counts_and_is_bounded() -> None:
    message = parse_json('{"jsonrpc":"2.0","id":1,"result":{},"result":{"content":[]}}', "docs")
    reply = parse_reply(message, 1)
    assert reply is not None
    assert json.dumps(reply.result) == '{"content": []}'
