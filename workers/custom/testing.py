"""A worker for operators' tools inside a test process: no Redis, no Celery, no pool.

Results are the same as in a real worker.
"""

import asyncio
import contextlib
import copy
import inspect
import itertools
import json
import queue
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from structlog.processors import format_exc_info
from structlog.testing import capture_logs

from toolcrew.contract.call_events import MODEL
from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, MAX_BLOB_BYTES, POOL_GRACE_S, ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.completions import Completion, TokenUsage
from toolcrew.contract.functions.model_questions import ModelAnswer, parse_question
from toolcrew.contract.functions.session_state import (
    MAX_STATE_BYTES,
    Change,
    encode_value,
    entry_size,
    state_full_error,
)
from toolcrew.contract.registry import ToolRegistry
from toolcrew.contract.specs import ToolSpec
from toolcrew.store.call_records import CallClaim
from toolcrew.workers.call_event_writer import CallEvents
from toolcrew.workers.custom.call_loops import is_running_here
from toolcrew.workers.custom.calls import CustomCalls
from toolcrew.workers.custom.loading import serve_values
from toolcrew.workers.executor import CallPolicy, Executor
from toolcrew.workers.interrupts import END_SIGNAL, CallInterrupts, CancelBoard
from toolcrew.workers.tools.base import WorkerResources

AskModel = Callable[[list[dict[str, Any]]], str]
"""Function that maps messages in the OpenAI format to the text of the model's reply."""


class MemoryStates:
    """Stored values of sessions, in memory, by tenant and session. Calls must run one after the other."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)

    def open(self, tenant: str, session: str) -> "LocalSessionState":
        return LocalSessionState(self._texts[tenant, session])


class LocalSessionState:
    """State of a session in memory, with the limits and errors of the state in Redis."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    async def get(self, key: str, default: Any = None) -> Any:
        text = self._texts.get(key)
        return copy.copy(default) if text is None else json.loads(text)

    async def set(self, key: str, value: Any) -> None:
        text = encode_value(key, value)
        size = sum(entry_size(*entry) for entry in {**self._texts, key: text}.items())
        if size > MAX_STATE_BYTES:
            raise state_full_error(key, size, MAX_STATE_BYTES)
        self._texts[key] = text

    async def update(self, key: str, fn: Change) -> Any:
        while True:
            before = self._texts.get(key)
            value = fn(json.loads(before or "null"))
            if inspect.isawaitable(value):
                value = await value
            # Tasks of the same call may change the state while the new value is awaited.
            if self._texts.get(key) == before:
                await self.set(key, value)
                return json.loads(self._texts[key])

    async def items(self) -> dict[str, Any]:
        return {key: json.loads(text) for key, text in self._texts.items()}


class LocalWorker:
    """Loads tools and runs their calls as a worker does, including schema, validators, hard limit and result.

    Each item of `tools` is a tool, a function, a list of them, or a module. `config` replaces TOOLCREW_TOOL_CONFIG.
    `model` answers for the caller's model; None: calls have no model.

    Raises ConfigError: a worker would not start with these tools.
    """

    def __init__(self, *tools: Any, config: Mapping[str, Any] | None = None, model: AskModel | None = None) -> None:
        self._states = MemoryStates()
        self._model = model
        self._registry = ToolRegistry(serve_values(tools, CustomCalls(config or {}), "this test's worker"))
        # One executor serves all calls: every call has a new id, so no state of earlier calls matters.
        self._executor = Executor(
            self._registry,
            _GrantingLedger(),
            _NoBlobs(),
            WorkerResources({}, states=self._states, open_events=lambda call, context: self._open_events()),
            CallPolicy(self._registry),
            [CallInterrupts(CancelBoard(), lambda: None)],
        )
        self._numbers = itertools.count(1)
        self.log: list[MutableMapping[str, Any]] = []
        """Entries of the worker's log: printed text (`tool_printed`), and the traceback of each exception in
        `exception`.
        """

    def specs(self) -> list[ToolSpec]:
        """Return the specifications that models receive, sorted by name."""
        return self._registry.specs()

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        config: Mapping[str, Any] | None = None,
        session: str = "test",
    ) -> ToolResult:
        """Return the one result of a call. A failure of the call is a result, not an exception.

        `timeout_s` None: the tool's own limit, otherwise 30 s. `config` is the caller's configuration. Raises
        RuntimeError outside of the main thread and in an event loop: a worker cannot stop a tool there.
        """
        _check_thread()
        limit_s = self._limit(name, timeout_s)
        call = ToolCall(id=f"call-{next(self._numbers)}", name=name, arguments=dict(arguments or {}))
        now = time.time()
        context = ToolContext(
            tenant="test",
            session=session,
            sent_at=now,
            deadline_at=now + limit_s,
            timeout_s=limit_s,
            config=dict(config or {}),
            events="test",
            model="test" if self._model is not None else None,
        )
        started = time.monotonic()
        with self._logged(), _stopped_after(limit_s):
            result = self._executor.execute(call, context)
        ran_s = time.monotonic() - started
        if ran_s > limit_s + POOL_GRACE_S:
            description = (
                f"{name} went on for {ran_s - limit_s:.1f} s after its limit of {limit_s:g} s: a worker would have "
                "killed its process"
            )
            return ToolResult.failed(call, ErrorCode.OUTCOME_UNKNOWN, description)
        return ToolResult.model_validate_json(result.model_dump_json())

    def state(self, session: str = "test") -> dict[str, Any]:
        """Return the state that the tools have stored in a session."""
        return asyncio.run(self._states.open("test", session).items())

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """Collect the log entries of the block for the test. Also write tracebacks to stderr, where test runners show
        them.
        """
        with capture_logs(processors=[format_exc_info]) as entries:
            yield
        self.log += entries
        for entry in entries:
            if "exception" in entry:
                sys.stderr.write(f"{entry['exception']}\n")

    def _limit(self, name: str, timeout_s: float | None) -> float:
        tool = self._registry.get(name)
        if tool is None:
            return timeout_s or DEFAULT_TIMEOUT_S
        return float(min(timeout_s or tool.spec.timeout_s or DEFAULT_TIMEOUT_S, tool.spec.max_timeout_s))

    def _open_events(self) -> CallEvents:
        return CallEvents() if self._model is None else _ModelEvents(self._model)


class _GrantingLedger:
    """A ledger without other workers: every claim is granted."""

    def claim(self, call: ToolCall, context: ToolContext, holder: str, meanwhile: Callable[[], object]) -> CallClaim:
        return CallClaim.GRANTED

    def refuse(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim:
        return CallClaim.GRANTED


class _NoBlobs:
    """A blob store without blobs: calls of operators' tools have no bytes."""

    def take(self, tenant: str, key: str) -> bytes:
        raise ToolFailure(
            ErrorCode.OUTCOME_UNKNOWN, "a test cannot pass content to a call: pass everything in the arguments"
        )

    def leave(self, tenant: str, data: bytes, ttl_s: int = 0) -> str:
        raise ToolFailure(
            ErrorCode.FILE_TOO_LARGE,
            f"{len(data)} bytes of content for a result; the limit is {MAX_BLOB_BYTES}: return less content",
        )


class _ModelEvents(CallEvents):
    """Events to a caller that answers questions with a function of the test."""

    def __init__(self, model: AskModel) -> None:
        self._model = model
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def send(self, kind: str, payload: Mapping[str, Any]) -> bool:
        if kind != MODEL:
            return False
        question = parse_question(payload)
        completion = Completion(self._model([dict(message) for message in question.messages]), TokenUsage(), "stop")
        self._answers.put(ModelAnswer.of(question.number, completion).model_dump(mode="json"))
        return True

    def await_answer(self, timeout_s: float) -> dict[str, Any] | None:
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=timeout_s)
        return None


def _check_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "the tool was called from another thread than the main thread: call it from the main thread, as a "
            "worker does"
        )
    if is_running_here():
        raise RuntimeError("the tool was called while an event loop runs: call it from a test that is not async")


@contextlib.contextmanager
def _stopped_after(limit_s: float) -> Iterator[None]:
    """From the time limit on, send the main thread the signal with which Celery stops a call.

    At the end, restore the signal handler and the alarm.
    """
    main, has_ended = threading.main_thread().ident or 0, threading.Event()

    def interrupt() -> None:
        # Repeat the signal. A signal before the start of the call is lost, and a signal after the interrupt has no
        # effect.
        while not has_ended.wait(limit_s):
            signal.pthread_kill(main, END_SIGNAL)

    before = signal.signal(END_SIGNAL, signal.SIG_IGN)
    alarm_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    started, clock = time.monotonic(), threading.Thread(target=interrupt, name="limit", daemon=True)
    clock.start()
    try:
        yield
    finally:
        has_ended.set()
        clock.join()
        signal.signal(END_SIGNAL, before or signal.SIG_DFL)
        if alarm_s:
            # CallInterrupts stops any alarm of the process. This alarm belongs to the test runner, so start it again.
            signal.setitimer(signal.ITIMER_REAL, max(0.001, alarm_s - (time.monotonic() - started)), interval_s)
