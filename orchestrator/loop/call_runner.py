"""Runs the calls of a run in order, and read-only calls concurrently if the model requested that. Detects repeated
failures.
"""

import asyncio
import difflib
import json
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from toolcrew.contract.calls import MAX_ERROR_CHARS, MAX_NAME_CHARS, MAX_OUTPUT_CHARS, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.registry import Switch
from toolcrew.contract.run_events import CallFinished, CallStarted, RunEvent
from toolcrew.contract.schema import coerce_text, find_nearest
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import SKILL_TOOL
from toolcrew.orchestrator.dialects.base import CallRequested, MalformedCall
from toolcrew.orchestrator.dialects.observations import UNKNOWN_TOOL
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

REPEATS = 3
"""Number of identical failures after which the result tells the model to stop repeating the call."""

RunCall = Callable[[ToolCall], Awaitable[ToolResult]]
Requested = CallRequested | MalformedCall
Observed = tuple[str, ToolResult]
"""The id and the result of a call. The id is the one that the model sent, or the run's own id if the model sent none.
"""


class CallRunner:
    """Runs the calls of one run. `emit` receives their events. `skills`: names that a model may use like tools."""

    def __init__(
        self,
        run: str,
        specs: Sequence[ToolSpec],
        run_call: RunCall,
        emit: Callable[[RunEvent], None],
        max_parallel: int,
        switched_off: Mapping[str, Switch] | None = None,
        skills: Collection[str] = (),
    ) -> None:
        self._run = run
        self._specs = {spec.name: spec for spec in specs}
        self._switched_off = switched_off or {}
        self._skills = skills if SKILL_TOOL in self._specs else ()
        self._run_call = run_call
        self._emit = emit
        self._slots = asyncio.Semaphore(max_parallel)
        self._failures: dict[str, int] = {}

    @property
    def most_equal_failures(self) -> int:
        """Return the highest number of failures of any one call with the same arguments that has not succeeded
        since.
        """
        return max(self._failures.values(), default=0)

    def find_repeated(self, requested: Sequence[Requested]) -> list[str]:
        """Return the texts of those calls that have now failed more than once with the same arguments."""
        return [_show_call(request) for request in requested if self._failures.get(_build_repeat_key(request), 0) > 1]

    async def run(self, requested: Sequence[Requested]) -> list[Observed]:
        """Return the results in the order of the requests. If this method is cancelled, every running call is
        cancelled.
        """
        observed: list[Observed] = []
        for group in self._group_requests(requested):
            if len(group) == 1:
                results = [await self._run_request(group[0])]
            else:
                results = await self._run_concurrently(group)
            observed += [
                (request.model_id or _get_call_id(request), self._guard(request, result))
                for request, result in zip(group, results, strict=True)
            ]
        return observed

    async def _run_concurrently(self, group: Sequence[Requested]) -> list[ToolResult]:
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [
                    running.create_task(self._run_request(request), name=f"call-{_get_call_id(request)}")
                    for request in group
                ]
        except BaseExceptionGroup as errors:
            # Only `emit` can raise here. Raise its error unwrapped, as for a single call.
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _group_requests(self, requested: Sequence[Requested]) -> list[list[Requested]]:
        """Group adjacent requests that may run concurrently. Every other request is a group of its own."""
        groups: list[list[Requested]] = []
        for request in requested:
            if groups and self._may_overlap(request) and self._may_overlap(groups[-1][-1]):
                groups[-1].append(request)
            else:
                groups.append([request])
        return groups

    def _may_overlap(self, request: Requested) -> bool:
        if not (isinstance(request, CallRequested) and request.is_parallel):
            return False
        spec = self._specs.get(request.call.name)
        return spec is not None and spec.read_only

    async def _run_request(self, request: Requested) -> ToolResult:
        started = time.monotonic()
        if isinstance(request, MalformedCall):
            result = ToolResult.failed(_get_call(request), ErrorCode.INVALID_ARGUMENTS, request.reason)
        else:
            async with self._slots:
                call = self._resolve_call(request)
                self._emit(CallStarted(run=self._run, call=call))
                result = self._check_tool_name(call) or await self._execute(call)
        # A result from the run's log was measured by the process that made the call.
        seconds = max(time.monotonic() - started, result.clocks.total_s)
        self._emit(CallFinished(run=self._run, result=result, seconds=seconds))
        return result

    def _check_tool_name(self, call: ToolCall) -> ToolResult | None:
        """Return a failed result if the run may not use the tool. The check is needed because `run_call` may support
        more tools than this run may use.
        """
        if call.name in self._specs:
            return None
        switch = self._switched_off.get(call.name)
        if switch is not None:
            return ToolResult.failed(call, ErrorCode.TOOL_DISABLED, switch.refusal(call.name))
        nearest = find_nearest(call.name, [*self._specs, *(name for name in self._skills if name not in self._specs)])
        similar = "".join(
            f"; a tool with a similar name: {name}" for name in nearest[:1] if _is_similar(call.name, name)
        )
        return ToolResult.failed(
            call, ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {call.name}{similar}", metadata={"nearest": nearest}
        )

    async def _execute(self, call: ToolCall) -> ToolResult:
        try:
            return await self._run_call(call)
        except ToolFailure as failure:
            return ToolResult.failed(call, failure.code, failure.message)
        except OperatorError as error:
            return ToolResult.failed(call, error.code, str(error))
        # `run_call` may be a user's code. Any error of it becomes a result, so that the run continues.
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            log.exception("run_call_failed", run=self._run, tool=call.name, call=call.id)
            return ToolResult.failed(call, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}".removesuffix(": "))

    def _resolve_call(self, request: CallRequested) -> ToolCall:
        """Return the call to execute. A call of a skill that is no tool becomes a call that loads its instructions."""
        if (
            meant := find_meant_name(request.call.name, {*self._specs, *self._switched_off, *self._skills})
        ) is not None:
            request = replace(request, call=request.call.model_copy(update={"name": meant}))
        call = request.call
        if call.name in self._specs or call.name in self._switched_off or call.name not in self._skills:
            return self._coerce_arguments(request)
        return call.model_copy(update={"name": SKILL_TOOL, "arguments": {"name": call.name, "action": "load"}})

    def _coerce_arguments(self, request: CallRequested) -> ToolCall:
        spec = self._specs.get(request.call.name)
        if spec is None or not request.is_text:
            return request.call
        return request.call.model_copy(update={"arguments": coerce_text(spec, request.call.arguments)})

    def _guard(self, request: Requested, result: ToolResult) -> ToolResult:
        """Return the result, with a note if the same request has failed REPEATS times or more."""
        key = _build_repeat_key(request)
        if not _has_failed(result):
            self._failures.pop(key, None)
            return result
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        if failures < REPEATS:
            return result
        note = (
            f"This exact call has now failed {failures} times. Do not send it again: change its arguments, use another "
            "tool, or answer with what you know."
        )
        if result.success:
            return result.model_copy(update={"output": _with_note(result.output, note, MAX_OUTPUT_CHARS)})
        return result.model_copy(update={"error": _with_note(result.error, note, MAX_ERROR_CHARS)})


def _is_similar(name: str, other: str) -> bool:
    name, other = name.casefold(), other.casefold()
    is_part = min(len(name), len(other)) >= 3 and (name in other or other in name)
    return is_part or difflib.SequenceMatcher(None, name, other).ratio() >= 0.8


_CONTROL_TOKENS = re.compile(r"<\|[^|<>]{0,64}\|>")
_ROUTE = re.compile(r"^(?:commentary|analysis|final|assistant|to=|\s)+")
_NAMESPACE = re.compile(r"^(?:functions?|tools?|default_api|api|namespace)[.:/_-]+", re.IGNORECASE)
# Possessive: a model chooses the name, and a repetition that is tried in several ways takes exponential time.
_ENDING = re.compile(r"(?:\{\}|:\d{1,3}|[\s`'\",;:.()])++$")


def find_meant_name(name: str, names: Collection[str]) -> str | None:
    """Return the name among `names` that a model meant by `name`; None if none or several are possible.

    Models write the namespace of their training (`functions.x`, `default_api:x`), control tokens (`x<|channel|>json`),
    marks of a call (`x()`, `x:0`), quotes, blanks, or the name twice.
    """
    if name in names:
        return name
    found: set[str] = set()
    for part in _CONTROL_TOKENS.split(name[:MAX_NAME_CHARS]):
        bare = _ENDING.sub("", _ROUTE.sub("", part).strip(" \t\r\n`'\""))
        forms = {bare, _NAMESPACE.sub("", bare), bare[: len(bare) // 2] if bare == bare[: len(bare) // 2] * 2 else bare}
        found |= forms & set(names)
    return found.pop() if len(found) == 1 else None


def build_interrupted_results(
    requested: Sequence[Requested], started_results: Mapping[str, ToolResult | None]
) -> list[Observed]:
    """Return a result for each call of a batch that the run's time limit interrupted.

    `started_results`: result by id of each call that has started, None for calls that were still running.
    """
    return [
        (
            request.model_id or _get_call_id(request),
            started_results.get(_get_call_id(request)) or _build_interrupted(request, started_results),
        )
        for request in requested
    ]


def _build_interrupted(request: Requested, started_results: Mapping[str, ToolResult | None]) -> ToolResult:
    call = _get_call(request)
    if call.id in started_results:
        return ToolResult.failed(
            call,
            ErrorCode.CANCELLED,
            "the run reached its time limit during this call: it may or may not have "
            "acted; raise max_wall_s for more time",
        )
    return ToolResult.failed(
        call,
        ErrorCode.CANCELLED,
        "the run reached its time limit, so this call was not run; raise max_wall_s for more time",
    )


def _is_being_cancelled() -> bool:
    """Return whether this task is being cancelled. False: something that it waited for was cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _get_call(request: Requested) -> ToolCall:
    """Return the call of a request. For a malformed request, only the id and the name of the call are set."""
    if isinstance(request, CallRequested):
        return request.call
    return ToolCall(id=request.call_id, name=(request.name or UNKNOWN_TOOL)[:MAX_NAME_CHARS])


def _get_call_id(request: Requested) -> str:
    return request.call.id if isinstance(request, CallRequested) else request.call_id


def _build_repeat_key(request: Requested) -> str:
    if isinstance(request, MalformedCall):
        return f"malformed {request.name} {request.raw}"
    return f"{request.call.name} {json.dumps(request.call.arguments, sort_keys=True)}"


def _show_call(request: Requested) -> str:
    """Return a call as text for a model: the command, or else the name and arguments."""
    if isinstance(request, MalformedCall):
        return request.raw
    command = request.call.arguments.get("command")
    return command if isinstance(command, str) else f"{request.call.name} {json.dumps(request.call.arguments)}"


def _has_failed(result: ToolResult) -> bool:
    """Return whether the call failed. A command with a nonzero exit code counts, because a stuck model often repeats
    it.
    """
    return not result.success or result.metadata.get("exit_code") not in (None, 0)


def _with_note(text: str | None, note: str, limit: int) -> str:
    available_chars = limit - len(note) - 1
    return f"{(text or '')[:available_chars]}\n{note}" if text else note
