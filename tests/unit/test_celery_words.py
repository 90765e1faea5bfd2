"""Celery's log lines about messages that it cannot use: told, without what was in them."""

import logging

import pytest
from celery.worker.consumer import consumer

from workers.celery_words import WithoutBodies

BODY = "canary-of-a-tenant"


def told(template: str, *arguments: object, error: Exception | None = None) -> str:
    info = (type(error), error, None) if error is not None else None
    record = logging.LogRecord("celery", logging.ERROR, "f", 1, template, arguments, info)
    assert WithoutBodies().filter(record)
    return logging.Formatter().format(record)


@pytest.mark.parametrize(
    "line",
    [
        (consumer.UNKNOWN_FORMAT, BODY),
        (consumer.UNKNOWN_TASK_ERROR, KeyError("tool.x"), BODY, BODY, BODY),
        (consumer.INVALID_TASK_ERROR, ValueError("no mapping"), BODY),
        (consumer.MESSAGE_DECODE_ERROR, ValueError("x"), "t", "e", BODY, BODY),
        ("Could not restore message: %r", BODY),
    ],
    ids=lambda line: line[0][:20],
)
def test_no_line_about_a_message_shows_it(line: tuple[str, object]) -> None:
    template, *arguments = line
    text = told(template, *arguments, error=KeyError("tool.x"))
    assert BODY not in text
    assert "KeyError: 'tool.x'" in text
    assert "\n" not in text


def test_other_lines_are_left_alone() -> None:
    assert told("Connected to %s", "redis") == "Connected to redis"
