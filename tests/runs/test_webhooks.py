"""Notices of ends: due from the step that ends a run or batch, signed, sent again after a failure, and not lost when
a process dies.
"""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import redis.asyncio
from pydantic import ValidationError

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.run_harness import build_item
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.webhooks import Webhook, WebhookDelivery, sign
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.orchestrator.runs.webhooks import PAUSES_S, WebhookSender
from toolcrew.store.batches import BatchDefaults, BatchRecord, BatchState, ItemOutcome
from toolcrew.store.run_queue import RunQueue
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.webhooks import DueNotices

SOON_S = 20.0
SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
HOOK = Webhook(url="https://hooks.example.org/x", secret=SECRET)


class Receiver:
    """A web worker. `answers`: statuses or errors; the last one repeats."""

    def __init__(self, *answers: int | ErrorCode | Exception) -> None:
        self.answers = list(answers)
        self.sent: list[dict[str, Any]] = []

    async def dispatch(self, request: Request) -> ToolResult:
        self.sent.append(dict(request.call.arguments))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, ErrorCode):
            return ToolResult.failed(request.call, answer, "no")
        return ToolResult(call_id=request.call.id, name=request.call.name, success=True, metadata={"status": answer})


class Harness:
    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.queue = RunQueue(client, "d", KEY)
        self.durable_runs = DurableRuns(client, "d", KEY, RedisTenants(client, "d", KEY))

    def sender(self, receiver: Receiver) -> WebhookSender:
        return WebhookSender(RunQueue(self.client, "d", KEY), cast(Any, receiver))

    async def end_batch(self, webhook: Webhook | None = HOOK) -> None:
        record = BatchRecord(
            state=BatchState.IN_PROGRESS, total=1, sha256="", concurrency=1, defaults=BatchDefaults(), created_at=1.0
        )
        await self.queue.batches.create("acme", "b", record, webhook)
        await self.queue.batches.add("acme", "b", [("b-1", build_item(1))])
        (claim,) = await self.queue.claim(1, ("acme", "b"))
        assert await self.due() == {}
        await self.queue.finish(claim, ItemOutcome(custom_id=claim.record.item.custom_id, run="b-1", status_code=200))

    async def due(self) -> dict[str, float]:
        entries: Any = await self.client.zrange("toolcrew:d:runs:webhooks:acme", 0, -1, withscores=True)
        return {name.decode(): score for name, score in entries}

    async def make_due(self) -> None:
        for name in await self.due():
            await self.client.zadd("toolcrew:d:runs:webhooks:acme", {name: 1.0})
            await self.client.zadd("toolcrew:d:runs:webhook-tenants", {"acme": 1.0})

    async def delivery(self) -> WebhookDelivery | None:
        return (await self.queue.batches.get("acme", "b")).webhook

    async def end_runs(self, tenant: str, count: int) -> list[str]:
        """End runs with webhooks, and return their ids."""
        runs = [
            (await self.durable_runs.start(tenant, RunBody(instruction="x"), webhook=HOOK)).id for _ in range(count)
        ]
        for run in runs:
            await self.durable_runs.cancel(tenant, run)
        return runs


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        yield Harness(client)


async def test_batch_end_is_sent_once_and_signed(harness: Harness) -> None:
    receiver = Receiver(204)
    await harness.end_batch()
    assert list(await harness.due()) == ["batch|b"]
    assert await harness.sender(receiver).send_due() == 1
    assert await harness.sender(receiver).send_due() == 0
    assert await harness.due() == {}
    (sent,) = receiver.sent
    body, headers = json.loads(sent["body"]), sent["headers"]
    assert sent["url"] == HOOK.url
    assert body["type"] == "batch.ended"
    assert body["data"]["id"] == "b"
    assert body["data"]["status"] == "completed"
    assert body["data"]["request_counts"]["completed"] == 1
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{sent['body']}".encode()
    expected = base64.b64encode(hmac.new(b"k" * 24, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert SECRET not in json.dumps(sent)


async def test_failed_notice_is_retried_with_the_same_id_and_finally_dropped(harness: Harness) -> None:
    receiver = Receiver(500, ErrorCode.NETWORK_ERROR)
    await harness.end_batch()
    for tries in range(1, len(PAUSES_S) + 2):
        assert await harness.sender(receiver).send_due() == 1, tries
        if tries <= len(PAUSES_S):
            seconds, microseconds = await harness.client.time()
            (at,) = (await harness.due()).values()
            assert at - seconds - microseconds / 1e6 > PAUSES_S[tries - 1] * 0.9
            assert await harness.sender(receiver).send_due() == 0
            await harness.make_due()
        delivery = await harness.delivery()
        assert delivery is not None
        assert (delivery.state, delivery.tries) == ("pending" if tries <= len(PAUSES_S) else "failed", tries)
        assert delivery.error is not None
    assert await harness.due() == {}
    assert len({sent["headers"]["webhook-id"] for sent in receiver.sent}) == 1


async def test_unexpected_exception_delays_only_one_notice(harness: Harness) -> None:
    receiver = Receiver(RuntimeError("a defect"), 200)
    await harness.end_batch()
    assert await harness.sender(receiver).send_due() == 1
    await harness.make_due()
    assert await harness.sender(receiver).send_due() == 1
    assert await harness.due() == {}


async def test_notice_claimed_by_a_dead_sender_is_sent_later(harness: Harness) -> None:
    receiver = Receiver(200)
    await harness.end_batch()
    # The process has the notice, and is killed before the notice is sent.
    assert len(await DueNotices(harness.queue.step).claim(9, 60)) == 1
    assert await harness.sender(receiver).send_due() == 0
    await harness.make_due()
    assert await harness.sender(receiver).send_due() == 1
    assert await harness.due() == {}


async def test_late_sender_keeps_the_notice_of_a_reopened_batch(harness: Harness) -> None:
    await harness.end_batch()
    notices = DueNotices(harness.queue.step)
    (claimed_notice,) = await notices.claim(9, 60)
    await harness.client.hset("toolcrew:d:t:acme:batch.b", "webhook_notice", "2.0")
    await notices.settle(claimed_notice)
    assert list(await harness.due()) == ["batch|b"]


async def test_run_and_batch_report_the_state_of_their_webhook(harness: Harness) -> None:
    run = await harness.durable_runs.start("acme", RunBody(instruction="x"), webhook=HOOK)
    assert run.webhook == WebhookDelivery(state="pending")
    await harness.durable_runs.cancel("acme", run.id)
    await harness.sender(Receiver(204)).send_due()
    assert (await harness.queue.runs.get("acme", run.id)).webhook == WebhookDelivery(state="delivered", tries=1)
    assert (await harness.durable_runs.start("acme", RunBody(instruction="x"))).webhook is None
    await harness.end_batch()
    assert await harness.delivery() == WebhookDelivery(state="pending")
    await harness.sender(Receiver(204)).send_due()
    assert await harness.delivery() == WebhookDelivery(state="delivered", tries=1)


async def test_tenants_with_more_notices_than_one_step_reads_hide_no_other(harness: Harness) -> None:
    tenants = [f"t{number}" for number in range(6)]
    for tenant in tenants:
        await harness.end_runs(tenant, 6)
    await harness.end_runs("rival", 1)
    notices = DueNotices(harness.queue.step)
    claimed = [notice.tenant for _ in range(4) for notice in await notices.claim(2, 60)]
    assert sorted(claimed) == sorted([*tenants, "rival", claimed[-1]])
    assert len(await notices.claim(99, 60, tenant_limit=3, busy={"t0": 3, "t1": 2})) == 4 * 3 + 1


async def test_slow_receivers_of_one_tenant_delay_no_other(harness: Harness) -> None:
    is_slow, is_sent = asyncio.Event(), asyncio.Event()

    class SlowReceiver(Receiver):
        async def dispatch(self, request: Request) -> ToolResult:
            if request.tenant == "acme":
                await is_slow.wait()
            else:
                is_sent.set()
            return await super().dispatch(request)

    await harness.end_runs("acme", 20)
    sending = asyncio.create_task(harness.sender(SlowReceiver(204)).run())
    try:
        await harness.end_runs("rival", 1)
        async with asyncio.timeout(SOON_S):
            await is_sent.wait()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_tenant_with_many_notices_does_not_delay_another(harness: Harness) -> None:
    for tenant, count in (("acme", 40), ("rival", 1)):
        for _ in range(count):
            run = await harness.durable_runs.start(tenant, RunBody(instruction="x"), webhook=HOOK)
            await harness.durable_runs.cancel(tenant, run.id)
    notices = DueNotices(harness.queue.step)
    first = [notice.tenant for notice in await notices.claim(16, 60)]
    # Free slots go to the tenant that has more notices.
    assert (first.count("rival"), first.count("acme")) == (1, 15)
    assert [notice.tenant for notice in await notices.claim(16, 60)] == ["acme"] * 16
    assert len(await notices.claim(16, 60)) == 9


async def test_forged_webhook_is_dropped(harness: Harness) -> None:
    receiver = Receiver(200)
    await harness.end_batch()
    await harness.client.hset("toolcrew:d:t:acme:batch.b", "webhook", HOOK.model_dump_json())
    await harness.sender(receiver).send_due()
    assert receiver.sent == []
    assert await harness.due() == {}


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", "no", "whsec_!!!"])
def test_weak_webhook_secrets_are_refused(secret: str) -> None:
    with pytest.raises(ValidationError):
        Webhook(url="https://example.org", secret=secret)
    with pytest.raises(ValueError, match="write whsec_"):
        sign(secret, "msg_1", 1, "{}")


async def test_run_end_is_sent(harness: Harness) -> None:
    receiver = Receiver(200)
    run = await harness.durable_runs.start("acme", RunBody(instruction="x"), metadata={"for": "tests"}, webhook=HOOK)
    await harness.durable_runs.cancel("acme", run.id)
    assert await harness.sender(receiver).send_due() == 1
    body = json.loads(receiver.sent[0]["body"])
    assert (body["type"], body["data"]["id"], body["data"]["state"]) == ("run.ended", run.id, "cancelled")
    assert body["data"]["metadata"] == {"for": "tests"}
