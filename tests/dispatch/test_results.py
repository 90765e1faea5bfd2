"""The hub of results on a real Redis: by pub/sub, by a sweep for missed messages, and over a restart. Invalid data
does not stop the hub.
"""

import asyncio
import logging
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.fakes import close_hub
from tests.support.redis.result_harness import build_stored_result, open_hub, publish, receive
from tests.support.stack.waiting import SOON_S, until, wait_until_async
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.store import call_messages as results
from toolcrew.store.call_messages import ResultHub


@pytest.fixture(autouse=True)
def short_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RECONNECT_S", (0.02,))


@pytest.fixture
def sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SWEEP_EVERY_S", 0.05)


@pytest.fixture
def not_sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SWEEP_EVERY_S", 1000.0)


@pytest.mark.parametrize("status", ["SUCCESS", "FAILURE", "REVOKED"])
async def test_a_published_result_arrives(redis_server: RedisProcess, not_sweeping: None, status: str) -> None:
    async with open_hub(redis_server) as (hub, client):
        task_id = hub.task_id("c1")
        with hub.expect(task_id) as future:
            await publish(client, task_id, build_stored_result(task_id, status))
            result = await receive(future)
        assert (result["status"], result["result"]) == (status, {"n": 1})
        assert hub._waiting == {}


async def test_sweep_finds_results_without_a_message(
    redis_server: RedisProcess, sweeping: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "SWEEP_BATCH", 3)
    async with open_hub(redis_server) as (hub, client):
        ids = [hub.task_id(f"c{number}") for number in range(10)]
        futures = {}
        for task_id in ids:
            futures[task_id] = hub._waiting.setdefault(task_id, asyncio.get_running_loop().create_future())
        await client.mset({f"celery-task-meta-{task_id}": build_stored_result(task_id) for task_id in ids})
        assert [(await receive(futures[task_id]))["task_id"] for task_id in ids] == ids


async def test_subscription_is_restored_after_a_restart(redis_server: RedisProcess, not_sweeping: None) -> None:
    async with open_hub(redis_server) as (hub, _):
        await asyncio.to_thread(redis_server.stop)
        await asyncio.to_thread(redis_server.start)
        task_id = hub.task_id("c1")
        with hub.expect(task_id) as future, redis_server.client() as worker:
            # Redis does not report a restored subscription: the test polls until there is a listener.
            await until(
                lambda: bool(worker.publish(f"celery-task-meta-{task_id}", build_stored_result(task_id))), SOON_S
            )
            assert (await receive(future))["task_id"] == task_id


async def test_unexpected_results_are_ignored(redis_server: RedisProcess, not_sweeping: None) -> None:
    async with open_hub(redis_server) as (hub, client):
        task_id = hub.task_id("c1")
        with hub.expect(task_id) as future:
            await publish(client, hub.task_id("other"))
            await publish(client, task_id, build_stored_result("another-task"))
            await publish(client, task_id, build_stored_result(task_id, "STARTED"))
            await publish(client, task_id, build_stored_result(task_id, result="first"))
            await publish(client, task_id, build_stored_result(task_id, result="second"))
            result = await receive(future)
            assert (result["task_id"], result["status"], result["result"]) == (task_id, "SUCCESS", "first")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b"{}",
        b'{"task_id": "x"}',
        b'{"task_id": null, "status": "SUCCESS"}',
        b'{"task_id": [], "status": "SUCCESS"}',
        b'{"task_id": "x", "status": {}}',
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
async def test_invalid_result_message_is_ignored(
    redis_server: RedisProcess, not_sweeping: None, message: bytes
) -> None:
    async with open_hub(redis_server) as (hub, client):
        task_id = hub.task_id("c1")
        with hub.expect(task_id) as future:
            await publish(client, task_id, message)
            await publish(client, task_id)
            await receive(future)


async def test_late_result_of_a_failed_task_is_dropped(redis_server: RedisProcess, not_sweeping: None) -> None:
    async with open_hub(redis_server) as (hub, client):
        task_id, other = hub.task_id("c1"), hub.task_id("c2")
        with hub.expect(task_id) as future, hub.expect(other) as last:
            hub.fail(task_id, KeyError("lost"))
            hub.fail(task_id, KeyError("lost twice"))
            hub.fail("of no call", KeyError("x"))
            await publish(client, task_id)
            await publish(client, other)
            await receive(last)
            with pytest.raises(KeyError, match="'lost'"):
                await future
        assert hub.dropped == 1


async def test_late_and_duplicate_results_are_counted(redis_server: RedisProcess, not_sweeping: None) -> None:
    async with open_hub(redis_server) as (hub, client):
        task_id, other = hub.task_id("c1"), hub.task_id("c2")
        with hub.expect(task_id) as future:
            await publish(client, task_id)
            await receive(future)
            await publish(client, task_id)
        await publish(client, task_id)
        with hub.expect(other) as last:
            await publish(client, other)
            await receive(last)
        assert hub.dropped == 2


@pytest.mark.parametrize("is_closed", [False, True])
async def test_received_or_dropped_result_is_deleted(
    redis_server: RedisProcess, not_sweeping: None, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    monkeypatch.setattr(results, "DISCARD_EVERY_S", 1000.0 if is_closed else 0.01)
    async with open_hub(redis_server) as (hub, client):
        task_id, late_id = hub.task_id("c1"), hub.task_id("late")
        with hub.expect(task_id) as future:
            for each in (late_id, task_id):
                await client.set(f"celery-task-meta-{each}", build_stored_result(each))
                await publish(client, each)
            await receive(future)
        if is_closed:
            await hub.close()
            assert await client.dbsize() == 0
        await wait_until_async(client.dbsize, SOON_S, "every key is removed", 0.01, lambda size: size == 0)


async def test_a_second_wait_for_one_id_is_refused(redis_server: RedisProcess, not_sweeping: None) -> None:
    async with open_hub(redis_server) as (hub, client):
        task_id = hub.task_id("c1")
        with hub.expect(task_id) as first:
            with pytest.raises(ValueError, match="already waits for task"), hub.expect(task_id):
                pass
            await publish(client, task_id)
            await receive(first)


async def test_close_fails_waiting_calls_and_leaves_no_task(redis_server: RedisProcess, not_sweeping: None) -> None:
    before = len(asyncio.all_tasks())
    async with open_hub(redis_server) as (hub, _):
        with hub.expect(hub.task_id("c1")) as future:
            await close_hub(hub)
            with pytest.raises(BrokerUnavailable, match="the client was closed"):
                future.result()
    assert len(asyncio.all_tasks()) == before


class CancelSwallowingClient:
    """A client whose read swallows the first cancellation. redis-py does the same when a cancellation arrives
    together with a time-out.
    """

    def __init__(self) -> None:
        self.reading = asyncio.Event()
        self._swallowed = False

    def pubsub(self, **_: Any) -> "CancelSwallowingClient":
        return self

    async def __aenter__(self) -> "CancelSwallowingClient":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def psubscribe(self, _: str) -> None: ...

    async def mget(self, keys: list[str]) -> list[None]:
        return [None for _ in keys]

    async def parse_response(self, *, block: bool, timeout: float) -> list[Any] | None:
        if not self.reading.is_set():
            self.reading.set()
            return [b"psubscribe", b"pattern", 1]
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self._swallowed:
                raise
            self._swallowed = True
        return None


async def test_close_ends_when_a_cancellation_is_swallowed(not_sweeping: None) -> None:
    hub = ResultHub(CancelSwallowingClient())  # type: ignore[arg-type]
    await hub.start()
    await asyncio.sleep(0)
    closing = asyncio.create_task(hub.close())
    finished, _ = await asyncio.wait({closing}, timeout=0.5)
    if not finished:
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
    assert finished


async def test_start_fails_when_redis_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    timeout = asyncio.timeout
    monkeypatch.setattr(results.asyncio, "timeout", lambda _: timeout(0.2))
    client = redis.asyncio.Redis(port=reserve_port())
    with pytest.raises(BrokerUnavailable, match="subscription"):
        await ResultHub(client).start()
    await client.aclose()
