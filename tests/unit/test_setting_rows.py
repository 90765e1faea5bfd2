"""`toolcrew config show`: every setting with its value and source, and never a secret."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from contract.setting_rows import MASK, build_rows
from orchestrator.cli.config import read_settings
from orchestrator.command import app
from orchestrator.settings import OrchestratorSettings
from workers.setting_list import PROCESSES, build_list
from workers.settings import SandboxdSettings, WebSettings, WorkerSettings


def rows_of(settings: Any) -> dict[str, tuple[str | None, str]]:
    return {row.name: (row.value, row.origin) for row in build_rows(settings)}


def test_values_are_shown_as_written_with_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EGRESS_UIDS": "[7]"}.items():
        monkeypatch.setenv(f"TOOLCREW_{name}", value)
    rows = rows_of(SandboxdSettings())

    assert rows["TOOLCREW_EGRESS_UIDS"] == ("[7]", "environment")
    assert rows["TOOLCREW_MAX_SANDBOXES"] == ("200", "default")
    assert rows["TOOLCREW_WORKSPACE_STORE"] == (None, "default")


def test_rows_can_be_loaded_as_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SandboxdSettings(
        sandboxd_socket=Path("/run/x.sock"), tenant_classes={"gold": {"runtime": "runsc"}}, host_free_bytes=5
    )  # type: ignore[dict-item]
    for row in build_rows(settings):
        if row.value is not None:
            monkeypatch.setenv(row.name, row.value)

    assert SandboxdSettings() == settings


def test_secrets_are_hidden_and_the_redis_host_is_shown() -> None:
    orchestrator = OrchestratorSettings.model_validate(
        {
            "redis_url": "sentinel://u:geheim1@h1:1/0;sentinel://h2:2",
            "secret": "geheim2",
            "secrets_previous": ["geheim3"],
            "api_key": "geheim4",
            "OPENAI_API_KEY": "geheim5",
            "OPENAI_BASE_URL": "http://user:geheim6@host/v1",
        }
    )
    web = WebSettings(searxng_url=SecretStr("https://geheim7@host/?key=geheim8"))
    worker = WorkerSettings(
        redis_url=SecretStr("redis://:gehe/im@h:1/0"), tool_config={"dsn": "pg://user:geheim9@host/db"}
    )
    rows = [row for settings in (orchestrator, web, worker) for row in build_rows(settings)]

    assert [row for row in rows if "gehe" in f"{row.value}{row.default}"] == []
    process_rows = rows_of(orchestrator)
    assert process_rows["TOOLCREW_REDIS_URL"][0] == f"sentinel://{MASK}@h1:1/0;sentinel://h2:2"
    assert process_rows["TOOLCREW_SECRET"] == (MASK, "environment")
    assert process_rows["TOOLCREW_SECRETS_PREVIOUS"] == (f'["{MASK}"]', "environment")


@pytest.mark.parametrize(
    "url",
    [
        "redis://:p?w#geheim@h:1/0",
        "redis://h:1/0?password=geheim",
        "redis://[geheim",
        "geheim",
        "redis://u:a/b:geheim@h",
    ],
)
def test_a_redis_url_that_is_none_reports_nothing_of_what_may_be_its_password(url: str) -> None:
    rows = rows_of(OrchestratorSettings.model_validate({"redis_url": url}))
    assert "geheim" not in (rows["TOOLCREW_REDIS_URL"][0] or "")


async def test_every_process_is_listed_with_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    monkeypatch.setenv("TOOLCREW_MAX_SANDBOXES", "many")
    processes = {process["process"]: process for process in await read_settings()}

    assert set(processes) == {"orchestrator", "tracing, of all", *PROCESSES}
    assert {name for name, process in processes.items() if process["problem"]} == {"sandboxd"}
    assert processes["sandboxd"]["problem"].startswith("TOOLCREW_MAX_SANDBOXES")
    redis = next(row for row in processes["worker"]["settings"] if row["name"] == "TOOLCREW_REDIS_URL")
    assert (redis["value"], redis["origin"]) == (None, "default")


def test_a_worker_with_something_else_wrong_says_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    monkeypatch.setenv("TOOLCREW_CONCURRENCY", "0")
    assert ["TOOLCREW_CONCURRENCY" in row["problem"] for row in build_list() if row["process"] == "worker"] == [True]


def test_the_command_shows_settings_and_fails_for_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_DEPLOYMENT", "blue")
    shown = CliRunner().invoke(app, ["config", "show", "--set", "--origin"])
    monkeypatch.setenv("TOOLCREW_APPROVALS", "maybe")
    as_json = CliRunner().invoke(app, ["config", "show", "--json"])

    assert shown.exit_code == 0
    assert "TOOLCREW_DEPLOYMENT" in shown.stdout
    assert "blue  [environment; default: default]" in shown.stdout
    assert "TOOLCREW_DIALECT" not in shown.stdout
    assert as_json.exit_code == 1
    problems = {row["process"]: row["problem"] for row in json.loads(as_json.stdout)["processes"]}
    assert "TOOLCREW_APPROVALS" in problems["orchestrator"]


def test_asking_the_worker_side_leaves_no_process_behind_when_it_is_cancelled() -> None:
    async def work() -> None:
        reading = asyncio.ensure_future(read_settings())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(work())
