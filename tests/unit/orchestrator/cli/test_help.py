"""The first page of the help, and the shape of the commands."""

import inspect
import subprocess
import sys
from itertools import pairwise

import pytest
from typer.core import TyperGroup
from typer.testing import CliRunner

from toolcrew.contract.session_spec import SandboxOptions, SessionOptions
from toolcrew.orchestrator.cli.session_options import OPTION_NAMES
from toolcrew.orchestrator.command import app, import_all
from toolcrew.orchestrator.sdk.client import ToolClient

SINGLE_COMMANDS = {"up", "run", "call", "doctor", "serve", "config"}
"""Commands that are no noun with a verb."""


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_help_page_fits_80_columns_and_starts_with_first_commands(arguments: list[str]) -> None:
    lines = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).output.splitlines()
    assert (len(lines) <= 28, max(map(len, lines)) <= 80) == (True, True)
    start = lines.index("Start here:")
    assert [line.split()[0] for line in lines[start + 1 : start + 6]] == ["up", "run", "call", "doctor", "batches"]
    assert not [line for line in lines if line.endswith("...") and "COMMAND" not in line], "a description is cut"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("toolcrew.orchestrator.command", {"pydantic", "redis", "celery", "toolcrew.orchestrator.cli"}),
        ("toolcrew.orchestrator.cli.up", {"celery", "toolcrew.orchestrator.sdk", "toolcrew.orchestrator.runs"}),
    ],
)
def test_a_command_does_not_import_packages_that_it_does_not_use(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert absent.isdisjoint(process.stdout.split())


@pytest.mark.parametrize(("name", "suggestion"), [("sesions", "sessions"), ("zzz", None)])
def test_an_unknown_command_is_reported_with_the_nearest_name(name: str, suggestion: str | None) -> None:
    process = CliRunner().invoke(app, [name])
    assert (process.exit_code, f"'{name}'" in process.output) == (2, True)
    assert ("Did you mean" in process.output) == (suggestion is not None)
    assert suggestion is None or f"'{suggestion}'" in process.output


def test_every_grouped_command_is_a_plural_noun_and_a_verb() -> None:
    groups = {name: command for name, command in import_all().commands.items() if name not in SINGLE_COMMANDS}
    assert all(isinstance(group, TyperGroup) and name.endswith("s") for name, group in groups.items())
    names = [
        f"{name} {verb}" for name, group in groups.items() if isinstance(group, TyperGroup) for verb in group.commands
    ]
    assert len(names) <= 56, names


@pytest.mark.parametrize(
    "command",
    [["call", "bash_tool", "command=true", "--timeout"], ["sessions", "exec", "--timeout"]],
    ids=["call", "session exec"],
)
@pytest.mark.parametrize(
    ("timeout", "message"),
    [
        ("99999", "less than or equal to 86400"),
        ("86400.5", "less than or equal to 86400"),
        ("0", "greater than or equal to 0.001"),
        ("-1", "greater than or equal to 0.001"),
    ],
)
def test_a_timeout_out_of_range_is_refused(
    command: list[str], timeout: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", "redis://127.0.0.1:1/0")
    arguments_after = ["s1", "--", "true"] if command[0] == "sessions" else []

    result = CliRunner().invoke(app, [*command, timeout, *arguments_after], env={"COLUMNS": "200"})

    assert result.exit_code == 2
    assert "--timeout" in result.stderr
    assert message in result.stderr


def list_commands(group: TyperGroup, *path: str) -> list[list[str]]:
    inner = [
        list_commands(command, *path, name) if isinstance(command, TyperGroup) else [[*path, name]]
        for name, command in group.commands.items()
    ]
    return [command for commands in inner for command in commands]


@pytest.mark.parametrize("command", list_commands(import_all()), ids=" ".join)
def test_help_names_no_type_of_flags_and_breaks_lines_at_the_width_of_the_terminal(command: list[str]) -> None:
    page = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).output
    assert "bool" not in page
    text = [line.strip() for line in page.partition("╭")[0].splitlines()]
    broken = [line for line, after in pairwise(text) if line and after and len(line) < 150]
    assert broken == []


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["call", "bash_tool", "command=id", "--session"], "--session"),
        (["call", "bash_tool", "command=id", "--session", ""], "--session"),
        (["call", "bash_tool", "--session", "command=id"], "--session"),
        (["sessions", "exec", "", "--", "id"], "session_id"),
        (["sessions", "close", "s1", ""], "session_ids"),
        (["sessions", "list", "--tenant", ""], "--tenant"),
        (["batches", "show", ""], "batch"),
        (["run", ""], "text"),
    ],
    ids=" ".join,
)
def test_a_value_that_a_failed_command_did_not_give_is_named(arguments: list[str], name: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert name in result.stderr
    assert "alone" in result.stderr


def test_empty_arguments_of_a_program_and_empty_texts_are_no_missing_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    for arguments in (["sessions", "exec", "s1", "--", "echo", ""], ["tenants", "pause", "acme", "--reason", ""]):
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code == 2, "empty" in result.stderr) == (False, False)


def test_every_command_that_opens_a_session_has_all_of_its_options() -> None:
    root = import_all()
    expected = {*SessionOptions.model_fields, "workspace", "options"} - SandboxOptions.model_fields.keys()
    sessions = root.commands["sessions"]
    assert isinstance(sessions, TyperGroup)
    for command in (root.commands["run"], root.commands["call"], sessions.commands["open"]):
        assert expected <= {parameter.name for parameter in command.params}
    accepted = set(inspect.signature(ToolClient.open_session).parameters)
    assert expected == accepted - {"self", "tenant", "ttl_s", "key"}
    options = {parameter.opts[0] for parameter in root.commands["call"].params if parameter.name in expected}
    assert set(OPTION_NAMES.replace(" and", ",").split(", ")) == options


@pytest.mark.parametrize("line", ["approvals list", "changes list", "tools disable echo", "run act --model scripted"])
def test_pool_commands_require_redis(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    monkeypatch.setenv("TOOLCREW_APPROVALS", "queue")
    result = CliRunner().invoke(app, line.split())
    assert (result.exit_code, "TOOLCREW_REDIS_URL" in result.stderr) == (1, True)
