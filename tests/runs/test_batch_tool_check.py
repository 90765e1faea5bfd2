"""A batch is checked against its tenant's tools before anything of the batch is queued."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from tests.support.runs.item_harness import HarnessFactory, build_run, echo_then
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import catalog_names_key
from toolcrew.contract.run_events import BatchNotice
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.specs import Catalog
from toolcrew.orchestrator.batches.displays import DisplayedBatch, LogDisplay
from toolcrew.orchestrator.batches.lines import BadBatch, load_lines
from toolcrew.orchestrator.batches.progress import BatchProgress
from toolcrew.orchestrator.batches.tool_check import MAX_SHOWN, check_tools
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.models.choice import FALLBACK_WARNING, ChosenModel
from toolcrew.orchestrator.models.scripted import ALL_CAPABILITIES
from toolcrew.orchestrator.runs.models import Models
from toolcrew.orchestrator.sdk.client import ToolClient

BASH = build_spec(
    "bash_tool", properties={"command": {"type": "string"}}, required=["command"], aliases={"cmd": "command"}
)
SESSION_TOOL = build_spec("session.open", audience="session")


def write_lines(folder: Path, *items: dict[str, Any]) -> Path:
    file = folder / "in.jsonl"
    file.write_text("".join(json.dumps({"id": f"i{number}", **item}) + "\n" for number, item in enumerate(items)))
    return file


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, "arguments": arguments}


@pytest.fixture
def submit(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Result]:
    """Submit a file to a pool that publishes bash_tool, and knows a tool that no worker serves now."""
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    with redis_server.client() as client:
        redis_server.publish_catalog(Catalog(tools=(BASH, SESSION_TOOL)))
        client.set(catalog_names_key("default", "web"), json.dumps(["webfetch_tool"]))
    return lambda file: CliRunner().invoke(app, ["batches", "submit", str(file), "--detach"])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (call("bash_tol", command="ls"), "line 1: the tool bash_tol does not exist: did you mean bash_tool?"),
        (call("zzz"), "line 1: the tool zzz does not exist: `toolcrew tools list` lists the tools"),
        (call("session.open"), "line 1: the tool session.open does not exist"),
        (call("bash_tool"), "line 1: `arguments` are invalid for the tool: bash_tool: parameter 'command' is required"),
        (call("bash_tool", command=5), "parameter 'command' must be string, not integer 5"),
        (call("bash_tool", comand="ls"), "unknown parameter 'comand'; did you mean 'command'?"),
        (
            {"instruction": "act", "tools": ["bash_tool", "bash_tol"]},
            "line 1: the tool bash_tol does not exist: did you mean bash_tool?",
        ),
    ],
)
def test_an_unknown_tool_or_invalid_arguments_stop_the_submission(
    item: dict[str, Any], message: str, submit: Callable[[Path], Result], redis_server: RedisProcess, tmp_path: Path
) -> None:
    with redis_server.client() as client:
        before = set(client.keys())
        result = submit(write_lines(tmp_path, item))
        assert (result.exit_code, result.stdout) == (1, "")
        assert message in result.stderr
        assert "nothing was started" in result.stderr
        assert set(client.keys()) == before


def test_errors_above_the_limit_are_only_counted(tmp_path: Path) -> None:
    file = load_lines(write_lines(tmp_path, *(call("bash_tol") for _ in range(MAX_SHOWN + 5))))
    with pytest.raises(BadBatch) as refused:
        check_tools(file, (BASH,), lambda _: False, "in.jsonl", "acme")
    assert (len(refused.value.errors), refused.value.more) == (MAX_SHOWN, 5)


def test_the_tool_check_stops_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.orchestrator.batches.tool_check.CHECK_S", -1.0)
    file = load_lines(write_lines(tmp_path, call("bash_tol")))
    assert check_tools(file, [BASH], lambda _: False, "in.jsonl", "default") == [
        "tools and arguments from line 1 on were not checked: the check reached its limit of -1 s"
    ]


def warning(at: float = 1.0, message: str = FALLBACK_WARNING) -> BatchNotice:
    return BatchNotice(at=at, message=message, is_warning=True)


async def test_a_batch_warns_once_when_it_falls_back_to_the_shipped_model(make: HarnessFactory) -> None:
    harness = make([*echo_then("one"), *echo_then("two")])
    fallback = replace(ChosenModel(harness.model, capabilities=ALL_CAPABILITIES), is_fallback=True)
    harness.work.models = Models(OrchestratorSettings(deployment="d", redis_url=None), harness.pool, fallback)
    await harness.submit(2, work=build_run().work)
    for claim in await harness.queue.claim(2, ("acme", "b")):
        await harness.execute(claim)
    notes = [event for event in harness.run_events if isinstance(event, BatchNotice)]
    assert [(note.message, note.is_warning) for note in notes] == [(FALLBACK_WARNING, True)]


@pytest.mark.parametrize(
    ("environment", "line", "is_warned"),
    [
        ({}, {"instruction": "act"}, True),
        ({"TOOLCREW_MODEL": "local"}, {"instruction": "act"}, False),
        ({"OPENAI_API_KEY": "k", "TOOLCREW_MODEL": "gpt"}, {"instruction": "act"}, False),
        ({}, {"tool": "echo"}, False),
    ],
)
def test_submit_warns_about_the_fallback_model_before_it_starts_items(
    environment: dict[str, str],
    line: dict[str, str],
    is_warned: bool,
    redis_server: RedisProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "TOOLCREW_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    redis_server.publish_catalog(Catalog(tools=(build_spec("other"),)))
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"id": "a", **line}) + "\n")
    # The folder of the output does not exist, so that no item runs here.
    result = CliRunner().invoke(
        app, ["batches", "submit", str(file), "--output", str(tmp_path / "no" / "o.jsonl")], env=environment
    )
    assert (result.exit_code, f"toolcrew: warning: {FALLBACK_WARNING}" in result.stderr) == (1, is_warned), (
        result.output
    )


def test_submit_refuses_a_shipped_model_when_a_server_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "a", "instruction": "act", "model": "scripted"}\n')
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    result = CliRunner().invoke(app, ["batches", "submit", str(file), "--output", str(tmp_path / "o.jsonl")])
    assert result.exit_code == 1
    assert "the model 'scripted' is shipped with toolcrew, but OPENAI_BASE_URL is set" in result.stderr


def test_a_parameter_alias_is_accepted_with_one_warning_for_all_lines(
    submit: Callable[[Path], Result], tmp_path: Path
) -> None:
    result = submit(
        write_lines(
            tmp_path, call("bash_tool", command="ls"), call("bash_tool", cmd="ls"), call("bash_tool", cmd="pwd")
        )
    )
    assert result.exit_code == 0, result.stderr
    assert "warning: line 2 and 1 more: `cmd` is an alias of the parameter `command` of bash_tool" in result.stderr


@pytest.mark.parametrize(("printed", "count"), [((), 1), ((FALLBACK_WARNING,), 0)])
def test_a_command_prints_a_warning_once(printed: tuple[str, ...], count: int) -> None:
    out = io.StringIO()
    displayed = DisplayedBatch("b", BatchProgress(1), printed_warnings=printed)
    with LogDisplay(displayed, out, has_past=True) as display:
        display.show(warning())
        display.show(warning(at=2.0))
    assert out.getvalue().count("no model is set") == count


def test_the_summary_contains_earlier_warnings() -> None:
    out = io.StringIO()
    with LogDisplay(DisplayedBatch("b", BatchProgress(1)), out) as display:
        display.show(warning())
    assert f"  warning: {FALLBACK_WARNING}" in out.getvalue().splitlines()


def test_line_errors_and_tool_errors_are_reported_together(
    submit: Callable[[Path], Result], redis_server: RedisProcess, tmp_path: Path
) -> None:
    file = write_lines(tmp_path, call("bash_tool", comand="ls"), {"instruction": "act", "tools": ["bash_tol"]})
    file.write_text(file.read_text() + "no JSON\n" + '{"id": "z", "promt": "act"}\n')
    result = submit(file)
    assert (result.exit_code, result.stdout) == (1, "")
    for text in ("has 5 errors", "line 1: ", "line 2: the tool bash_tol", "line 3, column 1: ", "line 4: `promt`"):
        assert text in result.stderr


@pytest.mark.parametrize("tool", ["bash_tool", "all", "webfetch_tool"])
async def test_a_run_with_a_tool_that_exists_is_accepted(tool: str, redis_server: RedisProcess) -> None:
    redis_server.publish_catalog(Catalog(tools=(BASH, SESSION_TOOL)))
    with redis_server.client() as redis:
        redis.set(catalog_names_key("default", "web"), json.dumps(["webfetch_tool"]))
    async with ToolClient.connect(redis_server.url) as client:
        await client.runs.start(RunBody(instruction="act", tools=(tool,)))


@pytest.mark.parametrize("tool", ["bash_tol", "session.open"])
async def test_a_run_with_an_unknown_tool_is_refused(tool: str, redis_server: RedisProcess) -> None:
    redis_server.publish_catalog(Catalog(tools=(BASH, SESSION_TOOL)))
    async with ToolClient.connect(redis_server.url) as client:
        with pytest.raises(ToolFailure) as refused:
            await client.runs.start(RunBody(instruction="act", tools=("bash_tool", tool)))
    assert (refused.value.code, f"the tool {tool} does not exist" in refused.value.message) == (
        ErrorCode.INVALID_ARGUMENTS,
        True,
    )
