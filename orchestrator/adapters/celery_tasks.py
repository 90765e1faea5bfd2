"""Shared tasks for other Celery applications: they use the pool through its HTTP API.

The id of a task is the key of its call, run or batch. So a task that Celery delivers again, or that is retried,
continues what it has begun and runs nothing twice. A task that waits for a run or a batch is retried from time to time
and occupies no worker meanwhile.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeAlias, TypeVar

from celery import Task, shared_task
from pydantic import BaseModel, ValidationError

from toolcrew.contract.errors import ApiUnavailable, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.run_views import BatchOptions, BatchStatus
from toolcrew.orchestrator.sdk.http.client import Client

M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
R = TypeVar("R")
AnyTask: TypeAlias = "Task[Any, Any]"
FIRST_POLL_S = 1.0
LAST_POLL_S = 30.0
"""Longest pause between two questions for a run or a batch, in seconds. Pauses grow to it."""
_GROWTH = 1.5
_MAX_GROWTHS = 20
_FITTING_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LATER = frozenset({ErrorCode.RATE_LIMITED, ErrorCode.QUOTA_EXCEEDED, ErrorCode.SESSION_BUSY})


class PoolError(Exception):
    """Error of a task: the pool has refused it, or its outcome is unknown. `code`: a code of docs/errors.md."""

    def __init__(self, code: str, message: str) -> None:
        # Serializers of Celery build the exception again from these arguments.
        super().__init__(code, message)
        self.code = code

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


def _shared(name: str) -> "Callable[[Callable[Concatenate[AnyTask, P], R]], Task[P, R]]":
    return shared_task(name=name, bind=True, acks_late=True, reject_on_worker_lost=True, max_retries=None)


@_shared("toolcrew.call_tool")
def call_tool(
    self: AnyTask, session: str, tool: str, arguments: Mapping[str, Any], timeout_s: float | None = None
) -> dict[str, Any]:
    """Run a tool once in an open session, and return its result (`success`, `output`, `error`, ...), also when the tool
    fails. Raises PoolError.
    """
    try:
        called = (
            _client(os.getpid()).sessions.get(session).call(tool, arguments, timeout_s=timeout_s, call_id=_key(self))
        )
    except (ToolFailure, OperatorError) as error:
        _retry_or_fail(self, error)
    return called.model_dump(mode="json")


@_shared("toolcrew.run_agent")
def run_agent(
    self: AnyTask, instruction: str, options: Mapping[str, Any] | None = None, run: str | None = None
) -> dict[str, Any]:
    """Run an agent, and return its run after the end: `state`, `answer`, `failure`, ... `options`: the fields of
    `RunBody`. `run`: set by retries. Raises PoolError.
    """
    client = _client(os.getpid())
    try:
        if run is None:
            body = _check(RunBody, {**(options or {}), "instruction": instruction})
            view = client.runs.start(body, idempotency_key=_key(self))
        else:
            view = client.runs.get(run)
    except (ToolFailure, OperatorError) as error:
        _retry_or_fail(self, error)
    if view.ended_at is None:
        _wait_more(self, run=view.id)
    return view.model_dump(mode="json")


@_shared("toolcrew.submit_batch")
def submit_batch(
    self: AnyTask,
    lines: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
    wait: bool = False,
    batch: str | None = None,
) -> dict[str, Any]:
    """Queue a run for every line, and return the batch. `lines`: objects with at least `id` and `instruction`.
    `options`: the fields of `BatchOptions`. `wait`: return after the end of the batch. `batch`: set by retries. Raises
    PoolError.
    """
    client = _client(os.getpid())
    try:
        status: BatchStatus
        if batch is None:
            chosen = _check(BatchOptions, options or {})
            status = client.batches.submit(lines, chosen, idempotency_key=_key(self))
        else:
            status = client.batches.get(batch)
    except (ToolFailure, OperatorError) as error:
        _retry_or_fail(self, error)
    if wait and status.ended_at is None:
        _wait_more(self, batch=status.id)
    return status.model_dump(mode="json")


def _check(kind: type[M], fields: Mapping[str, Any]) -> M:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise PoolError(ErrorCode.INVALID_ARGUMENTS.value, describe_invalid(error)) from None


@cache
def _client(_process: int) -> Client:
    """Return the client of this process: a connection must not be shared over a fork."""
    return Client()


def _key(task: AnyTask) -> str:
    """Return the id of the task as a key. Programs may choose an id that is no key."""
    task_id = str(task.request.id)
    if _FITTING_ID.fullmatch(task_id):
        return task_id
    return hashlib.sha256(task_id.encode(errors="surrogatepass")).hexdigest()


def _wait_more(task: AnyTask, **begun: str) -> NoReturn:
    raise task.retry(kwargs={**(task.request.kwargs or {}), **begun}, countdown=_pause_s(task))


def _retry_or_fail(task: AnyTask, error: ToolFailure | OperatorError) -> NoReturn:
    """Send the request again later if it had no effect, or if its key makes it safe. Otherwise raise PoolError."""
    if isinstance(error, ApiUnavailable) or error.code in _LATER:
        raise task.retry(countdown=_pause_s(task))
    raise PoolError(error.code.value, str(error)) from error


def _pause_s(task: AnyTask) -> float:
    return float(min(FIRST_POLL_S * _GROWTH ** min(task.request.retries, _MAX_GROWTHS), LAST_POLL_S))
