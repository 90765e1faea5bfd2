"""`toolcrew trace`: what each command prints, writes and exits with."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from contract.calls import ToolCall, ToolResult
from contract.registry import ToolState
from orchestrator.cli import trace as cli_trace
from orchestrator.cli.trace import trace_app
from orchestrator.models.scripted import ScriptedModel
from orchestrator.settings import load_settings
from orchestrator.traces.opening import Traces
from tests.builders import build_spec
from tests.trace_ground import echo, run_traced


@pytest.fixture
async def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLCREW_TRACES", str(tmp_path / "traces"))
    await run_traced(tmp_path / "talks", ScriptedModel(["done"]), run="talk")
    path, _, _ = await run_traced(tmp_path / "traces")
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(trace_app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_show_prints_a_run_by_its_id_or_its_path(trace: Path) -> None:
    assert "answer: It is a." in run("show", "run1")[1]
    assert run("show", str(trace))[1] == run("show", "run1", "--tenant", "acme")[1]
    assert len(json.loads(run("show", "run1", "--json")[1])["records"]) == 9


def test_a_run_that_is_not_there_is_one_sentence_and_an_object_with_json(trace: Path) -> None:
    code, _, told = run("show", "nope")
    assert (code, told.startswith("toolcrew: there is no trace of the run nope"), told.count("\n")) == (1, True, 1)
    assert json.loads(run("show", "nope", "--json")[1])["error"]["code"] == "CONFIG_MISSING"


def test_view_writes_a_page_that_is_its_owners_alone(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("view", "run1", "--no-open", "-o", str(page))[0] == 0
    assert (page.read_text().startswith("<!doctype html>"), page.stat().st_mode & 0o777) == (True, 0o600)
    assert run("view", "run1", "--no-open")[1] == f"wrote {trace.with_suffix('.html')}\n"
    code, _, told = run("view", "run1", "--no-open", "-o", str(tmp_path / "no" / "page.html"))
    assert (code, "give another file with -o" in told) == (1, True)


def test_stats_counts_all_runs(trace: Path) -> None:
    assert json.loads(run("stats", "--json")[1])["tools"]["echo"]["count"] == 1
    assert "1 runs, 2 steps: 1 answered" in run("stats")[1]
    assert json.loads(run("stats", "--tenant", "other", "--json")[1])["runs"] == 0


@pytest.mark.parametrize(
    ("to", "key"),
    [("atif", "schema_version"), ("openai", "messages"), ("traj", "trajectory"), ("otel", "resourceSpans")],
)
def test_export_prints_or_writes_each_format(trace: Path, tmp_path: Path, to: str, key: str) -> None:
    assert key in json.loads(run("export", "run1", "--to", to)[1])
    assert run("export", "run1", "--to", to, "-o", str(tmp_path / "x.json"))[1] == ""
    assert key in json.loads((tmp_path / "x.json").read_text())


class FakeClient:
    """Opens sessions whose calls are answered by `answer`."""

    def __init__(self, answer: Any, pool: Literal["sandbox", "tools"] = "sandbox") -> None:
        self._answer, self._pool = answer, pool
        self.traces = Traces(load_settings(), {})

    async def tool_states(self) -> list[ToolState]:
        return [ToolState(build_spec("echo").model_copy(update={"pool": self._pool}))]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        result: ToolResult = self._answer(ToolCall(id="new", name=name, arguments=dict(arguments)))
        return result

    async def open_session(self, *_: Any, **__: Any) -> "FakeClient":
        return self

    async def __aenter__(self) -> "FakeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""


def replay_with(monkeypatch: pytest.MonkeyPatch, answer: Any, pool: Literal["sandbox", "tools"] = "sandbox") -> None:
    @asynccontextmanager
    async def open_client(tenant: str | None = None) -> AsyncIterator[FakeClient]:
        yield FakeClient(answer, pool)

    monkeypatch.setattr(cli_trace, "open_client", open_client)


def test_replay_exits_with_0_when_all_is_the_same_and_1_when_not(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_with(monkeypatch, echo)
    code, told, _ = run("replay", "run1")
    assert (code, told.splitlines()) == (0, ['same  echo {"text": "a"}', "1 the same, 0 different"])
    replay_with(monkeypatch, lambda call: echo(call).model_copy(update={"output": "a 12:01 \x1b[2J"}))
    code, told, _ = run("replay", "run1")
    assert (code, "DIFFERENT  echo" in told, "\x1b" in told) == (1, True, False)
    assert json.loads(run("replay", "run1", "--json")[1])["different"] == 1
    assert run("replay", "run1", "--ignore", "^a.*")[0] == 0


def test_replay_leaves_alone_what_acts_outside_of_the_sandbox_unless_told(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_with(monkeypatch, echo, pool="tools")
    code, told, _ = run("replay", "run1")
    assert (code, "left alone  echo" in told, told.splitlines()[-1]) == (
        0,
        True,
        "0 the same, 0 different, 1 act outside of the sandbox and were left alone",
    )
    assert run("replay", "run1", "--outside")[1].splitlines()[-1] == "1 the same, 0 different"


def test_replay_reads_what_export_wrote(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_with(monkeypatch, echo)
    run("export", "run1", "--to", "atif", "-o", str(tmp_path / "x.json"))
    assert run("replay", str(tmp_path / "x.json"))[0] == 0


def test_replay_says_what_is_wrong_before_it_opens_a_session(trace: Path) -> None:
    code, _, told = run("replay", "run1", "--ignore", "(")
    assert (code, "is no regular expression" in told) == (1, True)


def test_a_run_without_calls_cannot_be_replayed(trace: Path) -> None:
    code, _, told = run("replay", str(trace.parent.parent.parent / "talks" / "acme" / "talk.jsonl"))
    assert (code, "no call that can be run again" in told) == (1, True)
