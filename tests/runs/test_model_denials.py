"""Denials of a model server: only a server that denies requests without a tenant's content stops other runs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.runs.test_model_runs import build_models
from tests.runs.test_run_runner import FailingWorker
from tests.support.models.model_endpoint import END, HELLO, ROLE, Answer, Server, answer, serving, stream
from tests.support.runs.item_harness import HarnessFactory, build_run
from tests.support.runs.runner_harness import BATCH, RunnerHarness
from tests.support.stack.waiting import wait_until_async
from toolcrew.contract.errors import ModelDenied, ModelRefused, ModelUnavailable
from toolcrew.contract.run_events import FailureKind
from toolcrew.orchestrator.dialects.model import ModelRequest
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.runs import runner as runner_module
from toolcrew.orchestrator.runs.outcomes import MODEL_REFUSED
from toolcrew.orchestrator.runs.runner import MAX_DENIALS
from toolcrew.store.batches import BatchState

OK = stream(ROLE, HELLO, END)
FLAGGED = "a flagged text"


def deny(status: int, otherwise: bytes = OK, *, error: Any = None) -> Answer:
    """Return a server that denies requests with a flagged text."""

    def reply(_: int, body: dict[str, Any]) -> bytes:
        is_flagged = any(FLAGGED in str(message["content"]) for message in body["messages"])
        return answer(status, error or {"error": {"message": "flagged by moderation"}}) if is_flagged else otherwise

    return reply


async def ask(server: Server, text: str = FLAGGED, *, streaming: bool = True) -> None:
    model = OpenAIModel("m", server.url, "sk-secret", 5.0, retries=0, streaming=streaming)
    try:
        [_ async for _ in model.stream(ModelRequest([{"role": "user", "content": text}]))]
    finally:
        await model.aclose()


WHOLE = answer(200, {"choices": [{"message": {"content": "ok"}}]})


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("status", [401, 402, 403, 404])
async def test_denial_of_one_request_is_a_refusal_of_its_content(status: int, streaming: bool) -> None:
    async with serving(deny(status, OK if streaming else WHOLE)) as server:
        with pytest.raises(ModelRefused, match="flagged by moderation"):
            await ask(server, streaming=streaming)
    assert FLAGGED not in str(server.bodies[1])


async def test_denial_inside_a_reply_is_a_refusal_of_its_content() -> None:
    error = {"error": {"code": 403, "message": "flagged by moderation"}}
    async with serving(deny(200, WHOLE, error=error)) as server:
        with pytest.raises(ModelRefused):
            await ask(server, streaming=False)


@pytest.mark.parametrize("status", [401, 402, 403, 404])
async def test_denial_of_every_request_is_a_denial(status: int) -> None:
    async with serving([answer(status, {"error": {"message": "no"}})]) as server:
        with pytest.raises(ModelDenied):
            await ask(server)
    assert len(server.bodies) == 2


async def test_exhausted_account_is_a_denial() -> None:
    async with serving([answer(429, {"error": {"message": "no", "code": "insufficient_quota"}})]) as server:
        with pytest.raises(ModelDenied):
            await ask(server)


@pytest.mark.parametrize("otherwise", [answer(503, {}), answer(429, {}), b""])
async def test_denial_is_undecided_while_the_server_does_not_answer(otherwise: bytes) -> None:
    async with serving(deny(403, otherwise)) as server:
        with pytest.raises(ModelUnavailable) as caught:
            await ask(server)
    assert not isinstance(caught.value, ModelDenied | ModelRefused)


async def test_a_request_that_the_server_cannot_process_shows_that_it_accepts_the_key() -> None:
    async with serving(deny(403, answer(400, {"error": {"message": "max_tokens is too small"}}))) as server:
        with pytest.raises(ModelRefused):
            await ask(server)


async def test_requests_that_are_denied_together_share_one_probe() -> None:
    async with serving([answer(401, {})]) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        server.gate.clear()
        asking = [asyncio.ensure_future(anext(model.stream(ModelRequest([])))) for _ in range(8)]  # type: ignore[arg-type]
        await wait_until_async(lambda: len(server.bodies) == 8, 30.0, "eight requests")
        server.gate.set()
        assert {type(error) for error in await asyncio.gather(*asking, return_exceptions=True)} == {ModelDenied}
        await model.aclose()
    assert len(server.bodies) < 16


async def test_flagged_run_fails_and_stops_no_other_run(make: HarnessFactory) -> None:
    harness = make()
    async with serving(deny(403)) as server:
        harness.work.models = build_models(harness.client, openai_base_url=server.url, model="m", model_retries=0)
        flagged = await harness.execute(await harness.put(build_run(instruction=FLAGGED)))
    assert flagged.failure is not None
    assert (flagged.failure.kind, flagged.failure.code) == (FailureKind.MODEL, MODEL_REFUSED)


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunnerHarness]:
    monkeypatch.setattr(runner_module, "CHECK_INTERVAL_S", 0.02)
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        with capture_logs():
            yield RunnerHarness(client)


async def stop_by_denial(harness: RunnerHarness) -> None:
    runner = replace(harness.runner(FailingWorker(ModelDenied("no"))), only=None)
    async with harness.working(runner) as (task,):
        with pytest.raises(ModelDenied):
            await task


async def test_run_that_stops_one_process_after_another_fails(harness: RunnerHarness) -> None:
    await harness.submit(1)
    for _ in range(MAX_DENIALS):
        await stop_by_denial(harness)
        assert (await harness.queue.batches.get(*BATCH)).state is BatchState.IN_PROGRESS
    await stop_by_denial(harness)
    record = await harness.queue.batches.get(*BATCH)
    assert (record.state, sum(record.failed.values())) == (BatchState.COMPLETED, 1)
