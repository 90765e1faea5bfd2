"""One listener a process for the results of all calls in flight: one pub/sub pattern, and a sweep for what it missed."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable
from contract.names import result_channel_pattern, result_key
from orchestrator.logs import get_logger

log = get_logger(__name__)

SWEEP_EVERY_S = 5.0
SWEEP_BATCH = 500
RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)
OUTAGE_LIMIT_S = 30.0
"""How long Redis may be away before calls in flight are given up: a restart takes seconds, and results outlive it."""
_READY = frozenset({"SUCCESS", "FAILURE", "REVOKED"})


class ResultHub:
    """Futures of results by task id. Task ids start with the hub's own id, so one subscription, made before the first publish, hears them all.

    Pub/sub delivers at most once; after every (re)connection and every SWEEP_EVERY_S the keys of what is still awaited are read.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.id = secrets.token_hex(6)
        self._client = client
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._subscribed = asyncio.Event()
        self._lost_at: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Subscribe; returns when the subscription stands. Raises BrokerUnavailable."""
        self._tasks = [
            asyncio.create_task(self._listen(), name="results"),
            asyncio.create_task(self._sweep_regularly(), name="results-sweep"),
        ]
        try:
            async with asyncio.timeout(10):
                await self._subscribed.wait()
        except TimeoutError:
            await self.close()
            raise BrokerUnavailable(
                "Redis did not confirm the subscription to results within 10 s: does its ACL allow PSUBSCRIBE?"
            ) from None

    async def close(self) -> None:
        """Stop listening; who still waits gets BrokerUnavailable."""
        pending = set(self._tasks)
        while pending:
            # Again and again: a client library may swallow one cancellation.
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(BrokerUnavailable("the client was closed while this call was awaited: it may or may not have acted"))
        self._waiting.clear()

    def task_id(self, call_id: str) -> str:
        """The task id under which a call's result comes back to this hub."""
        return f"{self.id}-{call_id}"

    @contextlib.contextmanager
    def expect(self, task_id: str) -> Iterator[asyncio.Future[dict[str, Any]]]:
        """A future of the task's stored result; enter before publishing. Raises ValueError when that task is awaited already."""
        if task_id in self._waiting:
            raise ValueError(f"task {task_id} is awaited already")
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[task_id] = future
        try:
            yield future
        finally:
            self._waiting.pop(task_id, None)

    async def _listen(self) -> None:
        attempt = 0
        while True:
            try:
                async with self._client.pubsub() as pubsub:
                    await pubsub.psubscribe(result_channel_pattern(self.id))
                    await self._read(pubsub)
            except (RedisError, OSError) as error:
                attempt = 0 if self._subscribed.is_set() else attempt + 1
                delay = RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)]
                self._note_loss(error, delay)
                await asyncio.sleep(delay)

    def _note_loss(self, error: Exception, delay: float) -> None:
        """Say it once an outage; give up who waits when it lasts."""
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
            log.warning("results_connection_lost", error=str(error), retry_in_s=delay)
        self._subscribed.clear()
        if now - self._lost_at > OUTAGE_LIMIT_S:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(
                        BrokerUnavailable(f"Redis has been away for {OUTAGE_LIMIT_S:g} s ({error}); the call may or may not have acted")
                    )

    async def _read(self, pubsub: Any) -> None:
        while True:
            message = await pubsub.get_message(timeout=SWEEP_EVERY_S)
            if message is None:
                continue
            if message["type"] == "psubscribe":
                self._lost_at = None
                self._subscribed.set()
                await self._sweep()
            elif message["type"] == "pmessage":
                self._deliver(message["data"])

    async def _sweep_regularly(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await self._sweep()
            except (RedisError, OSError) as error:
                log.warning("results_sweep_failed", error=str(error))

    async def _sweep(self) -> None:
        awaited = list(self._waiting)
        for at in range(0, len(awaited), SWEEP_BATCH):
            keys = [result_key(task_id) for task_id in awaited[at : at + SWEEP_BATCH]]
            for value in await self._client.mget(keys):
                if value is not None:
                    self._deliver(value)

    def _deliver(self, data: bytes | str) -> None:
        try:
            stored = json.loads(data)
            task_id, status = str(stored["task_id"]), str(stored["status"])
        except (ValueError, KeyError, TypeError, RecursionError):
            log.error("result_unreadable", size=len(data))
            return
        future = self._waiting.get(task_id)
        if status in _READY and future is not None and not future.done():
            future.set_result(stored)
