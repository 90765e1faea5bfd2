"""Celery's Redis transport, hardened: bytes in a queue that are no message cost themselves, and never the worker.

Kombu's own lets them out of its event loop, where Celery takes them for its own end. Whatever is dropped here has left the queue; BRPOP goes
on with the next turn of the loop, since kombu forgets the pending one before it reads.
"""

from collections.abc import Callable
from typing import Any

import structlog
from kombu import transport
from kombu.transport import TRANSPORT_ALIASES, redis

log = structlog.get_logger(__name__)

# What reading hostile JSON through kombu's hooks for dates, numbers and bytes, and decoding a body, may raise.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def register_transport() -> None:
    """Have every Redis URL of this process's Celery apps served by the hardened transport."""
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:Transport"
        # kombu keeps what it has resolved: a connection made earlier in this process must not decide for the worker's.
        transport._transport_cache.pop(scheme, None)  # type: ignore[attr-defined]


class Channel(redis.Channel):
    """Reads a queue that anyone may have written to."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[misc]
        except _UNREADABLE as error:
            log.error("queue_garbage", error=type(error).__name__)
            return None

    def basic_consume(self, queue: str, no_ack: bool, callback: Callable[..., Any] | None, consumer_tag: str | None, **kwargs: Any) -> str:
        guarded = self._guarded(callback) if callback is not None else None
        tag: str = super().basic_consume(queue, no_ack, guarded, consumer_tag, **kwargs)
        return tag

    def _guarded(self, callback: Callable[..., Any]) -> Callable[[Any], Any]:
        def take(message: Any) -> Any:
            try:
                return callback(message)
            except Exception as error:  # the edge: a message that Celery chokes on must cost itself only
                if self._is_broken_connection(error):
                    raise
                log.error("message_refused", error=type(error).__name__)
                if not message.acknowledged:
                    # Else it would come back, again and again.
                    message.reject()
                return None

        return take

    def _is_broken_connection(self, error: Exception) -> bool:
        # kombu counts KeyError among the errors of a connection; of a message it means a missing field.
        return isinstance(error, self.connection.connection_errors) and not isinstance(error, KeyError)


class Transport(redis.Transport):
    """Delivers what has the shape of a message."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str | None) -> None:
        if _is_message(message):
            super()._deliver(message, queue)
        else:
            log.error("queue_garbage", queue=queue)


def _is_message(message: Any) -> bool:
    """Whether kombu can take it apart, and keep it as not yet acknowledged."""
    match message:
        case {
            "body": str(),
            "properties": {"delivery_tag": str(), "delivery_info": {"exchange": str(), "routing_key": str()}} as properties,
        }:
            headers = message.get("headers")
            # Ours are not compressed; unpacking what a stranger compressed could fill the memory.
            is_plain = headers is None or (isinstance(headers, dict) and "compression" not in headers)
            return is_plain and properties.get("body_encoding") in (None, "base64", "utf-8")
        case _:
            return False
