"""The message that Celery and kombu put into a Redis list for a task: protocol 2, as text."""

import base64
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from functools import cache

from contract.calls import POOL_GRACE_S
from orchestrator.dispatch.transport import Delivery
from orchestrator.links import show_call

_EMBED: Mapping[str, None] = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def build_message(delivery: Delivery, task_id: str, call_key: str) -> str:
    """One item of the queue's list. `call_key`: of the call's record, which the reaper of a dead host's queue marks when it is of this attempt.

    It does not expire: a worker would judge that by its own clock. When a call must no longer start stands in its envelope.
    Flower and logs show the call, its tenant, session and run, and the name of the tool. They never show arguments.
    """
    shown = {"argsrepr": "()", "kwargsrepr": show_call(delivery.call_id, delivery.tenant, delivery.session, delivery.run)}
    body = json.dumps(((), {"envelope": delivery.envelope}, _EMBED))
    task = f"tool.{delivery.shown_as}" if delivery.shown_as else None
    headers: dict[str, object] = {
        "lang": "py",
        "task": delivery.task,
        "id": task_id,
        "shadow": task,
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": _limits(delivery),
        "root_id": task_id,
        "parent_id": None,
        **shown,
        "origin": describe_sender(),
        "ignore_result": None,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
        "call_key": call_key,
        "call_attempt": delivery.attempt,
    }
    properties: dict[str, object] = {
        "correlation_id": task_id,
        "reply_to": describe_sender(),
        **shown,
        "delivery_mode": 2,
        # By name, through the default exchange: one LPUSH, never dropped for want of a binding.
        "delivery_info": {"exchange": "", "routing_key": delivery.queue},
        "priority": 0,
        "body_encoding": "base64",
        # Of each message its own: a worker keeps by it what it has taken.
        "delivery_tag": str(uuid.uuid4()),
    }
    return json.dumps(
        {
            "body": base64.b64encode(body.encode()).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": headers,
            "properties": properties,
        }
    )


def build_failed_event(delivery: Delivery, task_id: str, node: str, error: str) -> str:
    """Return the message of Celery's event that a task has failed, on behalf of its worker `node`, which is dead.

    It is the message that celery.events.EventDispatcher publishes through kombu to the channel `failed_events_channel`. Without a clock value the receiver
    uses its own.
    """
    event = {
        "type": "task-failed",
        "uuid": task_id,
        "name": f"tool.{delivery.shown_as}" if delivery.shown_as else delivery.task,
        "args": "()",
        "kwargs": show_call(delivery.call_id, delivery.tenant, delivery.session, delivery.run),
        "exception": error,
        "traceback": "",
        "hostname": node,
        "pid": 0,
        "timestamp": time.time(),
    }
    message = {
        "body": base64.b64encode(json.dumps(event).encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"hostname": node},
        "properties": {
            "delivery_mode": 1,
            "delivery_info": {"exchange": "celeryev", "routing_key": "task.failed"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }
    return json.dumps(message)


def failed_events_channel(database: int) -> str:
    """Return the Redis channel of kombu for Celery's task-failed events. `database`: the number of the Redis database."""
    return f"/{database}.celeryev/task.failed"


def _limits(delivery: Delivery) -> tuple[float | None, float | None]:
    """Celery's hard and soft limit of a call that no sandbox limits; else those that its task has in the worker."""
    if delivery.limit_s is None:
        return None, None
    return delivery.limit_s + POOL_GRACE_S, delivery.limit_s


@cache
def describe_sender() -> str:
    """Return the name of this process, for operators."""
    return f"toolcrew{os.getpid()}@{socket.gethostname()}"
