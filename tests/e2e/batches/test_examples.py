"""The example batches as the README submits them: on a real pool, solved by their scripts, and checked by their own
checkers.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_server.running import running_model_server
from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.stack import Footprint, Stack

pytestmark = pytest.mark.stack
EXAMPLES = Path(__file__).parents[3] / "examples"
SAMPLE_STEP = 3
"""Every third question is asked once, because each question needs a sandbox. tests/repository/test_example_batches.py runs
the commands of all questions.
"""


def work(stack: Stack, footprint: Footprint, folder: Path, batch: Path, script: Path, *options: str) -> None:
    """Submit a batch and write its rows into `folder`."""
    with running_model_server(script) as server:
        environment = {
            "TOOLCREW_REDIS_URL": stack.redis_url,
            "TOOLCREW_TRACES": str(folder / "traces"),
            "TOOLCREW_APPROVALS": "auto",
            **server.environment(),
        }
        out = str(folder / "out.jsonl")
        done = run_toolcrew(
            footprint, "batches", "submit", str(batch), "--output", out, *options, environment=environment, within_s=250
        )
        stats = server.stats()
    assert done.returncode == 0, done.stderr
    assert (stats["replies_repeated"], stats["refused"]) == (0, 0)


def check(example: str, folder: Path, *arguments: str) -> str:
    """Return the last line that the example's checker prints."""
    argv = [sys.executable, "-B", str(EXAMPLES / example / "check.py"), str(folder / "out.jsonl"), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def submit_questions(stack: Stack, footprint: Footprint, folder: Path, example: Path, prepared: Path) -> None:
    """Submit some of the questions about `prepared / "workspace"`, and check the answers."""
    for name, source in (("batch", example), ("expected", prepared)):
        lines = [json.loads(line) for line in (source / f"{name}.jsonl").read_text().splitlines()][::SAMPLE_STEP]
        if name == "batch":
            lines = [{**line, "workspace": str(prepared / line["workspace"])} for line in lines]
        (folder / f"{name}-asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    work(stack, footprint, folder, folder / "batch-asked.jsonl", example / "script.jsonl")
    assert (
        check(example.name, folder, "--expected", str(folder / "expected-asked.jsonl"))
        == f"{len(lines)} of {len(lines)} right"
    )


def test_the_data_questions_example_is_answered_correctly(stack: Stack, footprint: Footprint, tmp_path: Path) -> None:
    example = EXAMPLES / "data-questions"
    submit_questions(stack, footprint, tmp_path, example, example)


def test_the_repository_questions_example_is_answered_correctly(
    stack: Stack, footprint: Footprint, tmp_path: Path
) -> None:
    example = EXAMPLES / "repository-questions"
    spec = importlib.util.spec_from_file_location("prepare_sources", example / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.prepare(tmp_path)
    submit_questions(stack, footprint, tmp_path, example, tmp_path)


def test_the_fix_the_test_example_returns_repaired_projects(stack: Stack, footprint: Footprint, tmp_path: Path) -> None:
    example, repaired = EXAMPLES / "fix-the-test", tmp_path / "repaired"
    work(stack, footprint, tmp_path, example / "batch.jsonl", example / "script.jsonl", "--artifacts", str(repaired))
    assert check("fix-the-test", tmp_path, "--artifacts", str(repaired)) == "5 of 5 right"
    # The submitted projects are unchanged: each project still fails.
    argv = [sys.executable, "-B", "-m", "unittest"]
    unrepaired = subprocess.run(
        argv, cwd=example / "projects" / "roman", capture_output=True, text=True, timeout=60, check=False
    )
    assert "FAILED (failures=1)" in unrepaired.stderr
