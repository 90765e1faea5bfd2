"""`toolcrew traces`: the output, files and exit status of each command."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.traces import traces_app
from orchestrator.models.scripted import ScriptedModel
from tests.trace_harness import run_traced


@pytest.fixture
async def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLCREW_TRACES", str(tmp_path / "traces"))
    await run_traced(tmp_path / "talks", ScriptedModel(["done"]), run="talk")
    path, _, _ = await run_traced(tmp_path / "traces")
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(traces_app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_show_prints_a_run_by_its_id_or_its_path(trace: Path) -> None:
    assert "answer: It is a." in run("show", "run1")[1]
    assert run("show", str(trace))[1] == run("show", "run1", "--tenant", "acme")[1]
    assert len(json.loads(run("show", "run1", "--json")[1])["events"]) == 13


def test_show_prints_the_last_attempt_of_an_item_and_lists_the_others(trace: Path) -> None:
    folder, item = trace.parent.parent, "0123456789abcdef01234567"
    for run_id, answer in ((item, "One."), (f"{item}-2", "Two.")):
        asyncio.run(run_traced(folder, ScriptedModel([answer]), run=run_id))
    _, shown, note = run("show", item)
    assert ("answer: Two." in shown, "the last of 2 attempts" in note, f"{item}.jsonl" in note) == (True, True, True)


def test_a_run_that_is_not_there_is_one_sentence_and_an_object_with_json(trace: Path) -> None:
    code, _, errors = run("show", "nope")
    assert (code, "has no trace of the run nope" in errors, errors.count("\n")) == (1, True, 1)
    assert json.loads(run("show", "nope", "--json")[1])["error"]["code"] == "CONFIG_MISSING"


@pytest.mark.parametrize(("to", "key"), [("atif", "schema_version"), ("otel", "resourceSpans")])
def test_export_prints_or_writes_each_format(trace: Path, tmp_path: Path, to: str, key: str) -> None:
    assert key in json.loads(run("export", "run1", "--to", to)[1])
    assert run("export", "run1", "--to", to, "-o", str(tmp_path / "x.json"))[1] == ""
    assert key in json.loads((tmp_path / "x.json").read_text())


def test_a_page_is_its_owners_alone(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("export", "run1", "--to", "html", "-o", str(page))[0] == 0
    assert (page.read_text().startswith("<!DOCTYPE html>"), page.stat().st_mode & 0o777) == (True, 0o600)
    code, _, errors = run("export", "run1", "--to", "html", "-o", str(tmp_path / "no" / "page.html"))
    assert (code, "give another file with -o" in errors) == (1, True)
