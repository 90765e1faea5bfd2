"""Inspect's tools that keep a server in the sandbox, in evaluations with Inspect's mock model on a real pool."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessageTool, ModelOutput, ModelUsage, get_model
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import bash_session, text_editor
from inspect_ai.util import (
    ExecCompleted,
    ExecRemoteStreamingOptions,
    ExecStdout,
    SandboxEnvironmentSpec,
    sandbox,
)

from tests.support.stack.stack import Stack, open_stack
from toolcrew.orchestrator.adapters.inspect_config import ToolcrewSandboxConfig

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(os.geteuid() != 0, reason="root inside needs the OCI start, which needs root"),
]
CONFIGS = {
    "root": ToolcrewSandboxConfig(user="root"),
    "agent": ToolcrewSandboxConfig(user="root", default_user="sandbox"),
    "sandbox": ToolcrewSandboxConfig(),
}
OWNERS = {"root": "0", "agent": "1000", "sandbox": "1000"}


@pytest.fixture(scope="module")
def pool(engine: APIClient) -> Iterator[Stack]:
    classes = {"default": {"largest": {"user": "root"}}}
    with open_stack(engine, {"TOOLCREW_TENANT_CLASSES": json.dumps(classes)}) as opened:
        yield opened


@pytest.fixture(params=CONFIGS)
def kind(pool: Stack, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", pool.redis_url)
    return str(request.param)


async def evaluate(kind: str, folder: Path, *steps: Solver, calls: list[tuple[str, dict[str, Any]]]) -> EvalLog:
    """Run one sample, whose model makes these calls, each in its own reply, and then ends."""
    outputs = [ModelOutput.for_tool_call("mockllm/model", name, arguments) for name, arguments in calls]
    outputs.append(ModelOutput.from_content("mockllm/model", "done"))
    for output in outputs:
        # Without a usage, the mock downloads a tokenizer to count tokens.
        output.usage = ModelUsage()
    task = Task(
        dataset=[Sample(input="-", sandbox=SandboxEnvironmentSpec("toolcrew", CONFIGS[kind]))], solver=list(steps)
    )
    log = (await eval_async(task, get_model("mockllm/model", custom_outputs=outputs), log_dir=str(folder)))[0]
    assert log.status == "success", log.error
    return log


def replies(log: EvalLog) -> list[str]:
    assert log.samples is not None
    messages = [message for message in log.samples[0].messages if isinstance(message, ChatMessageTool)]
    assert [message.error for message in messages] == [None] * len(messages)
    return [message.text for message in messages]


async def test_a_shell_keeps_its_programs_between_calls_and_the_editor_works_as_its_user(
    kind: str, tmp_path: Path
) -> None:
    lines = ["cd /workspace; mark=kept; sleep 300 &", "echo $mark-$UID $(jobs -r | wc -l) $PWD", "echo long; sleep 300"]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("bash_session", {"action": "type_submit", "input": line}) for line in lines
    ]
    path = "/workspace/notes.txt"
    calls += [
        ("bash_session", {"action": "interrupt"}),
        ("bash_session", {"action": "type_submit", "input": "echo $?"}),
        ("text_editor", {"command": "create", "path": path, "file_text": "one\ntwo\n"}),
        ("text_editor", {"command": "str_replace", "path": path, "old_str": "two", "new_str": "three"}),
        ("bash_session", {"action": "type_submit", "input": "stat -c %u notes.txt; paste -sd+ notes.txt"}),
    ]
    tools = use_tools(bash_session(wait_for_output=5), text_editor())
    shown = replies(await evaluate(kind, tmp_path, tools, generate(), calls=calls))
    assert f"kept-{OWNERS[kind]} 1 /workspace" in shown[1]
    assert "long" in shown[2]
    assert "130" in shown[4].split()
    assert shown[7].split()[:2] == [OWNERS[kind], "one+three"]


async def test_a_remote_program_streams_takes_input_and_is_killed(kind: str, tmp_path: Path) -> None:
    facts: dict[str, Any] = {}

    @solver
    def run() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            options = ExecRemoteStreamingOptions(stdin_open=True, poll_interval=0.2)
            process = await sandbox().exec_remote(["sh", "-c", "id -u; read line; echo got $line; exit 3"], options)
            await process.write_stdin("a line\n")
            events = [event async for event in process]
            facts["output"] = "".join(event.data for event in events if isinstance(event, ExecStdout))
            facts["codes"] = [event.exit_code for event in events if isinstance(event, ExecCompleted)]
            server = await sandbox().exec_remote(["sleep", "4242"])
            facts["running"] = (await sandbox().exec(["pgrep", "-f", "^sleep 4242"])).success
            await server.kill()
            facts["killed"] = not (await sandbox().exec(["pgrep", "-f", "^sleep 4242"])).success
            done = await sandbox().exec_remote(["sh", "-c", "echo late; echo bad >&2; exit 4"], stream=False)
            facts["done"] = (done.returncode, done.stdout, done.stderr)
            return state

        return solve

    await evaluate(kind, tmp_path, run(), calls=[])
    assert facts == {
        "output": f"{OWNERS[kind]}\ngot a line\n",
        "codes": [3],
        "running": True,
        "killed": True,
        "done": (4, "late\n", "bad\n"),
    }
