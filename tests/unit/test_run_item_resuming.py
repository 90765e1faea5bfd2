"""Items that another process resumes, leaves half-done or starts anew: no payment and no action happens twice."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.errors import BrokerUnavailable, ErrorCode, SandboxUnavailable
from contract.run_events import CallFinished, FailureKind
from orchestrator.dialects.model import Chunk, ModelRequest
from orchestrator.models.scripted import ScriptedModel
from orchestrator.runs import item_work
from store.batches import BatchDefaults, RunLimits
from tests.fakes import StreamModel
from tests.item_harness import (
    ItemHarness,
    Made,
    archive_of,
    build_run,
    build_tool_call,
    echo_then,
    failed,
    with_harness,
)

SOON_S = 15.0


async def broken_off(harness: ItemHarness, claim: Any, reached: asyncio.Event) -> None:
    """Run the work of a process, and stop it at the given point."""
    working = asyncio.create_task(harness.worked(claim))
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


# Going on


async def test_a_replayed_call_has_its_duration(make: Made) -> None:
    async def slow(call: ToolCall, _: ToolContext) -> ToolResult:
        await asyncio.sleep(0.05)
        return ToolResult(call_id=call.id, name=call.name, success=True, output="done")

    for item, turns in ((build_run(), echo_then("one", "a")), (build_tool_call(), ["unused"])):
        first, second = make(turns, answers={"echo": slow}), make([])
        await first.client.flushall()
        claim = await first.put(item)
        await first.worked(claim)
        await second.worked(await second.taken_over(claim))
        (event,) = [event for event in second.run_events if isinstance(event, CallFinished)]
        assert event.seconds >= 0.05


async def test_a_session_that_was_being_opened_is_given_up_where_it_is_and_another_one_opened(make: Made) -> None:
    reached = asyncio.Event()

    async def hang(call: ToolCall, _: ToolContext) -> ToolResult:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError("no code sets it")

    first, second = make(answers={"open": hang}), make()
    claim = await first.put(build_run())
    working = asyncio.create_task(first.worked(claim))
    async with asyncio.timeout(SOON_S):
        await reached.wait()
        assert (await second.worked(await second.taken_over(claim))).failure is None
    assert second.sent() == ["close", "open", "close"]
    assert [queue for queue, _ in second.transport.commands] == ["host.h1.b00t"]
    given_up = second.transport.contexts[0].session
    assert given_up == first.transport.contexts[0].session != second.transport.contexts[1].session
    working.cancel()
    await asyncio.sleep(0)
    assert not working.done()


async def test_a_single_call_that_has_ended_is_not_made_again(make: Made) -> None:
    first, second = make(), make()
    claim = await first.put(build_tool_call())
    before = await first.worked(claim)
    assert (await second.worked(await second.taken_over(claim))).body == before.body
    assert "echo" not in second.sent()


async def test_a_run_without_time_left_ends_with_its_log(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_work, "LEAST_WALL_S", 0.5)
    reached = asyncio.Event()
    first, second = make(echo_then("two", "a", "b"), answers={"echo": hangs_at("b", reached)}), make(["never"])
    claim = await first.put(build_run(limits=RunLimits(max_wall_s=60.0)))
    await broken_off(first, claim, reached)
    claim = await second.taken_over(claim)
    journal = await second.journal(claim)
    journal.spent_wall_s = 60.0
    outcome = await second.work.work(claim, journal, BatchDefaults(), second.run_events.append)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.MODEL, "max_wall")
    assert outcome.body is not None
    assert (outcome.body["steps"], second.asked()) == (3, 0)


async def test_a_removed_sandbox_is_not_reported_to_the_model_as_a_tool_failure(make: Made) -> None:
    reached = asyncio.Event()
    first, second = make(echo_then("two", "a", "b"), answers={"echo": hangs_at("b", reached)}), make(["a guess"])
    claim = await first.put(build_run())
    await broken_off(first, claim, reached)
    second.places.known.clear()
    outcome = await second.worked(await second.taken_over(claim))
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.INFRASTRUCTURE, SandboxUnavailable.code.value)
    assert second.asked() == 0


async def test_a_file_whose_name_is_no_text_is_an_artifact_like_any_other(make: Made, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "caf\udce9.txt").write_text("x")
    harness = make()

    def export(call: ToolCall, context: ToolContext) -> ToolResult:
        harness.blobs.kept["k"] = archive_of(made)
        return ToolResult(call_id=call.id, name=call.name, success=True, blob="k")

    harness.answers["export"] = export
    claim = await harness.put(with_harness(build_run(), artifacts=("*.txt",)))
    outcome = await harness.worked(claim, BatchDefaults(artifacts=str(tmp_path / "artifacts")))
    assert outcome.body is not None
    assert outcome.body["artifacts"] == ["caf\\xe9.txt"]
    assert await harness.queue.finish(claim, outcome)


# Stopping


async def test_a_stopped_process_leaves_the_session_open(make: Made) -> None:
    reached = asyncio.Event()
    harness = make(echo_then("one", "a"), answers={"echo": hangs_at("a", reached)})
    await broken_off(harness, await harness.put(build_run()), reached)
    assert harness.sent() == ["open", "echo"]


# Beginning anew


async def test_a_new_attempt_has_new_calls_and_a_new_session(make: Made) -> None:
    async def torn(request: ModelRequest) -> AsyncIterator[Chunk]:
        if len(request.messages) > 2:
            raise BrokerUnavailable("gone")
        async for chunk in ScriptedModel(echo_then("one", "a")).stream(request):
            yield chunk

    first, second = make(StreamModel(torn)), make(echo_then("one", "a"))
    claim = await first.put(build_run())
    outcome = await first.worked(claim)
    assert (outcome.failure and outcome.failure.kind) is FailureKind.INFRASTRUCTURE
    assert first.sent() == ["open", "echo", "close"]
    again = await second.begun_anew(claim)
    assert (again.record.attempt, again.is_resumed) == (2, False)
    outcome = await second.worked(again)
    assert (outcome.failure, outcome.attempt) == (None, 2)
    assert second.sent() == ["open", "echo", "close"]
    assert {call.id for call in first.transport.calls}.isdisjoint(call.id for call in second.transport.calls)
    assert {context.session for context in first.transport.contexts}.isdisjoint(
        context.session for context in second.transport.contexts
    )


async def test_a_restarted_single_call_has_a_new_id(make: Made) -> None:
    first, second = make(answers={"echo": failed(ErrorCode.HOST_LOST)}), make()
    claim = await first.put(build_tool_call())
    await first.worked(claim)
    outcome = await second.worked(await second.begun_anew(claim))
    assert (outcome.failure, outcome.body and outcome.body["output"]) == (None, "said x")
    calls = [call.id for harness in (first, second) for call in harness.transport.calls if call.name == "echo"]
    assert len(set(calls)) == 2
