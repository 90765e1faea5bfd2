"""A batch for which no model is named says so before its first item, in its summary and in its report."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contract.names import catalog_key
from contract.run_events import BatchNotice
from contract.specs import Catalog, seal_catalog
from orchestrator.batches.displays import LogDisplay, Watched
from orchestrator.batches.progress import BatchProgress
from orchestrator.command import app
from orchestrator.models.choice import FALLBACK_WARNING, ChosenModel
from orchestrator.models.scripted import EVERYTHING
from orchestrator.runs.models import Models
from orchestrator.settings import OrchestratorSettings
from tests.builders import build_spec
from tests.conftest import RedisProcess
from tests.item_harness import Made, build_run, echo_then


def warning(at: float = 1.0, message: str = FALLBACK_WARNING) -> BatchNotice:
    return BatchNotice(at=at, message=message, is_warning=True)


async def test_the_first_item_that_uses_the_shipped_model_unasked_warns_for_its_batch(make: Made) -> None:
    harness = make([*echo_then("one"), *echo_then("two")])
    fallback = replace(ChosenModel(harness.model, capabilities=EVERYTHING), is_fallback=True)
    harness.work._models = Models(OrchestratorSettings(deployment="d", redis_url=None), harness.pool, fallback)
    await harness.submit(2, work=build_run().work)
    for claim in await harness.queue.claim(2, ("acme", "b")):
        await harness.worked(claim)
    notes = [event for event in harness.run_events if isinstance(event, BatchNotice)]
    assert [(note.message, note.is_warning) for note in notes] == [(FALLBACK_WARNING, True)]


def test_a_warning_is_shown_once_as_it_comes_and_again_in_the_summary() -> None:
    out = io.StringIO()
    with LogDisplay(Watched("b", BatchProgress(1)), out, has_past=True) as display:
        display.show(warning())
        display.show(warning(at=2.0))
    assert out.getvalue().count("no model is set") == 2
    assert f"  warning: {FALLBACK_WARNING}" in out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("environment", "line", "is_told"),
    [
        ({}, {"instruction": "act"}, True),
        ({"TOOLCREW_MODEL": "local"}, {"instruction": "act"}, False),
        ({"OPENAI_API_KEY": "k", "TOOLCREW_MODEL": "gpt"}, {"instruction": "act"}, False),
        ({}, {"tool": "echo"}, False),
    ],
)
def test_submit_warns_before_anything_starts(
    environment: dict[str, str],
    line: dict[str, str],
    is_told: bool,
    redis_server: RedisProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "TOOLCREW_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    with redis_server.client() as client:
        client.set(
            catalog_key("default", "sandbox"),
            seal_catalog(redis_server.keys, "sandbox", Catalog(tools=(build_spec("other"),))),
        )
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"id": "a", **line}) + "\n")
    # The folder of the output does not exist, so that no item runs here.
    done = CliRunner().invoke(
        app, ["batches", "submit", str(file), "--output", str(tmp_path / "no" / "o.jsonl")], env=environment
    )
    assert (done.exit_code, f"toolcrew: warning: {FALLBACK_WARNING}" in done.stderr) == (1, is_told), done.output


def test_submit_refuses_the_name_of_a_shipped_model_while_a_server_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "a", "instruction": "act", "model": "scripted"}\n')
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    done = CliRunner().invoke(app, ["batches", "submit", str(file), "--output", str(tmp_path / "o.jsonl")])
    assert (
        done.exit_code,
        "the model 'scripted' is shipped with toolcrew, but OPENAI_BASE_URL is set" in done.stderr,
    ) == (1, True)
