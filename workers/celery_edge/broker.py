"""How a worker receives its tasks: Celery's Redis transport and Celery's consumer, each hardened.

The transport drops bytes in a queue that are not a message: kombu raises their errors out of its event loop, and Celery
then ends. What is dropped has left the queue. BRPOP continues with the next turn of the loop, since kombu forgets the
pending one before it reads.

A message belongs to the worker as soon as it is read. The records of calls tell what has not started, so kombu's own
list of unacknowledged messages, two round trips per message, is not kept. A message that is read a second time is a
repetition, even if Redis has forgotten that it was read.

The consumer takes new tasks while it runs, and sends the events of its tasks in batches: one message for each event is
more than half of what its main thread does otherwise.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import structlog
from celery.app.registry import TaskRegistry
from celery.app.trace import build_tracer
from celery.worker.consumer import Consumer
from kombu import transport
from kombu.transport import TRANSPORT_ALIASES, redis

from contract.errors import RefusalReason

log = structlog.get_logger(__name__)

INTAKE = "intake"
"""Transport option: the Intake of the app."""
REMEMBERED = 20_000
"""Messages that are remembered to detect repetitions: half a minute of more than a worker can run."""

# What reading hostile JSON through kombu's hooks for dates, numbers and bytes, and decoding a body, may raise.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Intake:
    """The messages that a worker has read, over all its connections to the broker. `on_refused` gets the reason when
    one was dropped.
    """

    def __init__(self, on_refused: Callable[[RefusalReason], None] | None = None) -> None:
        self._on_refused = on_refused
        self._read: OrderedDict[int, None] = OrderedDict()

    def is_repeated(self, message: dict[str, Any]) -> bool:
        """Return whether this message has been read before, and remember it."""
        mark = hash((message["properties"]["delivery_tag"], message["body"]))
        if mark in self._read:
            return True
        self._read[mark] = None
        if len(self._read) > REMEMBERED:
            self._read.popitem(last=False)
        return False

    def refuse(self, reason: RefusalReason) -> None:
        """Report that something was dropped."""
        if self._on_refused is not None:
            self._on_refused(reason)


def register_transport() -> None:
    """Use the hardened transport for every Redis URL of this process's Celery apps."""
    for scheme, name in (("redis", "Transport"), ("rediss", "Transport"), ("sentinel", "SentinelTransport")):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{name}"
        # kombu caches resolved transports: an earlier connection of this process must not decide for the worker.
        transport._transport_cache.pop(scheme, None)  # type: ignore[attr-defined]


class _HardenedChannel(redis.Channel):
    """Reads a queue to which any process may have written."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[misc]
        except _UNREADABLE as error:
            log.error("queue_garbage", error=type(error).__name__)
            _intake(self.connection).refuse("malformed")
            return None

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[..., Any] | None, consumer_tag: str | None, **kwargs: Any
    ) -> str:
        guarded = self._guarded(callback) if callback is not None else None
        # Always without acknowledgement: kombu then keeps no list of messages.
        tag: str = super().basic_consume(queue, no_ack=True, callback=guarded, consumer_tag=consumer_tag, **kwargs)
        return tag

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Do nothing: no list of unacknowledged messages is kept."""

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Put back a message of a queue that is no longer read. No other message is kept."""
        if requeue:
            super().basic_reject(delivery_tag, requeue=True)

    def _guarded(self, callback: Callable[..., Any]) -> Callable[[Any], Any]:
        def take(message: Any) -> Any:
            try:
                return callback(message)
            except Exception as error:  # the edge: a message that Celery cannot handle must cost only itself
                if self._is_broken_connection(error):
                    raise
                log.error("message_refused", error=type(error).__name__)
                _intake(self.connection).refuse("malformed")
                return None

        return take

    def _is_broken_connection(self, error: Exception) -> bool:
        # kombu counts KeyError as an error of the connection; here it means that the message lacks a field.
        return isinstance(error, self.connection.connection_errors) and not isinstance(error, KeyError)


class Channel(_HardenedChannel):
    """A channel of one Redis."""


class SentinelChannel(_HardenedChannel, redis.SentinelChannel):
    """A channel of the master that sentinels name."""


class Transport(redis.Transport):
    """Delivers each valid message once."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str | None) -> None:
        if not _is_message(message):
            log.error("queue_garbage", queue=queue)
            _intake(self).refuse("malformed")
        elif self._is_read(queue) and _intake(self).is_repeated(message):
            log.error("message_repeated", queue=queue)
            _intake(self).refuse("repeated")
        else:
            super()._deliver(message, queue)

    def _is_read(self, queue: str | None) -> bool:
        """Return whether a consumer of ours still takes messages of that queue."""
        callbacks: Any = self._callbacks
        return queue in callbacks


class SentinelTransport(Transport):
    """The same, for the Redis that sentinels name."""

    default_port = 26379
    Channel = SentinelChannel  # type: ignore[assignment]


def _intake(transport: Any) -> Intake:
    """Return the intake of the connection's app."""
    found: Intake = transport.client.transport_options.setdefault(INTAKE, Intake())
    return found


def _is_message(message: Any) -> bool:
    """Return whether kombu can decode the message."""
    match message:
        case {
            "body": str(),
            # A process that can write to a queue must not choose what is unpickled.
            "content-type": "application/json",
            "properties": {
                "delivery_tag": str(),
                "delivery_info": {"exchange": str(), "routing_key": str()},
            } as properties,
        }:
            headers = message.get("headers")
            # Our messages are not compressed; unpacking a hostile one could fill the memory.
            is_plain = headers is None or (isinstance(headers, dict) and "compression" not in headers)
            return is_plain and properties.get("body_encoding") in (None, "base64", "utf-8")
        case _:
            return False


FLUSH_AFTER_S = 0.1
"""The greatest age of the first event of a batch."""
MAX_BATCH = 500
FORGOTTEN_S = 1.0
"""A batch that is late by so much was lost with a broken connection."""


class LiveTasks(TaskRegistry):
    """Tasks of an app that may be added while it runs. `find` adds the task of a name, or does nothing; then a missing
    name raises NotRegistered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.find: Callable[[str], None] = lambda name: None

    def __missing__(self, name: str) -> Any:
        self.find(name)
        if name not in self:
            raise self.NotRegistered(name)
        task = self[name]
        # A process of the pool does this at its start for the tasks that it knows then.
        task.__trace__ = build_tracer(name, task, task.app.loader, app=task.app)
        return task


class LiveStrategies(dict[str, Any]):
    """How a consumer passes on a message, by its task, also for tasks that were added later. Raises KeyError for
    unknown tasks.
    """

    def __init__(self, consumer: Any) -> None:
        super().__init__()
        self._consumer = consumer

    def __missing__(self, name: str) -> Any:
        strategy = self[name] = self._consumer.app.tasks[name].start_strategy(self._consumer.app, self._consumer)
        return strategy


class BatchingConsumer(Consumer):
    """Celery's own sends events with every turn of its loop, and knows only the tasks that there were at its start."""

    hub: Any
    event_dispatcher: Any
    _flush_events: Any
    _due_at = 0.0

    def Strategies(self) -> LiveStrategies:  # type: ignore[override]  # where Celery has the class of a dictionary
        return LiveStrategies(self)

    def on_send_event_buffered(self) -> None:  # type: ignore[override]  # Celery's stubs expect what it gives by accident
        """Called with every event, by the thread that has ended a call."""
        # Celery makes a new dispatcher, with its own limit, for every connection.
        self.event_dispatcher.buffer_limit = MAX_BATCH
        now = time.monotonic()
        if self.hub and (self._due_at == 0.0 or now > self._due_at + FORGOTTEN_S):
            self._due_at = now + FLUSH_AFTER_S
            # Only the loop's own thread may set its timers.
            self.hub.call_soon(self._wait)

    def shutdown(self) -> None:
        self._flush()
        super().shutdown()

    def _wait(self) -> None:
        self.hub.call_later(FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        self._due_at = 0.0
        self._flush_events()
