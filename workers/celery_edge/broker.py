"""Hardened versions of Celery's Redis transport and Celery's consumer, through which a worker receives its tasks.

The transport drops bytes in a queue that are not a message. Otherwise kombu would raise an error out of its event loop,
and Celery would end. BRPOP has already removed the dropped bytes from the queue. The next turn of the loop sends BRPOP
again, because kombu marks the previous BRPOP as finished before it reads the reply.

A message belongs to the worker as soon as the worker has read it. The records of calls (store/calls.py) show which
calls of a dead worker have not started. So the transport does not keep kombu's list of unacknowledged messages, which
costs two round trips per message. A message that is read a second time counts as a repetition, even if Redis has lost
the record of the first read.

The consumer accepts new tasks while it runs, and sends the events of its tasks in batches. One message per event would
add more than half to the main thread's work.
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

from toolcrew.contract.errors import RefusalReason
from toolcrew.store.connection import CONNECTION_OPTIONS

log = structlog.get_logger(__name__)

DUPLICATE_FILTER = "duplicate_filter"
"""Transport option with the app's DuplicateFilter."""
REMEMBERED = 20_000
"""Number of messages that are remembered to detect repetitions. A worker needs more than half a minute to run so many.
"""

# Errors that hostile JSON causes in kombu: in its conversion of dates, numbers and bytes, and in the decoding of a
# body.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class DuplicateFilter:
    """Detects messages that the worker has already read, over any of its connections to the broker.

    `on_refused` receives the reason for each dropped message.
    """

    def __init__(self, on_refused: Callable[[RefusalReason], None] | None = None) -> None:
        self._on_refused = on_refused
        self._read: OrderedDict[int, None] = OrderedDict()

    def is_repeated(self, message: dict[str, Any]) -> bool:
        """Return whether this message has been read before. Remember the message."""
        mark = hash((message["properties"]["delivery_tag"], message["body"]))
        if mark in self._read:
            return True
        self._read[mark] = None
        if len(self._read) > REMEMBERED:
            self._read.popitem(last=False)
        return False

    def refuse(self, reason: RefusalReason) -> None:
        """Report a dropped message."""
        if self._on_refused is not None:
            self._on_refused(reason)


def register_transport() -> None:
    """Use the hardened transport for every Redis URL of this process's Celery apps."""
    for scheme, name in (
        ("redis", "DeduplicatingTransport"),
        ("rediss", "DeduplicatingTransport"),
        ("sentinel", "SentinelTransport"),
    ):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{name}"
        # kombu caches resolved transports. A transport that this process resolved earlier must not be used for the
        # worker.
        transport._transport_cache.pop(scheme, None)  # type: ignore[attr-defined]


class _HardenedChannel(redis.Channel):
    """A channel that checks each message, because any process may have written to the queue."""

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        return {**super()._connparams(asynchronous), **CONNECTION_OPTIONS}  # type: ignore[misc]

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[misc]
        except _UNREADABLE as error:
            log.error("queue_garbage", error=type(error).__name__)
            _get_duplicate_filter(self.connection).refuse("malformed")
            return None

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[..., Any] | None, consumer_tag: str | None, **kwargs: Any
    ) -> str:
        guarded = self._guard(callback) if callback is not None else None
        # Always consume without acknowledgement: kombu then keeps no list of unacknowledged messages.
        tag: str = super().basic_consume(queue, no_ack=True, callback=guarded, consumer_tag=consumer_tag, **kwargs)
        return tag

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Do nothing: there is no list of unacknowledged messages."""

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Return a message to its queue if this worker no longer reads the queue. Drop any other message."""
        if requeue:
            super().basic_reject(delivery_tag, requeue=True)

    def _guard(self, callback: Callable[..., Any]) -> Callable[[Any], Any]:
        def take(message: Any) -> Any:
            try:
                return callback(message)
            # The outermost handler: a message that Celery cannot handle must not affect other messages.
            except Exception as error:
                if self._is_broken_connection(error):
                    raise
                log.error("message_refused", error=type(error).__name__)
                _get_duplicate_filter(self.connection).refuse("malformed")
                return None

        return take

    def _is_broken_connection(self, error: Exception) -> bool:
        # kombu counts KeyError as a connection error. Here a KeyError means that the message lacks a field.
        return isinstance(error, self.connection.connection_errors) and not isinstance(error, KeyError)


class Channel(_HardenedChannel):
    """A channel to one Redis server."""


class SentinelChannel(_HardenedChannel, redis.SentinelChannel):
    """A channel to the master that Redis Sentinel names."""


class DeduplicatingTransport(redis.Transport):
    """A transport that delivers each valid message once."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str | None) -> None:
        if not _is_message(message):
            log.error("queue_garbage", queue=queue)
            _get_duplicate_filter(self).refuse("malformed")
        elif self._is_read(queue) and _get_duplicate_filter(self).is_repeated(message):
            log.error("message_repeated", queue=queue)
            _get_duplicate_filter(self).refuse("repeated")
        else:
            super()._deliver(message, queue)

    def _is_read(self, queue: str | None) -> bool:
        """Return whether a consumer of this connection still takes messages of the queue."""
        callbacks: Any = self._callbacks
        return queue in callbacks


class SentinelTransport(DeduplicatingTransport):
    """The same transport for Redis Sentinel."""

    default_port = 26379
    Channel = SentinelChannel  # type: ignore[assignment]


def _get_duplicate_filter(transport: Any) -> DuplicateFilter:
    """Return the DuplicateFilter of the Celery app that owns the connection."""
    options = transport.client.transport_options
    duplicate_filter: DuplicateFilter = options.setdefault(DUPLICATE_FILTER, DuplicateFilter())
    return duplicate_filter


def _is_message(message: Any) -> bool:
    """Return whether kombu can decode the message."""
    match message:
        case {
            "body": str(),
            # A process that can write to a queue must not choose the deserializer, such as pickle.
            "content-type": "application/json",
            "properties": {
                "delivery_tag": str(),
                "delivery_info": {"exchange": str(), "routing_key": str()},
            } as properties,
        }:
            headers = message.get("headers")
            # Our messages are not compressed. Unpacking a hostile message could fill the memory.
            is_plain = headers is None or (isinstance(headers, dict) and "compression" not in headers)
            return is_plain and properties.get("body_encoding") in (None, "base64", "utf-8")
        case _:
            return False


FLUSH_AFTER_S = 0.1
"""Maximum age of the first event of a batch, in seconds."""
MAX_BATCH = 500
FORGOTTEN_S = 1.0
"""Seconds after its due time at which an unsent batch counts as lost, because its connection is broken."""


class LiveTasks(TaskRegistry):
    """The tasks of an app; tasks can be added while the app runs.

    A lookup of an unknown task calls `find`, which may add the task. If `find` adds nothing, the lookup raises
    NotRegistered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.find: Callable[[str], None] = lambda name: None

    def __missing__(self, name: str) -> Any:
        self.find(name)
        if name not in self:
            raise self.NotRegistered(name)
        task = self[name]
        # At its start a pool process builds the function that runs a task (the tracer), but only for the tasks that
        # exist then.
        task.__trace__ = build_tracer(name, task, task.app.loader, app=task.app)
        return task


class LiveStrategies(dict[str, Any]):
    """Celery's strategies (functions that pass a message to the pool) by task name. Includes tasks that were added
    later.

    Raises KeyError for unknown tasks.
    """

    def __init__(self, consumer: Any) -> None:
        super().__init__()
        self._consumer = consumer

    def __missing__(self, name: str) -> Any:
        strategy = self[name] = self._consumer.app.tasks[name].start_strategy(self._consumer.app, self._consumer)
        return strategy


class BatchingConsumer(Consumer):
    """A consumer that sends events in batches and accepts new tasks.

    Celery's own consumer sends events in every turn of its loop, and knows only the tasks at its start.
    """

    hub: Any
    event_dispatcher: Any
    _flush_events: Any
    _due_at = 0.0

    def Strategies(self) -> LiveStrategies:  # type: ignore[override]  # where Celery has the class of a dictionary
        return LiveStrategies(self)

    def on_send_event_buffered(self) -> None:  # type: ignore[override]  # Celery's stubs expect what it gives by accident
        """Schedule a batch. Celery calls this method with every event, in the thread that has ended a call."""
        # Celery creates a new dispatcher, with its own limit, for every connection.
        self.event_dispatcher.buffer_limit = MAX_BATCH
        now = time.monotonic()
        if self.hub and (self._due_at == 0.0 or now > self._due_at + FORGOTTEN_S):
            self._due_at = now + FLUSH_AFTER_S
            # Only the thread that runs the loop may set timers of the loop.
            self.hub.call_soon(self._wait)

    def shutdown(self) -> None:
        self._flush()
        super().shutdown()

    def _wait(self) -> None:
        self.hub.call_later(FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        self._due_at = 0.0
        self._flush_events()
