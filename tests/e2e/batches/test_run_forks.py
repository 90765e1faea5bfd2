"""Forks of a run on a real pool: the files are those of the shared steps, and the model is asked only for the rest."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.batches.test_durable_runs import serving, wait_ended
from tests.model_server.running import ModelServer, running_model_server
from tests.support.stack.stack import Stack
from toolcrew.contract.run_spec import RunBody
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.run_records import DurableRun

pytestmark = pytest.mark.stack

STEPS = ["echo one >> log; export COLOUR=blue", "echo two >> log", 'cat log; echo "it is $COLOUR"']


def call(step: int) -> dict[str, Any]:
    reply = {"calls": [{"name": "bash_tool", "arguments": {"command": STEPS[step]}}]}
    return {"kind": "rule", "when": {"conversation": "tree", "step": step}, "reply": reply}


SCRIPT = [*map(call, range(3)), {"kind": "rule", "when": {"step": 3}, "reply": {"text": "done"}}]


@pytest.fixture
def server(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    with running_model_server(SCRIPT) as server:
        variables = {"TOOLCREW_REDIS_URL": stack.redis_url, "TOOLCREW_TRACES": str(tmp_path), **server.environment()}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield server


async def observations(client: ToolClient, run: DurableRun) -> list[str]:
    messages = await client.runs.transcript(run.id)
    return [str(message["content"]) for message in messages if message["role"] == "tool"]


async def work(server: ModelServer) -> None:
    async with serving() as client:
        run = await client.runs.start(RunBody(instruction="[item tree] act", keep_states=True))
        parent = await wait_ended(client, run.id)
        assert parent.end is not None
        assert parent.end.steps == 4
        assert "one\ntwo\nit is blue" in (await observations(client, parent))[2]
        requests = server.stats()["requests"]

        forks = await client.runs.fork(run.id, step=1, n=2)
        (later,) = await client.runs.fork(run.id, step=2)
        for fork, steps in [*((fork.id, 1) for fork in forks), (later.id, 2)]:
            found = await wait_ended(client, fork)
            assert found.end is not None, found
            assert (found.end.answer, found.end.steps, found.end.failure) == ("done", 4, None)
            observed = await observations(client, found)
            assert observed[:steps] == (await observations(client, parent))[:steps]
            # The file has the line of each step once, and the shell has its variable.
            assert "one\ntwo\nit is blue" in observed[2]
            assert found.end.usage.prompt_tokens < parent.end.usage.prompt_tokens
        assert server.stats()["requests"] - requests == 2 * 3 + 2
        page = await client.sessions()
        for session in page.sessions:
            await (await client.session(session.id)).close()


def test_forks_of_a_run_continue_with_the_files_and_messages_of_their_step(server: ModelServer) -> None:
    asyncio.run(work(server))
