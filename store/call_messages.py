"""Messages of calls between orchestrators and Redis: each call is put into its queue, and its result is received.

Invariant: the record and the message of a call are written in one atomic step. A repeated publish pushes no second
message.
"""

import asyncio
import contextlib
import json
import random
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.errors import BrokerFull, BrokerUnavailable
from toolcrew.contract.names import (
    account_key,
    call_key,
    host_key,
    location_key,
    result_channel_pattern,
    result_key,
    tenant_calls_key,
    tenant_sessions_key,
)
from toolcrew.store.call_scripts import PUBLISH
from toolcrew.store.clock import SharedClock
from toolcrew.store.connection import RedisClient, broker_error, broker_errors
from toolcrew.store.scripts import CLOSED, ReplyMissing, ScriptConnection, Value
from toolcrew.store.slots import held_slots_key
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

SEND_WAIT_S = 3.0
"""Seconds that a call waits while Redis does not answer, if the call was certainly not sent yet."""
RETRY_S = (0.05, 0.1, 0.2, 0.5)
CLOCK_ROUND_TRIP_S = 0.5
"""Longest round trip, in seconds, after which the clock is set from the time in Redis's reply. After a longer round
trip that time is out of date.
"""


class NotSent(Exception):
    """The call was not published. `host_lost`: the worker of the queue does not report. `moved`: the session is on
    another host, or is moving. `duplicate`: the call id was used before. `no_slot`: admission has not granted the slot
    yet.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class CallAttempt:
    """One attempt at a call."""

    tenant: str
    call_id: str
    number: int = 1
    """Number of the attempt at the call, from 1. Above 1, the earlier attempts were lost."""
    tool: str
    """Name of the tool that the worker runs."""
    queue: str
    start_by: float
    """Time after which the call must not start, in Unix seconds of the shared clock."""
    ticket: str = ""
    """Signed text in the call's record. The worker removes it when it begins the call (call_scripts.py)."""
    session: str | None = None
    fence: int | None = None
    """Fencing token of the session's location on the queue's host (sessions.py). None: any worker of the queue may run
    the call.
    """
    slot: str = ""
    """Id of the slot request that Redis must have granted when it publishes the attempt (slots.py); "": the attempt
    already has its slot.
    """
    extra_s: int = 0
    """Seconds by which the limit of the call exceeds MAX_TIMEOUT_S."""
    request_digest: str = ""
    """Digest of the content of a call whose caller chose its id. Another caller with the same id gets the result."""


class Publisher:
    """Publishes calls. Calls of the same iteration of the event loop share one pipeline.

    A publish without a reply is repeated. The repetition sends nothing twice, because the record contains the nonce of
    the publish.
    """

    def __init__(self, connection: ScriptConnection, deployment: str, clock: SharedClock) -> None:
        self._connection = connection
        self._deployment = deployment
        self._clock = clock

    async def publish(self, call: CallAttempt, task_id: str, text: str) -> None:
        """Put an attempt into its queue. `text`: the message of its Celery task `task_id`.

        Raises NotSent. Raises BrokerFull: Redis is nearly full. Raises BrokerUnavailable:
        Redis refuses the call, or does not answer for SEND_WAIT_S. If the call may have been sent, the method waits
        for certainty, or until the deadline of the call. Until then, the call may still start.
        """
        values = self._values(call, task_id, text)
        began = asyncio.get_running_loop().time()
        attempt, may_be_sent = 0, False
        while True:
            try:
                outcome = await self._post(values)
                break
            except ReplyMissing as unanswered:
                may_be_sent = may_be_sent or unanswered.may_have_run
                if str(unanswered) == CLOSED:
                    raise BrokerUnavailable(
                        "the client was closed while it sent the call: the call may or may not act"
                    ) from None
                waited_s = asyncio.get_running_loop().time() - began
                if not may_be_sent and waited_s > SEND_WAIT_S:
                    raise BrokerUnavailable(
                        f"the call was not sent: Redis does not answer ({unanswered}). Check that Redis is running"
                    ) from unanswered
            except RedisError as error:
                # This error is about the repetition only. The first publish may already have pushed the message.
                if not may_be_sent:
                    if isinstance(full := broker_error("the call was not sent", error), BrokerFull):
                        raise full from error
                    raise BrokerUnavailable(
                        f"the call was not sent: Redis refuses it ({error}). Check its user (`toolcrew doctor`)"
                    ) from error
                log.warning("publish_outcome_unknown", call=call.call_id, error=str(error))
            if may_be_sent and self._clock() > call.start_by:
                return  # the caller now forbids the call or receives its result
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
        if outcome == "memory":
            raise BrokerFull(
                "the call was not sent: the memory of Redis is nearly full (`maxmemory`). Delete ended batches, or "
                "raise `maxmemory`; `toolcrew doctor` shows how much is used"
            )
        if outcome != "sent":
            raise NotSent(outcome)

    def _values(self, call: CallAttempt, task_id: str, text: str) -> dict[str, Value]:
        """Return the keys and arguments of the script."""
        place, session, fence = list[str](), "", ""
        if call.session is not None and call.fence is not None:
            place = [
                location_key(self._deployment, call.tenant, call.session),
                host_key(self._deployment, call.queue),
                tenant_sessions_key(self._deployment, call.tenant),
            ]
            session, fence = call.session, str(call.fence)
        return {
            "call": call_key(self._deployment, call.tenant, call.call_id),
            "queue": call.queue,
            "slots": held_slots_key(self._deployment),
            "calls": tenant_calls_key(self._deployment, call.tenant),
            "account": account_key(self._deployment, call.tenant),
            "place": place,
            "attempt": call.number,
            # The nonce must be unique, but need not be unpredictable.
            "nonce": f"{call.number}:{random.getrandbits(64):x}",
            "tool": call.tool,
            "message": text,
            "task": task_id,
            "ticket": call.ticket,
            "slot": call.slot,
            "call_id": call.call_id,
            "session": session,
            "fence": fence,
            "extra_s": call.extra_s,
            "request_digest": call.request_digest,
        }

    async def _post(self, values: dict[str, Value]) -> str:
        """Send the call once, and return the outcome. Raises RedisError: Redis refused the script. Raises ReplyMissing:
        the call may have been sent.
        """
        began = asyncio.get_running_loop().time()
        answer: bytes = await self._connection.run(PUBLISH, **values)
        outcome, seconds, micros = answer.decode().split()
        if asyncio.get_running_loop().time() - began < CLOCK_ROUND_TRIP_S:
            self._clock.learn(int(seconds) + int(micros) / 1e6)
        return outcome


# --- Results ----------------------------------------------------------------------------------------------------------

SWEEP_EVERY_S = 5.0
FOREIGN_EVERY_S = 0.5
"""Interval, in seconds, of the reads of results whose calls another process has published."""
SWEEP_BATCH = 500
QUIET_S = 5.0
SILENCE_S = 20.0
"""Time without a message after which a subscription counts as dead, in seconds. The subscription is pinged every
QUIET_S, so silence means that the connection is broken.
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
    """Receives the results of the calls of one process, and passes each to the future of its Celery task. Task ids
    start with the id of the hub, so one subscription receives all results. A few other hubs share the subscription's
    pattern; their results are ignored.

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
        self._foreign: set[str] = set()
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
            asyncio.create_task(self._sweep_regularly(SWEEP_EVERY_S, self._waiting), name="results-sweep"),
            asyncio.create_task(self._sweep_regularly(FOREIGN_EVERY_S, self._foreign), name="results-foreign"),
            asyncio.create_task(self._delete_regularly(), name="results-discard"),
        ]
        try:
            async with asyncio.timeout(10):
                await self._subscribed.wait()
        except TimeoutError:
            await self.close()
            raise BrokerUnavailable(
                "Redis did not confirm the subscription to results within 10 s: check that its ACL allows PSUBSCRIBE"
            ) from None

    async def close(self) -> None:
        """Stop listening. Futures that still wait raise BrokerUnavailable."""
        await cancel_all(self._tasks)
        self._fail_all("the client was closed while it waited for this call: the call may or may not have acted")
        self._waiting.clear()
        # Received results are deleted. If Redis is unavailable, they expire by themselves.
        with contextlib.suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(1):
                await self._delete_read_results()

    def task_id(self, name: str) -> str:
        """Return a task id whose result this hub receives. `name`: the last part of the id."""
        return f"{self.id}-{name}"

    @contextlib.contextmanager
    def expect(self, task_id: str, *, keeps: bool = False) -> Iterator[asyncio.Future[dict[str, Any]]]:
        """Yield a future of the stored result of a task. Enter the block before publishing. Raises ValueError: the
        task is awaited already.

        `keeps`: the result stays in Redis until its receiver discards the key.
        """
        if task_id in self._waiting:
            raise ValueError(f"another caller already waits for task {task_id}: give every call its own id")
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[task_id] = future
        if keeps:
            self._stored.add(task_id)
        try:
            yield future
        finally:
            self._waiting.pop(task_id, None)
            self._stored.discard(task_id)
            self._foreign.discard(task_id)

    async def read_result(self, task_id: str) -> None:
        """Read the result of one task now, if it is stored, and then every FOREIGN_EVERY_S. Use this method for a task
        that another process has published, because Redis does not announce the result of such a task to this hub.
        """
        self._foreign.add(task_id)
        try:
            await self._take_stored([task_id])
        except BrokerUnavailable as error:
            log.debug("result_not_requested", task=task_id, error=str(error))

    def fail(self, task_id: str, error: Exception) -> None:
        """Raise `error` in the caller that waits for that task. A later result is dropped."""
        future = self._waiting.get(task_id)
        if future is not None and not future.done():
            future.set_exception(error)

    def discard(self, key: str) -> None:
        """Queue a result key for deletion. Keys are deleted in groups."""
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
                self._handle_loss(error, delay)
                await asyncio.sleep(delay)

    def _handle_loss(self, error: Exception, delay: float) -> None:
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
                    await self._sweep(self._waiting)

    async def _sweep_regularly(self, every_s: float, tasks: Collection[str]) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._sweep(tasks)
            except BrokerUnavailable as error:
                log.warning("results_sweep_failed", error=str(error))

    async def _sweep(self, tasks: Collection[str]) -> None:
        awaited = [task_id for task_id in tasks if not self._waiting[task_id].done()]
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
                await self._delete_read_results()
            except BrokerUnavailable as error:
                log.debug("results_not_deleted", error=str(error), keys=len(self._collected))

    async def _delete_read_results(self) -> None:
        while self._collected:
            batch = self._collected[:DISCARD_BATCH]
            with broker_errors("results were not deleted"):
                await self._client.unlink(*batch)
            del self._collected[: len(batch)]


async def _as_it_is(message: Any) -> Any:
    return message
