"""Stores the results of tasks: one script stores and publishes a result and marks its call as done. Retries until Redis
accepts it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog
from celery.backends.redis import RedisBackend, SentinelBackend
from redis.exceptions import RedisError

from store.calls import FinishedCalls

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Ending:
    """The end of a call that has run. `key`: of its record; `code`: "" when it succeeded; `sandbox`: "" when it had
    none.
    """

    key: str
    attempt: int
    code: str
    sandbox: str


class Answer(dict[str, Any]):
    """The return value of a task. Celery, its events and its log see a few harmless fields; the caller gets the whole
        record.

    `ending` None: the call was not run, and its record stays as it is. `log_end` writes the call's line of the log. It
    is called when the result is stored, so that the caller does not wait for it.
    """

    def __init__(
        self, encoded: Mapping[str, Any], ending: Ending | None, log_end: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__({name: value for name, value in encoded.items() if name not in ("data", "kept")})
        self.encoded = encoded
        self.ending = ending
        self.log_end = log_end


class CallNotServed(Exception):
    """Ends a task as FAILURE because the infrastructure failed its call. The caller still gets the signed result,
    `answer`.

    Flower and Celery's log show the text of this exception, so it contains only the code and the id of the call.
    """

    def __init__(self, code: str, call_id: str, answer: Answer | None = None) -> None:
        super().__init__(
            f"{code}: not the fault of the model or the tenant. `toolcrew calls show {call_id}` shows what happened"
        )
        self.code = code
        self.call_id = call_id
        self.answer = answer

    def __reduce__(self) -> tuple[type["CallNotServed"], tuple[str, str]]:
        # A process of the pool pickles the exception for its parent, which only announces the failure. The result stays
        # here.
        return CallNotServed, (self.code, self.call_id)


class _Results(RedisBackend):
    """Stores our results with our script, and everything else as Celery does. An unavailable Redis raises no exception:
    in a pool of threads an exception would also lose the slot."""

    _finished: FinishedCalls | None = None
    _ensure_retryable: Callable[[Callable[[], object]], object]
    """Celery's own loop, with the pauses of the app's settings."""
    expires: int

    def store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **options: Any
    ) -> Any:
        failure = result if isinstance(result, CallNotServed) else None
        answer = failure.answer if failure is not None else result
        try:
            if isinstance(answer, Answer):
                self._ensure_retryable(partial(self._store_answer, task_id, answer, failure))
            else:
                super().store_result(task_id, result, state, traceback, request, **options)
        except RedisError as error:
            log.error("result_lost", task=task_id, error=str(error))
        if isinstance(answer, Answer):
            answer.log_end()
        return result

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        # Also what Redis itself says: that it is full, loading, or has become a replica passes.
        return isinstance(exc, RedisError)

    def _store_answer(self, task_id: str, answer: Answer, failure: CallNotServed | None) -> None:
        ended = datetime.now(UTC).isoformat()
        text = json.dumps(
            {**_outcome(answer, failure), "traceback": None, "children": [], "date_done": ended, "task_id": task_id}
        )
        ending = answer.ending
        record = (ending.key, ending.attempt, ending.code, ending.sandbox) if ending is not None else None
        if self._finished is None:
            self._finished = FinishedCalls(self.client)
        if not self._finished.store(task_id, text, self.expires, record):
            # The call was sent again meanwhile: its caller waits for that attempt's answer.
            log.warning("late_answer_dropped", task=task_id)


def _outcome(answer: Answer, failure: CallNotServed | None) -> dict[str, Any]:
    """The part of a stored result that depends on its state. Celery's `result` of a failure is always an exception, so
    ours is `answer` there.
    """
    if failure is None:
        return {"status": "SUCCESS", "result": answer.encoded}
    error = {"exc_type": type(failure).__name__, "exc_message": [str(failure)], "exc_module": __name__}
    return {"status": "FAILURE", "result": error, "answer": answer.encoded}


class ResultBackend(_Results):
    """Uses the Redis of the URL."""


class SentinelResultBackend(_Results, SentinelBackend):
    """Uses the master that sentinels name."""


BACKENDS = {scheme: f"{__name__}:ResultBackend" for scheme in ("redis", "rediss")} | {
    "sentinel": f"{__name__}:SentinelResultBackend"
}
