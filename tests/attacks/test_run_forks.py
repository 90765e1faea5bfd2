"""A tenant tries to fork another tenant's run, by every way in, and to make more runs than it may."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from docker import APIClient

from tests.support.stack.api_stack import ApiStack, open_api_stack, read_events, start_run
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.run_spec import ItemEnvironment
from toolcrew.contract.run_views import DurableRunState
from toolcrew.contract.session_locations import MAX_FORKS
from toolcrew.orchestrator.runs.tenant_limits import LimitReader
from toolcrew.orchestrator.sdk.client import ToolClient

pytestmark = pytest.mark.stack

LATE_STEP = 2
"""A step of which the run of the script has a state."""


@dataclass
class Victim:
    """A run of acme with states, and the session of one of them."""

    stack: ApiStack
    run: str
    state: str

    async def snapshot(self) -> list[Any]:
        """Return the runs and the sessions of every tenant."""
        found: list[Any] = []
        for name in ("acme", "rival"):
            async with self.stack.client(name) as client:
                for path in ("/v1/runs", "/v1/sessions"):
                    rows = (await client.get(path, params={"limit": 200})).json()["data"]
                    found.append(sorted(str(row["id"]) for row in rows))
        return found


@pytest.fixture(scope="module")
def victim(engine: APIClient) -> Iterator[Victim]:
    with open_api_stack(engine) as stack:
        yield asyncio.run(_run_to_end(stack))


async def _run_to_end(stack: ApiStack) -> Victim:
    async with stack.client() as client:
        run = await start_run(client, "steps", keep_states=True)
        await read_events(client, f"/v1/runs/{run}/events")
        (state, *_) = (await client.get("/v1/sessions")).json()["data"]
        return Victim(stack, run, str(state["id"]))


@pytest.fixture
async def unchanged(victim: Victim) -> AsyncIterator[None]:
    """Check that an attack creates nothing."""
    before = await victim.snapshot()
    assert before[0]
    yield
    assert await victim.snapshot() == before


def refusal(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, str(reply.json()["code"])


@pytest.mark.usefixtures("unchanged")
async def test_a_run_of_another_tenant_cannot_be_forked_over_http(victim: Victim) -> None:
    """Aim: the messages and the files of another tenant. The answer is that for a run that does not exist."""
    unknown, body = "0" * len(victim.run), {"step": LATE_STEP, "n": 1}
    async with victim.stack.client("rival") as rival:
        replies = [await rival.post(f"/v1/runs/{run}/fork", json=body) for run in (victim.run, unknown)]
        assert [refusal(reply) for reply in replies] == [(404, "NOT_FOUND")] * 2
        assert replies[0].text.replace(victim.run, unknown) == replies[1].text
        named = await rival.post(f"/v1/runs/{victim.run}/fork", json=body, params={"tenant": "acme"})
        assert refusal(named) == (403, "PERMISSION_DENIED")
    async with httpx.AsyncClient(base_url=victim.stack.apis[0].url) as anonymous:
        for headers in ({}, {"Authorization": "Bearer tc_forged"}):
            reply = await anonymous.post(f"/v1/runs/{victim.run}/fork", json=body, headers=headers)
            assert refusal(reply) == (401, "UNAUTHENTICATED")


@pytest.mark.usefixtures("unchanged")
async def test_the_stored_state_of_another_tenants_run_cannot_be_used(victim: Victim) -> None:
    """Aim: the session from which the forks of the run begin."""
    async with victim.stack.client("rival") as rival:
        for path, body in (
            (f"/v1/sessions/{victim.state}/fork", {"n": 1}),
            ("/v1/runs", {"instruction": "go", "session": victim.state}),
        ):
            assert refusal(await rival.post(path, json=body)) == (404, "SESSION_NOT_FOUND")


async def test_a_run_in_a_fork_of_another_tenants_state_fails(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aim: the same, with a run of the attacker's own, which is queued before its session is found. The check before
    that is the attacker's own process.
    """
    before = await victim.snapshot()
    async with rival_client(victim) as client:
        with pytest.raises(ToolFailure, match="no open session"):
            await client.runs.start("[item steps] go", environment=ItemEnvironment(fork=victim.state))
    monkeypatch.setattr(LimitReader, "check_run", _accept_run)
    async with rival_client(victim) as client:
        run = await client.runs.start("[item steps] go", environment=ItemEnvironment(fork=victim.state))
        events = [text async for _, text in client.runs.follow(run.id)]
        ended = await client.runs.get(run.id)
    assert ended.state is DurableRunState.FAILED
    assert not [text for text in events if '"CallFinished"' in text]
    (acme_runs, acme_sessions, rival_runs, rival_sessions) = await victim.snapshot()
    assert [acme_runs, acme_sessions, rival_sessions] == [before[0], before[1], before[3]]
    assert set(rival_runs) - set(before[2]) == {run.id}


async def _accept_run(*_: object) -> None:
    """Replace the check of a run by none."""


def rival_client(victim: Victim, **options: Any) -> "contextlib.AbstractAsyncContextManager[ToolClient]":
    return ToolClient.connect(victim.stack.stack.redis_url, api_key=victim.stack.keys["rival"], **options)


@pytest.mark.usefixtures("unchanged")
async def test_a_run_of_another_tenant_cannot_be_forked_with_the_sdk(victim: Victim) -> None:
    """Aim: the same, from a program that reaches Redis."""
    unknown, messages = "0" * len(victim.run), list[str]()
    async with rival_client(victim) as client:
        for run in (victim.run, unknown):
            with pytest.raises(ToolFailure) as refused:
                await client.runs.fork(run, step=LATE_STEP, idempotency_key="forks")
            assert refused.value.code is ErrorCode.FILE_NOT_FOUND
            messages.append(refused.value.message.replace(run, unknown))
    assert len(set(messages)) == 1
    with pytest.raises(ToolFailure) as refused:
        async with rival_client(victim, tenant="acme") as client:
            await client.runs.fork(victim.run, step=LATE_STEP)
    assert refused.value.code is ErrorCode.PERMISSION_DENIED


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "name", ["{run}x", "acme.{run}", "acme:{run}", "../acme/runs/{run}", "*", "{run}%00", "..%2f{run}", "x" * 65, "é"]
)
async def test_a_similar_run_id_forks_no_run(victim: Victim, name: str) -> None:
    """Aim: lead the key of a record elsewhere."""
    run = name.format(run=victim.run)
    for tenant in ("acme", "rival"):
        async with victim.stack.client(tenant) as client:
            reply = await client.post(f"/v1/runs/{run}/fork", json={"step": LATE_STEP, "n": 1})
            assert refusal(reply) in ((404, "NOT_FOUND"), (422, "INVALID_ARGUMENTS"))
        async with ToolClient.connect(victim.stack.stack.redis_url, api_key=victim.stack.keys[tenant]) as sdk:
            with pytest.raises(ToolFailure) as refused:
                await sdk.runs.fork(run, step=LATE_STEP)
            assert refused.value.code is ErrorCode.FILE_NOT_FOUND


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "body",
    [
        *({"step": step, "n": 1} for step in (-1, 99, 10**30, 2.5, "two", None, [2])),
        *({"step": LATE_STEP, "n": n} for n in (0, -1, MAX_FORKS + 1, 10**9, 1.5, None)),
        {"n": 1},
        {"step": LATE_STEP, "n": 1, "tenant": "rival"},
        {"step": LATE_STEP, "session": "x"},
    ],
    ids=str,
)
async def test_forks_with_invalid_steps_or_counts_are_refused(victim: Victim, body: dict[str, Any]) -> None:
    """Aim: a state that does not exist, or load without a limit."""
    async with victim.stack.client() as client:
        reply = await client.post(f"/v1/runs/{victim.run}/fork", json=body)
        assert refusal(reply) == (422, "INVALID_ARGUMENTS")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("step", "n"), [(-1, 1), (99, 1), (10**30, 1), (LATE_STEP, 0), (LATE_STEP, MAX_FORKS + 1)])
async def test_forks_with_invalid_steps_or_counts_are_refused_by_the_sdk(victim: Victim, step: int, n: int) -> None:
    """Aim: the same, past the checks of the API."""
    async with ToolClient.connect(victim.stack.stack.redis_url, api_key=victim.stack.keys["acme"]) as client:
        with pytest.raises(ToolFailure) as refused:
            await client.runs.fork(victim.run, step=step, n=n)
        assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
