"""Tokens of replies that end early: a request that was sent counts, whatever becomes of its reply."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from tests.runs.test_model_runs import build_models
from tests.support.models.model_endpoint import END, HELLO, ROLE, answer, serving, stream
from tests.support.records.builders import KEY
from tests.support.records.fakes import StreamModel
from tests.support.runs.item_harness import HarnessFactory, build_run
from tests.support.stack.waiting import wait_until_async
from toolcrew.contract.errors import ModelUnavailable, ToolFailure
from toolcrew.contract.model_endpoints import Prices
from toolcrew.contract.tenancy import Budgets, TenantPolicy
from toolcrew.orchestrator.dialects.model import Chunk, Model, ModelRequest
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.runs.journal import MemoryJournal
from toolcrew.orchestrator.runs.model_account import ModelAccount, ReplyBill
from toolcrew.orchestrator.runs.run_gate import UngatedRun
from toolcrew.orchestrator.runs.run_model import RunModel
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.usage import ReplySpending, UsageStore, sum_rows

pytestmark = pytest.mark.usefixtures("quiet_logs")

PRICES = Prices(1_000_000.0, 2_000_000.0)
LONG = ModelRequest([{"role": "user", "content": "x" * 39_993}])
PROMPT_TOKENS = 10_000
USAGE = {"choices": [], "usage": {"prompt_tokens": 7000, "completion_tokens": 3}}


async def used(client: "redis.asyncio.Redis", tenant: str = "acme") -> dict[str, int]:
    now = (await client.time())[0]
    rows = await UsageStore(client, "d").read(tenant, now - 86_400, now + 1)
    sums = sum_rows(rows)
    return {name: sums[name] for name in ("prompt_tokens", "completion_tokens")}


def build_account(client: "redis.asyncio.Redis") -> ModelAccount:
    usage, tenants = UsageStore(client, "d"), RedisTenants(client, "d", KEY)
    return ModelAccount(
        lambda: tenants.check_budgets("acme"),
        lambda spending: usage.count_reply("acme", "s1", spending),
        PRICES,
    )


def bill(client: "redis.asyncio.Redis", model: Model) -> RunModel:
    account = build_account(client)
    return RunModel(model, account, MemoryJournal(account.count), UngatedRun(), {})


async def ask(model: Model, request: ModelRequest = LONG) -> list[Chunk]:
    return [chunk async for chunk in model.stream(request)]


async def reply_then_hang(request: ModelRequest) -> AsyncIterator[Chunk]:
    if request.before_send is not None:
        await request.before_send()
    yield HELLO
    await asyncio.Event().wait()


async def hang(request: ModelRequest) -> AsyncIterator[Chunk]:
    if request.before_send is not None:
        await request.before_send()
    await asyncio.Event().wait()
    yield HELLO


async def wait_for_permission(request: ModelRequest) -> AsyncIterator[Chunk]:
    await asyncio.Event().wait()
    yield HELLO


@pytest.mark.parametrize(
    ("model", "prompt_tokens", "completion_tokens"),
    [(reply_then_hang, PROMPT_TOKENS, 1), (hang, PROMPT_TOKENS, 0), (wait_for_permission, 0, 0)],
    ids=["after the first chunk", "before the first chunk", "before it was sent"],
)
async def test_cancelled_reply_counts_what_was_sent(
    client: "redis.asyncio.Redis", model: Any, prompt_tokens: int, completion_tokens: int
) -> None:
    begun = asyncio.Event()

    async def watched(request: ModelRequest) -> AsyncIterator[Chunk]:
        begun.set()
        async for chunk in model(request):
            yield chunk

    asking = asyncio.create_task(ask(bill(client, StreamModel(watched))))
    await begun.wait()
    if prompt_tokens:
        await wait_until_async(lambda: used(client), 30.0, "tokens", accepts=lambda tokens: tokens["prompt_tokens"] > 0)
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await used(client) == {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}


async def test_reader_that_leaves_after_the_first_chunk_pays_for_the_request(client: "redis.asyncio.Redis") -> None:
    chunks = bill(client, StreamModel(reply_then_hang)).stream(LONG)
    await anext(chunks)  # type: ignore[arg-type]
    await chunks.aclose()  # type: ignore[attr-defined]
    assert (await used(client))["prompt_tokens"] == PROMPT_TOKENS


async def test_killed_process_leaves_the_estimate_of_its_request(client: "redis.asyncio.Redis") -> None:
    """No code runs after a kill, so the estimate must be stored before the request is sent."""
    sent = asyncio.Event()

    async def record(request: ModelRequest) -> AsyncIterator[Chunk]:
        assert request.before_send is not None
        await request.before_send()
        assert (await used(client))["prompt_tokens"] == PROMPT_TOKENS
        sent.set()
        yield HELLO
        yield USAGE

    await ask(bill(client, StreamModel(record)))
    assert sent.is_set()


async def test_complete_reply_counts_exactly_what_the_server_counted(client: "redis.asyncio.Redis") -> None:
    async with serving([stream(ROLE, HELLO, END, USAGE)]) as server:
        model = OpenAIModel("m", server.url, None, 5.0)
        await ask(bill(client, model))
        await model.aclose()
    assert await used(client) == {"prompt_tokens": 7000, "completion_tokens": 3}


async def test_reply_without_counts_is_counted_by_estimate(client: "redis.asyncio.Redis") -> None:
    async with serving([stream(ROLE, HELLO, END)]) as server:
        model = OpenAIModel("m", server.url, None, 5.0)
        await ask(bill(client, model))
        await model.aclose()
    assert await used(client) == {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1}


@pytest.mark.parametrize("reply", [answer(400, {"error": {"message": "no"}}), answer(503, {}), stream(done=False)])
async def test_request_that_the_server_does_not_answer_costs_nothing(
    client: "redis.asyncio.Redis", reply: bytes
) -> None:
    async with serving([reply]) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        with pytest.raises(ModelUnavailable):
            await ask(bill(client, model))
        await model.aclose()
    assert await used(client) == {"prompt_tokens": 0, "completion_tokens": 0}


async def test_repeated_request_is_reserved_once(client: "redis.asyncio.Redis") -> None:
    async with serving([answer(503, {}), stream(ROLE, HELLO, END)]) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=1)
        await ask(bill(client, model))
        await model.aclose()
    assert (await used(client))["prompt_tokens"] == PROMPT_TOKENS


async def test_counts_during_the_reply_are_sums(client: "redis.asyncio.Redis") -> None:
    reply_bill = ReplyBill(build_account(client), LONG)
    for number in range(1, 4):
        reply_bill.add({**HELLO, "usage": {"prompt_tokens": 10, "completion_tokens": number}})
    spending = reply_bill.remainder()
    assert (spending.usage.prompt_tokens, spending.usage.completion_tokens) == (10, 3)


async def test_requests_at_the_same_time_see_the_reservations_of_each_other(client: "redis.asyncio.Redis") -> None:
    tenants = RedisTenants(client, "d", KEY)
    await tenants.add("acme", TenantPolicy(budgets=Budgets(tokens_per_day=PROMPT_TOKENS)))
    hanging = asyncio.create_task(ask(bill(client, StreamModel(hang))))
    await wait_until_async(lambda: used(client), 30.0, "tokens", accepts=lambda tokens: tokens["prompt_tokens"] > 0)
    with pytest.raises(ToolFailure, match="budget"):
        await ask(bill(client, StreamModel(hang)))
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_correction_counts_in_the_hour_of_its_estimate(client: "redis.asyncio.Redis") -> None:
    usage = UsageStore(client, "d")
    now = (await client.time())[0]
    earlier = now - 7200
    await usage.count_reply("acme", None, ReplySpending(at=earlier, counted=(-1000, 0, 0, 0)))
    await usage.count_reply("acme", None, ReplySpending(at=earlier, counted=(400, 0, 0, 0)))
    rows = await usage.read("acme", now - 86_400, now + 1, "hour")
    assert [(row.start, row.amounts["prompt_tokens"]) for row in rows] == [(earlier - earlier % 3600, 600)]


async def test_cancelled_run_costs_its_request(make: HarnessFactory) -> None:
    harness = make()

    async with serving([stream(ROLE, HELLO, END)]) as server:
        server.gate.clear()
        harness.work.models = build_models(harness.client, openai_base_url=server.url, model="m", model_retries=0)
        claim = await harness.put(build_run(instruction="x" * 40_000))
        running = asyncio.create_task(harness.execute(claim))
        await wait_until_async(lambda: len(server.bodies) == 1, 30.0, "a request")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.gate.set()
    assert (await used(harness.client))["prompt_tokens"] >= PROMPT_TOKENS
