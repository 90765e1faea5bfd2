"""The ReAct loop: ask the model, run the calls of its reply, tell it the results, until it answers or a limit is
reached.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile

from contract.calls import Clocks, ToolResult
from contract.errors import ContextWindowExceeded, ModelInterrupted
from contract.registry import Switch
from contract.run_events import (
    CallFinished,
    CallStarted,
    ModelAnswered,
    ModelAsked,
    OnEvent,
    RunAborted,
    RunEvent,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TextArrived,
    TextWithdrawn,
    Warned,
)
from contract.specs import ToolSpec
from orchestrator.dialects.base import Dialect, Event, MalformedCall, ReplyEnd, ReplyReader, Text
from orchestrator.dialects.model import Message, Model, ModelRequest, Usage
from orchestrator.dialects.thinking import strip_thinking
from orchestrator.loop.call_runner import CallRunner, Observed, Requested, RunCall, build_interrupted_results
from orchestrator.loop.context_window import ContextWindow
from orchestrator.loop.limits import ReActOptions, Spending, StopReason
from orchestrator.loop.reply_stream import ReadAhead, ShownText
from orchestrator.loop.transcript import Transcript
from telemetry.logs import get_logger

__all__ = ["Agent", "ReActStrategy", "RunCall", "RunResult"]

log = get_logger(__name__)

MAX_REFUSALS = 4
"""So often a request that is too long is sent again, shorter each time."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `answer` is the last text of the model, also when a limit stopped the run; `clocks` sums those
    of its calls; `usage` is what the server counted; `cost` is None without prices, and estimated where the server does
    not count."""

    answer: str
    stop_reason: StopReason
    steps: int
    transcript: Transcript
    usage: Usage
    clocks: Clocks
    run: str = ""
    cost: float | None = None


@dataclass
class Agent:
    """One model in one dialect with tools. Runs any number of instructions, also at once. `run_id`: of its only run;
    "": each gets one. `spent_by_tools`: what the calls of its only run had of the model, which counts for its budgets.

    `switched_off`: tools that are there and that nobody may call now; a model that calls one is told so. `skills`:
    names of skills; a model that calls one as a tool gets its instructions.

    Ids of calls are made of the run's: under one that has been used, pools take a second run's calls for repetitions of
    the first's.
    """

    model: Model
    dialect: Dialect
    specs: Sequence[ToolSpec]
    run_call: RunCall
    instruction: str = ""
    options: ReActOptions = field(default_factory=ReActOptions)
    on_event: OnEvent = lambda _: None
    run_id: str = ""
    spent_by_tools: Callable[[], Usage] = Usage
    switched_off: Mapping[str, Switch] = field(default_factory=dict)
    skills: Collection[str] = ()
    _has_run: bool = field(default=False, init=False, repr=False, compare=False)

    async def run(self, request: str, *, history: Sequence[Message] = ()) -> RunResult:
        """Work `request` to an answer or a limit; `history`: messages between the system prompt and it.

        Raises ModelUnavailable, and ValueError when the only run of `run_id` has begun; a call's failure is told to the
        model, never raised.
        """
        if self.run_id and self._has_run:
            raise ValueError(
                f"'{self.run_id}' has had its run: give the next one an Agent with another run_id, or none"
            )
        self._has_run = True
        return await _Run(self, request, history).work()


ReActStrategy = Agent
"""The name under which the requirements know it."""


@dataclass
class _Reply:
    """One reply as it is worked through. `end`: once it has been read to its end. `asked`: its calls, as far as they
    were handed over.
    """

    request: ModelRequest
    reader: ReplyReader
    end: ReplyEnd | None = None
    asked: list[Requested] = field(default_factory=list)
    observed: list[Observed] = field(default_factory=list)
    malformed: int = 0
    tools_s: float = 0.0
    asked_at: float = field(default_factory=time.monotonic)

    def finish(self) -> ReplyEnd:
        """Its end, also when it stops in the middle: calls that were half read count as asked."""
        if self.end is None:
            events, self.end = self.reader.finish(is_broken=True)
            self.asked += [event for event in events if not isinstance(event, Text)]
        return self.end

    def is_nothing_but_malformed(self) -> bool:
        return bool(self.observed) and self.malformed == len(self.observed)


class _Run:
    """One run of an agent, from its first request to its end."""

    def __init__(self, agent: Agent, request: str, history: Sequence[Message]) -> None:
        self._id = agent.run_id or secrets.token_hex(8)
        self._agent = agent
        self._request = request
        self._spending = Spending(agent.options, by_tools=agent.spent_by_tools)
        self._clocks = Clocks()
        self._window = ContextWindow(agent.options.context_tokens, agent.dialect.build_request((), agent.specs).tools)
        self._calls = CallRunner(
            self._id,
            agent.specs,
            agent.run_call,
            self._note_call,
            agent.options.max_parallel_calls,
            agent.switched_off,
            agent.skills,
        )
        system = agent.dialect.build_system(agent.instruction, agent.specs)
        self._transcript = Transcript(
            {"role": "system", "content": system}, *history, {"role": "user", "content": request}
        )
        self._answer = ""
        self._shortened = 0
        self._current: _Reply | None = None
        self._last_request = ModelRequest([])
        self._begun: dict[str, ToolResult | None] = {}

    async def work(self) -> RunResult:
        agent = self._agent
        self._tell(
            RunStarted(
                run=self._id,
                instruction=self._request,
                model=agent.model.name,
                dialect=agent.dialect.name,
                release=_find_release(),
            )
        )
        try:
            reason = await self._until_done()
        except (Exception, asyncio.CancelledError) as error:
            nameless = "the run was cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
            self._tell(RunAborted(run=self._id, reason=str(error) or nameless))
            raise
        spent = self._spending
        self._tell(
            RunFinished(
                run=self._id,
                answer=self._answer,
                stop_reason=reason.value,
                clocks=self._clocks,
                usage=spent.counted,
                cost=spent.cost,
            )
        )
        return RunResult(
            self._answer, reason, spent.steps, self._transcript, spent.counted, self._clocks, self._id, spent.cost
        )

    async def _until_done(self) -> StopReason:
        wall_s = self._agent.options.max_wall_s
        try:
            async with asyncio.timeout(wall_s) as wall:
                while (reason := await self._step()) is None:
                    pass
        except TimeoutError:
            if not wall.expired():
                raise
            self._warn(
                f"stopped at the limit of {wall_s:g} s; what was running has been ended, and the last reply is returned"
            )
            self._record_interrupted()
            return StopReason.MAX_WALL
        return reason

    async def _step(self) -> StopReason | None:
        """One reply with its calls, added to the transcript. Gives the reason to stop, or None."""
        spending, started = self._spending, time.monotonic()
        spending.steps += 1
        self._begun.clear()
        self._tell(StepStarted(run=self._id, step=spending.steps))
        reply = await self._reply()
        end = self._record(reply)
        self._answer = strip_thinking(end.text)
        spending.malformed_replies = spending.malformed_replies + 1 if reply.is_nothing_but_malformed() else 0
        model_s = max(0.0, time.monotonic() - started - reply.tools_s)
        self._tell(StepFinished(run=self._id, step=spending.steps, model_s=model_s, usage=end.usage))
        return self._stop_reason(reply, end)

    def _record(self, reply: _Reply) -> ReplyEnd:
        """Take the reply and its results into the transcript and the sums."""
        end, self._current = reply.finish(), None
        self._transcript.append(end.message)
        if reply.observed:
            self._transcript.append_observations(self._agent.dialect.build_observations(reply.observed))
        for _, result in reply.observed:
            self._clocks += result.clocks
        if self._spending.charge(end.usage, self._window.estimate(reply.request.messages, end.message)):
            self._warn("the server does not count tokens: the budget goes by an estimate")
        return end

    def _record_interrupted(self) -> None:
        """What the calls of the reply that a limit interrupted have done stays known, and each has its answer."""
        reply = self._current
        if reply is None or not reply.asked:
            return
        if reply.end is None:
            self._tell_answer(reply, reply.finish())
        results = build_interrupted_results(reply.asked[len(reply.observed) :], self._begun)
        for _, result in results:
            if self._begun.get(result.call_id) is None:
                self._tell(CallFinished(run=self._id, result=result))
        reply.observed += results
        self._record(reply)

    def _stop_reason(self, reply: _Reply, end: ReplyEnd) -> StopReason | None:
        if not reply.observed:
            if end.finish_reason == "length":
                self._warn("the reply was cut at the model's token limit; the answer is not whole")
                return StopReason.CUT_REPLY
            if not self._answer.strip():
                self._warn("the model answered nothing")
                return StopReason.EMPTY_REPLY
            return StopReason.ANSWERED
        repairs = self._agent.dialect.max_repairs
        limit = self._agent.options.max_malformed_replies if repairs is None else repairs + 1
        if self._spending.malformed_replies >= limit:
            self._warn(
                f"the model wrote {self._spending.malformed_replies} replies in a row that cannot be read; the last "
                "one is returned as it is"
            )
            return StopReason.MALFORMED_REPLY
        reason = self._spending.exhausted()
        if reason is not None:
            self._warn(
                f"stopped by the limit {reason.value} after {self._spending.steps} steps while the model still called "
                "tools; the last reply is returned"
            )
        return reason

    async def _reply(self) -> _Reply:
        """One whole reply. A request that is too long is shortened and sent again, a reply that broke off asked for
        again.
        """
        shown, refusals, interruptions = ShownText(), 0, 0
        while True:
            messages, request = self._build_request()
            try:
                reply = await self._read(request, shown)
            except ContextWindowExceeded as error:
                refusals += 1
                before = self._window.fit(messages, self._transcript.older, self._transcript.newest)
                self._window.shrink(error.limit_tokens, before[0])
                if (
                    refusals > MAX_REFUSALS
                    or self._window.fit(messages, self._transcript.older, self._transcript.newest) == before
                ):
                    raise
                shown.begin_again()
            except ModelInterrupted as error:
                interruptions += 1
                if interruptions > self._agent.options.max_interruptions:
                    raise
                self._warn(f"{error}; the reply is asked for again")
                shown.begin_again()
            else:
                self._withdraw(shown.end())
                self._window.learn(request.messages, reply.finish().usage)
                return reply

    def _build_request(self) -> tuple[list[Message], ModelRequest]:
        messages = self._transcript.messages()
        fitted, shortened = self._window.fit(messages, self._transcript.older, self._transcript.newest)
        if shortened > self._shortened:
            self._warn(
                f"{shortened} results are shortened to fit the context window of {self._window.limit_tokens} tokens"
            )
        self._shortened = shortened
        return messages, self._agent.dialect.build_request(fitted, self._agent.specs)

    async def _read(self, request: ModelRequest, shown: ShownText) -> _Reply:
        """The reply to one request: shown as it comes, its calls run in order. Raises ModelInterrupted or
        ContextWindowExceeded when it broke off before any call."""
        reader = self._agent.dialect.open_reader(
            self._id, self._spending.steps, reads_tags=self._agent.options.enable_tool_action_parsing
        )
        reply = self._current = _Reply(request, reader)
        self._tell(build_asked(self._id, self._spending.steps, request, self._last_request))
        self._last_request = request
        is_broken = False
        async with ReadAhead(self._agent.model.stream(request)) as chunks:
            try:
                async for chunk in chunks:
                    if events := reader.feed(chunk):
                        await self._handle(events, reply, shown)
            except (ModelInterrupted, ContextWindowExceeded) as error:
                if not reply.observed:
                    raise
                # What has run is not run again: the rest of the reply is lost, and the model is asked how to go on.
                self._warn(f"{error}; its calls up to there have run")
                is_broken = True
        events, reply.end = reader.finish(is_broken=is_broken)
        self._tell_answer(reply, reply.end)
        await self._handle(events, reply, shown)
        return reply

    async def _handle(self, events: Sequence[Event], reply: _Reply, shown: ShownText) -> None:
        """Events in order: neighbouring calls are handed over together, and what follows waits for them."""
        calls: list[Requested] = []
        for event in events:
            if not isinstance(event, Text):
                calls.append(event)
                continue
            await self._carry_out(calls, reply)
            calls = []
            void, text = shown.show(event.text)
            self._withdraw(void)
            if text:
                self._tell(TextArrived(run=self._id, text=text))
        await self._carry_out(calls, reply)

    async def _carry_out(self, calls: Sequence[Requested], reply: _Reply) -> None:
        if not calls:
            return
        started = time.monotonic()
        reply.asked += calls
        reply.observed += await self._calls.run(calls)
        reply.malformed += sum(isinstance(call, MalformedCall) for call in calls)
        reply.tools_s += time.monotonic() - started

    def _note_call(self, event: RunEvent) -> None:
        if isinstance(event, CallStarted):
            self._begun[event.call.id] = None
        elif isinstance(event, CallFinished):
            self._begun[event.result.call_id] = event.result
        self._tell(event)

    def _tell_answer(self, reply: _Reply, end: ReplyEnd) -> None:
        model_s = max(0.0, time.monotonic() - reply.asked_at - reply.tools_s)
        self._tell(
            ModelAnswered(
                run=self._id,
                step=self._spending.steps,
                message=end.message,
                finish_reason=end.finish_reason,
                usage=end.usage,
                model_s=model_s,
            )
        )

    def _withdraw(self, characters: int) -> None:
        if characters:
            self._tell(TextWithdrawn(run=self._id, characters=characters))

    def _warn(self, message: str) -> None:
        log.warning("run_warning", run=self._id, message=message)
        self._tell(Warned(run=self._id, message=message))

    def _tell(self, event: RunEvent) -> None:
        self._agent.on_event(event)


def build_asked(run: str, step: int, request: ModelRequest, before: ModelRequest) -> ModelAsked:
    """Return the event of a request as its difference to the one before."""
    pairs = zip(before.messages, request.messages, strict=False)
    kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return ModelAsked(
        run=run,
        step=step,
        messages=len(request.messages),
        tools=len(request.tools),
        kept=kept,
        new_messages=request.messages[kept:],
        new_tools=request.tools if request.tools != before.tools else None,
        extra=request.extra,
    )


@cache
def _find_release() -> str:
    try:
        return version("toolcrew")
    except PackageNotFoundError:
        return ""
