"""Celery's Redis transport, hardened: bytes in a queue that are no message cost themselves, and never the worker.

Kombu's own lets them out of its event loop, where Celery takes them for its own end. Whatever is dropped here has left
the queue; BRPOP goes on with the next turn of the loop, since kombu forgets the pending one before it reads.

A message is the worker's from the moment it is read: the ledger knows what has not started, so kombu's own book of what
is not acknowledged, two round trips a message, is not kept. A message that is read again is a repetition, also when
Redis itself has forgotten that it was read.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import structlog
from kombu import transport
from kombu.transport import TRANSPORT_ALIASES, redis

from contract.errors import RefusalReason

log = structlog.get_logger(__name__)

INTAKE = "intake"
"""Transport option: the Intake of the app."""
REMEMBERED = 20_000
"""Messages by which a repetition is known: those of half a minute, at more than a worker can run."""

# What reading hostile JSON through kombu's hooks for dates, numbers and bytes, and decoding a body, may raise.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Intake:
    """What a worker has read, over all its connections to the broker, and who is told why something was dropped."""

    def __init__(self, on_refused: Callable[[RefusalReason], None] | None = None) -> None:
        self._on_refused = on_refused
        self._read: OrderedDict[int, None] = OrderedDict()

    def is_repeated(self, message: dict[str, Any]) -> bool:
        """Whether this very message has been read before; from now on it has."""
        mark = hash((message["properties"]["delivery_tag"], message["body"]))
        if mark in self._read:
            return True
        self._read[mark] = None
        if len(self._read) > REMEMBERED:
            self._read.popitem(last=False)
        return False

    def refuse(self, reason: RefusalReason) -> None:
        """Something was dropped."""
        if self._on_refused is not None:
            self._on_refused(reason)


def register_transport() -> None:
    """Have every Redis URL of this process's Celery apps served by the hardened transport."""
    for scheme, name in (("redis", "Transport"), ("rediss", "Transport"), ("sentinel", "SentinelTransport")):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{name}"
        # kombu keeps what it has resolved: a connection made earlier in this process must not decide for the worker's.
        transport._transport_cache.pop(scheme, None)  # type: ignore[attr-defined]


class _HardenedChannel(redis.Channel):
    """Reads a queue that anyone may have written to."""

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
        is_kept = False
        tag: str = super().basic_consume(queue, not is_kept, guarded, consumer_tag, **kwargs)
        return tag

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Nothing is kept that would have to be taken back."""

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """What came for a queue that is read no more goes back; nothing else is kept that could."""
        if requeue:
            super().basic_reject(delivery_tag, requeue=True)

    def _guarded(self, callback: Callable[..., Any]) -> Callable[[Any], Any]:
        def take(message: Any) -> Any:
            try:
                return callback(message)
            except Exception as error:  # the edge: a message that Celery chokes on must cost itself only
                if self._is_broken_connection(error):
                    raise
                log.error("message_refused", error=type(error).__name__)
                _intake(self.connection).refuse("malformed")
                return None

        return take

    def _is_broken_connection(self, error: Exception) -> bool:
        # kombu counts KeyError among the errors of a connection; of a message it means a missing field.
        return isinstance(error, self.connection.connection_errors) and not isinstance(error, KeyError)


class Channel(_HardenedChannel):
    """Of one Redis."""


class SentinelChannel(_HardenedChannel, redis.SentinelChannel):
    """Of the master that sentinels name."""


class Transport(redis.Transport):
    """Delivers what has the shape of a message, once."""

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
        """Whether a consumer of ours still takes messages of that queue."""
        callbacks: Any = self._callbacks
        return queue in callbacks


class SentinelTransport(Transport):
    """The same, for the Redis that sentinels name."""

    default_port = 26379
    Channel = SentinelChannel  # type: ignore[assignment]


def _intake(transport: Any) -> Intake:
    """Of the app that the connection was made for."""
    found: Intake = transport.client.transport_options.setdefault(INTAKE, Intake())
    return found


def _is_message(message: Any) -> bool:
    """Whether kombu can take it apart, and keep it as not yet acknowledged."""
    match message:
        case {
            "body": str(),
            # Whoever can write to a queue must not choose what is unpickled.
            "content-type": "application/json",
            "properties": {
                "delivery_tag": str(),
                "delivery_info": {"exchange": str(), "routing_key": str()},
            } as properties,
        }:
            headers = message.get("headers")
            # Ours are not compressed; unpacking what a stranger compressed could fill the memory.
            is_plain = headers is None or (isinstance(headers, dict) and "compression" not in headers)
            return is_plain and properties.get("body_encoding") in (None, "base64", "utf-8")
        case _:
            return False
