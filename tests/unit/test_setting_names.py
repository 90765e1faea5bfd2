"""A misspelled TOOLCREW_ variable is an error in every process, and a value that is not JSON is explained with an
example.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from contract.errors import ConfigError
from contract.setting_names import OTHERS, SETTINGS, check_names
from contract.setting_rows import PREFIX, variable_names
from contract.settings import SharedSettings
from orchestrator.settings import OrchestratorSettings, load_settings
from scripts.setting_docs import docstrings
from telemetry.settings import LogSettings, TracingSettings, load_tracing_settings
from tests.stack import ROOT
from workers.settings import (
    EgressSettings,
    SandboxdSettings,
    WebSettings,
    WorkerSettings,
    load_egress_settings,
    load_sandboxd_settings,
    load_web_settings,
    load_worker_settings,
)

CLASSES: tuple[type[BaseSettings], ...] = (
    OrchestratorSettings,
    TracingSettings,
    WorkerSettings,
    SandboxdSettings,
    WebSettings,
    EgressSettings,
)
LOADERS = (
    load_settings,
    load_tracing_settings,
    load_worker_settings,
    load_sandboxd_settings,
    load_web_settings,
    load_egress_settings,
)


def test_the_list_of_settings_is_that_of_all_settings_classes() -> None:
    """A new setting is added to contract/setting_names.py as well."""
    fields = {
        name
        for settings_class in CLASSES
        for field, info in settings_class.model_fields.items()
        for name in variable_names(field, info)
    }
    assert {name.removeprefix(PREFIX) for name in fields if name.startswith(PREFIX)} == SETTINGS


def test_there_are_few_settings_and_each_says_who_changes_it() -> None:
    assert len(SETTINGS) <= 70
    for settings in (*CLASSES, SharedSettings, LogSettings):
        for name, meaning in docstrings(settings).items():
            assert re.search(r"\b([Oo]perator|[Bb]atch team|[Tt]enant)\b", meaning), (
                f"{name}: say who changes it and when"
            )


def test_every_name_in_deployment_files_scripts_and_tests_is_known() -> None:
    files = [
        ROOT / "docker-compose.yml",
        ROOT / "Dockerfile",
        ROOT / "deploy",
        ROOT / "scripts",
        ROOT / "tests",
        ROOT / "benchmarks",
    ]
    paths = [path for file in files for path in ([file] if file.is_file() else file.rglob("*")) if path.is_file()]
    texts = [path.read_text(errors="replace") for path in paths if path != Path(__file__) and path.suffix != ".pyc"]
    named = {
        name for text in texts for name in re.findall(r"\bTOOLCREW_([A-Z0-9][A-Z0-9_]*[A-Z0-9])(?![A-Z0-9_{])", text)
    }
    # POOL_TARGET: for processes of an earlier release (tests/host_harness.py).
    assert named - SETTINGS - OTHERS - {"SOCKET", "POOL_TARGET"} == set()


@pytest.mark.parametrize("load", LOADERS)
def test_every_process_refuses_a_misspelled_variable(load: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_UR", "redis://x")
    with pytest.raises(ConfigError, match=r"TOOLCREW_REDIS_UR is not a setting: did you mean TOOLCREW_REDIS_URL\?"):
        load()  # type: ignore[operator]


PROGRAMS = (
    "orchestrator hosts list",
    "orchestrator skills install --check .",
    "orchestrator.operations.flower",
    "workers",
    "workers.sandboxd",
    "workers.egress",
    "contract.settings",
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_ends_with_the_name_before_it_does_anything(program: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", *program.split()]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TOOLCREW_REDIS_UR": "redis://x",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []
    assert "TOOLCREW_REDIS_UR is not a setting: did you mean TOOLCREW_REDIS_URL?" in done.stderr + done.stdout


def test_scripts_check_the_names_when_they_set_up() -> None:
    """Scripts that only read variables in the shell, or in tests, check nothing themselves."""
    setup = (ROOT / "scripts" / "setup").read_text()
    assert '"$venv/bin/python" -m contract.settings || exit 78' in setup
    assert (
        setup.count("\n    check_names\n    echo 'setup: up to date'")
        + setup.count("\ncheck_names\necho 'setup: ready'")
        == 2
    )
    callers = [
        path
        for path in (ROOT / "scripts").iterdir()
        if path.is_file() and "scripts/setup" in path.read_text(errors="replace")
    ]
    assert {"bench", "chaos", "demo", "fuzz", "test"} <= {path.name for path in callers}


def test_variables_of_other_processes_and_of_kubernetes_are_accepted() -> None:
    check_names(["PATH", "TOOLCREW_SANDBOXD_STATE", "toolcrew_redis_url", "TOOLCREW_API_BIND", "TOOLCREW_TEST_REQUIRE"])
    check_names(
        [
            "TOOLCREW_REDIS_SERVICE_HOST",
            "TOOLCREW_REDIS_SERVICE_PORT_HTTP",
            "TOOLCREW_REDIS_PORT_6379_TCP_ADDR",
            "TOOLCREW_X_PORT",
        ]
    )


def test_a_name_like_no_other_is_refused_without_a_suggestion_and_many_are_counted() -> None:
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
        ("CONCURRENCY", "many", "TOOLCREW_CONCURRENCY: Input should be a valid integer"),
    ],
)
def test_an_error_hides_the_value(name: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", "redis://x")
    monkeypatch.setenv(f"TOOLCREW_{name}", value)
    with pytest.raises(ConfigError) as refused:
        load_worker_settings()
    assert sentence in str(refused.value)
    assert value == "{" or value not in str(refused.value)
