"""The results of all calls in flight: one listener for each process with one pub/sub pattern, and a sweep for what it
missed.
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
"""A subscription without a message for this time, though it is pinged every QUIET_S, is dead: its other end may have
ended without notice.
"""
RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)
OUTAGE_LIMIT_S = 30.0
"""How long Redis may not answer before calls in flight are given up: a restart takes seconds, and results survive
it.
"""
DISCARD_EVERY_S = 0.2
DISCARD_BATCH = 500
MAX_UNDELETED = 10_000
"""Keys to delete while Redis does not answer; further ones expire by themselves."""
_READY = frozenset({"SUCCESS", "FAILURE", "REVOKED"})


async def read_result_record(client: RedisClient, key: str) -> bytes | None:
    """Return the record of a result that is stored apart from its message. Raises BrokerUnavailable."""
    with broker_errors("the record of a result was not read"):
        data = await client.get(key)
    return data if isinstance(data, bytes) else None


class ResultHub:
    """Futures of results by task id. Task ids start with the hub's own id, so one subscription, made before the first
    publish, hears them all, and those of the few other hubs that share its pattern, which are passed over.

    Pub/sub delivers at most once; after every (re)connection and every SWEEP_EVERY_S the keys of what is still awaited
    are read. A result that was taken, or that nobody awaits, is deleted. `dropped`: results that came twice, or too
    late.
    """

    def __init__(self, client: RedisClient) -> None:
        self.id = secrets.token_hex(6)
        self.dropped = 0
        self._client = client
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._kept: set[str] = set()
        self._taken: list[str] = []
        self._channel_start = result_key(f"{self.id}-").encode()
        self._key_chars = len(result_key(""))
        self._subscribed = asyncio.Event()
        self._lost_at: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Subscribe; return when the subscription is active. Raises BrokerUnavailable."""
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
        """Stop listening. Callers that still wait get BrokerUnavailable."""
        await cancel_all(self._tasks)
        self._fail_all("the client was closed while this call was awaited: it may or may not have acted")
        self._waiting.clear()
        # What was taken goes; when Redis is away it expires by itself.
        with contextlib.suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(1):
                await self._delete_taken()

    def task_id(self, name: str) -> str:
        """Return the task id under which a result comes back to this hub."""
        return f"{self.id}-{name}"

    @contextlib.contextmanager
    def expect(self, task_id: str, *, keeps: bool = False) -> Iterator[asyncio.Future[dict[str, Any]]]:
        """Yield a future of the task's stored result; enter before publishing. Raises ValueError when that task is
        awaited already.

        `keeps`: the result stays in Redis until its key is discarded by who took it.
        """
        if task_id in self._waiting:
            raise ValueError(f"task {task_id} is awaited already")
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[task_id] = future
        if keeps:
            self._kept.add(task_id)
        try:
            yield future
        finally:
            self._waiting.pop(task_id, None)
            self._kept.discard(task_id)

    async def look(self, task_id: str) -> None:
        """Take the result of one task now, if it is stored: results that another hub published are not announced
        here.
        """
        try:
            await self._take_stored([task_id])
        except BrokerUnavailable as error:
            log.debug("result_not_looked_for", task=task_id, error=str(error))

    def fail(self, task_id: str, error: Exception) -> None:
        """Raise `error` to the caller that waits for that task; a result that comes later is dropped."""
        future = self._waiting.get(task_id)
        if future is not None and not future.done():
            future.set_exception(error)

    def discard(self, key: str) -> None:
        """Delete a key soon, together with others."""
        if len(self._taken) < MAX_UNDELETED:
            self._taken.append(key)

    async def _listen(self) -> None:
        attempt = 0
        while True:
            try:
                # Told what to do with a message, the client does not write each down for a log that nobody reads.
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
        """Log an outage once; fail the waiting calls when it lasts."""
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
        """Read messages as the connection gives them: `get_message` would double the cost of each."""
        clock = asyncio.get_running_loop().time
        heard_at = clock()
        while True:
            answer = await pubsub.parse_response(block=False, timeout=QUIET_S)
            if answer is None:
                if clock() - heard_at > SILENCE_S:
                    raise ConnectionError(f"nothing was heard for {SILENCE_S:g} s")
                await pubsub.ping("results")
                continue
            heard_at = clock()
            match answer:
                case [b"pmessage", _, bytes(channel), bytes(data)]:
                    self._take_message(channel, data)
                case [b"psubscribe", *_]:
                    self._lost_at = None
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
        """Give a result to its caller. The task id comes from the key or the channel; the content must have the
        same.
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
            if task_id not in self._kept:
                self.discard(result_key(task_id))

    async def _delete_regularly(self) -> None:
        while True:
            await asyncio.sleep(DISCARD_EVERY_S)
            try:
                await self._delete_taken()
            except BrokerUnavailable as error:
                log.debug("results_not_deleted", error=str(error), keys=len(self._taken))

    async def _delete_taken(self) -> None:
        while self._taken:
            batch = self._taken[:DISCARD_BATCH]
            with broker_errors("results were not deleted"):
                await self._client.unlink(*batch)
            del self._taken[: len(batch)]


async def _as_it_is(message: Any) -> Any:
    return message
