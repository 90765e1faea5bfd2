"""The Celery tasks. A task decodes a message, runs its call, and stores the encoded result. Each tool has one task.

One Redis script stores and publishes a result and marks its call as done. The result backend retries until Redis
accepts the result.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog
from celery import Celery
from celery.app.task import Context
from celery.backends.redis import RedisBackend, SentinelBackend
from celery.exceptions import Ignore, TimeLimitExceeded, WorkerLostError
from celery.signals import task_unknown
from redis.exceptions import RedisError
from structlog.contextvars import bound_contextvars

from toolcrew.contract.calls import POOL_GRACE_S, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import decode_call, encode_result
from toolcrew.contract.errors import (
    OPERATOR_CODES,
    BrokerUnavailable,
    EnvelopeRefused,
    ErrorCode,
    RefusalReason,
    ToolFailure,
)
from toolcrew.contract.names import POOL_QUEUES, task_name
from toolcrew.contract.signing import ResultSeal, SigningKeys
from toolcrew.contract.specs import ToolSpec
from toolcrew.store.calls import FinishedCalls
from toolcrew.store.connection import CONNECTION_OPTIONS
from toolcrew.store.usage import CallEnding, StoredChange
from toolcrew.workers.celery_edge.broker import LiveTasks
from toolcrew.workers.executor import BlobStore, CallRepeated, Executor
from toolcrew.workers.tools.base import WorkerRegistry

log = structlog.get_logger(__name__)

ExecutorFactory = Callable[[], Executor]
OnRefused = Callable[[RefusalReason], None]
Body = Callable[..., "TaskResult"]

_STORED_IDS = {
    "session.checkpoint": "checkpoint",
    "session.save_files": "file",
    "session.delete_checkpoint": "checkpoint",
}
CELERY_MARGIN_S = 30.0
"""Seconds after a call's own limit at which Celery kills the process of the call.

Celery can kill only processes (`prefork`). In the threads pool of workers with sandboxes, Celery's limit has no effect:
the guest and sandboxd end the call.
"""
RECORD_TTL_S = 3600 + 60
"""Seconds that Redis keeps a large result: longer than Celery keeps the message that names it."""
KEEP_WAIT_S = 60.0
"""Seconds that a result waits for an unavailable Redis. A restart of Redis takes seconds, and the call has already
acted.
"""
PAUSE_S = 0.5


class TaskResult:
    """The return value of a task. Celery's events and log show the text of this object, which contains only harmless
    fields.

    The caller gets the whole record. This class is not a dict, because Celery needs a long time to shorten the text of
    a dict. `ending` is None when the call was not run; the call's record then stays unchanged. `log_end` writes the
    call's log line after the result is stored, so that the caller does not wait for the log.
    """

    def __init__(
        self, encoded: Mapping[str, Any], ending: CallEnding | None, log_end: Callable[[], None] = lambda: None
    ) -> None:
        self.encoded = encoded
        self.ending = ending
        self.log_end = log_end

    def __repr__(self) -> str:
        return repr({name: value for name, value in self.encoded.items() if name not in ("data", "kept")})


class CallNotServed(Exception):
    """Error that ends a task as FAILURE, because the infrastructure failed its call.

    The caller still gets the signed result `answer`. Flower and Celery's log show the text of this exception. The
    text contains only the code and the id of the call.
    """

    def __init__(self, code: str, call_id: str, answer: TaskResult | None = None) -> None:
        super().__init__(
            f"{code}: not the fault of the model or the tenant. `toolcrew calls show {call_id}` shows what happened"
        )
        self.code = code
        self.call_id = call_id
        self.answer = answer

    def __reduce__(self) -> tuple[type["CallNotServed"], tuple[str, str]]:
        # A pool process pickles the exception for its parent, which only announces the failure. The result stays in
        # the pool process.
        return CallNotServed, (self.code, self.call_id)


def register_tasks(
    app: Celery,
    registry: WorkerRegistry,
    key: SigningKeys,
    build_executor: ExecutorFactory,
    on_refused: OnRefused,
    deployment: str,
    copy_updates: Callable[[], None] | None = None,
) -> None:
    """Give `app` a task for every tool of `registry`, also for tools that are added later.

    Executors are created lazily: after the fork, one per thread. `on_refused` receives the reason for each message
    that was not run. `copy_updates` updates the registry before each call; None: the registry does not change.
    """
    edge = _Edge(key, _PerThread(build_executor), on_refused, deployment, copy_updates)

    def add(spec: ToolSpec) -> None:
        name = task_name(spec.name)
        # A shared task would belong to every Celery app of the process, including the publisher's app.
        options: dict[str, Any] = {"resultrepr_maxsize": 160, "throws": (CallNotServed,), **_limits(spec)}
        register: Callable[[Body], Any] = app.task(name=name, shared=False, lazy=False, **options)
        register(edge.body(name))

    def find(name: str) -> None:
        if copy_updates is not None:
            copy_updates()
        for state in registry.describe():
            if task_name(state.name) == name:
                add(state.spec)

    for spec in registry.specs():
        add(spec)
    if isinstance(app.tasks, LiveTasks):
        app.tasks.find = find

    def refuse_unknown(sender: Any, message: Any, name: str, **_: Any) -> None:
        if sender.app is app:
            edge.refuse_unknown(name, message)

    task_unknown.connect(refuse_unknown, weak=False)


def _limits(spec: ToolSpec) -> dict[str, Any]:
    """Return the task's limits.

    The message of a call without a sandbox contains limits. These limits apply to a message without its own.
    """
    if spec.pool in POOL_QUEUES:
        return {"soft_time_limit": spec.max_timeout_s, "time_limit": spec.max_timeout_s + POOL_GRACE_S}
    return {"time_limit": int(spec.max_timeout_s + CELERY_MARGIN_S)}


class _PerThread:
    """The executor of each thread. Threads do not share one, because a connection to sandboxd carries one request at a
    time.
    """

    def __init__(self, build: ExecutorFactory) -> None:
        self._build = build
        self._local = threading.local()

    def get(self) -> Executor:
        """Return this thread's executor."""
        if not hasattr(self._local, "executor"):
            self._local.executor = self._build()
        executor: Executor = self._local.executor
        return executor


class _Edge:
    """Builds the functions that Celery runs for the tasks of a worker."""

    def __init__(
        self,
        key: SigningKeys,
        executors: _PerThread,
        on_refused: OnRefused,
        deployment: str,
        copy_updates: Callable[[], None] | None,
    ) -> None:
        self._key = key
        self._copy_updates = copy_updates
        self._executors = executors
        self._on_refused = on_refused
        self._deployment = deployment

    def body(self, name: str) -> Body:
        """Return the function that Celery runs for the task `name`."""

        def run(envelope: str) -> TaskResult:
            return self._run(name, envelope)

        return run

    def _run(self, name: str, envelope: object) -> TaskResult:
        """Run the call of the task `name`. Return its answer.

        Raises EnvelopeRefused: the message is not a valid call, and nothing has run. Raises CallNotServed with the
        answer: the infrastructure failed the call. Celery counts both as failures. Raises Ignore: the message is a
        repetition.
        """
        try:
            call, context = _decode(name, envelope, self._key)
        except EnvelopeRefused as error:
            log.error("envelope_refused", task=name, reason=error.reason, error=str(error))
            self._on_refused(error.reason)
            raise
        if self._copy_updates is not None:
            self._copy_updates()
        with bound_contextvars(**_call_names(call, context)):
            try:
                return self._answer(call, context)
            except CallRepeated as repeated:
                log.warning(
                    "call_repeated", tool=call.name, call=call.id, attempt=context.attempt, claim=repeated.claim.value
                )
                self._on_refused("repeated")
                # Store no result: it would replace the result that the caller waits for.
                raise Ignore from None

    def _answer(self, call: ToolCall, context: ToolContext) -> TaskResult:
        log.debug("call_begun", attempt=context.attempt)
        executor = self._executors.get()
        finished = executor.finish(call, context)
        result = finished.result
        encoded = encode_result_message(result, call, context, executor.blobs, self._key)
        ending = CallEnding(
            deployment=self._deployment,
            tenant=context.tenant,
            call=call.id,
            attempt=context.attempt,
            code=result.error_code or "",
            sandbox=_sandbox_id(result),
            session=context.session,
            stored=_find_stored_change(call, context, result),
            usage=finished.session_usage,
            folder=finished.folder,
            fence=context.fence,
        )
        answer = TaskResult(encoded, None if result.has_not_run else ending, partial(_log_end, call, context, result))
        if result.error_code in OPERATOR_CODES:
            raise CallNotServed(str(result.error_code), call.id, answer)
        return answer

    def refuse_unknown(self, name: str, message: Any) -> None:
        """Refuse a task that this worker does not have.

        If the message contains a valid call, the call's record says that it will not start.
        """
        self._on_refused("wrong_task")
        try:
            _, arguments, _ = message.payload
            # The executor refuses the call too, because it does not have the tool.
            self._executors.get().execute(*_decode(name, arguments.get("envelope"), self._key))
        except (EnvelopeRefused, CallRepeated, ValueError, TypeError, AttributeError) as error:
            log.error("unknown_task_refused", task=name, error=str(error))


def _log_end(call: ToolCall, context: ToolContext, result: ToolResult) -> None:
    log.info(
        "call_ended",
        **_call_names(call, context),
        attempt=context.attempt,
        code=result.error_code,
        **{name: round(seconds, 4) for name, seconds in result.clocks if name != "transfer_s"},
        sandbox=_sandbox_id(result),
    )


def _call_names(call: ToolCall, context: ToolContext) -> dict[str, str]:
    """Return the log fields that identify a call."""
    names = {
        "tenant": context.tenant,
        "session": context.session,
        "run": context.run,
        "call": call.id,
        "tool": call.name,
    }
    return {name: value for name, value in names.items() if value is not None}


def _find_stored_change(call: ToolCall, context: ToolContext, result: ToolResult) -> StoredChange | None:
    """Return the file that a call stored outside of its sandbox, or deleted there; None for any other call."""
    if call.name not in _STORED_IDS or not result.success:
        return None
    file, size = str({**result.metadata, **call.arguments}[_STORED_IDS[call.name]]), result.metadata.get("bytes")
    if call.name == "session.delete_checkpoint":
        # An earlier attempt may have deleted the file and lost its result.
        return StoredChange(file, None) if result.metadata["deleted"] or context.attempt > 1 else None
    return StoredChange(file, size) if isinstance(size, int) and size > 0 else None


def _sandbox_id(result: ToolResult) -> str:
    return result.sandbox.id if result.sandbox is not None else ""


def _decode(name: str, envelope: object, key: SigningKeys) -> tuple[ToolCall, ToolContext]:
    """Return the call and its context. Raises EnvelopeRefused."""
    if not isinstance(envelope, str):
        raise EnvelopeRefused("envelope is not text")
    call, context = decode_call(envelope, key)
    # The signature covers the call but not Celery's task name. A valid envelope (signed call) must not run under
    # another task.
    if task_name(call.name) != name:
        raise EnvelopeRefused("the envelope is for another tool than its task", "wrong_task")
    return call, context


def encode_result_message(
    result: ToolResult, call: ToolCall, context: ToolContext, blobs: BlobStore, keys: SigningKeys
) -> Mapping[str, Any]:
    """Return the encoded result, signed with `keys`.

    A part that is too large for a message is stored in `blobs` for the tenant, and the message names it. If the part
    cannot be stored, the result is an error that says so.
    """
    seal = ResultSeal(keys, context.tenant, context.attempt)

    def store_blob(data: bytes) -> str:
        until = time.monotonic() + KEEP_WAIT_S
        while True:
            try:
                return blobs.leave(context.tenant, data, RECORD_TTL_S)
            except BrokerUnavailable as error:
                if time.monotonic() > until:
                    raise
                log.warning("result_waits_for_redis", call=call.id, error=str(error))
                time.sleep(PAUSE_S)

    try:
        return encode_result(result, store_blob, seal)
    except (BrokerUnavailable, ToolFailure) as error:
        log.error("result_not_stored", tool=call.name, call=call.id, error=str(error))
        message = f"the call has run, but its result is lost: {error}"
        unknown = ToolResult.failed(
            call, ErrorCode.OUTCOME_UNKNOWN, message, clocks=result.clocks, sandbox=result.sandbox
        )
        return encode_result(unknown, seal=seal)


# --- Results ----------------------------------------------------------------------------------------------------------


class _Results(RedisBackend):
    """Stores toolcrew's results with one Redis script, and all other results as Celery does.

    An unavailable Redis raises no exception: in a pool of threads, an exception would also block the slot forever.
    """

    _finished: FinishedCalls | None = None
    _ensure_retryable: Callable[[Callable[[], object]], object]
    """Celery's retry loop for Redis commands, with the pauses of the app's settings."""
    expires: int
    connparams: dict[str, Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.connparams |= CONNECTION_OPTIONS

    def store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **options: Any
    ) -> Any:
        failure = result if isinstance(result, CallNotServed) else None
        answer = failure.answer if failure is not None else result
        try:
            if isinstance(answer, TaskResult):
                self._ensure_retryable(partial(self._store_answer, task_id, answer, failure))
            else:
                super().store_result(task_id, result, state, traceback, request, **options)
                if isinstance(result, (WorkerLostError, TimeLimitExceeded)) and request is not None:
                    # Store the loss after any result: a caller must learn that a limit ended the call, and not that the
                    # call was lost.
                    self._ensure_retryable(partial(self._store_loss, request, result))
        except RedisError as error:
            log.error("result_lost", task=task_id, error=str(error))
        if isinstance(answer, TaskResult):
            answer.log_end()
        return result

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        # Retry Redis's own errors too: a Redis that is full, loading, or a replica may recover.
        return isinstance(exc, RedisError)

    def _store_loss(self, request: Context, error: Exception) -> None:
        """Record that the process of the call died. A living caller also records the loss. But the caller may have
        cancelled the call or died, and the record would then say `running` for a day.
        """
        call, attempt = request.get("call_key"), request.get("call_attempt")
        if isinstance(call, str) and isinstance(attempt, int):
            reason = f"the process that ran the call was lost ({type(error).__name__})"
            self._calls().lose(call, attempt, request.get("hostname") or "", reason)

    def _calls(self) -> FinishedCalls:
        if self._finished is None:
            self._finished = FinishedCalls(self.client)
        return self._finished

    def _store_answer(self, task_id: str, answer: TaskResult, failure: CallNotServed | None) -> None:
        date_done = datetime.now(UTC).isoformat()
        text = json.dumps(
            {
                **_outcome(answer, failure),
                "traceback": None,
                "children": [],
                "date_done": date_done,
                "task_id": task_id,
            }
        )
        if not self._calls().store(task_id, text, self.expires, answer.ending):
            # The caller has sent the call again and waits for the result of the new attempt.
            log.warning("late_result_dropped", task=task_id)


def _outcome(answer: TaskResult, failure: CallNotServed | None) -> dict[str, Any]:
    """Return the fields of a stored result that differ between success and failure.

    Celery's `result` of a failure is always an exception, so a failed result stores toolcrew's record in `answer`.
    """
    if failure is None:
        return {"status": "SUCCESS", "result": answer.encoded}
    error = {"exc_type": type(failure).__name__, "exc_message": [str(failure)], "exc_module": __name__}
    return {"status": "FAILURE", "result": error, "answer": answer.encoded}


class ResultBackend(_Results):
    """Result backend for the Redis of the URL."""


class SentinelResultBackend(_Results, SentinelBackend):
    """Result backend for the master that Redis Sentinel names."""


BACKENDS = {scheme: f"{__name__}:ResultBackend" for scheme in ("redis", "rediss")} | {
    "sentinel": f"{__name__}:SentinelResultBackend"
}
