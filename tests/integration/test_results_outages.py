"""Results during failures of the connection to Redis: restarts with running calls, a slow reader, and a connection
that is lost silently.
"""

import asyncio
import base64
import contextlib
import json

import pytest
import redis.asyncio
from pydantic import SecretStr

from tests.conftest import RedisProcess
from tests.support.records.builders import build_attempt
from tests.support.records.fakes import close_hub
from tests.support.redis.result_harness import SilentRelay, build_stored_result, open_hub
from tests.support.stack.waiting import SOON_S, until
from toolcrew.contract.broker import BrokerSettings
from toolcrew.orchestrator.dispatch.celery_transport import CeleryTransport
from toolcrew.store import call_messages as results
from toolcrew.store.call_messages import ResultHub

QUEUE = "host.test.b00t"


@pytest.fixture(autouse=True)
def short_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RECONNECT_S", (0.02,))


@pytest.fixture
def frequent_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SWEEP_EVERY_S", 0.05)


@pytest.fixture
def no_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SWEEP_EVERY_S", 1000.0)


async def test_a_listener_disconnected_for_slowness_receives_all_results(
    redis_server: RedisProcess, frequent_sweeps: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_hub(redis_server) as (hub, client):
        names = [hub.task_id(f"c{number}") for number in range(200)]
        with contextlib.ExitStack() as stack:
            futures = [stack.enter_context(hub.expect(name)) for name in names]
            await client.config_set("client-output-buffer-limit", "pubsub 64kb 32kb 1")
            # The listener uses this thread, so no data is read while the thread writes.
            with redis_server.client() as worker:
                for name in names:
                    text = build_stored_result(name, result="x" * 60_000)
                    worker.set(f"celery-task-meta-{name}", text)
                    worker.publish(f"celery-task-meta-{name}", text)
            await asyncio.wait_for(asyncio.gather(*futures), SOON_S)
            await client.config_set("client-output-buffer-limit", "pubsub 33554432 8388608 60")
        assert "results_connection_lost" in caplog.text


async def test_a_silently_lost_subscription_is_renewed(
    redis_server: RedisProcess, no_sweeps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "QUIET_S", 0.05)
    monkeypatch.setattr(results, "SILENCE_S", 0.3)
    async with SilentRelay(redis_server) as relay:
        client = redis.asyncio.Redis.from_url(relay.url, socket_timeout=5)
        hub = ResultHub(client)
        await hub.start()
        heard_first = relay.connections
        relay.swallow = True
        async with asyncio.timeout(SOON_S):
            await until(lambda: not hub._subscribed.is_set())
            relay.swallow = False
            await hub._subscribed.wait()
        assert relay.connections > heard_first
        await close_hub(hub)
        await client.aclose()


class Pool:
    """Workers that read the queue and store results as Celery does. After an outage a store is retried until Redis
    accepts it.

    Nothing is removed from the queue. Otherwise messages in transfer at the end of Redis would be lost, which these
    tests do not cover.
    """

    def __init__(self, server: RedisProcess) -> None:
        self._client = redis.asyncio.Redis.from_url(server.url, socket_timeout=2)
        self.started: list[str] = []
        self.may_answer = asyncio.Event()

    async def serve(self, calls: int) -> None:
        async with asyncio.TaskGroup() as group:
            while len(self.started) < calls:
                try:
                    item = await self._client.lindex(QUEUE, -len(self.started) - 1)
                except (redis.RedisError, OSError):
                    item = None
                if item is None:
                    await asyncio.sleep(0.01)
                    continue
                assert isinstance(item, bytes)
                message = json.loads(item)
                _, arguments, _ = json.loads(base64.b64decode(message["body"]))
                self.started.append(arguments["envelope"])
                group.create_task(self._answer(message["headers"]["id"], arguments["envelope"]))
        await self._client.aclose()

    async def _answer(self, task_id: str, envelope: str) -> None:
        await self.may_answer.wait()
        text = build_stored_result(task_id, result=envelope)
        while True:
            try:
                async with self._client.pipeline(transaction=True) as pipe:
                    pipe.set(f"celery-task-meta-{task_id}", text, ex=3600)
                    pipe.publish(f"celery-task-meta-{task_id}", text)
                    await pipe.execute()
                    return
            except (redis.RedisError, OSError):
                await asyncio.sleep(0.05)


async def test_a_redis_outage_with_calls_in_flight_loses_none_and_runs_none_twice(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "SWEEP_EVERY_S", 0.2)
    calls = 300
    client = redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5)
    hub = ResultHub(client)
    await hub.start()
    transport = CeleryTransport(BrokerSettings(redis_url=SecretStr(redis_server.url)), hub)
    pool = Pool(redis_server)
    serving = asyncio.create_task(pool.serve(calls))
    deliveries = [build_attempt(queue=QUEUE, call_id=f"c{number}", envelope=f"e{number}") for number in range(calls)]
    waiting = [asyncio.create_task(transport.deliver(delivery)) for delivery in deliveries]
    async with asyncio.timeout(SOON_S):
        await until(lambda: len(pool.started) >= calls)
        await asyncio.to_thread(redis_server.stop)
        pool.may_answer.set()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(redis_server.start)
        assert await asyncio.gather(*waiting) == [f"e{number}" for number in range(calls)]
    await serving
    assert sorted(pool.started) == sorted(f"e{number}" for number in range(calls))
    await transport.aclose()
    await close_hub(hub)
    await client.aclose()


async def test_calls_sent_while_redis_restarts_run_once(redis_server: RedisProcess, frequent_sweeps: None) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5)
    hub = ResultHub(client)
    await hub.start()
    transport = CeleryTransport(BrokerSettings(redis_url=SecretStr(redis_server.url)), hub)
    pool = Pool(redis_server)
    pool.may_answer.set()
    serving = asyncio.create_task(pool.serve(10_000))
    ended: list[object] = []

    async def caller(number: int) -> None:
        for turn in range(40):
            name = f"c{number}-{turn}"
            delivery = build_attempt(queue=QUEUE, call_id=name, envelope=name)
            ended.append((await asyncio.gather(transport.deliver(delivery), return_exceptions=True))[0])

    callers = asyncio.gather(*(caller(number) for number in range(10)))
    async with asyncio.timeout(SOON_S * 2):
        await until(lambda: len(pool.started) >= 100)
        await asyncio.to_thread(redis_server.stop)
        await asyncio.to_thread(redis_server.start)
        await callers
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert [str(each) for each in ended if not isinstance(each, str)] == []
    assert len(set(pool.started)) == len(pool.started) == 400
    await transport.aclose()
    await close_hub(hub)
    await client.aclose()
