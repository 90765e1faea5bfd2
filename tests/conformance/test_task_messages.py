"""The task messages of toolcrew equal the messages of Celery and kombu. Every field is compared with the message that
`send_task` writes to a real Redis.
"""

import base64
import json
import uuid
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import RedisProcess
from tests.support.records.builders import build_attempt
from toolcrew.contract.calls import POOL_GRACE_S
from toolcrew.orchestrator.dispatch.celery_transport import build_message
from toolcrew.orchestrator.dispatch.request import Attempt

QUEUE = "host.a.b00t"
OF_EACH_MESSAGE = {("properties", "delivery_tag"), ("properties", "reply_to"), ("headers", "origin")}
"""Fields that are random or that identify the sender."""


def attempt(envelope: str = "{}", limit_s: float | None = None) -> Attempt:
    return build_attempt(queue=QUEUE, envelope=envelope, limit_s=limit_s)


def sent_by_celery(server: RedisProcess, envelope: str, **options: Any) -> dict[str, Any]:
    app = Celery("peer", broker=server.url, backend=None, set_as_current=False)
    app.conf.update(task_serializer="json", broker_transport_options={"priority_steps": [0]})
    try:
        app.send_task(
            "tool.x",
            kwargs={"envelope": envelope},
            task_id="hub-c1",
            queue=QUEUE,
            argsrepr="()",
            kwargsrepr="call c1, tenant acme",
            headers={"call_key": "the call", "call_attempt": 1},
            **options,
        )
    finally:
        app.close()
    with server.client() as client:
        item: Any = client.rpop(QUEUE)
    return dict(json.loads(item))


def flat(message: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the message's fields without the fields that differ in every message. The body is decoded."""
    fields: dict[tuple[str, ...], Any] = {}
    for name, value in message.items():
        if isinstance(value, dict):
            fields.update({(name, inner): inner_value for inner, inner_value in value.items()})
        else:
            fields[name,] = value
    fields["body",] = json.loads(base64.b64decode(message["body"]))
    return {path: value for path, value in fields.items() if path not in OF_EACH_MESSAGE}


@pytest.mark.parametrize("limit_s", [None, 5.0])
@pytest.mark.parametrize("envelope", ["", '{"é": "读\\ud83d\\ude00"}', "x" * 100_000], ids=["empty", "text", "long"])
def test_a_message_equals_the_message_of_celery(
    redis_server: RedisProcess, envelope: str, limit_s: float | None
) -> None:
    limits = {} if limit_s is None else {"soft_time_limit": limit_s, "time_limit": limit_s + POOL_GRACE_S}
    ours = json.loads(build_message(attempt(envelope, limit_s), "hub-c1", "the call"))
    assert flat(ours) == flat(sent_by_celery(redis_server, envelope, **limits))


def test_fields_that_differ_in_every_message_have_the_types_of_celery(
    redis_server: RedisProcess,
) -> None:
    theirs, ours = sent_by_celery(redis_server, "{}"), json.loads(build_message(attempt(), "hub-c1", "the call"))
    for part, name in OF_EACH_MESSAGE:
        assert type(ours[part][name]) is type(theirs[part][name])
    assert uuid.UUID(ours["properties"]["delivery_tag"])


def test_every_message_has_its_own_delivery_tag() -> None:
    tags = {
        json.loads(build_message(attempt(), "hub-c1", "the call"))["properties"]["delivery_tag"] for _ in range(100)
    }
    assert len(tags) == 100


def test_a_message_contains_no_arguments_outside_its_body() -> None:
    message = json.loads(build_message(attempt("canary"), "hub-c1", "the call"))
    assert "canary" not in json.dumps({**message, "body": None})


@given(st.text())
def test_any_envelope_text_arrives_unchanged(envelope: str) -> None:
    message = json.loads(build_message(attempt(envelope), "hub-c1", "the call"))
    assert json.loads(base64.b64decode(message["body"]))[1] == {"envelope": envelope}
