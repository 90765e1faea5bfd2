"""Every command and program of the README is run as it stands there, from a clone's root."""

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from docker import APIClient

from tests.model_server.running import running_model_server
from tests.stack import open_stack, require_engine

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

FAST = {
    # The two commands run their whole work elsewhere: this very test run, and test_the_demo below.
    "scripts/test": "scripts/test tests/unit/test_locks.py -q",
    ". .venv/bin/activate": "true",
}


BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


BATCH = next(block for block in BLOCKS if "toolcrew batches submit" in block[0])


def read_commands() -> list[str]:
    """Those that need nothing."""
    return [line for block in BLOCKS[:-1] if block != BATCH for line in block]


def run(command: str, folder: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLCREW_", "OPENAI_"))}
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        env={**kept, "PATH": path, **environment},
        timeout=500,
        check=False,
    )


def test_the_readme_names_both_commands_first() -> None:
    assert read_commands()[:2] == ["scripts/demo", "scripts/test"]


@pytest.mark.parametrize(
    "command", [c for c in read_commands() if c != "scripts/demo" and not c.startswith("toolcrew run")]
)
def test_a_command_of_the_readme_works(command: str) -> None:
    require_engine()

    done = run(FAST.get(command, command))

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_for_a_running_pool_work_in_their_order(tmp_path: Path) -> None:
    engine = require_engine()
    with open_stack(engine, {"TOOLCREW_HOST": "HOST", "TOOLCREW_WORKSPACE_STORE": str(tmp_path)}) as stack:
        with running_model_server(ROOT / "examples" / "fix-the-test" / "script.jsonl") as server:
            (tmp_path / "examples").symlink_to(ROOT / "examples")
            environment = {
                "TOOLCREW_REDIS_URL": stack.redis_url,
                "TOOLCREW_TRACES": str(tmp_path / "traces"),
                **server.environment(),
            }
            for command in BATCH:
                done = run(command, tmp_path, **environment)
                assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        for command in BLOCKS[-1]:
            done = run(command, TOOLCREW_REDIS_URL=stack.redis_url)
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert BLOCKS[-1][-1] == "toolcrew hosts drain HOST --wait"


PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_program_of_the_readme_works() -> None:
    require_engine()
    program = PROGRAMS[0]

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "architecture.md" in done.stdout
    assert "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03" in done.stdout


@pytest.mark.model
def test_the_program_with_its_own_function_works_with_the_local_model() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLCREW_", "OPENAI_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[1]],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "22" in done.stdout


@pytest.mark.model
def test_the_demo_answers_all_three_jobs_with_the_local_model_and_leaves_nothing() -> None:
    engine = require_engine()
    mark = f"demo-{secrets.token_hex(4)}"

    done = run("scripts/demo", TOOLCREW_DEPLOYMENT=mark)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 answers are right" in done.stdout
    assert leftovers(engine, mark) == []


@pytest.mark.model
def test_the_run_command_of_the_readme_answers() -> None:
    require_engine()
    command = next(c for c in read_commands() if c.startswith("toolcrew run"))

    done = run(command)

    lines = len((ROOT / "docs" / "architecture.md").read_text().splitlines())
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(lines) in done.stdout.splitlines()[-1]


def leftovers(engine: APIClient, deployment: str) -> list[str]:
    """Containers of that deployment; other tests have theirs meanwhile."""
    filters = {"label": [f"toolcrew.deployment={deployment}"]}
    return [str(container["Names"]) for container in engine.containers(all=True, filters=filters)]
