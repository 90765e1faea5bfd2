"""Run every command and program of the README from the root of a clone."""

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.stack.stack import require_engine

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.stack

FAST = {
    # The two commands do their work elsewhere: in this test run, and in test_the_demo below.
    "scripts/test": "scripts/test tests/repository/test_locks.py -q",
    ". .venv/bin/activate": "true",
}


COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]


def run(command: str, folder: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    base_environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TOOLCREW_", "OPENAI_"))
    }
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        env={**base_environment, "PATH": path, **environment},
        timeout=500,
        check=False,
    )


def test_the_readme_names_both_commands_first() -> None:
    assert COMMANDS[:2] == ["scripts/demo", "scripts/test"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "scripts/demo" and not c.startswith("toolcrew run")])
def test_a_command_of_the_readme_works(command: str) -> None:
    require_engine()

    done = run(FAST.get(command, command))

    assert done.returncode == 0, done.stdout + done.stderr


def run_program(page: str, timeout_s: float) -> str:
    """Run the one complete program of a page and return its output."""
    [program] = [p for p in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "asyncio.run(main())" in p]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLCREW_", "OPENAI_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_of_the_readme_works() -> None:
    require_engine()

    assert run_program(README, 120).startswith("True 7\n")


def test_the_program_of_the_page_of_names_works() -> None:
    require_engine()

    tools, required, line = run_program((ROOT / "docs" / "names.md").read_text(), 120).splitlines()[:3]
    assert "'read_tool'" in tools
    assert required == "['file_path']"
    assert (ROOT / "examples" / "tutorial" / "names.txt").read_text().splitlines()[0] in line


@pytest.mark.model
def test_the_program_of_the_agents_page_works_with_the_local_model() -> None:
    assert "22" in run_program((ROOT / "docs" / "agents.md").read_text(), 200)


@pytest.mark.model
def test_the_demo_completes_three_jobs_with_the_local_model_and_leaves_nothing() -> None:
    engine = require_engine()
    mark = f"demo-{secrets.token_hex(4)}"

    done = run("scripts/demo", TOOLCREW_DEPLOYMENT=mark)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 answers are right" in done.stdout
    assert leftovers(engine, mark) == []


@pytest.mark.model
def test_the_run_command_of_the_readme_answers() -> None:
    require_engine()
    command = next(c for c in COMMANDS if c.startswith("toolcrew run"))

    done = run(command)

    lines = len((ROOT / "docs" / "design.md").read_text().splitlines())
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(lines) in done.stdout.splitlines()[-1]


def leftovers(engine: APIClient, deployment: str) -> list[str]:
    """Return the containers of that deployment. Other tests may have their own containers at the same time."""
    filters = {"label": [f"toolcrew.deployment={deployment}"]}
    return [str(container["Names"]) for container in engine.containers(all=True, filters=filters)]
