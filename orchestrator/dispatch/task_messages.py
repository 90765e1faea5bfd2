"""The messages that Celery and kombu would put into Redis, as text, for the script that publishes a call in one step
with its record.

Celery's own code builds a task and kombu's own code wraps it. Only sending is ours: Celery sends with LPUSH alone, and
then a call could be in its queue without a record.
"""

import os
import socket
from collections.abc import Mapping
from functools import cache
from typing import Any

from celery import Celery
from celery.events.event import Event
from kombu import Connection
from kombu.serialization import dumps
from kombu.utils.json import dumps as to_json

from contract.calls import POOL_GRACE_S
from contract.names import show_call, task_name
from orchestrator.dispatch.request import Attempt, Request

_PERSISTENT, _TRANSIENT = 2, 1
FAILED_EVENTS = "celeryev/task.failed"
"""The channel of Celery's task-failed events, as kombu names it after the number of the Redis database."""


def build_message(attempt: Attempt, task_id: str, call_key: str) -> str:
    """Return one item of the queue's list. `call_key`: the key of the call's record, which the reaper of a dead host's
    queue marks as lost.

    It does not expire: a worker would judge that by its own clock. The envelope has the time until which a call may
    start. Flower and logs show the call, its tenant, session and run, and the name of the tool. They never show
    arguments.
    """
    request = attempt.request
    shown = {"argsrepr": "()", "kwargsrepr": _show_call(request)}
    # None: the limits that the task has in the worker.
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
    # By name, through the default exchange: one LPUSH, never dropped because a binding is missing.
    return _wrap(task.body, headers, {**task.properties, **shown, "delivery_mode": _PERSISTENT}, "", attempt.queue)


def build_failed_event(attempt: Attempt, task_id: str, node: str, error: str) -> str:
    """Return the message of Celery's event that a task has failed, on behalf of its worker `node`, which is dead.

    It is the message that celery.events.EventDispatcher publishes through kombu to the channel FAILED_EVENTS. Without a
    clock value the receiver uses its own.
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


def _show_call(request: Request) -> str:
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
    """Return a channel of kombu that wraps messages and never connects. All its transports without exchanges of their
    own share this code, Redis too.
    """
    return Connection("memory://").channel()
