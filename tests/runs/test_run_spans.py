"""Spans of runs and calls without a collector: lost attempts, runs that another process resumes, and items of
batches.
"""

import asyncio
from dataclasses import replace
from typing import Any

import redis.asyncio

from tests.dispatch import test_delivery
from tests.support.records.builders import KEY
from tests.support.runs.item_harness import (
    HarnessFactory,
    ItemHarness,
    build_run,
    build_tool_call,
    echo_then,
    fail_with,
)
from tests.support.sandboxd.fake_hosts import StaticHosts, build_report
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.approvals import Decision
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.traceparent import attempt_span_id
from toolcrew.orchestrator.approvals import AutoApprover
from toolcrew.orchestrator.approvals.approvers import ApprovalRequest
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, Rule
from toolcrew.orchestrator.dispatch.delivery import Pool
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.middleware import TracedCalls
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.dispatch.transport import CallLost
from toolcrew.orchestrator.runs.agent_builder import AgentBuilder
from toolcrew.orchestrator.runs.executor import RunExecutor
from toolcrew.store.calls import CallStore
from toolcrew.telemetry.spans import Span, Tracer


def enable_tracing(harness: ItemHarness, ended: list[Span]) -> ItemHarness:
    """Return the same process with tracing on."""
    tracer = Tracer(ended.append, lambda _: True)
    pool: Any = Pool(harness.places, StaticHosts(build_report()), CallStore(harness.pool.redis, "d"))
    dispatcher = Dispatcher(
        harness.transport,
        TenantCatalog(harness.pool.catalog),
        KEY,
        queue_wait_s=60,
        pool=pool,
        middleware=[TracedCalls(tracer)],
    )
    harness.pool = replace(harness.pool, dispatcher=dispatcher, tracer=tracer)
    harness.builder = AgentBuilder(
        OrchestratorSettings(deployment="d", dialect="native", redis_url=None),
        harness.pool,
        AutoApprover(),
        ApprovalPolicy(),
    )
    harness.work = RunExecutor(harness.pool, harness.builder, harness.work.models)
    return harness


def assert_one_tree(spans: list[Span]) -> None:
    span_ids = {span.ref.span_id for span in spans}
    assert len(span_ids) == len(spans), "a span was sent twice"
    assert len({span.ref.trace_id for span in spans}) == 1
    assert [span.name for span in spans if span.parent is not None and span.parent.span_id not in span_ids] == []


async def test_attempt_span_links_to_the_previous_attempt(client: "redis.asyncio.Redis") -> None:
    ended: list[Span] = []
    harness = test_delivery.Harness(client, CallLost("gone", has_started=True))
    harness.dispatcher._middleware = [TracedCalls(Tracer(ended.append, lambda _: True))]
    assert (await harness.call("safe")).success
    of_call = [
        span
        for span in ended
        if span.ref.trace_id
        == next(execution for execution in ended if execution.name == "execute_tool safe").ref.trace_id
    ]
    assert_one_tree(of_call)
    first, second = [span for span in of_call if span.name == "send safe"]
    assert (first.ref.span_id, second.ref.span_id) == (attempt_span_id("c1", 1), attempt_span_id("c1", 2))
    assert (first.error, second.error, second.links) == ("CALL_LOST", "", (first.ref,))
    contexts = [context.trace for _, context in harness.transport.calls]
    assert contexts == [str(first.ref), str(second.ref)]


async def test_single_call_is_one_trace_with_its_error(make: HarnessFactory) -> None:
    ended: list[Span] = []
    harness = enable_tracing(make(answers={"echo": fail_with(ErrorCode.NETWORK_ERROR)}), ended)
    outcome = await harness.execute(await harness.put(build_tool_call()))
    assert outcome.failure is not None
    assert_one_tree(ended)
    root = next(span for span in ended if span.parent is None)
    assert (root.name, root.error) == ("batch_item", outcome.failure.code)
    assert next(span for span in ended if span.name == "execute_tool echo").error == "NETWORK_ERROR"


async def test_resumed_run_stays_one_trace_without_repeated_spans(make: HarnessFactory) -> None:
    reached, ended = asyncio.Event(), list[Span]()

    async def hang(call: ToolCall, _: ToolContext) -> ToolResult:
        if call.arguments["text"] == "b":
            reached.set()
            await asyncio.Event().wait()
        return ToolResult(call_id=call.id, name=call.name, success=True, output="said")

    first = enable_tracing(make(echo_then("two", "a", "b"), answers={"echo": hang}), ended)
    claim = await first.put(build_run())
    working = asyncio.create_task(first.execute(claim))
    async with asyncio.timeout(SOON_S):
        await reached.wait()
    working.cancel()
    await asyncio.wait({working}, timeout=SOON_S)
    first_count = len(ended)
    first.work.forget(claim)
    assert "invoke_agent toolcrew" not in [span.name for span in ended]

    second = enable_tracing(make(["two"]), ended)
    resumed_claim = await first.claim_by_other(claim)
    assert (await second.execute(resumed_claim)).failure is None
    assert_one_tree(ended)
    assert first_count < len(ended)
    calls = [span for span in ended if span.name == "execute_tool echo"]
    assert len({span.ref.span_id for span in calls}) == len(calls) == 2
    assert len([span for span in ended if span.name == "chat scripted"]) == 3
    root = next(span for span in ended if span.parent is None)
    assert root.start_at <= min(span.start_at for span in ended)


async def test_cancelled_run_has_spans_with_the_cancelled_error(make: HarnessFactory) -> None:
    reached, ended = asyncio.Event(), list[Span]()

    async def hang(call: ToolCall, _: ToolContext) -> ToolResult:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError(call.id)

    harness = enable_tracing(make(echo_then("one", "a"), answers={"echo": hang}), ended)
    claim = await harness.put(build_run())
    working = asyncio.create_task(harness.execute(claim))
    async with asyncio.timeout(SOON_S):
        await reached.wait()
    working.cancel()
    await asyncio.wait({working}, timeout=SOON_S)
    await harness.work.abandon(claim, await harness.journal(claim))
    assert_one_tree(ended)
    assert {span.error for span in ended if span.name in ("invoke_agent toolcrew", "execute_tool echo")} == {
        "CANCELLED"
    }


class _DenyingApprover(AutoApprover):
    async def decide(self, request: ApprovalRequest) -> Decision:
        return Decision(False, "not today")


async def test_approval_span_is_a_child_of_its_call_span(make: HarnessFactory) -> None:
    ended: list[Span] = []
    harness = enable_tracing(make(echo_then("one", "a")), ended)
    policy = ApprovalPolicy(rules=(Rule(action="ask", tool="echo"),))
    harness.work.builder = AgentBuilder(
        OrchestratorSettings(deployment="d", dialect="native", redis_url=None), harness.pool, _DenyingApprover(), policy
    )
    await harness.execute(await harness.put(build_run()))
    assert_one_tree(ended)
    approval, call = (next(span for span in ended if span.name == name) for name in ("approval", "execute_tool echo"))
    assert (approval.parent.span_id, approval.attributes["toolcrew.is_allowed"]) == (call.ref.span_id, False)
    assert call.error == "PERMISSION_DENIED"
