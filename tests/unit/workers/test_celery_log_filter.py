"""Celery's own functions log messages that they cannot process. No log line shows the content of a message."""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker.consumer import consumer
from kombu.transport.redis import Channel

from toolcrew.workers.celery_edge.app import BodyFilter

BODY = "canary-of-a-tenant"
MESSAGE = SimpleNamespace(
    body=BODY,
    content_type="t",
    content_encoding="e",
    headers={"id": "1", "task": "tool.x", "more": BODY},
    properties={"more": BODY},
    delivery_info={"more": BODY},
    ack=lambda: None,
    reject_log_error=lambda *_: None,
)
CONSUMER: Any = SimpleNamespace(
    connection_errors=(),
    _message_report=lambda body, message: body,
    app=SimpleNamespace(backend=SimpleNamespace(mark_as_failure=lambda *_, **__: None)),
    event_dispatcher=None,
)
KOMBU: Any = SimpleNamespace(_lookup=lambda *_: 1 / 0, connection_errors=())


REFUSALS: dict[str, Callable[[], None]] = {
    "unknown message": lambda: consumer.Consumer.on_unknown_message(CONSUMER, BODY, MESSAGE),
    "unknown task": lambda: consumer.Consumer.on_unknown_task(CONSUMER, BODY, MESSAGE, KeyError("tool.x")),
    "invalid task": lambda: consumer.Consumer.on_invalid_task(CONSUMER, BODY, MESSAGE, ValueError("no mapping")),
    "undecodable message": lambda: consumer.Consumer.on_decode_error(CONSUMER, MESSAGE, ValueError("x")),
    "message not restored": lambda: Channel._do_restore_message(KOMBU, {"body": BODY}, "", "", None),
}


@pytest.fixture
def lines() -> Iterator[list[str]]:
    log_lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log_lines.append(logging.Formatter().format(record))  # type: ignore[method-assign]
    names = ("celery.worker.consumer.consumer", "kombu.transport.redis")
    body_filter = BodyFilter()
    for name in names:
        logging.getLogger(name).addFilter(body_filter)
        logging.getLogger(name).addHandler(handler)
    yield log_lines
    for name in names:
        logging.getLogger(name).removeHandler(handler)
        logging.getLogger(name).removeFilter(body_filter)


@pytest.mark.parametrize("refuse", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_message_is_logged_without_its_content(lines: list[str], refuse: Callable[[], None]) -> None:
    try:
        raise LookupError("why")
    except LookupError:
        # Celery calls its hooks while it handles the error.
        refuse()
    (line,) = lines
    assert "a message was refused by" in line
    assert BODY not in line
    assert "\n" not in line


def test_other_log_lines_are_unchanged(lines: list[str]) -> None:
    logging.getLogger("kombu.transport.redis").error("Connected to %s", "redis")
    assert lines == ["Connected to redis"]
