"""Envelopes over Celery: published without a result backend, awaited through the hub. The only file here that imports celery."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from contract.calls import POOL_GRACE_S
from contract.errors import BrokerUnavailable, ErrorCode
from contract.names import control_queue
from contract.settings import BrokerSettings
from orchestrator.redis_connection import open_redis
from orchestrator.results import ResultHub
from orchestrator.transport import Delivery, DeliveryFailed

PUBLISH_THREADS = 4
START_GRACE_S = 2.0
"""Beyond a call's deadline for starting: clocks of two hosts differ a little."""
CONTROL_TTL_S = 60


class CeleryTransport:
    """Publishes to a queue by name and awaits the stored result.

    The app has no result backend on purpose: with one, every publish would subscribe to its own channel and keep it.
    """

    def __init__(self, broker: BrokerSettings, hub: ResultHub) -> None:
        self._hub = hub
        self._redis = open_redis(broker)
        self._threads = ThreadPoolExecutor(PUBLISH_THREADS, thread_name_prefix="publish")
        self._app = _build_publisher(broker)

    async def deliver(self, delivery: Delivery) -> Any:
        """The encoded result. Raises DeliveryFailed, TimeoutError after `wait_s`, BrokerUnavailable when Redis is away."""
        task_id = self._hub.task_id(delivery.call_id)
        try:
            with self._hub.expect(task_id) as stored:
                async with asyncio.timeout(delivery.wait_s):
                    await asyncio.get_running_loop().run_in_executor(self._threads, self._publish, delivery, task_id)
                    return _unpack(await self._await_stored(stored, delivery), delivery)
        except ValueError as error:
            raise DeliveryFailed(ErrorCode.INVALID_ARGUMENTS, f"the call id '{delivery.call_id}' is in use by a call in flight") from error

    async def _await_stored(self, stored: "asyncio.Future[dict[str, Any]]", delivery: Delivery) -> dict[str, Any]:
        """The result; when it has not even started by its deadline, that is known at once and need not be waited for."""
        done, _ = await asyncio.wait({stored}, timeout=max(0.0, delivery.start_by - time.time()) + START_GRACE_S)
        if not done:
            try:
                has_started = bool(await self._redis.exists(delivery.marker))
            except (RedisError, OSError):
                has_started = True  # not known: wait on
            if not has_started:
                raise DeliveryFailed(
                    ErrorCode.TIMEOUT, "no worker took the call before its deadline, and it was not run: is a worker running?"
                )
        return await stored

    async def command(self, queue: str, envelope: str) -> None:
        """Put an envelope on the host's control list, which its worker reads at once, however busy its pool is."""
        key = control_queue(queue)
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.lpush(key, envelope)
                pipe.expire(key, CONTROL_TTL_S)
                await pipe.execute()
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"the host could not be told: Redis does not answer ({error})") from error

    async def aclose(self) -> None:
        """Close the connections to the broker."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._app.close()
        await self._redis.aclose()

    def _publish(self, delivery: Delivery, task_id: str) -> None:
        try:
            self._app.send_task(
                delivery.task,
                kwargs={"envelope": delivery.envelope},
                task_id=task_id,
                # A queue by name goes through the default exchange: one LPUSH, never dropped for want of a binding.
                queue=delivery.queue,
                expires=datetime.fromtimestamp(delivery.start_by, UTC),
                **_limits(delivery),
                # What people see of a call in Flower and in logs: its id, never its arguments.
                argsrepr="()",
                kwargsrepr=f"call {delivery.call_id}",
            )
        except (OperationalError, OSError) as error:
            raise BrokerUnavailable(f"the call was not sent: Redis does not answer ({error})") from error


def _limits(delivery: Delivery) -> dict[str, Any]:
    """Celery's own limits of a call that no sandbox limits; else those that its task has in the worker."""
    if delivery.limit_s is None:
        return {}
    return {"soft_time_limit": delivery.limit_s, "time_limit": delivery.limit_s + POOL_GRACE_S}


def _build_publisher(broker: BrokerSettings) -> Celery:
    app = Celery("toolcrew-publisher", broker=broker.redis_url.get_secret_value(), backend=None, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_send_sent_event=False,
        broker_pool_limit=PUBLISH_THREADS,
        broker_pool_acquire_timeout=5,
        task_publish_retry=True,
        task_publish_retry_policy={"max_retries": 3, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5},
        broker_transport_options={
            "priority_steps": [0],
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 15,
        },
    )
    return app


def _unpack(stored: dict[str, Any], delivery: Delivery) -> Any:
    status, result = stored["status"], stored.get("result")
    if status == "SUCCESS":
        return result
    if status == "REVOKED":
        raise DeliveryFailed(ErrorCode.TIMEOUT, "the call waited in the queue past its deadline and was not run")
    kind = result.get("exc_type", "") if isinstance(result, dict) else ""
    words = _words(result.get("exc_message", "")) if isinstance(result, dict) else str(result)
    if kind == "EnvelopeRefused":
        raise DeliveryFailed(ErrorCode.ENVELOPE_REFUSED, f"the worker refused the call: {words}")
    name = delivery.task.removeprefix("tool.")
    if kind == "NotRegistered":
        raise DeliveryFailed(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name}")
    if kind == "TimeLimitExceeded" and delivery.limit_s is not None:
        raise DeliveryFailed(
            ErrorCode.TIMEOUT,
            f"{name} did not end within its limit of {delivery.limit_s:g} s, nor in the {POOL_GRACE_S:g} s it had to clean up, and its process was "
            "killed; it may have acted",
        )
    if kind in ("WorkerLostError", "TimeLimitExceeded", "Terminated"):
        raise DeliveryFailed(ErrorCode.OUTCOME_UNKNOWN, f"the worker was lost while it ran the call ({kind}); it may have acted")
    raise DeliveryFailed(ErrorCode.INTERNAL, f"the worker failed outside the call ({kind}): {words[:500]}")


def _words(message: object) -> str:
    """Celery stores an exception's arguments, mostly one sentence in a list."""
    return "; ".join(map(str, message)) if isinstance(message, list | tuple) else str(message)
