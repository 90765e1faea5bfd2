"""Carries out the calls of a run: in order, read-only ones side by side where the model asked for that; with a guard
against repetition.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from contract.calls import MAX_ERROR_CHARS, MAX_NAME_CHARS, MAX_OUTPUT_CHARS, ToolCall, ToolResult
from contract.errors import ErrorCode, OperatorError, ToolFailure
from contract.registry import Switch
from contract.run_events import CallFinished, CallStarted, RunEvent
from contract.schema import coerce_text, find_nearest
from contract.specs import ToolSpec
from contract.tenancy import SKILL_TOOL
from orchestrator.dialects.base import CallRequested, MalformedCall
from orchestrator.dialects.observations import UNKNOWN_TOOL
from telemetry.logs import get_logger

log = get_logger(__name__)

REPEATS = 3
"""So many identical failures are answered with more than the failure."""

RunCall = Callable[[ToolCall], Awaitable[ToolResult]]
Requested = CallRequested | MalformedCall
Observed = tuple[str, ToolResult]
"""(the call's id as the model knows it, else ours; its result)."""


class CallRunner:
    """Runs the calls of one run. `tell` gets their events as they happen. `skills`: names that a model may take for
    tools.
    """

    def __init__(
        self,
        run: str,
        specs: Sequence[ToolSpec],
        run_call: RunCall,
        tell: Callable[[RunEvent], None],
        max_parallel: int,
        switched_off: Mapping[str, Switch] | None = None,
        skills: Collection[str] = (),
    ) -> None:
        self._run = run
        self._specs = {spec.name: spec for spec in specs}
        self._switched_off = switched_off or {}
        self._skills = skills if SKILL_TOOL in self._specs else ()
        self._run_call = run_call
        self._tell = tell
        self._slots = asyncio.Semaphore(max_parallel)
        self._failures: dict[str, int] = {}

    async def run(self, requested: Sequence[Requested]) -> list[Observed]:
        """Results in the order of the requests. Cancelled: every call that runs is, too."""
        observed: list[Observed] = []
        for group in self._groups(requested):
            if len(group) == 1:
                results = [await self._one(group[0])]
            else:
                results = await self._side_by_side(group)
            observed += [
                (request.model_id or _id(request), self._guard(request, result))
                for request, result in zip(group, results, strict=True)
            ]
        return observed

    async def _side_by_side(self, group: Sequence[Requested]) -> list[ToolResult]:
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(self._one(request), name=f"call-{_id(request)}") for request in group]
        except BaseExceptionGroup as errors:
            # Only what `tell` raises comes here: it comes out as it does from a call by itself.
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _groups(self, requested: Sequence[Requested]) -> list[list[Requested]]:
        """Neighbours that may run side by side; every other one by itself."""
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

    async def _one(self, request: Requested) -> ToolResult:
        began = time.monotonic()
        if isinstance(request, MalformedCall):
            result = ToolResult.failed(_call(request), ErrorCode.INVALID_ARGUMENTS, request.reason)
        else:
            async with self._slots:
                call = self._resolved(request)
                self._tell(CallStarted(run=self._run, call=call))
                result = self._unknown(call) or await self._outcome(call)
        # A result of the log was measured by the process that made the call.
        seconds = max(time.monotonic() - began, result.clocks.total_s)
        self._tell(CallFinished(run=self._run, result=result, seconds=seconds))
        return result

    def _unknown(self, call: ToolCall) -> ToolResult | None:
        """The result of a call to a tool that the model was not told of: whoever runs calls may know more tools than
        this run may use.
        """
        if call.name in self._specs:
            return None
        switch = self._switched_off.get(call.name)
        if switch is not None:
            return ToolResult.failed(call, ErrorCode.TOOL_DISABLED, switch.refusal(call.name))
        nearest = find_nearest(call.name, [*self._specs, *(name for name in self._skills if name not in self._specs)])
        return ToolResult.failed(
            call, ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {call.name}", metadata={"nearest": nearest}
        )

    async def _outcome(self, call: ToolCall) -> ToolResult:
        try:
            return await self._run_call(call)
        except ToolFailure as failure:
            return ToolResult.failed(call, failure.code, failure.message)
        except OperatorError as error:
            return ToolResult.failed(call, error.code, str(error))
        except (
            Exception,
            asyncio.CancelledError,
        ) as error:  # a user's code may stand behind it; the loop goes on whatever that raises
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            log.exception("run_call_failed", run=self._run, tool=call.name, call=call.id)
            return ToolResult.failed(call, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}".removesuffix(": "))

    def _resolved(self, request: CallRequested) -> ToolCall:
        """The call as it is carried out: of a skill that is no tool by itself, the loading of its instructions, which
        say how it is used.
        """
        call = request.call
        if call.name in self._specs or call.name in self._switched_off or call.name not in self._skills:
            return self._typed(request)
        return call.model_copy(update={"name": SKILL_TOOL, "arguments": {"name": call.name, "action": "load"}})

    def _typed(self, request: CallRequested) -> ToolCall:
        spec = self._specs.get(request.call.name)
        if spec is None or not request.is_text:
            return request.call
        return request.call.model_copy(update={"arguments": coerce_text(spec, request.call.arguments)})

    def _guard(self, request: Requested, result: ToolResult) -> ToolResult:
        """The result, told with more emphasis when the very same request has failed before, again and again."""
        key = _key(request)
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


def build_interrupted_results(requested: Sequence[Requested], begun: Mapping[str, ToolResult | None]) -> list[Observed]:
    """A result for each call of a batch that the run's time limit interrupted. `begun`: by call id what those gave that
    had begun, None for the ones that were still running."""
    return [
        (request.model_id or _id(request), begun.get(_id(request)) or _interrupted(request, begun))
        for request in requested
    ]


def _interrupted(request: Requested, begun: Mapping[str, ToolResult | None]) -> ToolResult:
    call = _call(request)
    if call.id in begun:
        return ToolResult.failed(
            call, ErrorCode.CANCELLED, "the run reached its time limit during this call: it may or may not have acted"
        )
    return ToolResult.failed(call, ErrorCode.CANCELLED, "the run reached its time limit, so this call was not run")


def _is_being_cancelled() -> bool:
    """Whether somebody cancels this task; False: something that it waited for was cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _call(request: Requested) -> ToolCall:
    """The call; of a malformed one, as much as its result needs."""
    if isinstance(request, CallRequested):
        return request.call
    return ToolCall(id=request.call_id, name=(request.name or UNKNOWN_TOOL)[:MAX_NAME_CHARS])


def _id(request: Requested) -> str:
    return request.call.id if isinstance(request, CallRequested) else request.call_id


def _key(request: Requested) -> str:
    if isinstance(request, MalformedCall):
        return f"malformed {request.name} {request.raw}"
    return f"{request.call.name} {json.dumps(request.call.arguments, sort_keys=True)}"


def _has_failed(result: ToolResult) -> bool:
    """A command that ran and exited with an error counts, too: it is what a stuck model repeats most."""
    return not result.success or result.metadata.get("exit_code") not in (None, 0)


def _with_note(text: str | None, note: str, limit: int) -> str:
    room = limit - len(note) - 1
    return f"{(text or '')[:room]}\n{note}" if text else note
