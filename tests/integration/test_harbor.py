"""Harbor with sandboxes of a pool: the oracle of each task solves it, and an agent that does nothing does not. Needs the
real `harbor` in PATH.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient

from tests.support.stack.stack import ROOT, Stack, open_stack

pytestmark = pytest.mark.stack

CLASSES = {"default": {"largest": {"user": "root"}}}
CONFIG = 'version = "1.0"\n[environment]\nworkdir = "/app"\n[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = 120\n'
REWARD = "echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n"
TASKS: dict[str, dict[str, str]] = {
    "hello": {
        "environment/Dockerfile": "# comment\nFROM toolcrew-sandbox:dev\nWORKDIR /work\n",
        "solution/solve.sh": 'echo "Hello, world!" > hello.txt\n',
        "tests/test.sh": f'if grep -qx "Hello, world!" /app/hello.txt; then {REWARD}',
    },
    "sort": {
        "image": "toolcrew-sandbox:dev",
        "environment/in.txt": "3\n1\n2\n",
        "solution/solve.sh": "sort in.txt > out.txt\n",
        "tests/test.sh": f'if [ "$(paste -sd, /app/out.txt)" = 1,2,3 ]; then {REWARD}',
    },
    "users": {
        "image": "toolcrew-sandbox:dev",
        "environment/note": "x",
        "solution/solve.sh": "id -u > root; useradd -m bob; su bob -c 'id -un' > bob; ln -s root link\n",
        "tests/test.sh": f'if [ "$(cat /app/root /app/bob | paste -sd,)" = 0,bob ]; then {REWARD}',
    },
    "variables": {
        "image": "toolcrew-sandbox:dev",
        "config": '[environment.env]\nPLACE = "here"\n[solution.env]\nWORD = "blue"\n[verifier.env]\nWANTED = "blue here"\n',
        "solution/solve.sh": 'echo "$WORD $PLACE" > word\n',
        "tests/test.sh": f'if [ "$(cat /app/word)" = "$WANTED" ]; then {REWARD}',
    },
    "healthy": {
        "image": "toolcrew-sandbox:dev",
        "config": '[environment.healthcheck]\ncommand = "grep -q up status"\ninterval_sec = 0.1\n',
        "environment/status": "up\n",
        "solution/solve.sh": "mv status seen\n",
        "tests/expected/seen": "up\n",
        "tests/test.sh": f"if cmp /tests/expected/seen /app/seen; then {REWARD}",
    },
    "separate": {
        "image": "toolcrew-sandbox:dev",
        "config": 'environment_mode = "separate"\n',
        "solution/solve.sh": "mkdir -p /logs/artifacts; echo 42 > /logs/artifacts/answer; echo x > only-here\n",
        "tests/test.sh": f"if grep -qx 42 /logs/artifacts/answer && [ ! -e /app/only-here ]; then {REWARD}",
    },
}


@pytest.fixture(scope="module")
def rooted(engine: APIClient) -> Iterator[Stack]:
    if shutil.which("harbor") is None:
        pytest.skip("harbor is not installed: it needs Python 3.12")
    with open_stack(engine, {"TOOLCREW_TENANT_CLASSES": json.dumps(CLASSES)}) as opened:
        yield opened


def write_tasks(folder: Path) -> Path:
    for name, files in TASKS.items():
        image = f'docker_image = "{files["image"]}"\n' if "image" in files else ""
        config = CONFIG.replace("[agent]", f"{image}[agent]") + files.get("config", "")
        written = {"task.toml": config, "instruction.md": "Do it.", **files}
        for path, text in written.items():
            if path not in ("image", "config"):
                target = folder / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(f"#!/bin/bash\n{text}" if path.endswith(".sh") else text)
    return folder


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_harbor_tasks_are_solved_by_their_oracle_and_not_by_an_idle_agent(
    rooted: Stack, tmp_path: Path, agent: str, reward: float
) -> None:
    environment = "toolcrew.orchestrator.adapters.harbor:ToolcrewEnvironment"
    options = ["--env", environment, "-a", agent, "-o", str(tmp_path / "jobs"), "-n", "2", "--yes"]
    done = subprocess.run(
        ["harbor", "run", "-p", str(write_tasks(tmp_path / "tasks")), *options],
        env={**os.environ, "TOOLCREW_REDIS_URL": rooted.redis_url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    results: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in (tmp_path / "jobs").glob("*/*__*/result.json")
    ]
    assert len(results) == len(TASKS), done.stdout + done.stderr
    rewards = {result["task_name"]: (result["verifier_result"] or {}).get("rewards") for result in results}
    exceptions = [result["exception_info"] for result in results]
    assert set(map(str, rewards.values())) == {str({"reward": reward})}, (rewards, exceptions, done.stdout)
