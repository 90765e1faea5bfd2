"""The contract of every Transport: functions in this process, and Celery over a real Redis."""

import asyncio
import base64
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio
from pydantic import SecretStr

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_attempt, build_call, build_context
from tests.support.records.fakes import close_hub
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.envelope import decode_result, encode_call
from toolcrew.contract.errors import BrokerUnavailable, EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.hosts import HOST_LOST_TYPE
from toolcrew.contract.signing import ResultSeal, SigningKeys
from toolcrew.orchestrator.dispatch.celery_transport import CeleryTransport
from toolcrew.orchestrator.dispatch.in_process_transport import InProcessTransport
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.orchestrator.dispatch.transport import CallLost, DeliveryFailed, Transport
from toolcrew.store import call_messages as publishing
from toolcrew.store.call_messages import ResultHub

QUEUE = "host.test.b00t"


async def _shout(text: str) -> str:
    return text.upper()


def _refuse() -> str:
    raise ToolFailure(ErrorCode.NO_MATCH, "nothing like it")


def _break() -> str:
    raise RuntimeError("broken")


async def _hang() -> str:
    await asyncio.Event().wait()
    return "never"


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "plain": lambda text: text[::-1],
    "shout": _shout,
    "refuse": _refuse,
    "break": _break,
    "hang": _hang,
}


@dataclass
class Worker:
    """A pool with one worker. The worker takes tasks in Celery's format from the queue, and stores results as Celery
    does.
    """

    client: "redis.asyncio.Redis"
    received: list[dict[str, Any]] = field(default_factory=list)

    async def serve(self) -> None:
        functions = InProcessTransport(FUNCTIONS, KEY)
        async with asyncio.TaskGroup() as group:
            while True:
                _, message = await self.client.brpop([QUEUE], timeout=0)
                group.create_task(self._run(functions, json.loads(message)))

    async def _run(self, functions: InProcessTransport, message: dict[str, Any]) -> None:
        self.received.append(message["headers"])
        _, kwargs, _ = json.loads(base64.b64decode(message["body"]))
        task_id = message["headers"]["id"]
        try:
            result = await functions.deliver(build_attempt(envelope=kwargs["envelope"], wait_s=SOON_S))
            outcome = {"status": "SUCCESS", "result": result}
        except EnvelopeRefused as error:
            outcome = {"status": "FAILURE", "result": {"exc_type": "EnvelopeRefused", "exc_message": [str(error)]}}
        stored = json.dumps({"task_id": task_id, **outcome})
        key = f"celery-task-meta-{task_id}"
        await self.client.set(key, stored, ex=60)
        await self.client.publish(key, stored)


@contextlib.asynccontextmanager
async def celery_transport(server: RedisProcess) -> AsyncIterator[tuple[CeleryTransport, Worker]]:
    ours, theirs = (redis.asyncio.Redis.from_url(server.url) for _ in range(2))
    hub = ResultHub(ours)
    await hub.start()
    transport = CeleryTransport(BrokerSettings(redis_url=SecretStr(server.url)), hub)
    worker = Worker(theirs)
    serving = asyncio.create_task(worker.serve())
    try:
        yield transport, worker
    finally:
        while not serving.done():
            # Cancelled repeatedly, because a client library may swallow one cancellation.
            serving.cancel()
            await asyncio.wait({serving}, timeout=0.1)
        await transport.aclose()
        await close_hub(hub)
        for client in (ours, theirs):
            await client.aclose()


@pytest.fixture(params=["in-process", "celery"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    if request.param == "in-process":
        yield InProcessTransport(FUNCTIONS, KEY)
        return
    async with celery_transport(request.getfixturevalue("redis_server")) as (over_redis, _):
        yield over_redis


def build_delivery(
    tool: str = "plain", *, key: SigningKeys = KEY, wait_s: float = SOON_S, call_id: str = "c1", **arguments: Any
) -> Attempt:
    envelope = encode_call(build_call(tool, call_id=call_id, **arguments), build_context(), key)
    return build_attempt(tool, call_id=call_id, queue=QUEUE, envelope=envelope, wait_s=wait_s)


async def delivered(transport: Transport, attempt: Attempt) -> ToolResult:
    async with asyncio.timeout(SOON_S):
        return decode_result(await transport.deliver(attempt), ResultSeal(KEY, attempt.tenant, attempt.number))


async def test_a_call_returns_its_own_encoded_result(transport: Transport) -> None:
    result = await delivered(transport, build_delivery(text="abc"))
    assert (result.success, result.output, result.call_id, result.name) == (True, "cba", "c1", "plain")


async def test_any_text_arrives_unchanged(transport: Transport) -> None:
    text = 'é 读取 \U0001f600 "quoted" \\ \n\t\0 </tag>'
    assert (await delivered(transport, build_delivery(text=text))).output == text[::-1]


async def test_an_async_tool_is_awaited(transport: Transport) -> None:
    assert (await delivered(transport, build_delivery("shout", text="abc"))).output == "ABC"


async def test_a_tool_failure_becomes_a_result_with_its_code(transport: Transport) -> None:
    result = await delivered(transport, build_delivery("refuse"))
    assert (result.success, result.error_code, result.error) == (False, ErrorCode.NO_MATCH, "nothing like it")


async def test_an_exception_in_the_tool_becomes_an_internal_error(transport: Transport) -> None:
    assert (await delivered(transport, build_delivery("break"))).error_code is ErrorCode.INTERNAL


async def test_concurrent_calls_get_their_own_results(transport: Transport) -> None:
    deliveries = [build_delivery("shout", call_id=f"c{number}", text=f"t{number}") for number in range(40)]
    results = await asyncio.gather(*(delivered(transport, delivery) for delivery in deliveries))
    assert [(result.call_id, result.output) for result in results] == [
        (f"c{number}", f"T{number}") for number in range(40)
    ]


async def test_an_envelope_signed_with_another_key_is_refused(transport: Transport) -> None:
    with pytest.raises((EnvelopeRefused, DeliveryFailed)) as refused:
        await delivered(transport, build_delivery(text="x", key=SigningKeys.of("j" * 32)))
    assert isinstance(refused.value, EnvelopeRefused) or refused.value.code is ErrorCode.ENVELOPE_REFUSED


async def test_a_cancelled_call_is_abandoned_at_once(transport: Transport) -> None:
    waiting = asyncio.create_task(transport.deliver(build_delivery("hang")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, SOON_S)


async def gives_up(transport: Transport) -> None:
    async with asyncio.timeout(SOON_S):
        with pytest.raises(TimeoutError):
            await transport.deliver(build_delivery("hang", wait_s=0.2))


async def test_celery_transport_times_out_after_the_wait(redis_server: RedisProcess) -> None:
    async with celery_transport(redis_server) as (transport, _):
        await gives_up(transport)


# Celery only


async def test_task_headers_show_the_call_id_and_no_arguments(redis_server: RedisProcess) -> None:
    async with celery_transport(redis_server) as (transport, worker):
        await delivered(transport, build_delivery(text="hunter2"))
        [headers] = worker.received
    assert (headers["task"], headers["kwargsrepr"], headers["argsrepr"]) == ("tool.plain", "call c1, tenant acme", "()")
    assert "hunter2" not in json.dumps(headers)


async def test_an_unreachable_redis_is_an_unavailable_broker(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "SEND_WAIT_S", 0.2)
    async with celery_transport(redis_server) as (transport, _):
        await asyncio.to_thread(redis_server.stop)
        try:
            with pytest.raises(BrokerUnavailable):
                await asyncio.wait_for(transport.deliver(build_delivery(text="x")), SOON_S)
        finally:
            await asyncio.to_thread(redis_server.start)


STORED: list[tuple[dict[str, Any], ErrorCode | CallLost]] = [
    ({"status": "REVOKED", "result": None}, ErrorCode.TIMEOUT),
    (
        {"status": "FAILURE", "result": {"exc_type": "WorkerLostError", "exc_message": ["x"]}},
        CallLost("x", has_started=True),
    ),
    (
        {"status": "FAILURE", "result": {"exc_type": "TimeLimitExceeded", "exc_message": [630]}},
        CallLost("x", has_started=True),
    ),
    (
        {"status": "FAILURE", "result": {"exc_type": HOST_LOST_TYPE, "exc_message": ["gone"]}},
        CallLost("x", has_started=False),
    ),
    ({"status": "FAILURE", "result": {"exc_type": "KeyError", "exc_message": ["x"]}}, ErrorCode.INTERNAL),
    ({"status": "FAILURE", "result": "text"}, ErrorCode.INTERNAL),
    ({"status": "FAILURE"}, ErrorCode.INTERNAL),
]


@pytest.mark.parametrize(("outcome", "expected"), STORED, ids=lambda value: str(value)[:50])
async def test_a_failure_stored_by_celery_becomes_an_error_code_or_a_lost_call(
    redis_server: RedisProcess, outcome: dict[str, Any], expected: ErrorCode | CallLost
) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    hub = ResultHub(client)
    await hub.start()
    transport = CeleryTransport(BrokerSettings(redis_url=SecretStr(redis_server.url)), hub)
    try:
        delivery = build_delivery(text="x")
        waiting: Awaitable[Any] = asyncio.create_task(transport.deliver(delivery))
        await client.brpop([QUEUE], timeout=int(SOON_S))
        task_id = hub.task_id("c1.1.acme")
        await client.publish(f"celery-task-meta-{task_id}", json.dumps({"task_id": task_id, **outcome}))
        [ended] = await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), SOON_S)
        if isinstance(expected, CallLost):
            assert isinstance(ended, CallLost)
            assert ended.has_started is expected.has_started
        else:
            assert isinstance(ended, DeliveryFailed)
            assert ended.code is expected
    finally:
        await transport.aclose()
        await close_hub(hub)
        await client.aclose()


async def test_settling_an_unknown_call_does_nothing(transport: Transport) -> None:
    transport.settle("acme", "never-sent")
    assert (await delivered(transport, build_delivery(text="abc"))).output == "cba"


async def test_a_kept_result_is_available_to_another_process_until_it_is_settled(
    redis_server: RedisProcess,
) -> None:
    async with celery_transport(redis_server) as (first, worker), celery_transport(redis_server) as (second, _):
        delivery = build_delivery(text="abc")
        delivery = dataclasses.replace(delivery, request=dataclasses.replace(delivery.request, keeps_result=True))
        assert (await delivered(first, delivery)).output == "cba"
        [key] = await worker.client.keys("celery-task-meta-*")
        task = key.decode().removeprefix("celery-task-meta-")
        assert (await delivered(second, dataclasses.replace(delivery, published_as=task))).output == "cba"
        first.settle("acme", "c1")
        second.settle("acme", "c1")
        async with asyncio.timeout(SOON_S):
            # The record is deleted with others, a moment later.
            while await worker.client.exists(f"celery-task-meta-{task}"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
