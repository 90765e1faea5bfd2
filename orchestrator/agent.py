"""The ReAct loop: ask the model, run the calls of its reply, tell it the results, until it answers or a limit is reached."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from contract.calls import Clocks, ToolCall, ToolResult
from contract.errors import ErrorCode
from contract.specs import ToolSpec
from orchestrator.dialects.base import CallRequested, Dialect, Event, MalformedCall, ReplyEnd, Text, Usage
from orchestrator.events import (
    CallFinished,
    CallStarted,
    OnEvent,
    RunEvent,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TextArrived,
    Warned,
)
from orchestrator.limits import ReActOptions, Spending, StopReason
from orchestrator.logs import get_logger
from orchestrator.models.base import Chunk, Model, ModelRequest
from orchestrator.transcript import Transcript

log = get_logger(__name__)

MAX_NAME_CHARS = 128

RunCall = Callable[[ToolCall], Awaitable[ToolResult]]


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `answer` is the last text of the model, also when a limit stopped the run; `clocks` sums those of its calls."""

    answer: str
    stop_reason: StopReason
    steps: int
    transcript: Transcript
    usage: Usage
    clocks: Clocks
    run: str = ""


@dataclass
class _Reply:
    """One reply as it is worked through."""

    end: ReplyEnd
    observed: list[tuple[str, ToolResult]]
    model_s: float


@dataclass
class Agent:
    """One model in one dialect with tools. Runs instructions one at a time."""

    model: Model
    dialect: Dialect
    specs: Sequence[ToolSpec]
    run_call: RunCall
    instruction: str = ""
    options: ReActOptions = field(default_factory=ReActOptions)
    on_event: OnEvent = lambda _: None
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))

    async def run(self, request: str) -> RunResult:
        """Work `request` to an answer or a limit. Raises ModelUnavailable; a call's failure is told to the model, never raised."""
        spending = Spending(self.options)
        usage, clocks = Usage(), Clocks()
        transcript = Transcript(
            {"role": "system", "content": self.dialect.build_system(self.instruction, self.specs)},
            {"role": "user", "content": request},
        )
        self._tell(RunStarted(run=self.run_id, instruction=request, model=self.model.name, dialect=self.dialect.name))
        while True:
            spending.steps += 1
            self._tell(StepStarted(run=self.run_id, step=spending.steps))
            reply = await self._step(transcript, spending.steps)
            usage = _add_usage(usage, reply.end.usage)
            spending.tokens = usage.prompt_tokens + usage.completion_tokens
            for _, result in reply.observed:
                clocks = _add_clocks(clocks, result.clocks)
            self._tell(StepFinished(run=self.run_id, step=spending.steps, model_s=reply.model_s, usage=reply.end.usage))
            reason = self._stop_reason(reply, spending)
            if reason is not None:
                break
        self._tell(RunFinished(run=self.run_id, answer=reply.end.text, stop_reason=reason.value, clocks=clocks))
        return RunResult(reply.end.text, reason, spending.steps, transcript, usage, clocks, self.run_id)

    def _stop_reason(self, reply: _Reply, spending: Spending) -> StopReason | None:
        if not reply.observed:
            if reply.end.finish_reason == "length":
                self._warn("the reply was cut at the model's token limit; the answer is not whole")
                return StopReason.CUT_REPLY
            if not reply.end.text.strip():
                self._warn("the model answered nothing")
                return StopReason.EMPTY_REPLY
            return StopReason.ANSWERED
        reason = spending.exhausted()
        if reason is not None:
            self._warn(
                f"stopped by the limit {reason.value} after {spending.steps} steps while the model still called tools; the last reply is returned"
            )
        return reason

    async def _step(self, transcript: Transcript, step: int) -> _Reply:
        """One reply: shown as it comes, its calls run in order, reply and results added to the transcript."""
        started = time.monotonic()
        request = ModelRequest(transcript.messages(), self.dialect.build_tools(self.specs))
        reader = self.dialect.open_reader(self.run_id, step)
        observed: list[tuple[str, ToolResult]] = []
        async with _ReadAhead(self.model.stream(request)) as chunks:
            async for chunk in chunks:
                await self._handle(reader.feed(chunk), observed)
            model_s = time.monotonic() - started - sum(_busy_s(result.clocks) for _, result in observed)
        events, end = reader.finish()
        await self._handle(events, observed)
        transcript.append(end.message)
        for message in self.dialect.build_observations(observed):
            transcript.append(message)
        return _Reply(end, observed, max(0.0, model_s))

    async def _handle(self, events: Sequence[Event], observed: list[tuple[str, ToolResult]]) -> None:
        for event in events:
            if isinstance(event, Text):
                self._tell(TextArrived(run=self.run_id, text=event.text))
            elif isinstance(event, CallRequested):
                self._tell(CallStarted(run=self.run_id, call=event.call))
                result = await self.run_call(event.call)
                observed.append((event.model_id or event.call.id, result))
                self._tell(CallFinished(run=self.run_id, result=result))
            else:
                result = _malformed_result(event)
                observed.append((event.model_id or event.call_id, result))
                self._tell(CallFinished(run=self.run_id, result=result))

    def _warn(self, message: str) -> None:
        log.warning("run_warning", run=self.run_id, message=message)
        self._tell(Warned(run=self.run_id, message=message))

    def _tell(self, event: RunEvent) -> None:
        self.on_event(event)


class _ReadAhead:
    """Reads the model's stream in the background, so that a tool that runs for 30 s does not stall the connection."""

    def __init__(self, stream: AsyncIterator[Chunk]) -> None:
        self._stream = stream
        self._queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "_ReadAhead":
        self._task = asyncio.create_task(self._pump(), name="model-stream")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    async def _pump(self) -> None:
        try:
            async for chunk in self._stream:
                self._queue.put_nowait(chunk)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # handed to the reader, which raises it
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(None)


def _malformed_result(event: MalformedCall) -> ToolResult:
    call = ToolCall(id=event.call_id, name=(event.name or "unknown")[:MAX_NAME_CHARS])
    return ToolResult.failed(call, ErrorCode.INVALID_ARGUMENTS, event.reason)


def _busy_s(clocks: Clocks) -> float:
    return clocks.queued_s + clocks.sandbox_s + clocks.run_s + clocks.transfer_s


def _add_clocks(one: Clocks, other: Clocks) -> Clocks:
    return Clocks(
        queued_s=one.queued_s + other.queued_s,
        sandbox_s=one.sandbox_s + other.sandbox_s,
        run_s=one.run_s + other.run_s,
        transfer_s=one.transfer_s + other.transfer_s,
    )


def _add_usage(one: Usage, other: Usage) -> Usage:
    return Usage(one.prompt_tokens + other.prompt_tokens, one.completion_tokens + other.completion_tokens)
