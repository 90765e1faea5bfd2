"""verifiers with sessions of a pool: a grader in a new session gives the reward, and no failure of the infrastructure
becomes one. Needs the real `vf-eval` in PATH.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient

from tests.model_server.running import ModelServer, running_model_server
from tests.support.sandboxd.containers import watch
from tests.support.stack.stack import ROOT, Stack, commands_in, open_stack
from tests.support.stack.waiting import wait_until
from toolcrew.orchestrator.runs.grading import TRIES

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

START_S = 400
"""vf-eval takes 20 s of processor time to start."""
PASSING_GRADER = {"command": '[ "$(cat "$ARTIFACTS/answer")" = right ]', "artifacts": ["answer"], "timeout_s": 60}
SCORING_GRADER = {"command": 'echo \'{"reward": 0.5, "lines": 1}\' > r', "reward_file": "r", "timeout_s": 60}


@pytest.fixture(scope="module")
def pool(engine: APIClient) -> Iterator[Stack]:
    if shutil.which("vf-eval") is None:
        pytest.skip("verifiers is not installed: it needs an environment of its own")
    with open_stack(engine) as opened:
        yield opened


def rule(command: str, **when: Any) -> dict[str, Any]:
    call = {"name": "bash_tool", "arguments": {"command": command}}
    return {"kind": "rule", "when": {"step": 0, **when}, "reply": {"calls": [call]}}


@contextmanager
def running_eval(
    stack: Stack, server: ModelServer, folder: Path, graders: dict[str, dict[str, Any]], *options: str
) -> Iterator["subprocess.Popen[str]"]:
    """Run an evaluation with a task for each grader, whose name is the item of the model's script."""
    lines = [{"id": name, "instruction": f"[item {name}] act", "grader": grader} for name, grader in graders.items()]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    client = ["--client.base-url", server.url, "--client.api-key-var", "NO_KEY", "-m", "played"]
    output = ["-o", str(folder / "out"), "--run.dir", "run", "--no-push", "--no-rich"]
    taskset = ["verifiers_tasks", "--env.taskset.file", str(folder / "tasks.jsonl")]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "HOME": str(folder)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["vf-eval", *taskset, *client, *output, *options],
            env={**os.environ, **paths, "TOOLCREW_REDIS_URL": stack.redis_url},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def read_traces(folder: Path, process: "subprocess.Popen[str]") -> dict[str, dict[str, Any]]:
    """Wait for the end of the evaluation, and return the trace of each task."""
    assert process.wait(START_S) == 0, (folder / "log").read_text()
    episodes = [json.loads(line) for line in (folder / "out/run/traces.jsonl").read_text().splitlines()]
    return {trace["task"]["data"]["id"]: trace for episode in episodes for trace in episode["traces"]}


def test_only_a_completed_grader_gives_a_reward(pool: Stack, tmp_path: Path) -> None:
    """The sandbox of one agent is lost while its call runs, and so are all sandboxes of one grader."""
    agent_sleeps, grader_sleeps = "sleep 177.125", "sleep 178.125"
    script = [
        {"kind": "fault", "when": {"conversation": "denied"}, "fault": {"kind": "status", "status": 401}},
        rule(agent_sleeps, conversation="agent-lost"),
        rule("printf '%s' {{item}} > answer"),
        {"kind": "rule", "reply": {"text": "done"}},
    ]
    graders = {
        "right": PASSING_GRADER,
        "wrong": PASSING_GRADER,
        "scored": SCORING_GRADER,
        "broken": {**PASSING_GRADER, "command": "kill -9 $$"},
        "denied": PASSING_GRADER,
        "agent-lost": PASSING_GRADER,
        "grader-lost": {**PASSING_GRADER, "command": grader_sleeps, "timeout_s": 300},
    }
    with running_model_server(script) as server, running_eval(pool, server, tmp_path, graders) as process:
        for command in (agent_sleeps, *[grader_sleeps] * TRIES):
            end_sandbox_of(pool, command)
        traces = read_traces(tmp_path, process)
    rewards = {name: trace["rewards"]["graded"]["score"] for name, trace in traces.items() if trace["rewards"]}
    assert rewards == {"right": 1.0, "wrong": 0.0, "scored": 0.5}
    assert {name for name, trace in traces.items() if trace["ok"]} == rewards.keys()
    errors = {name: [error["type"] for error in traces[name]["errors"]] for name in graders.keys() - rewards.keys()}
    assert errors == {
        "broken": ["TaskError"],
        "denied": ["ProviderError"],
        "agent-lost": ["SandboxError"],
        "grader-lost": ["SandboxError"],
    }
    assert traces["scored"]["metrics"]["lines"] == 1
    # The trace has the whole conversation: the request, the call, its result and the answer.
    roles = [node["message"]["role"] for node in traces["right"]["nodes"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_a_verifiers_limit_ends_the_agent_and_its_work_is_graded(pool: Stack, tmp_path: Path) -> None:
    with (
        running_model_server([rule("printf right > answer")]) as server,
        running_eval(pool, server, tmp_path, {"right": PASSING_GRADER}, "--env.agent.max-turns", "1") as process,
    ):
        trace = read_traces(tmp_path, process)["right"]
    assert (trace["ok"], trace["stop_condition"], trace["rewards"]["graded"]["score"]) == (True, "max_turns", 1.0)


def end_sandbox_of(stack: Stack, command: str) -> None:
    """Wait until a sandbox runs the command, and end the sandbox."""
    found = list[str]()

    def is_running() -> bool:
        found[:] = [
            container
            for container in stack.footprint.containers()
            if any(command in line for line in commands_in(stack.full_id(container)).values())
        ]
        return bool(found)

    wait_until(is_running, START_S, f"{command} runs", pause_s=0.5)
    watch(stack.api, found[0]).end()
