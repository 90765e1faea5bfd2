"""The ReAct loop: send the messages to the model, run the calls in its reply, and send it the results. The loop ends
when the model answers or a limit is reached.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile

from toolcrew.contract.calls import CallUsage, Clocks, ToolCall, ToolResult
from toolcrew.contract.errors import ContextWindowExceeded, ErrorCode, ModelInterrupted, ToolFailure
from toolcrew.contract.plurals import count
from toolcrew.contract.registry import Switch
from toolcrew.contract.run_events import (
    CallFinished,
    CallStarted,
    ModelAnswered,
    ModelAsked,
    OnEvent,
    ReplyRepaired,
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
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import (
    CallRequested,
    Dialect,
    Event,
    MalformedCall,
    ReplyEnd,
    ReplyReader,
    Text,
)
from toolcrew.orchestrator.dialects.call_ids import build_call_id
from toolcrew.orchestrator.dialects.fences import find_command
from toolcrew.orchestrator.dialects.finish_reasons import ReplyEnding, explain_ending
from toolcrew.orchestrator.dialects.foreign_calls import FOREIGN_CALL, find_foreign_call
from toolcrew.orchestrator.dialects.model import Chunk, Message, Model, ModelRequest, TokenUsage
from toolcrew.orchestrator.dialects.profiles import SHELL_TOOL, STANDARD, ModelProfile
from toolcrew.orchestrator.dialects.thinking import strip_thinking
from toolcrew.orchestrator.dialects.tokens import TokenCollector
from toolcrew.orchestrator.loop.call_runner import CallRunner, Observed, Requested, RunCall, build_interrupted_results
from toolcrew.orchestrator.loop.context_window import ContextWindow
from toolcrew.orchestrator.loop.limits import ReActOptions, Spending, StopReason
from toolcrew.orchestrator.loop.reply_stream import DisplayedText, ReadAhead, ReplyChanged
from toolcrew.orchestrator.loop.transcript import Transcript
from toolcrew.telemetry.logs import get_logger

__all__ = ["Agent", "ReActStrategy", "RunCall", "RunResult"]

log = get_logger(__name__)

TRIED = "These calls were tried and failed. Solve the request in another way:"
"""Heading of the calls that a restarted conversation names."""
MAX_TRIED_CHARS = 2000
REMINDER = "You have not called a tool. If the request needs one, call {tool} now. If not, repeat your answer."
_ABSOLUTE_PATH = re.compile(r"""(?:^|[\s'"`(])/\w""")
MAX_REFUSALS = 4
"""Limit of how often a request that the server refused as too long is sent again, each time shorter."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run. `answer` is the last text of the model, also when a limit stopped the run.

    `clocks` and `call_usage` are the sums over the calls. `usage` has the tokens that the server counted. `cost` is
    None without prices, and an estimate if the server does not count tokens. `finish_reason`: the server's word for the
    end of the last reply; None if it sent none.
    """

    answer: str
    stop_reason: StopReason
    steps: int
    transcript: Transcript
    usage: TokenUsage
    clocks: Clocks
    run: str = ""
    cost: float | None = None
    call_usage: CallUsage = field(default_factory=CallUsage)
    finish_reason: str | None = None


@dataclass
class Agent:
    """One model in one dialect with tools. Runs any number of instructions, also concurrently.

    `run_id`: the id of its only run; "": each run gets a new id. `usage_by_tools`: returns the tokens that tools of its
    only run have used; they count for the limits of the run. `switched_off`: existing tools that may not be called now;
    a model that calls one gets an explanation. `skills`: names of skills; a model that calls one as a tool gets its
    instructions. `profile`: decides how replies without a call are repaired. `files`: list of the files in the working
    directory, which is added to a request that names no absolute path; "": no list. `copied_steps`: the first steps of
    a run that was forked from another run. They count for `max_iterations`, and for no other limit or sum: the other
    run has counted them. `is_logged`: the model writes each reply to a log before its stream ends. Then no call starts
    before the end of its reply, and a reply that breaks off is withdrawn and counts for no limit: a process that
    resumes the run does not know it.

    Call ids contain the run's id. If a second run used the same id, pools would treat its calls as repetitions of the
    first run's.
    """

    model: Model
    dialect: Dialect
    specs: Sequence[ToolSpec]
    run_call: RunCall
    instruction: str = ""
    options: ReActOptions = field(default_factory=ReActOptions)
    on_event: OnEvent = lambda _: None
    run_id: str = ""
    usage_by_tools: Callable[[], TokenUsage] = TokenUsage
    switched_off: Mapping[str, Switch] = field(default_factory=dict)
    skills: Collection[str] = ()
    profile: ModelProfile = STANDARD
    files: str = ""
    copied_steps: int = 0
    is_logged: bool = False
    _has_run: bool = field(default=False, init=False, repr=False, compare=False)

    async def run(self, request: str, *, history: Sequence[Message] = ()) -> RunResult:
        """Run `request` until the model answers or a limit is reached. `history`: messages between the system prompt
        and `request`.

        A model that raises ToolFailure(BUDGET_EXCEEDED) ends the run like a limit. Raises ModelUnavailable, and
        ValueError when the only run of `run_id` has already started. The failure of a call is reported to the model and
        never raised.
        """
        if self.run_id and self._has_run:
            raise ValueError(
                f"the run '{self.run_id}' has already started. Create an Agent with another run_id, or without one."
            )
        self._has_run = True
        return await _Run(self, request, history).execute()


_UNFINISHED = {
    ReplyEnding.CUT: StopReason.CUT_REPLY,
    ReplyEnding.FILTERED: StopReason.CONTENT_FILTER,
    ReplyEnding.REFUSED: StopReason.REFUSED,
    ReplyEnding.FAILED: StopReason.FAILED_REPLY,
    ReplyEnding.UNKNOWN: StopReason.UNKNOWN_END,
}
"""The end of a run whose last reply has no calls and did not end normally."""
ReActStrategy = Agent
"""The documented name of Agent."""


@dataclass
class _Reply:
    """One reply that is being processed. `end` is set after its last chunk. `waiting`: calls that must not start before
    the end of the reply. `requested`: the calls that were started so far.
    """

    request: ModelRequest
    reader: ReplyReader
    end: ReplyEnd | None = None
    waiting: list[Requested] = field(default_factory=list)
    requested: list[Requested] = field(default_factory=list)
    observed: list[Observed] = field(default_factory=list)
    malformed: int = 0
    has_begun: bool = False
    tools_s: float = 0.0
    requested_at: float = field(default_factory=time.monotonic)
    tokens: TokenCollector = field(default_factory=TokenCollector)

    def finish(self) -> ReplyEnd:
        """Return the end of the reply, also if the reply stops in the middle. Calls that were only partly read count as
        requested.
        """
        if self.end is None:
            events, self.end = self.reader.finish(is_broken=True)
            self.requested += [event for event in events if not isinstance(event, Text)]
        return self.end

    def has_only_malformed_calls(self) -> bool:
        return bool(self.observed) and self.malformed == len(self.observed)


class _BudgetUsed(Exception):
    """An interrupted reply has used up a limit of the run, so the reply is not requested again."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class _Run:
    """State of one run of an agent, from its first request to its end."""

    def __init__(self, agent: Agent, request: str, history: Sequence[Message]) -> None:
        self._id = agent.run_id or secrets.token_hex(8)
        self._agent = agent
        self._request = request
        self._spending = Spending(agent.options, by_tools=agent.usage_by_tools)
        self._clocks = Clocks()
        self._call_usage = CallUsage()
        self._window = ContextWindow(agent.options.context_tokens, agent.dialect.build_request((), agent.specs).tools)
        self._calls = CallRunner(
            self._id,
            agent.specs,
            agent.run_call,
            self._record_call,
            agent.options.max_parallel_calls,
            agent.switched_off,
            agent.skills,
        )
        system = agent.dialect.build_system(agent.instruction, agent.specs)
        self._request_index = 1 + len(history)
        self._tried: dict[str, None] = {}
        self._restarted_at = 0
        self._transcript = Transcript(
            {"role": "system", "content": system},
            *history,
            {"role": "user", "content": _add_files(request, agent.files)},
        )
        self._answer = ""
        self._finish_reason: str | None = None
        self._calls_itself = self._is_reminded = False
        self._shortened = 0
        self._current: _Reply | None = None
        self._last_request = ModelRequest([])
        self._call_results: dict[str, ToolResult | None] = {}

    async def execute(self) -> RunResult:
        agent = self._agent
        self._emit(
            RunStarted(
                run=self._id,
                instruction=self._request,
                model=agent.model.name,
                dialect=agent.dialect.name,
                release=_find_release(),
            )
        )
        try:
            reason = await self._run_steps()
        except (Exception, asyncio.CancelledError) as error:
            description = "the run was cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
            self._emit(RunAborted(run=self._id, reason=str(error) or description))
            raise
        spending = self._spending
        self._emit(
            RunFinished(
                run=self._id,
                answer=self._answer,
                stop_reason=reason.value,
                clocks=self._clocks,
                usage=spending.counted,
                cost=spending.cost,
                call_usage=self._call_usage,
            )
        )
        return RunResult(
            self._answer,
            reason,
            spending.steps,
            self._transcript,
            spending.counted,
            self._clocks,
            self._id,
            spending.cost,
            self._call_usage,
            self._finish_reason,
        )

    async def _run_steps(self) -> StopReason:
        wall_s = self._agent.options.max_wall_s
        try:
            async with asyncio.timeout(wall_s) as wall:
                while (reason := await self._step()) is None:
                    pass
        except TimeoutError:
            if not wall.expired():
                raise
            self._warn(
                f"stopped at the limit of {wall_s:g} s; running calls were cancelled, and the last reply is returned"
            )
            self._record_interrupted()
            return StopReason.MAX_WALL
        except ToolFailure as failure:
            if failure.code is not ErrorCode.BUDGET_EXCEEDED:
                raise
            self._warn(f"stopped because {failure.message}; the last reply is returned")
            self._record_interrupted()
            return StopReason.BUDGET_EXCEEDED
        except _BudgetUsed as used:
            self._warn(f"stopped by the limit {used.reason.value} after an interrupted reply")
            return used.reason
        return reason

    async def _step(self) -> StopReason | None:
        """Add one reply and its results to the transcript. Return the reason to stop, or None."""
        spending, started = self._spending, time.monotonic()
        spending.steps += 1
        self._call_results.clear()
        self._emit(StepStarted(run=self._id, step=spending.steps))
        reply = await self._request_reply()
        end = self._record(reply)
        self._answer, self._finish_reason = strip_thinking(end.text), end.finish_reason
        spending.malformed_replies = spending.malformed_replies + 1 if reply.has_only_malformed_calls() else 0
        model_s = max(0.0, time.monotonic() - started - reply.tools_s)
        self._emit(StepFinished(run=self._id, step=spending.steps, model_s=model_s, usage=end.usage))
        return self._find_stop_reason(reply, end)

    def _record(self, reply: _Reply) -> ReplyEnd:
        """Add the reply and its results to the transcript and the totals."""
        end, self._current = reply.finish(), None
        self._transcript.append(end.message)
        if reply.observed:
            self._transcript.append_observations(self._agent.dialect.build_observations(reply.observed))
        if self._spending.steps <= self._agent.copied_steps:
            return end
        for _, result in reply.observed:
            self._clocks += result.clocks
            self._call_usage += result.usage or CallUsage()
        self._charge(reply, end)
        return end

    def _charge(self, reply: _Reply, end: ReplyEnd) -> None:
        if self._spending.charge(end.usage, self._window.estimate(reply.request.messages, end.message)):
            self._warn("the server does not count tokens, so the budget uses an estimate")

    def _charge_unrecorded(self) -> None:
        """Charge the reply that broke off and is not in the transcript: its tokens were used."""
        reply, self._current = self._current, None
        if reply is not None and reply.has_begun and self._spending.steps > self._agent.copied_steps:
            self._charge(reply, reply.finish())

    def _record_interrupted(self) -> None:
        """Record the calls of a reply that a limit interrupted. Each call gets a result."""
        reply = self._current
        if reply is None or not reply.requested:
            self._charge_unrecorded()
            return
        if reply.end is None:
            self._emit_answer(reply, reply.finish())
        results = build_interrupted_results(reply.requested[len(reply.observed) :], self._call_results)
        for _, result in results:
            if self._call_results.get(result.call_id) is None:
                self._emit(CallFinished(run=self._id, result=result))
        reply.observed += results
        self._record(reply)

    def _find_stop_reason(self, reply: _Reply, end: ReplyEnd) -> StopReason | None:
        if not reply.observed:
            if (unfinished := _UNFINISHED.get(end.ending)) is not None:
                self._warn(f"{explain_ending(end.ending, end.finish_reason)}; the answer is incomplete")
                return unfinished
            if not self._answer.strip():
                self._warn("the model sent an empty answer")
                return StopReason.EMPTY_REPLY
            return None if self._remind() else StopReason.ANSWERED
        self._restart_if_stuck(reply)
        repairs = self._agent.dialect.max_repairs
        limit = self._agent.options.max_malformed_replies if repairs is None else repairs + 1
        if self._spending.malformed_replies >= limit:
            self._warn(
                f"the model wrote {self._spending.malformed_replies} malformed replies in a row; the last one is "
                "returned unchanged"
            )
            return StopReason.MALFORMED_REPLY
        failures = self._agent.profile.max_equal_failures
        if failures is not None and self._calls.most_equal_failures >= failures:
            self._warn(f"stopped because exactly the same call failed {failures} times; the last reply is returned")
            return StopReason.REPEATED_FAILURE
        exhausted = self._spending.find_exhausted()
        if exhausted is not None:
            self._warn(
                f"stopped by the limit {exhausted.value} after {count(self._spending.steps, 'step')} while the model "
                "still called tools; the last reply is returned"
            )
        return exhausted

    def _remind(self) -> bool:
        """Remind a model that has answered without any call. Return whether a reminder was added. A run has at most one
        reminder, and none when a budget is used up.
        """
        has_called = self._is_reminded or self._call_results or self._spending.steps > 1
        if has_called or not self._repairs_replies() or not self._agent.specs or self._spending.find_exhausted():
            return False
        self._is_reminded = True
        self._emit(ReplyRepaired(run=self._id, step=self._spending.steps, repair="reminder"))
        self._transcript.append({"role": "user", "content": REMINDER.format(tool=self._agent.specs[0].name)})
        return True

    def _restart_if_stuck(self, reply: _Reply) -> None:
        """Let the next requests begin again with the user's request, if the model has repeated a failed call."""
        if self._agent.profile.restarts and (repeated := self._calls.find_repeated(reply.requested)):
            self._tried |= dict.fromkeys(repeated)
            self._restarted_at = len(self._transcript)
            self._emit(ReplyRepaired(run=self._id, step=self._spending.steps, repair="restart"))

    def _select_messages(self, messages: list[Message]) -> list[Message]:
        """Return the messages for a request: after a restart, those of the user's request and of the steps since."""
        if not self._tried:
            return messages
        request = messages[self._request_index]
        tried = "\n".join([TRIED, *self._tried])[:MAX_TRIED_CHARS]
        restarted = {**request, "content": f"{request['content']}\n\n{tried}"}
        return [*messages[: self._request_index], restarted, *messages[self._restarted_at :]]

    async def _request_reply(self) -> _Reply:
        """Return one whole reply. A request that is too long is shortened, and an interrupted reply
        is requested again.
        """
        displayed, refusals, interruptions = DisplayedText(), 0, 0
        while True:
            messages, request = self._build_request()
            try:
                reply = await self._read_reply(request, displayed)
            except ContextWindowExceeded as error:
                refusals += 1
                previous = self._window.fit(messages, self._transcript.older, self._transcript.newest)
                self._window.shrink(error.limit_tokens, previous[0])
                if (
                    refusals > MAX_REFUSALS
                    or self._window.fit(messages, self._transcript.older, self._transcript.newest) == previous
                ):
                    raise
                displayed.restart()
            except ModelInterrupted as error:
                interruptions += 1
                self._charge_unrecorded()
                if interruptions > self._agent.options.max_interruptions:
                    raise
                if (exhausted := self._spending.find_exhausted_budget()) is not None:
                    raise _BudgetUsed(exhausted) from error
                self._warn(f"{error}; the reply is requested again")
                displayed.restart()
            else:
                self._emit_withdrawal(displayed.end())
                self._window.learn(request.messages, reply.finish().usage)
                return reply

    def _build_request(self) -> tuple[list[Message], ModelRequest]:
        messages = self._transcript.messages()
        fitted, shortened = self._window.fit(messages, self._transcript.older, self._transcript.newest)
        if shortened > self._shortened:
            self._warn(
                f"{count(shortened, 'result was', 'results were')} shortened to fit the context window of "
                f"{self._window.limit_tokens} tokens"
            )
        self._shortened = shortened
        request = self._agent.dialect.build_request(self._select_messages(fitted), self._agent.specs)
        if self._tried:
            request = replace(request, extra={**request.extra, **self._agent.profile.restart_sampling})
        return messages, request

    async def _read_reply(self, request: ModelRequest, displayed: DisplayedText) -> _Reply:
        """Read the reply to one request: emit its text as it arrives, and run its calls in order.

        Raises ModelInterrupted or ContextWindowExceeded if the reply broke off before its first call.
        """
        reply = self._current = _Reply(request, self._open_reader())
        self._emit(build_model_asked(self._id, self._spending.steps, request, self._last_request))
        self._last_request = request
        is_broken = await self._read_chunks(reply, displayed)
        await self._run_calls(reply.waiting, reply)
        events, reply.end = reply.reader.finish(is_broken=is_broken)
        self._emit_answer(reply, reply.end)
        await self._handle(events, reply, displayed)
        if reply.requested:
            self._calls_itself = True
        else:
            await self._run_calls(self._find_calls_in_text(reply.end), reply)
        return reply

    async def _read_chunks(self, reply: _Reply, displayed: DisplayedText) -> bool:
        """Read the chunks of the reply. Return whether it broke off after its first call."""
        is_logged, is_whole = self._agent.is_logged, False
        async with ReadAhead(self._agent.model.stream(reply.request)) as chunks:
            try:
                async for chunk in chunks:
                    reply.has_begun = not is_logged
                    reply.tokens.feed(chunk)
                    await self._read_chunk(chunk, reply, displayed)
                is_whole = True
            except ReplyChanged as changed:
                is_whole = True
                displayed.restart()
                reply.reader = self._open_reader()
                reply.waiting.clear()
                for chunk in changed.chunks:
                    await self._read_chunk(chunk, reply, displayed)
            except (ModelInterrupted, ContextWindowExceeded) as error:
                if not reply.observed:
                    raise
                # Calls of this reply have run and must not run again, so do not repeat the request. Drop the rest of
                # the reply.
                self._warn(f"{error}; its calls up to there have run")
                return True
            finally:
                if is_logged and not is_whole:
                    self._emit_withdrawal(displayed.withdraw())
        reply.has_begun = reply.has_begun or is_logged
        return False

    async def _read_chunk(self, chunk: Chunk, reply: _Reply, displayed: DisplayedText) -> None:
        events = reply.reader.feed(chunk)
        if events and not self._agent.is_logged:
            await self._handle(events, reply, displayed)
            return
        for event in events:
            if isinstance(event, Text):
                self._show(event, displayed)
            else:
                reply.waiting.append(event)

    def _open_reader(self) -> ReplyReader:
        return self._agent.dialect.open_reader(
            self._id, self._spending.steps, reads_tags=self._agent.options.enable_tool_action_parsing
        )

    def _repairs_replies(self) -> bool:
        return self._agent.profile.repairs_replies and not self._calls_itself

    def _find_calls_in_text(self, end: ReplyEnd) -> list[Requested]:
        """Return the call in the text of a reply that has none: of the command in its code block, or one in a notation
        that is not read.
        """
        if end.ending is not ReplyEnding.NORMAL or not self._agent.specs:
            return []
        text = strip_thinking(end.text)
        foreign = find_foreign_call(text, [spec.name for spec in self._agent.specs])
        if foreign is not None:
            call_id = build_call_id(self._id, self._spending.steps, 0)
            return [MalformedCall(call_id, foreign, FOREIGN_CALL, end.text)]
        command = find_command(text) if self._repairs_replies() else None
        if command is None or not any(spec.name == SHELL_TOOL for spec in self._agent.specs):
            return []
        self._emit(ReplyRepaired(run=self._id, step=self._spending.steps, repair="code_block"))
        call = ToolCall(
            id=build_call_id(self._id, self._spending.steps, 0), name=SHELL_TOOL, arguments={"command": command}
        )
        return [CallRequested(call, end.text)]

    async def _handle(self, events: Sequence[Event], reply: _Reply, displayed: DisplayedText) -> None:
        """Handle events in order. Adjacent calls are started together, and the events after them wait for the
        results.
        """
        calls: list[Requested] = []
        for event in events:
            if not isinstance(event, Text):
                calls.append(event)
                continue
            await self._run_calls(calls, reply)
            calls = []
            self._show(event, displayed)
        await self._run_calls(calls, reply)

    def _show(self, event: Text, displayed: DisplayedText) -> None:
        withdrawn, text = displayed.show(event.text)
        self._emit_withdrawal(withdrawn)
        if text:
            self._emit(TextArrived(run=self._id, text=text))

    async def _run_calls(self, calls: Sequence[Requested], reply: _Reply) -> None:
        if not calls:
            return
        started = time.monotonic()
        reply.requested += calls
        reply.observed += await self._calls.run(calls)
        reply.malformed += sum(isinstance(call, MalformedCall) for call in calls)
        reply.tools_s += time.monotonic() - started

    def _record_call(self, event: RunEvent) -> None:
        if isinstance(event, CallStarted):
            self._call_results[event.call.id] = None
        elif isinstance(event, CallFinished):
            self._call_results[event.result.call_id] = event.result
        self._emit(event)

    def _emit_answer(self, reply: _Reply, end: ReplyEnd) -> None:
        model_s = max(0.0, time.monotonic() - reply.requested_at - reply.tools_s)
        self._emit(
            ModelAnswered(
                run=self._id,
                step=self._spending.steps,
                message=end.message,
                finish_reason=end.finish_reason,
                usage=end.usage,
                model_s=model_s,
                tokens=reply.tokens.build(),
            )
        )

    def _emit_withdrawal(self, characters: int) -> None:
        if characters:
            self._emit(TextWithdrawn(run=self._id, characters=characters))

    def _warn(self, message: str) -> None:
        log.warning("run_warning", run=self._id, message=message)
        self._emit(Warned(run=self._id, message=message))

    def _emit(self, event: RunEvent) -> None:
        self._agent.on_event(event)


def build_model_asked(run: str, step: int, request: ModelRequest, previous: ModelRequest) -> ModelAsked:
    """Return the event about a request. The event contains only what differs from the previous request."""
    pairs = zip(previous.messages, request.messages, strict=False)
    equal_messages = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return ModelAsked(
        run=run,
        step=step,
        messages=len(request.messages),
        tools=len(request.tools),
        kept=equal_messages,
        new_messages=request.messages[equal_messages:],
        new_tools=request.tools if request.tools != previous.tools else None,
        extra=request.extra,
    )


def _add_files(request: str, files: str) -> str:
    """Return the request with the list of files. A request with an absolute path needs no list, and the names of other
    files distract a small model.
    """
    return request if not files or _ABSOLUTE_PATH.search(request) else f"{request}\n\n{files}"


@cache
def _find_release() -> str:
    try:
        return version("toolcrew")
    except PackageNotFoundError:
        return ""
