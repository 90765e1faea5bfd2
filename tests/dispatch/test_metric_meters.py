"""Counts of calls and runs: each is counted once, under an existing name, and reaches Redis after an outage of any
length.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call, build_spec
from tests.support.records.fakes import AnsweringTransport, StaticCatalog
from tests.support.stack.metric_harness import Key, key, nonzero_samples, read_page
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.calls import Clocks, ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.run_events import (
    ApprovalAsked,
    ApprovalDecided,
    CallFinished,
    CallSent,
    ModelAnswered,
    OnEvent,
    RunAborted,
    RunEvent,
    RunFinished,
    RunStarted,
    StepStarted,
    pass_to,
)
from toolcrew.orchestrator.dialects.model import Message
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.middleware import CallMeter
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.loop.limits import TokenUsage
from toolcrew.orchestrator.metrics.page import MetricsPage
from toolcrew.orchestrator.metrics.tally import Tally
from toolcrew.orchestrator.runs.journal import MemoryJournal
from toolcrew.orchestrator.runs.run_meter import RunMeter
from toolcrew.store.metrics import metrics_key
from toolcrew.store.usage import ReplySpending

ECHO = build_spec("echo")
ROUTE = ("acme", "s1", "host.h1.b00t")
CLOCKS = Clocks(queued_s=0.01, sandbox_s=0.2, run_s=2.0)


@asynccontextmanager
async def open_tally(server: RedisProcess) -> AsyncIterator[tuple[Tally, MetricsPage]]:
    async with redis.asyncio.Redis.from_url(server.url, socket_timeout=5) as client:
        tally = Tally(client, "d")
        try:
            yield tally, MetricsPage(client, "d")
        finally:
            await tally.aclose()


async def read(tally: Tally, page: MetricsPage) -> dict[Key, float]:
    await tally.flush()
    return dict(read_page(await page.render()))


def build_answer(**fields: Any) -> Any:
    def answer(call: ToolCall, _: ToolContext) -> ToolResult:
        code = fields.get("error_code")
        payload = {"output": "ü" * 60, "success": True} if code is None else {"success": False, "error": "no"}
        return ToolResult.model_validate({"call_id": call.id, "name": call.name, "clocks": CLOCKS, **payload, **fields})

    return answer


async def dispatch(
    tally: Tally, answer: Any, call: ToolCall | None = None, meter: CallMeter | None = None
) -> ToolResult:
    dispatcher = Dispatcher(
        AnsweringTransport(answer),
        TenantCatalog(StaticCatalog(ECHO)),
        KEY,
        queue_wait_s=60,
        middleware=[meter or CallMeter(tally.counts)],
    )
    return await dispatcher.dispatch(Request(call or build_call(text="hi"), *ROUTE))


async def test_call_metrics_include_code_durations_and_output_size(redis_server: RedisProcess) -> None:
    async with open_tally(redis_server) as (tally, page):
        await dispatch(tally, build_answer(truncated=True))
        await dispatch(tally, build_answer(error_code=ErrorCode.TIMEOUT))
        series = await read(tally, page)
    assert nonzero_samples(series, "toolcrew_tool_calls_total") == {
        ("", "ok", "echo"): 1,
        ("TIMEOUT", "error", "echo"): 1,
    }
    assert nonzero_samples(series, "toolcrew_calls_ended_total") == {("done",): 2}
    assert series[key("toolcrew_tool_duration_seconds_sum", tool="echo")] == 4.0
    assert series[key("toolcrew_tool_queue_wait_seconds_count", queue="host")] == 2
    assert series[key("toolcrew_tool_output_bytes_sum", tool="echo")] == 120
    assert nonzero_samples(series, "toolcrew_tool_output_truncated_total") == {("echo",): 1}


@pytest.mark.parametrize(
    ("code", "end", "is_refusal"),
    [
        (ErrorCode.SECURITY_REFUSED, "not_run", True),
        (ErrorCode.RATE_LIMITED, "not_run", True),
        (ErrorCode.HOST_LOST, "lost", False),
        (ErrorCode.OUTCOME_UNKNOWN, "unknown", False),
    ],
)
async def test_call_without_a_worker_reply_is_counted_by_its_end(
    redis_server: RedisProcess, code: ErrorCode, end: str, is_refusal: bool
) -> None:
    def refuse(*_: object) -> ToolResult:
        raise ToolFailure(code, "no")

    async with open_tally(redis_server) as (tally, page):
        await dispatch(tally, refuse)
        series = await read(tally, page)
    assert nonzero_samples(series, "toolcrew_tool_calls_total") == {(code.value, "error", "echo"): 1}
    assert nonzero_samples(series, "toolcrew_calls_ended_total") == {(end,): 1}
    assert nonzero_samples(series, "toolcrew_security_refusals_total") == ({(code.value,): 1} if is_refusal else {})


async def test_unknown_tool_names_are_counted_as_other(redis_server: RedisProcess) -> None:
    async with open_tally(redis_server) as (tally, page):
        meter = CallMeter(tally.counts)
        for number in range(300):
            await dispatch(tally, build_answer(), build_call(f"invented-{number}"), meter)
        meter.count_unsent("echo", ErrorCode.PERMISSION_DENIED)
        series = await read(tally, page)
    assert nonzero_samples(series, "toolcrew_tool_calls_total") == {
        ("TOOL_NOT_FOUND", "error", "other"): 300,
        ("PERMISSION_DENIED", "error", "echo"): 1,
    }


async def test_cancelled_call_is_counted_unless_its_result_is_kept(redis_server: RedisProcess) -> None:
    began = asyncio.Event()

    class SilentTransport(AnsweringTransport):
        async def deliver(self, *_: object) -> str:
            began.set()
            await asyncio.get_running_loop().create_future()
            return ""

    async with open_tally(redis_server) as (tally, page):
        dispatcher = Dispatcher(
            SilentTransport(build_answer()),
            TenantCatalog(StaticCatalog(ECHO)),
            KEY,
            queue_wait_s=60,
            middleware=[CallMeter(tally.counts)],
        )
        for keeps in (False, True):
            began.clear()
            task = asyncio.create_task(dispatcher.dispatch(Request(build_call(text="x"), *ROUTE, keeps_result=keeps)))
            await began.wait()
            task.cancel()
            await asyncio.wait({task})
        series = await read(tally, page)
    assert nonzero_samples(series, "toolcrew_tool_calls_total") == {("CANCELLED", "error", "echo"): 1}


class RunHistory(MemoryJournal):
    """The journal of a durable run. The test sets `is_catching_up`."""

    is_durable = True


async def count_nothing(_: ReplySpending) -> None:
    """Do nothing: the test does not read the usage."""


def watch_run(tally: Tally, journal: MemoryJournal | None = None) -> OnEvent:
    """Return the listener that counts the events of a run."""
    return RunMeter(CallMeter(tally.counts), journal or MemoryJournal(count_nothing)).on_event


def build_step_events(*, is_sent: bool, code: ErrorCode | None = None) -> list[RunEvent]:
    """Return one step with one call."""
    call = build_call(text="x")
    result = ToolResult.failed(call, code, "no") if code else ToolResult(call_id=call.id, name=call.name, success=True)
    usage = TokenUsage(prompt_tokens=100, completion_tokens=7)
    answered = ModelAnswered(run="r", step=1, message=Message(), finish_reason="stop", usage=usage, model_s=0.3)
    sent = [CallSent(run="r", call=call)] if is_sent else []
    return [
        RunStarted(run="r", instruction="", model="m", dialect="d"),
        StepStarted(run="r", step=1),
        answered,
        *sent,
        CallFinished(run="r", result=result),
    ]


RUN_FINISHED = RunFinished(run="r", answer="", stop_reason="answered", clocks=Clocks())


async def test_run_metrics_include_tokens_steps_end_and_unsent_calls(
    redis_server: RedisProcess,
) -> None:
    async with open_tally(redis_server) as (tally, page):
        run_events = list[RunEvent]()
        on_event = pass_to(watch_run(tally), run_events.append)
        events = [
            *build_step_events(is_sent=True),
            *build_step_events(is_sent=False, code=ErrorCode.PERMISSION_DENIED),
            RUN_FINISHED,
        ]
        for event in events:
            on_event(event)
        series = await read(tally, page)
    assert run_events == events
    assert nonzero_samples(series, "toolcrew_llm_tokens_total") == {("input", "m"): 200, ("output", "m"): 14}
    assert series[key("toolcrew_agent_iterations_sum")] == 2
    assert nonzero_samples(series, "toolcrew_agent_runs_total") == {("answered",): 1}
    assert nonzero_samples(series, "toolcrew_tool_calls_total") == {("PERMISSION_DENIED", "error", "other"): 1}


async def test_replayed_run_events_are_not_counted_again(redis_server: RedisProcess) -> None:
    history = RunHistory(count_nothing)
    async with open_tally(redis_server) as (tally, page):
        on_event = watch_run(tally, history)
        history.is_catching_up = True
        for event in build_step_events(is_sent=False, code=ErrorCode.PERMISSION_DENIED):
            on_event(event)
        history.is_catching_up = False
        for event in (*build_step_events(is_sent=True), RunAborted(run="r", reason="the process ends"), RUN_FINISHED):
            on_event(event)
        series = await read(tally, page)
    assert nonzero_samples(series, "toolcrew_llm_tokens_total") == {("input", "m"): 100, ("output", "m"): 7}
    assert nonzero_samples(series, "toolcrew_tool_calls_total") == {}
    assert nonzero_samples(series, "toolcrew_agent_runs_total") == {("answered",): 1}


async def test_approval_requests_and_decisions_are_counted(redis_server: RedisProcess) -> None:
    async with open_tally(redis_server) as (tally, page):
        on_event = watch_run(tally)
        for is_allowed, is_changed in ((True, False), (True, True), (False, False), (False, False)):
            on_event(ApprovalAsked(run="r", call=build_call(), digest="d", reason="", warning="", expires_at=0.0))
            on_event(
                ApprovalDecided(
                    run="r", call_id="c", digest="d", is_allowed=is_allowed, reason="", is_changed=is_changed
                )
            )
        series = await read(tally, page)
    assert nonzero_samples(series, "toolcrew_approvals_total") == {("approved",): 1, ("modified",): 1, ("rejected",): 2}
    assert series[key("toolcrew_approvals_asked_total")] == 4


async def test_counts_are_flushed_periodically_and_at_close(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        async with open_tally(redis_server) as (tally, _):
            tally.start()
            await dispatch(tally, build_answer())
            await wait_until_async(lambda: client.hlen(metrics_key("d")), SOON_S, "the meters are flushed")
            await dispatch(tally, build_answer())
        assert client.hget(metrics_key("d"), "\ttoolcrew_tool_calls_total\techo\tok\t") == b"2"


async def test_counts_survive_a_redis_outage(redis_server: RedisProcess) -> None:
    async with open_tally(redis_server) as (tally, page):
        await dispatch(tally, build_answer())
        await tally.flush()
        redis_server.stop()
        await dispatch(tally, build_answer())
        with pytest.raises(BrokerUnavailable):
            await tally.flush()
        redis_server.start()
        await dispatch(tally, build_answer())
        series = await read(tally, page)
    # A count that a server without a disk forgot is lost; a count that it never received is not.
    assert nonzero_samples(series, "toolcrew_tool_calls_total")["", "ok", "echo"] in (2, 3)
