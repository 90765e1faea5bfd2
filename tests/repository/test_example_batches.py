"""The example batches: their expected answers are correct, their scripts solve them, and their checkers distinguish
right from wrong.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.model_server.in_process import TRUST_NOBODY
from tests.model_server.running import ModelServer, running_model_server
from tests.model_server.script import load_script

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA, REPOSITORY, FIX = (EXAMPLES / name for name in ("data-questions", "repository-questions", "fix-the-test"))
MAX_STEPS = 5
"""The default limit of a run."""


def load_module(path: Path) -> ModuleType:
    """Load a script of the examples. Their folders do not have Python names."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}".replace("-", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def build_row(item: str, answer: str) -> dict[str, Any]:
    body = {"run": f"run-{item}", "answer": answer, "stop_reason": "answered", "steps": 2}
    return {
        "id": f"run-{item}",
        "custom_id": item,
        "response": {"status_code": 200, "request_id": f"run-{item}", "body": body},
        "error": None,
    }


def write_rows(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def check(folder: Path, output: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-B", str(folder / "check.py"), str(output), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository questions with their sources, copied from the running Python."""
    folder = tmp_path_factory.mktemp("repository")
    load_module(REPOSITORY / "prepare.py").prepare(folder)
    return folder


@pytest.mark.parametrize("line", read_lines(FIX / "expected.jsonl"), ids=lambda line: str(line["id"]))
def test_exactly_the_named_test_of_a_project_fails(line: dict[str, Any]) -> None:
    project = FIX / "projects" / line["id"]
    assert (project / line["file"]).is_file()
    assert load_module(FIX / "check.py").run_tests(project) == (line["tests"], 1, 0, line["failing"])


@pytest.mark.parametrize("folder", [DATA, REPOSITORY, FIX], ids=lambda folder: folder.name)
def test_items_match_their_expected_answers_and_scripts(folder: Path, prepared: Path) -> None:
    batch = read_lines(folder / "batch.jsonl")
    expected = read_lines((prepared if folder == REPOSITORY else folder) / "expected.jsonl")
    names = [line["id"] for line in batch]
    assert len(set(names)) == len(names)
    assert names == [line["id"] for line in expected]
    assert all(f"[item {line['id']}]" in line["instruction"] for line in batch)
    fields = {name for rule in load_script(folder / "script.jsonl").rules for name in rule.when.conversations or ()}
    assert fields == set(names)


def run_script(server: ModelServer, client: httpx.Client, instruction: str, workspace: Path) -> str:
    """Run the commands of our own script on this machine, in a copy of the workspace."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    for _ in range(MAX_STEPS):
        body = {
            "model": "scripted",
            "messages": messages,
            "tools": [{"type": "function", "function": {"name": "bash_tool"}}],
        }
        reply = client.post(f"{server.url}/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"])
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            process = subprocess.run(
                ["bash", "-c", command], cwd=workspace, capture_output=True, text=True, timeout=60, check=False
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": process.stdout + process.stderr})
    raise AssertionError(f"no answer after {MAX_STEPS} steps")


@pytest.mark.parametrize("folder", [DATA, REPOSITORY], ids=lambda folder: folder.name)
def test_the_script_answers_every_question_and_the_checker_agrees(folder: Path, prepared: Path, tmp_path: Path) -> None:
    prepared_folder = prepared if folder == REPOSITORY else folder
    copy = tmp_path / "workspace"
    shutil.copytree(prepared_folder / "workspace", copy)
    with (
        running_model_server(folder / "script.jsonl") as server,
        httpx.Client(verify=TRUST_NOBODY, timeout=60, trust_env=False) as client,
    ):
        rows = [
            build_row(line["id"], run_script(server, client, line["instruction"], copy))
            for line in read_lines(folder / "batch.jsonl")
        ]
        stats = server.stats()
    process = check(
        folder, write_rows(tmp_path / "out.jsonl", *rows), "--expected", str(prepared_folder / "expected.jsonl")
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1] == f"{len(rows)} of {len(rows)} right"
    assert (stats["replies"], stats["replies_repeated"]) == (2 * len(rows), 0)


def test_the_checker_rejects_unrepaired_projects(tmp_path: Path) -> None:
    rows = [build_row(line["id"], "ANSWER: repaired") for line in read_lines(FIX / "batch.jsonl")]
    process = check(FIX, write_rows(tmp_path / "out.jsonl", *rows), "--artifacts", str(FIX / "projects"))
    assert process.returncode == 1
    assert process.stdout.splitlines()[-1] == "0 of 5 right; 5 wrong"


ANSWERS = {line["id"]: line["answer"] for line in read_lines(DATA / "expected.jsonl")}


def test_the_checker_reports_wrong_missing_duplicate_failed_and_cut_rows(tmp_path: Path) -> None:
    rows = [build_row(name, f"I looked.\nANSWER: {answer}") for name, answer in ANSWERS.items()]
    rows[0] = build_row("nile-largest-year", "ANSWER: 1900")
    rows[1] = build_row("nile-below-700", "I cannot say.")
    rows[2] = {
        **rows[2],
        "response": None,
        "error": {"code": "max_iterations", "message": "stopped\x1b[31m", "kind": "model"},
    }
    del rows[3]
    output = write_rows(tmp_path / "out.jsonl", *rows, rows[-1], build_row("stranger", "ANSWER: 1"))
    with output.open("a") as file:
        file.write('{"id": "run-x", "custom_')

    process = check(DATA, output)

    assert process.returncode == 1
    assert (
        process.stdout.splitlines()[-1]
        == f"{len(ANSWERS) - 5} of {len(ANSWERS)} right; 2 wrong, 1 failed, 1 missing, 1 twice"
    )
    assert "expected '1879', came '1900'" in process.stdout
    assert "max_iterations: stopped" in process.stdout
    assert "\x1b" not in process.stdout
    assert "'stranger' belongs to no item" in process.stdout
    assert "not a row" in process.stdout
