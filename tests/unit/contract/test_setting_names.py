"""A misspelled TOOLCREW_ variable is an error in every process, and a value that is not JSON is explained with an
example.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from scripts.pages.settings import docstrings
from tests.support.stack.stack import ROOT
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.setting_rows import MASK, build_rows
from toolcrew.contract.settings import (
    CLASSES,
    OTHERS,
    SETTINGS,
    LogSettings,
    OrchestratorSettings,
    SandboxdSettings,
    SharedSettings,
    WebSettings,
    WorkerSettings,
    check_names,
    read_environment,
)
from toolcrew.orchestrator.cli.config import PROCESSES, read_settings
from toolcrew.orchestrator.command import app
from toolcrew.workers.sandboxd.runtime.hardening import PASSED_PREFIX


def test_settings_are_few_and_documented_with_their_audience() -> None:
    assert len(SETTINGS) <= 75
    for settings in (*CLASSES, SharedSettings, LogSettings):
        for name, meaning in docstrings(settings).items():
            assert re.search(r"\b([Oo]perator|[Bb]atch team|[Tt]enant)\b", meaning), (
                f"{name}: say who changes it and when"
            )


WRONG_NAMES = (Path(__file__), ROOT / "tests" / "limits" / "test_settings_at_startup.py")
"""Files that name settings which do not exist."""


def test_setting_names_in_deployment_files_scripts_and_tests_exist() -> None:
    files = [
        ROOT / "docker-compose.yml",
        ROOT / "Dockerfile",
        ROOT / "deploy",
        ROOT / "scripts",
        ROOT / "tests",
        ROOT / "benchmarks",
    ]
    paths = [path for file in files for path in ([file] if file.is_file() else file.rglob("*")) if path.is_file()]
    texts = [path.read_text(errors="replace") for path in paths if path not in WRONG_NAMES and path.suffix != ".pyc"]
    named = {
        name for text in texts for name in re.findall(r"\bTOOLCREW_([A-Z0-9][A-Z0-9_]*[A-Z0-9])(?![A-Z0-9_{])", text)
    }
    # sandboxd passes the variables of an image to the guest with this prefix.
    of_images = {name for name in named if f"TOOLCREW_{name}".startswith(PASSED_PREFIX)}
    assert named - SETTINGS - OTHERS - of_images - {"SOCKET"} == set()


def test_variables_of_other_processes_and_kubernetes_are_accepted() -> None:
    check_names(["PATH", "TOOLCREW_SANDBOXD_STATE", "toolcrew_redis_url", "TOOLCREW_API_BIND", "TOOLCREW_TEST_REQUIRE"])
    check_names(
        [
            "TOOLCREW_REDIS_SERVICE_HOST",
            "TOOLCREW_REDIS_SERVICE_PORT_HTTP",
            "TOOLCREW_REDIS_PORT_6379_TCP_ADDR",
            "TOOLCREW_X_PORT",
        ]
    )


def test_unknown_settings_are_refused_and_counted() -> None:
    with pytest.raises(
        ConfigError, match=r"TOOLCREW_NOTHING_LIKE_IT is not a setting\. Correct the name or unset the variable"
    ):
        check_names(["TOOLCREW_NOTHING_LIKE_IT"])
    with pytest.raises(ConfigError, match="; and 4 more"):
        check_names(f"TOOLCREW_{number}{number}{number}" for number in range(9))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "TOOL_MODULES",
            "mytools.weather",
            """TOOLCREW_TOOL_MODULES is not a JSON list: write for example TOOLCREW_TOOL_MODULES='[""",
        ),
        ("SECRETS_PREVIOUS", "hush", "TOOLCREW_SECRETS_PREVIOUS is not a JSON list: write for example"),
        ("WORKER_QUEUES", "pool.web", "TOOLCREW_WORKER_QUEUES is not a JSON list: write for example"),
        ("TOOL_CONFIG", "{", "TOOLCREW_TOOL_CONFIG is not a JSON object: write for example"),
        ("CONCURRENCY", "many", "TOOLCREW_CONCURRENCY: must be a whole number"),
    ],
)
def test_setting_error_hides_the_value(name: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", "redis://x")
    monkeypatch.setenv(f"TOOLCREW_{name}", value)
    with pytest.raises(ConfigError) as refused:
        read_environment(WorkerSettings)
    assert sentence in str(refused.value)
    assert value == "{" or value not in str(refused.value)


def rows_of(settings: Any) -> dict[str, tuple[str | None, str]]:
    return {row.name: (row.value, row.origin) for row in build_rows(settings)}


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
def test_invalid_redis_url_is_shown_without_a_password(url: str) -> None:
    rows = rows_of(OrchestratorSettings.model_validate({"redis_url": url}))
    assert "geheim" not in (rows["TOOLCREW_REDIS_URL"][0] or "")


def test_settings_of_every_process_are_listed_with_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    monkeypatch.setenv("TOOLCREW_MAX_SANDBOXES", "many")
    processes = {process["process"]: process for process in read_settings()}

    assert list(processes) == list(PROCESSES)
    assert {name for name, process in processes.items() if process["problem"]} == {"sandboxd"}
    assert processes["sandboxd"]["problem"].startswith("TOOLCREW_MAX_SANDBOXES")
    redis = next(row for row in processes["worker"]["settings"] if row["name"] == "TOOLCREW_REDIS_URL")
    assert (redis["value"], redis["origin"]) == (None, "default")


def test_config_show_prints_settings_and_fails_for_invalid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_DEPLOYMENT", "blue")
    set_only = CliRunner().invoke(app, ["config", "show", "--set", "--origin"])
    monkeypatch.setenv("TOOLCREW_APPROVALS", "maybe")
    as_json = CliRunner().invoke(app, ["config", "show", "--json"])

    assert set_only.exit_code == 0
    assert "TOOLCREW_DEPLOYMENT" in set_only.stdout
    assert "blue  [environment; default: default]" in set_only.stdout
    assert "TOOLCREW_DIALECT" not in set_only.stdout
    assert as_json.exit_code == 1
    problems = {row["process"]: row["problem"] for row in json.loads(as_json.stdout)["processes"]}
    assert "TOOLCREW_APPROVALS" in problems["orchestrator"]


def test_worker_reports_an_invalid_setting_before_a_missing_redis_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    monkeypatch.setenv("TOOLCREW_CONCURRENCY", "0")
    assert ["TOOLCREW_CONCURRENCY" in row["problem"] for row in read_settings() if row["process"] == "worker"] == [True]
