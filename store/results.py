"""Results of all calls in flight. Each process has one listener with one pub/sub pattern, and a sweep that finds
missed results.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Iterator
from typing import Any

from contract.errors import BrokerUnavailable
from contract.names import result_channel_pattern, result_key
from store.connection import RedisClient, broker_errors
from store.tasks import cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

SWEEP_EVERY_S = 5.0
SWEEP_BATCH = 500
QUIET_S = 5.0
SILENCE_S = 20.0
"""Time without a message after which a subscription counts as dead, in seconds. The subscription is pinged every
QUIET_S, so silence means that the other end is lost.
"""
RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)
OUTAGE_LIMIT_S = 30.0
"""Maximum duration of an outage of Redis before the calls in flight fail, in seconds. A restart takes seconds, and
results survive a restart.
"""
DISCARD_EVERY_S = 0.2
DISCARD_BATCH = 500
MAX_UNDELETED = 10_000
"""Limit of keys to delete while Redis does not answer. Further keys expire by themselves."""
_READY = frozenset({"SUCCESS", "FAILURE", "REVOKED"})


async def read_result_record(client: RedisClient, key: str) -> bytes | None:
    """Return the record of a result that is stored separately from its message. Raises BrokerUnavailable when Redis
    does not answer.
    """
    with broker_errors("the record of a result was not read"):
        data = await client.get(key)
    return data if isinstance(data, bytes) else None


class ResultHub:
    """Futures of results by task id. Task ids start with the id of the hub, so one subscription before the first
    publish receives all results. A few other hubs share the pattern; their results are ignored.

    Pub/sub delivers each message at most once. The hub therefore reads the keys of all awaited results after every
    connection and every SWEEP_EVERY_S. A result is deleted after its caller has received it, or if no caller waits for
    it. `dropped`: number of results that came twice or too late.
    """

    def __init__(self, client: RedisClient) -> None:
        self.id = secrets.token_hex(6)
        self.dropped = 0
        self._client = client
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._stored: set[str] = set()
        self._collected: list[str] = []
        self._channel_start = result_key(f"{self.id}-").encode()
        self._key_chars = len(result_key(""))
        self._subscribed = asyncio.Event()
        self._lost_at: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Subscribe, and return when the subscription is active. Raises BrokerUnavailable when Redis does not confirm
        it.
        """
        self._tasks = [
            asyncio.create_task(self._listen(), name="results"),
            asyncio.create_task(self._sweep_regularly(), name="results-sweep"),
            asyncio.create_task(self._delete_regularly(), name="results-discard"),
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
        """Stop listening. Waiting callers get BrokerUnavailable."""
        await cancel_all(self._tasks)
        self._fail_all("the client was closed while it waited for this call: the call may or may not have acted")
        self._waiting.clear()
        # Received results are deleted. If Redis is unavailable, they expire by themselves.
        with contextlib.suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(1):
                await self._delete_taken()

    def task_id(self, name: str) -> str:
        """Return the task id under which a result returns to this hub."""
        return f"{self.id}-{name}"

    @contextlib.contextmanager
    def expect(self, task_id: str, *, keeps: bool = False) -> Iterator[asyncio.Future[dict[str, Any]]]:
        """Yield a future of the stored result of a task. Enter the block before publishing. Raises ValueError: the
        task is awaited already.

        `keeps`: the result stays in Redis until its receiver discards the key.
        """
        if task_id in self._waiting:
            raise ValueError(f"another caller already waits for task {task_id}")
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[task_id] = future
        if keeps:
            self._stored.add(task_id)
        try:
            yield future
        finally:
            self._waiting.pop(task_id, None)
            self._stored.discard(task_id)

    async def look(self, task_id: str) -> None:
        """Read the result of one task now, if it is stored. Results that another hub published are not announced to
        this hub.
        """
        try:
            await self._take_stored([task_id])
        except BrokerUnavailable as error:
            log.debug("result_not_looked_for", task=task_id, error=str(error))

    def fail(self, task_id: str, error: Exception) -> None:
        """Raise `error` in the caller that waits for that task. A later result is dropped."""
        future = self._waiting.get(task_id)
        if future is not None and not future.done():
            future.set_exception(error)

    def discard(self, key: str) -> None:
        """Delete a key soon, together with others."""
        if len(self._collected) < MAX_UNDELETED:
            self._collected.append(key)

    async def _listen(self) -> None:
        attempt = 0
        while True:
            try:
                # With a push handler, the client does not write a log entry for each message.
                with broker_errors("results are not received"):
                    async with self._client.pubsub(push_handler_func=_as_it_is) as pubsub:
                        await pubsub.psubscribe(result_channel_pattern(self.id))
                        await self._read(pubsub)
            except BrokerUnavailable as error:
                attempt = 0 if self._subscribed.is_set() else attempt + 1
                delay = RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)]
                self._note_loss(error, delay)
                await asyncio.sleep(delay)

    def _note_loss(self, error: Exception, delay: float) -> None:
        """Log an outage once. If it lasts too long, fail the waiting calls."""
        now = asyncio.get_running_loop().time()
        if self._lost_at is None:
            self._lost_at = now
            log.warning("results_connection_lost", error=str(error), retry_in_s=delay)
        self._subscribed.clear()
        if now - self._lost_at > OUTAGE_LIMIT_S:
            self._fail_all(
                f"{error}; it has not answered for {OUTAGE_LIMIT_S:g} s, and the call may or may not have acted"
            )

    def _fail_all(self, sentence: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(BrokerUnavailable(sentence))

    async def _read(self, pubsub: Any) -> None:
        """Read messages directly from the connection. `get_message` would double the cost of each message."""
        clock = asyncio.get_running_loop().time
        received_at = clock()
        while True:
            answer = await pubsub.parse_response(block=False, timeout=QUIET_S)
            if answer is None:
                if clock() - received_at > SILENCE_S:
                    raise ConnectionError(f"no message arrived for {SILENCE_S:g} s")
                await pubsub.ping("results")
                continue
            received_at = clock()
            match answer:
                case [b"pmessage", _, bytes(channel), bytes(data)]:
                    self._take_message(channel, data)
                case [b"psubscribe", *_]:
                    self._lost_at = None
                    # Results may have arrived before the subscription was active.
                    self._subscribed.set()
                    await self._sweep()

    async def _sweep_regularly(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await self._sweep()
            except BrokerUnavailable as error:
                log.warning("results_sweep_failed", error=str(error))

    async def _sweep(self) -> None:
        awaited = [task_id for task_id, future in self._waiting.items() if not future.done()]
        for at in range(0, len(awaited), SWEEP_BATCH):
            await self._take_stored(awaited[at : at + SWEEP_BATCH])

    async def _take_stored(self, awaited: list[str]) -> None:
        with broker_errors("stored results were not read"):
            stored = await self._client.mget([result_key(task_id) for task_id in awaited])
        for task_id, value in zip(awaited, stored, strict=True):
            future = self._waiting.get(task_id)
            if isinstance(value, bytes) and future is not None and not future.done():
                self._take(task_id, value)

    def _take_message(self, channel: bytes, data: bytes) -> None:
        if channel.startswith(self._channel_start):
            self._take(channel[self._key_chars :].decode(errors="replace"), data)

    def _take(self, task_id: str, data: bytes) -> None:
        """Deliver a result to its caller. The task id comes from the key or the channel, and must be the same in the
        content.
        """
        future = self._waiting.get(task_id)
        if future is None or future.done():
            self.dropped += 1
            log.debug("result_dropped", task=task_id, size=len(data))
            self.discard(result_key(task_id))
            return
        try:
            stored = json.loads(data)
            is_ready = stored["task_id"] == task_id and stored["status"] in _READY
        except (ValueError, KeyError, TypeError, RecursionError):
            log.error("result_unreadable", task=task_id, size=len(data))
            return
        if is_ready:
            future.set_result(stored)
            if task_id not in self._stored:
                self.discard(result_key(task_id))

    async def _delete_regularly(self) -> None:
        while True:
            await asyncio.sleep(DISCARD_EVERY_S)
            try:
                await self._delete_taken()
            except BrokerUnavailable as error:
                log.debug("results_not_deleted", error=str(error), keys=len(self._collected))

    async def _delete_taken(self) -> None:
        while self._collected:
            batch = self._collected[:DISCARD_BATCH]
            with broker_errors("results were not deleted"):
                await self._client.unlink(*batch)
            del self._collected[: len(batch)]


async def _as_it_is(message: Any) -> Any:
    return message
