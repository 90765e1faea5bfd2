"""The first page of the help, and the shape of the commands."""

import subprocess
import sys

import pytest
from typer.core import TyperGroup
from typer.testing import CliRunner

from orchestrator.command import app, import_all

ALONE = {"up", "run", "call", "doctor", "serve", "config"}
"""Commands that are no noun with a verb."""


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_first_page_fits_a_small_terminal_and_begins_with_what_a_newcomer_needs(arguments: list[str]) -> None:
    lines = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).output.splitlines()
    assert (len(lines) <= 28, max(map(len, lines)) <= 80) == (True, True)
    start = lines.index("Start here:")
    assert [line.split()[0] for line in lines[start + 1 : start + 6]] == ["up", "run", "call", "doctor", "batches"]
    assert not [line for line in lines if line.endswith("...") and "COMMAND" not in line], "a description is cut"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("orchestrator.command", {"pydantic", "redis", "celery", "orchestrator.cli"}),
        ("orchestrator.cli.up", {"celery", "orchestrator.sdk", "orchestrator.runs"}),
    ],
)
def test_a_command_starts_without_the_packages_that_it_does_not_use(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert absent.isdisjoint(done.stdout.split())


@pytest.mark.parametrize(("typed", "meant"), [("sesions", "sessions"), ("zzz", None)])
def test_an_unknown_command_is_answered_with_the_nearest_name(typed: str, meant: str | None) -> None:
    done = CliRunner().invoke(app, [typed])
    assert (done.exit_code, f"'{typed}'" in done.output) == (2, True)
    assert ("Did you mean" in done.output) == (meant is not None)
    assert meant is None or f"'{meant}'" in done.output


def test_every_other_command_is_a_plural_noun_and_a_verb() -> None:
    groups = {name: command for name, command in import_all().commands.items() if name not in ALONE}
    assert all(isinstance(group, TyperGroup) and name.endswith("s") for name, group in groups.items())
    names = [
        f"{name} {verb}" for name, group in groups.items() if isinstance(group, TyperGroup) for verb in group.commands
    ]
    assert len(names) <= 50, names
