"""The Celery edge: bytes -> call -> executor -> bytes. One task a tool, all with the same body."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from celery import Celery

from contract.calls import POOL_GRACE_S, ToolCall, ToolContext, ToolResult
from contract.envelope import decode_call, encode_result
from contract.errors import EnvelopeRefused
from contract.names import POOL_QUEUES, task_name
from contract.specs import ToolSpec
from workers.app import CELERY_MARGIN_S
from workers.executor import Executor
from workers.tools.base import WorkerRegistry

log = structlog.get_logger(__name__)

ExecutorFactory = Callable[[], Executor]
Body = Callable[..., Mapping[str, Any]]


def register_tasks(app: Celery, registry: WorkerRegistry, key: bytes, build_executor: ExecutorFactory) -> None:
    """Give `app` a task for every tool of `registry`. Executors are made lazily: after the fork, one a thread."""
    executors = _PerThread(build_executor)
    for spec in registry.specs():
        name = task_name(spec.name)
        # Shared would mean every Celery app of the process, the publisher's too.
        register: Callable[[Body], Any] = app.task(name=name, shared=False, resultrepr_maxsize=160, **_limits(spec))
        register(_body(name, key, executors))


def _limits(spec: ToolSpec) -> dict[str, Any]:
    """What no call of the tool may exceed. Where no sandbox limits a call its message carries its own limits, and these are for one without."""
    if spec.pool in POOL_QUEUES:
        return {"soft_time_limit": spec.max_timeout_s, "time_limit": spec.max_timeout_s + POOL_GRACE_S}
    return {"time_limit": int(spec.max_timeout_s + CELERY_MARGIN_S)}


class _PerThread:
    """One executor a thread: its connection to sandboxd carries one request at a time."""

    def __init__(self, build: ExecutorFactory) -> None:
        self._build = build
        self._local = threading.local()

    def execute(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if not hasattr(self._local, "executor"):
            self._local.executor = self._build()
        executor: Executor = self._local.executor
        return executor.execute(call, context)


def _body(name: str, key: bytes, executors: _PerThread) -> Body:
    def run(envelope: str) -> Mapping[str, Any]:
        call, context = _opened(name, envelope, key)
        return encode_result(executors.execute(call, context))

    return run


def _opened(name: str, envelope: object, key: bytes) -> tuple[ToolCall, ToolContext]:
    """The call, or EnvelopeRefused: Celery then counts the task as failed, and nothing has run."""
    try:
        if not isinstance(envelope, str):
            raise EnvelopeRefused("envelope is not text")
        call, context = decode_call(envelope, key)
        if task_name(call.name) != name:
            raise EnvelopeRefused("the envelope is for another tool than its task")
    except EnvelopeRefused as error:
        log.error("envelope_refused", task=name, reason=str(error))
        raise
    return call, context
