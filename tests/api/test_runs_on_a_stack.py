"""Runs, approvals, batches and switches over HTTP on real orchestrators, workers and sandboxes, and an API that dies
during these operations.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.stack.api_stack import STEPS, ApiStack, read_events, read_until, start_run
from tests.support.stack.stack import ROOT
from tests.support.stack.waiting import SOON_S, wait_until_async

pytestmark = pytest.mark.stack

SHELL_EXAMPLES = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)


async def wait_for_state(client: httpx.AsyncClient, run: str, *states: str) -> dict[str, Any]:
    """Return the run as soon as it has one of these states."""
    return await read_until(client, f"/v1/runs/{run}", "state", *states)


async def test_a_run_event_stream_continues_on_another_replica(api_stack: ApiStack) -> None:
    async with api_stack.client() as client, api_stack.client(replica=1) as other:
        run = await start_run(client, "steps")
        path = f"/v1/runs/{run}/events"
        first = await read_events(client, path, most=5)
        second = await read_events(other, path, last=first[-1]["id"], most=7)
        third = await read_events(client, path, last=second[-1]["id"])
        whole = await read_events(other, path)
        assert [event["id"] for event in first + second + third] == [event["id"] for event in whole]
        assert first + second + third == whole
        assert whole[-1]["event"] == "RunEnded"
        assert len([event for event in whole if event["event"] == "CallFinished"]) == STEPS
        reply = (await client.get(f"/v1/runs/{run}")).json()
        assert (reply["state"], reply["answer"]) == ("succeeded", f"{STEPS} steps")
        messages = (await other.get(f"/v1/runs/{run}/transcript")).json()["messages"]
        assert len([message for message in messages if message["role"] == "tool"]) == STEPS
        assert run in [one["id"] for one in (await other.get("/v1/runs", params={"state": "succeeded"})).json()["data"]]


async def test_a_run_is_cancelled_from_any_replica(api_stack: ApiStack) -> None:
    async with api_stack.client() as client, api_stack.client("operator", replica=1) as operator:
        run = await start_run(client, "sleeps")
        await read_events(client, f"/v1/runs/{run}/events", most=4)
        await wait_for_state(client, run, "running")
        assert (await operator.post(f"/v1/runs/{run}/cancel", params={"tenant": "acme"})).status_code == 200
        assert (await wait_for_state(client, run, "cancelled"))["ended_at"] is not None
        entries = (await operator.get("/v1/audit", params={"action": "run.cancel", "target": run})).json()["data"]
        assert [(entry["actor"]["name"], entry["tenant"]) for entry in entries] == [("operator", "acme")]


async def test_forks_of_a_run_repeat_no_step_and_belong_to_its_tenant(api_stack: ApiStack) -> None:
    async with api_stack.client() as client, api_stack.client("rival", replica=1) as other:
        run = await start_run(client, "steps", keep_states=True)
        assert (await wait_for_state(client, run, "succeeded"))["answer"] == f"{STEPS} steps"
        path, key = f"/v1/runs/{run}/fork", {"Idempotency-Key": "forks"}
        reply = await client.post(path, json={"step": 2, "n": 2}, headers=key)
        assert reply.status_code == 202, reply.text
        forks = [fork["id"] for fork in reply.json()["runs"]]
        again = await client.post(path, json={"step": 2, "n": 2}, headers=key)
        assert [fork["id"] for fork in again.json()["runs"]] == forks
        for fork in forks:
            ended = await wait_for_state(client, fork, "succeeded")
            # The file of the steps has only the lines of the shared steps and of the fork's own.
            assert (ended["answer"], ended["forked_from"]) == (f"{STEPS} steps", {"run": run, "step": 2})
        refusals = [
            await client.post(path, json={"step": 9, "n": 1}),
            await other.post(path, json={"step": 2, "n": 1}),
            await client.post(f"/v1/runs/{forks[0]}x/fork", json={"step": 2, "n": 1}),
        ]
        assert [refusal.status_code for refusal in refusals] == [422, 404, 404]


@asynccontextmanager
async def start_asking_run(client: httpx.AsyncClient) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield a run that waits for approval, and its question."""
    run = await start_run(client, "asks")

    async def find_questions() -> list[dict[str, Any]]:
        return [one for one in (await client.get("/v1/approvals")).json()["data"] if one["run"] == run]

    yield run, (await wait_until_async(find_questions, SOON_S, "the run asks"))[0]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"decision": "allow"}, "observed: "),
        ({"decision": "modify", "arguments": {"command": "echo instead"}}, "instead"),
        ({"decision": "reject", "reason": "not on a Sunday"}, "not on a Sunday"),
    ],
    ids=["allowed", "modified", "rejected"],
)
async def test_a_call_that_needs_approval_is_decided_over_http(
    api_stack: ApiStack, answer: dict[str, Any], expected: str
) -> None:
    async with api_stack.client() as client, api_stack.client(replica=1) as other:
        async with start_asking_run(client) as (run, question):
            assert (question["command"], question["tool"]) == ("rm -rf /srv/build", "bash_tool")
            assert question["warning"]
            path = f"/v1/approvals/{question['id']}"
            assert (await other.post(path, json={**answer, "digest": "f" * 64})).status_code == 409
            decided = await other.post(path, json={**answer, "digest": question["digest"]})
            assert (decided.status_code, decided.json()["is_allowed"]) == (200, answer["decision"] != "reject")
            assert (await client.post(path, json={**answer, "digest": question["digest"]})).status_code == 409
        assert expected in (await wait_for_state(client, run, "succeeded"))["answer"]


async def test_s2_26_a_tool_disabled_over_http_cannot_be_called_by_an_agent_while_others_can(
    api_stack: ApiStack,
) -> None:
    async with api_stack.client("operator") as operator, api_stack.client(replica=1) as client:
        off = await operator.patch(
            "/v1/tools/glob_tool", json={"enabled": False, "reason": "it is being repaired", "tenant": "acme"}
        )
        assert (off.status_code, off.json()["state"]) == (200, "disabled")
        try:
            # Another replica learns of the change within two seconds.
            await read_until(client, "/v1/tools/glob_tool", "state", "disabled")
            run = await start_run(client, "globs")
            result = await wait_for_state(client, run, "succeeded")
            messages = (await client.get(f"/v1/runs/{run}/transcript")).json()["messages"]
            assert "it is being repaired" in str(messages)
            assert result["answer"].startswith("observed: still here")
            listed = {tool["name"]: tool for tool in (await client.get("/v1/tools")).json()["data"]}
            assert (listed["glob_tool"]["state"], listed["bash_tool"]["state"]) == ("disabled", "enabled")
            assert all(tool["description"] for tool in listed.values())
        finally:
            await operator.patch("/v1/tools/glob_tool", json={"enabled": True, "tenant": "acme"})


async def test_a_batch_is_executed_and_its_rows_are_read(api_stack: ApiStack) -> None:
    lines = "".join(f'{{"id": "line-{number}", "instruction": "[item hello] {number}"}}\n' for number in range(5))
    async with api_stack.client() as client, api_stack.client(replica=1) as other:
        submitted = await client.post("/v1/batches", content=lines, headers={"Content-Type": "application/jsonl"})
        assert submitted.status_code == 201, submitted.text
        path = submitted.headers["location"]
        reply = await read_until(other, path, "status", "completed")
        assert reply["request_counts"]["completed"] == 5
        rows = (await other.get(f"{path}/results")).text.splitlines()
        assert sorted(re.findall(r'"custom_id": ?"(line-\d)"', "".join(rows))) == [
            f"line-{number}" for number in range(5)
        ]


async def test_runs_of_a_killed_api_continue_on_another_and_no_call_runs_twice(api_stack: ApiStack) -> None:
    async with api_stack.client() as client:
        runs: list[str] = []
        with api_stack.open_api() as dying:
            async with asyncio.timeout(SOON_S):
                # Any of the three processes may take a run. The test starts runs until the process to kill has taken one.
                while not any(f'"run":"{run}"' in dying.log() for run in runs[-1:]):
                    runs.append(await start_run(client, "steps"))
                    await read_events(client, f"/v1/runs/{runs[-1]}/events", most=4)
            dying.kill()
        for run in runs:
            events = await read_events(client, f"/v1/runs/{run}/events")
            reply = (await client.get(f"/v1/runs/{run}")).json()
            assert (reply["state"], reply["answer"]) == ("succeeded", f"{STEPS} steps"), (reply, events)
            assert [event["event"] for event in events].count("RunEnded") == 1
        assert (await client.get(f"/v1/runs/{runs[-1]}")).json()["attempt"] >= 1


def run_shell(api_stack: ApiStack, *lines: str, url: str = "") -> "subprocess.CompletedProcess[str]":
    """Run shell lines with the variables and functions of docs/api.md."""
    environment = {"API": url or api_stack.apis[1].url, "KEY": api_stack.keys["admin"]}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join((SHELL_EXAMPLES[0], *lines))],
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )


def test_the_shell_functions_of_the_docs_show_the_explanation_of_an_error(api_stack: ApiStack) -> None:
    for line in ('ask "$API/v1/runs/nope"', 'RUN=$(ask "$API/v1/runs/nope" | field id)'):
        done = run_shell(api_stack, line)
        assert done.returncode != 0
        assert "run nope was not found" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    done = run_shell(api_stack, 'ask "$API/v1/runs" | field id', url="http://127.0.0.1:1")
    assert (done.returncode != 0, "Traceback" in done.stderr) == (True, False)


def test_the_commands_in_docs_api_md_work(api_stack: ApiStack) -> None:
    assert len(SHELL_EXAMPLES) >= 6
    done = run_shell(api_stack, *SHELL_EXAMPLES[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hello" in done.stdout
    assert "event: RunEnded" in done.stdout
    assert "1,2" in done.stdout
    assert '"name":"table.csv"' in done.stdout.replace(": ", ":")


async def test_a_run_or_batch_that_asks_for_more_than_its_tenant_has_is_refused_at_once(api_stack: ApiStack) -> None:
    line = '{"id": "a", "tool": "bash_tool", "arguments": {"command": "true"}, "timeout_s": 5000}\n'
    async with api_stack.client() as client:
        for body, field in (
            ({"image": "no.example/image:1"}, "`image`"),
            ({"cpus": 4096}, "`cpus`"),
            ({"tool_timeout_s": 5000}, "`limits.tool_timeout_s`"),
            ({"secrets": ["NO_SUCH"]}, "`secrets`"),
        ):
            answer = await client.post("/v1/runs", json={"instruction": "steps", **body})
            assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_ARGUMENTS"), answer.text
            assert field in answer.json()["detail"]
        refused = await client.post("/v1/batches", content=line)
        assert (refused.status_code, "line 1: `timeout_s`" in refused.json()["detail"]) == (422, True), refused.text
