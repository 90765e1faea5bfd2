"""The outcome of an item: completed, resumed by another process, or started anew without a trace of the previous
attempt. No payment and no action happens twice.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.errors import BrokerUnavailable, ErrorCode, ModelRefused, SandboxUnavailable
from contract.run_events import FailureKind
from orchestrator.dialects.model import Chunk, ModelRequest
from orchestrator.models.scripted import ScriptedModel
from orchestrator.runs import item_work
from store.batches import BatchDefaults, RunLimits
from tests.fakes import StreamModel
from tests.item_harness import (
    HarnessFactory,
    ItemHarness,
    archive_of,
    build_run,
    build_tool_call,
    echo_then,
    fail_with,
    with_environment,
)


async def test_a_single_call_is_made_in_a_session_of_its_own(make: HarnessFactory) -> None:
    harness = make()
    outcome = await harness.execute(await harness.put(build_tool_call()))
    assert (outcome.failure, outcome.body and outcome.body["output"]) == (None, "said x")
    assert harness.sent() == ["open", "echo", "close"]
    (delivery,) = [sent for sent in harness.transport.deliveries if sent.request.call.name == "echo"]
    assert delivery.request.keeps_result
    assert harness.transport.settled == [("acme", delivery.call_id)]
    assert harness.count_model_requests() == 0


async def test_a_run_that_reaches_a_limit_is_a_failure_of_the_model_with_what_there_is(make: HarnessFactory) -> None:
    harness = make(echo_then("never", "a", "b", "c"))
    outcome = await harness.execute(await harness.put(build_run(limits=RunLimits(max_iterations=2))))
    assert (outcome.failure and outcome.failure.kind) == FailureKind.MODEL
    assert (outcome.failure and outcome.failure.code) == "max_iterations"
    assert outcome.body is not None
    assert outcome.body["steps"] == 2


async def test_a_request_that_the_model_refuses_is_a_failure_of_the_model(make: HarnessFactory) -> None:
    async def refuse(request: ModelRequest) -> AsyncIterator[Chunk]:
        raise ModelRefused("not that")
        yield {}

    outcome = await make(StreamModel(refuse)).execute(await make().put(build_run()))
    assert (outcome.failure and outcome.failure.kind, outcome.body) == (FailureKind.MODEL, None)


async def test_a_session_that_cannot_be_opened_fails_its_item(make: HarnessFactory) -> None:
    harness = make(answers={"open": fail_with(ErrorCode.PERMISSION_DENIED)})
    outcome = await harness.execute(await harness.put(build_run()))
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.INPUT, "PERMISSION_DENIED")
    assert harness.count_model_requests() == 0


async def test_a_workspace_that_is_not_there_is_the_lines_own_fault(make: HarnessFactory, tmp_path: Path) -> None:
    harness = make()
    outcome = await harness.execute(
        await harness.put(with_environment(build_run(), workspace=str(tmp_path / "missing")))
    )
    assert (outcome.failure and outcome.failure.kind, harness.sent()) == (FailureKind.INPUT, [])


async def test_limits_that_do_not_go_together_are_the_lines_own_fault(make: HarnessFactory) -> None:
    harness = make()
    outcome = await harness.execute(await harness.put(build_run(limits=RunLimits(max_cost=1.0))))
    assert outcome.failure is not None
    assert (outcome.failure.kind, "prices" in outcome.failure.message) == (FailureKind.INPUT, True)
    assert harness.sent() == ["open", "close"]


async def test_a_bug_ends_the_item_and_not_the_batch(make: HarnessFactory) -> None:
    def stumble(messages: list[Any]) -> str:
        raise KeyError("oops")

    harness = make([stumble])
    outcome = await harness.execute(await harness.put(build_run()))
    assert outcome.failure is not None
    assert (outcome.failure.code, outcome.failure.kind) == ("INTERNAL", FailureKind.INFRASTRUCTURE)
    assert harness.sent() == ["open", "close"]


async def test_a_session_of_whose_closing_nothing_is_known_is_closed_for_everybody(make: HarnessFactory) -> None:
    async def never_answers(*_: object) -> ToolResult:
        raise TimeoutError

    harness = make(answers={"close": never_answers})
    assert (await harness.execute(await harness.put(build_run()))).failure is None
    (opened, *_) = harness.transport.contexts
    assert [queue for queue, _ in harness.transport.commands] == ["host.h1.b00t"]
    assert await harness.places.find("acme", str(opened.session)) is None


def build_chat() -> Any:
    """Return the run that a line for /v1/chat/completions becomes."""
    item = build_run(
        instruction="hi",
        tools=(),
        history=({"role": "system", "content": "be brief"},),
        limits=RunLimits(max_iterations=1),
    )
    return item.model_copy(update={"url": "/v1/chat/completions"})


async def test_a_chat_asks_for_no_sandbox_and_says_what_its_line_says(make: HarnessFactory) -> None:
    harness = make(["hello"])
    outcome = await harness.execute(await harness.put(build_chat()))
    assert (outcome.failure, outcome.body and outcome.body["object"]) == (None, "chat.completion")
    assert harness.sent() == []
    assert isinstance(harness.model, ScriptedModel)
    (request,) = harness.model.requests
    assert request.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert request.tools == []


async def test_a_model_that_calls_a_tool_in_a_chat_runs_nothing(make: HarnessFactory) -> None:
    harness = make(echo_then("never", "x"))
    outcome = await harness.execute(await harness.put(build_chat()))
    assert (outcome.failure and outcome.failure.kind, harness.sent()) == (FailureKind.MODEL, [])


async def test_a_run_without_tools_has_a_sandbox_only_for_files(make: HarnessFactory, tmp_path: Path) -> None:
    harness = make(["hello"] * 2)
    assert (await harness.execute(await harness.put(build_run(tools=())))).failure is None
    assert harness.sent() == []
    other = with_environment(build_run(tools=()), image="python")
    await harness.client.flushall()
    assert (await harness.execute(await harness.put(other))).failure is None
    assert harness.sent() == ["open", "close"]


SOON_S = 15.0


async def broken_off(harness: ItemHarness, claim: Any, reached: asyncio.Event) -> None:
    """Run the work of a process, and stop it at the given point."""
    working = asyncio.create_task(harness.execute(claim))
    async with asyncio.timeout(SOON_S):
        await reached.wait()
    working.cancel()
    await asyncio.wait({working}, timeout=SOON_S)
    assert working.cancelled()


def hangs_at(text: str, reached: asyncio.Event) -> Callable[[ToolCall, ToolContext], Any]:
    """Return a tool that answers, but hangs on the given text."""

    async def answer(call: ToolCall, _: ToolContext) -> ToolResult:
        if call.arguments["text"] == text:
            reached.set()
            await asyncio.Event().wait()
        return ToolResult(call_id=call.id, name=call.name, success=True, output=f"said {call.arguments['text']}")

    return answer


async def test_a_session_that_was_being_opened_is_given_up_where_it_is_and_another_one_opened(
    make: HarnessFactory,
) -> None:
    reached = asyncio.Event()

    async def hang(call: ToolCall, _: ToolContext) -> ToolResult:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError("no code sets it")

    first, second = make(answers={"open": hang}), make()
    claim = await first.put(build_run())
    working = asyncio.create_task(first.execute(claim))
    async with asyncio.timeout(SOON_S):
        await reached.wait()
        assert (await second.execute(await second.claim_by_other(claim))).failure is None
    assert second.sent() == ["close", "open", "close"]
    assert [queue for queue, _ in second.transport.commands] == ["host.h1.b00t"]
    given_up = second.transport.contexts[0].session
    assert given_up == first.transport.contexts[0].session != second.transport.contexts[1].session
    working.cancel()
    await asyncio.sleep(0)
    assert not working.done()


async def test_a_run_without_time_left_ends_with_its_log(make: HarnessFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_work, "LEAST_WALL_S", 0.5)
    reached = asyncio.Event()
    first, second = make(echo_then("two", "a", "b"), answers={"echo": hangs_at("b", reached)}), make(["never"])
    claim = await first.put(build_run(limits=RunLimits(max_wall_s=60.0)))
    await broken_off(first, claim, reached)
    claim = await second.claim_by_other(claim)
    journal = await second.journal(claim)
    journal.spent_wall_s = 60.0
    outcome = await second.work.work(claim, journal, BatchDefaults(), second.run_events.append)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.MODEL, "max_wall")
    assert outcome.body is not None
    assert (outcome.body["steps"], second.count_model_requests()) == (3, 0)


async def test_a_removed_sandbox_is_not_reported_to_the_model_as_a_tool_failure(make: HarnessFactory) -> None:
    reached = asyncio.Event()
    first, second = make(echo_then("two", "a", "b"), answers={"echo": hangs_at("b", reached)}), make(["a guess"])
    claim = await first.put(build_run())
    await broken_off(first, claim, reached)
    assert first.sent() == ["open", "echo", "echo"], "a stopped process leaves its session open"
    second.places.locations.clear()
    outcome = await second.execute(await second.claim_by_other(claim))
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.INFRASTRUCTURE, SandboxUnavailable.code.value)
    assert second.count_model_requests() == 0


async def test_a_file_whose_name_is_no_text_is_an_artifact_like_any_other(make: HarnessFactory, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "caf\udce9.txt").write_text("x")
    harness = make()

    def export(call: ToolCall, context: ToolContext) -> ToolResult:
        harness.blobs.kept["k"] = archive_of(made)
        return ToolResult(call_id=call.id, name=call.name, success=True, blob="k")

    harness.answers["export"] = export
    claim = await harness.put(with_environment(build_run(), artifacts=("*.txt",)))
    outcome = await harness.execute(claim, BatchDefaults(artifacts=str(tmp_path / "artifacts")))
    assert outcome.body is not None
    assert outcome.body["artifacts"] == ["caf\\xe9.txt"]
    assert await harness.queue.finish(claim, outcome)


async def test_a_new_attempt_has_new_calls_and_a_new_session(make: HarnessFactory) -> None:
    async def torn(request: ModelRequest) -> AsyncIterator[Chunk]:
        if len(request.messages) > 2:
            raise BrokerUnavailable("gone")
        async for chunk in ScriptedModel(echo_then("one", "a")).stream(request):
            yield chunk

    first, second = make(StreamModel(torn)), make(echo_then("one", "a"))
    claim = await first.put(build_run())
    outcome = await first.execute(claim)
    assert (outcome.failure and outcome.failure.kind) is FailureKind.INFRASTRUCTURE
    assert first.sent() == ["open", "echo", "close"]
    again = await second.claim_next_attempt(claim)
    assert (again.record.attempt, again.is_resumed) == (2, False)
    outcome = await second.execute(again)
    assert (outcome.failure, outcome.attempt) == (None, 2)
    assert second.sent() == ["open", "echo", "close"]
    assert {call.id for call in first.transport.calls}.isdisjoint(call.id for call in second.transport.calls)
    assert {context.session for context in first.transport.contexts}.isdisjoint(
        context.session for context in second.transport.contexts
    )


async def test_a_restarted_single_call_has_a_new_id(make: HarnessFactory) -> None:
    first, second = make(answers={"echo": fail_with(ErrorCode.HOST_LOST)}), make()
    claim = await first.put(build_tool_call())
    await first.execute(claim)
    outcome = await second.execute(await second.claim_next_attempt(claim))
    assert (outcome.failure, outcome.body and outcome.body["output"]) == (None, "said x")
    calls = [call.id for harness in (first, second) for call in harness.transport.calls if call.name == "echo"]
    assert len(set(calls)) == 2
