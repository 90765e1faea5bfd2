"""Send calls as Celery tasks and await their results.

Celery builds the message of a task, and kombu wraps it. Only the sending is code of this project: one Redis script
puts the message into its queue and writes the call's record. Celery sends with LPUSH alone, which could leave a call
in its queue without a record.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

from celery import Celery
from celery.events.event import Event
from kombu import Connection
from kombu.serialization import dumps
from kombu.utils.json import dumps as to_json

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import POOL_GRACE_S
from toolcrew.contract.envelope import find_encoded_result, find_result_key, join_result
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode
from toolcrew.contract.hosts import HOST_LOST_TYPE
from toolcrew.contract.names import call_key, is_blob_of, result_key, show_call, task_name
from toolcrew.orchestrator.dispatch.request import Attempt, CheckedRequest
from toolcrew.orchestrator.dispatch.transport import CallIdInUse, CallLost, DeliveryFailed, result_expired
from toolcrew.store.call_messages import Publisher, ResultHub, read_result_record
from toolcrew.store.calls import CallStore
from toolcrew.store.clock import SharedClock
from toolcrew.store.connection import open_redis
from toolcrew.store.hosts import send_order
from toolcrew.store.scripts import ScriptConnection
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

START_GRACE_S = 2.0
"""Seconds to wait after the deadline by which a call must start. A worker that claims the call at the last moment needs
this time to record the claim.
"""
RESULT_RETRY_S = 0.5
_PERSISTENT, _TRANSIENT = 2, 1
FAILED_EVENTS = "celeryev/task.failed"
"""Channel of Celery's task-failed events. Kombu names the channel after the number of the Redis database."""


class LossMonitor(Protocol):
    """Finds calls whose worker was lost (orchestrator/dispatch/call_monitor.py)."""

    def over(self, task_id: str, attempt: Attempt) -> AbstractContextManager[None]:
        """Raise CallLost in the caller if the worker is lost while the block awaits the task."""
        ...


class CeleryTransport:
    """Publishes to a queue by name and awaits the stored result.

    `clock` is set to the time of Redis with every publish. `monitor` finds calls whose worker was lost; without a
    monitor, the sender notices the loss when its wait ends.
    """

    def __init__(
        self,
        broker: BrokerSettings,
        hub: ResultHub,
        monitor: LossMonitor | None = None,
        clock: SharedClock | None = None,
        scripts: ScriptConnection | None = None,
    ) -> None:
        self._hub = hub
        self._deployment = broker.deployment
        self._clock = clock or SharedClock()
        self._monitor = monitor
        self._redis = open_redis(broker)
        self._scripts = scripts or ScriptConnection(self._redis)
        self._owns_scripts = scripts is None
        self._publisher = Publisher(self._scripts, broker.deployment, self._clock)
        self._calls = CallStore(self._redis, broker.deployment)
        self._in_flight: set[tuple[str, str]] = set()
        self._result_keys: dict[tuple[str, str], list[str]] = {}

    async def deliver(self, attempt: Attempt) -> Any:
        """Return the encoded result. Raises NotSent, CallLost, DeliveryFailed. Raises TimeoutError after `wait_s`,
        and BrokerUnavailable when Redis does not answer.
        """
        name = (attempt.tenant, attempt.call_id)
        if name in self._in_flight:
            raise CallIdInUse(attempt.call_id)
        self._in_flight.add(name)
        try:
            async with asyncio.timeout(attempt.request.wait_s):
                return await self._deliver(attempt)
        finally:
            self._in_flight.discard(name)

    async def _deliver(self, attempt: Attempt) -> Any:
        # Every attempt has its own task id. With a common id, a late result of the first attempt would be taken for
        # that of the second.
        task_id = attempt.published_as or self._hub.task_id(f"{attempt.call_id}.{attempt.number}.{attempt.tenant}")
        with self._hub.expect(task_id, keeps=attempt.request.keeps_result) as stored:
            if attempt.published_as is None:
                record = call_key(self._deployment, attempt.tenant, attempt.call_id)
                await self._publisher.publish(attempt, task_id, build_message(attempt, task_id, record))
            else:
                await self._hub.read_result(task_id)
            if self._monitor is None:
                stored_result = await self._await_stored(stored, attempt)
            else:
                with self._monitor.over(task_id, attempt):
                    stored_result = await self._await_stored(stored, attempt)
        if attempt.request.digest:
            if attempt.published_as is None:
                await self._count_kept(attempt.tenant, task_id)
        elif attempt.request.keeps_result:
            self._result_keys[attempt.tenant, attempt.call_id] = [result_key(task_id)]
        return await self._complete(_unpack(stored_result, attempt), attempt)

    async def _await_stored(self, stored: "asyncio.Future[dict[str, Any]]", attempt: Attempt) -> dict[str, Any]:
        """Return the stored result. If the call has not started by its deadline, mark the call so that no worker starts
        it, and stop waiting.
        """
        wait_s = max(0.0, attempt.start_by - self._clock()) + START_GRACE_S
        has_requested = False
        while not (await asyncio.wait({stored}, timeout=wait_s))[0]:
            try:
                state = await self._calls.forbid(attempt.tenant, attempt.call_id, attempt.number)
            except BrokerUnavailable:
                has_requested, wait_s = True, RESULT_RETRY_S
                continue
            if state == "queued" or (state == "forbidden" and has_requested):
                raise DeliveryFailed(
                    ErrorCode.TIMEOUT,
                    "no worker took the call before its deadline, and it was not run: check that a worker is running",
                )
            if state != "forbidden":
                break
            # The call was cancelled, or a worker found that the deadline has passed and is about to report that.
            if not (await asyncio.wait({stored}, timeout=START_GRACE_S))[0]:
                raise DeliveryFailed(
                    ErrorCode.CANCELLED, "the call was cancelled before a worker took it, and was not run"
                )
        return await stored

    async def _complete(self, result: Any, attempt: Attempt) -> Any:
        """Return the encoded result. If the result is stored in a separate record, read that record."""
        key = find_result_key(result)
        if key is None:
            return result
        if not is_blob_of(key, self._deployment, attempt.tenant):
            raise DeliveryFailed(
                ErrorCode.ENVELOPE_REFUSED,
                "the result names a record of another tenant and was refused: check the worker that sent it",
            )
        record = await self._read(key)
        if record is None and attempt.request.digest:
            raise result_expired(attempt.call_id)
        if record is None:
            raise DeliveryFailed(
                ErrorCode.OUTCOME_UNKNOWN,
                "the call has ended, but Redis lost its result before it was read: check that Redis evicts no keys",
            )
        if attempt.request.digest:
            pass
        elif attempt.request.keeps_result:
            self._result_keys[attempt.tenant, attempt.call_id].append(key)
        else:
            self._hub.discard(key)
        return join_result(result, record)

    async def _count_kept(self, tenant: str, task_id: str) -> None:
        """Count a result that stays in Redis. If Redis does not answer, the result is not counted, and expires."""
        try:
            await self._calls.keep_result(tenant, task_id)
        except BrokerUnavailable as error:
            log.warning("kept_result_not_counted", task=task_id, error=str(error))

    async def _read(self, key: str) -> bytes | None:
        """Return a stored record. Waits until Redis answers."""
        while True:
            try:
                return await read_result_record(self._redis, key)
            except BrokerUnavailable:
                await asyncio.sleep(RESULT_RETRY_S)

    def settle(self, tenant: str, call_id: str) -> None:
        """Delete the stored result of a call."""
        for key in self._result_keys.pop((tenant, call_id), ()):
            self._hub.discard(key)

    async def send_order(self, queue: str, envelope: str) -> None:
        """Put an envelope on the host's control list. The worker reads this list immediately, even when its pool is
        busy.
        """
        await send_order(self._redis, queue, envelope)

    async def aclose(self) -> None:
        """Close the connections to the broker."""
        if self._owns_scripts:
            await self._scripts.aclose()
        await self._redis.aclose()


def _unpack(stored: dict[str, Any], attempt: Attempt) -> Any:
    status, result, answer = stored["status"], stored.get("result"), find_encoded_result(stored)
    if status == "SUCCESS" or answer is not None:
        return answer
    if status == "REVOKED":
        raise DeliveryFailed(
            ErrorCode.TIMEOUT, "the call waited in the queue until after its deadline and was not run: send it again"
        )
    kind = result.get("exc_type", "") if isinstance(result, dict) else ""
    message = _exception_text(result.get("exc_message", "")) if isinstance(result, dict) else str(result)
    if kind == HOST_LOST_TYPE:
        raise CallLost(message, has_started=False)
    if kind == "EnvelopeRefused":
        raise DeliveryFailed(ErrorCode.ENVELOPE_REFUSED, f"the worker refused the call: {message}")
    request = attempt.request
    name = request.worker_call.name
    if kind == "NotRegistered":
        raise DeliveryFailed(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name}")
    if kind == "TimeLimitExceeded" and request.celery_limit_s is not None:
        raise DeliveryFailed(
            ErrorCode.TIMEOUT,
            f"{name} did not end within its limit of {request.celery_limit_s:g} s, nor in the {POOL_GRACE_S:g} s "
            "for its cleanup, and its process was killed; it may have acted, so check its effects before you repeat it",
        )
    if kind in ("WorkerLostError", "TimeLimitExceeded", "Terminated"):
        raise CallLost(f"the process that ran the call was lost ({kind})", has_started=True)
    raise DeliveryFailed(
        ErrorCode.INTERNAL, f"the worker failed outside the call ({kind}): {message[:500]}; see its log"
    )


def _exception_text(message: object) -> str:
    """Return the exception's text. Celery stores an exception's arguments, usually one sentence in a list."""
    return "; ".join(map(str, message)) if isinstance(message, list | tuple) else str(message)


def build_message(attempt: Attempt, task_id: str, call_key: str) -> str:
    """Return one item of the queue's list. `call_key`: the key of the call's record. When the host dies, the reaper of
    its queue marks that record as lost.

    The item does not expire, because a worker would compare the expiry with its own clock. The envelope contains the
    time until which a call may start. Flower and logs show the call, its tenant, session and run, and the name of the
    tool. Flower and logs never show arguments.
    """
    request = attempt.request
    shown = {"argsrepr": "()", "kwargsrepr": _show_call(request)}
    # With None, the task has the time limits that the worker sets.
    limit_s = request.celery_limit_s
    task = _app().amqp.create_task_message(
        task_id,
        task_name(request.worker_call.name),
        kwargs={"envelope": attempt.envelope},
        time_limit=limit_s + POOL_GRACE_S if limit_s is not None else None,
        soft_time_limit=limit_s,
        shadow=task_name(request.shown_as) if request.shown_as else None,
        ignore_result=None,
        origin=describe_sender(),
        **shown,
    )
    headers = {**task.headers, "call_key": call_key, "call_attempt": attempt.number}
    # Sent by queue name through the default exchange: one LPUSH, which no missing binding can drop.
    return _wrap(task.body, headers, {**task.properties, **shown, "delivery_mode": _PERSISTENT}, "", attempt.queue)


def build_failed_event(attempt: Attempt, task_id: str, node: str, error: str) -> str:
    """Return the message of Celery's event that a task has failed, on behalf of its dead worker `node`.

    celery.events.EventDispatcher publishes the same message through kombu to the channel FAILED_EVENTS. Without a
    clock value the receiver uses its own clock.
    """
    event = Event(
        "task-failed",
        uuid=task_id,
        name=task_name(attempt.request.call.name),
        args="()",
        kwargs=_show_call(attempt.request),
        exception=error,
        traceback="",
        hostname=node,
        pid=0,
    )
    return _wrap(event, {"hostname": node}, {"delivery_mode": _TRANSIENT}, "celeryev", "task.failed")


def _show_call(request: CheckedRequest) -> str:
    return show_call(request.call.id, request.tenant, request.session, request.run)


@cache
def describe_sender() -> str:
    """Return the name of this process, for operators."""
    return f"toolcrew{os.getpid()}@{socket.gethostname()}"


def _wrap(
    body: object, headers: Mapping[str, object], properties: Mapping[str, object], exchange: str, routing_key: str
) -> str:
    content_type, encoding, text = dumps(body, serializer="json")
    channel = _channel()
    message = channel.prepare_message(text, 0, content_type, encoding, headers, {**properties})
    channel._inplace_augment_message(message, exchange, routing_key)
    text_of_message: str = to_json(message)
    return text_of_message


@cache
def _app() -> Celery:
    return Celery("toolcrew", set_as_current=False)


@cache
def _channel() -> Any:
    """Return a channel of kombu that wraps messages and never connects. All transports of kombu without exchanges of
    their own, such as Redis, share this code.
    """
    return Connection("memory://").channel()
