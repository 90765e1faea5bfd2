"""The outcome of an item: completed, resumed by another process, or started anew without a trace of the previous
attempt. No payment and no action happens twice.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.records.fakes import StreamModel
from tests.support.runs.item_harness import (
    HarnessFactory,
    ItemHarness,
    archive_of,
    build_run,
    build_tool_call,
    echo_then,
    fail_with,
    with_environment,
)
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ModelRefused, SandboxUnavailable
from toolcrew.contract.run_events import FailureKind
from toolcrew.contract.run_spec import RunLimits
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest
from toolcrew.orchestrator.models.scripted import ScriptedModel
from toolcrew.orchestrator.runs import executor
from toolcrew.orchestrator.runs.item_artifacts import NOT_COPIED
from toolcrew.store.batches import BatchDefaults


async def test_single_call_runs_in_its_own_session(make: HarnessFactory) -> None:
    harness = make()
    outcome = await harness.execute(await harness.put(build_tool_call()))
    assert (outcome.failure, outcome.body and outcome.body["output"]) == (None, "said x")
    assert harness.sent() == ["open", "echo", "close"]
    (delivery,) = [sent for sent in harness.transport.deliveries if sent.request.call.name == "echo"]
    assert delivery.request.keeps_result
    assert harness.transport.settled == [("acme", delivery.call_id)]
    assert harness.count_model_requests() == 0


async def test_run_at_its_iteration_limit_is_a_model_failure_with_a_body(make: HarnessFactory) -> None:
    harness = make(echo_then("never", "a", "b", "c"))
    outcome = await harness.execute(await harness.put(build_run(limits=RunLimits(max_iterations=2))))
    assert (outcome.failure and outcome.failure.kind) == FailureKind.MODEL
    assert (outcome.failure and outcome.failure.code) == "max_iterations"
    assert outcome.body["steps"] == 2


async def test_request_refused_by_the_model_is_a_model_failure(make: HarnessFactory) -> None:
    async def refuse(request: ModelRequest) -> AsyncIterator[Chunk]:
        raise ModelRefused("not that")
        yield {}

    outcome = await make(StreamModel(refuse)).execute(await make().put(build_run()))
    assert (outcome.failure and outcome.failure.kind, outcome.body) == (FailureKind.MODEL, None)


async def test_failed_session_open_fails_the_item(make: HarnessFactory) -> None:
    harness = make(answers={"open": fail_with(ErrorCode.PERMISSION_DENIED)})
    outcome = await harness.execute(await harness.put(build_run()))
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.INPUT, "PERMISSION_DENIED")
    assert harness.count_model_requests() == 0


async def test_missing_workspace_is_an_input_failure(make: HarnessFactory, tmp_path: Path) -> None:
    harness = make()
    outcome = await harness.execute(
        await harness.put(with_environment(build_run(), workspace=str(tmp_path / "missing")))
    )
    assert (outcome.failure and outcome.failure.kind, harness.sent()) == (FailureKind.INPUT, [])


async def test_conflicting_limits_are_an_input_failure(make: HarnessFactory) -> None:
    harness = make()
    outcome = await harness.execute(await harness.put(build_run(limits=RunLimits(max_cost=1.0))))
    assert (outcome.failure.kind, "prices" in outcome.failure.message) == (FailureKind.INPUT, True)
    assert harness.sent() == ["open", "close"]


async def test_unexpected_exception_is_an_internal_failure_of_the_item(make: HarnessFactory) -> None:
    def raise_key_error(messages: list[Any]) -> str:
        raise KeyError("oops")

    harness = make([raise_key_error])
    outcome = await harness.execute(await harness.put(build_run()))
    assert (outcome.failure.code, outcome.failure.kind) == ("INTERNAL", FailureKind.INFRASTRUCTURE)
    assert harness.sent() == ["open", "close"]


async def test_session_with_an_unanswered_close_is_removed(make: HarnessFactory) -> None:
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


async def test_chat_completion_item_opens_no_sandbox(make: HarnessFactory) -> None:
    harness = make(["hello"])
    outcome = await harness.execute(await harness.put(build_chat()))
    assert (outcome.failure, outcome.body and outcome.body["object"]) == (None, "chat.completion")
    assert harness.sent() == []
    assert isinstance(harness.model, ScriptedModel)
    (request,) = harness.model.requests
    assert request.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert request.tools == []


async def test_tool_call_in_a_chat_item_is_not_run(make: HarnessFactory) -> None:
    harness = make(echo_then("never", "x"))
    outcome = await harness.execute(await harness.put(build_chat()))
    assert (outcome.failure and outcome.failure.kind, harness.sent()) == (FailureKind.MODEL, [])


async def test_run_without_tools_opens_a_sandbox_only_for_files(make: HarnessFactory, tmp_path: Path) -> None:
    harness = make(["hello"] * 2)
    assert (await harness.execute(await harness.put(build_run(tools=())))).failure is None
    assert harness.sent() == []
    other = with_environment(build_run(tools=()), image="python")
    await harness.client.flushall()
    assert (await harness.execute(await harness.put(other))).failure is None
    assert harness.sent() == ["open", "close"]


async def run_and_cancel(harness: ItemHarness, claim: Any, reached: asyncio.Event) -> None:
    """Run the work of a process, and stop it at the given point."""
    working = asyncio.create_task(harness.execute(claim))
    async with asyncio.timeout(SOON_S):
        await reached.wait()
    working.cancel()
    await asyncio.wait({working}, timeout=SOON_S)
    assert working.cancelled()


def build_hanging_answer(text: str, reached: asyncio.Event) -> Callable[[ToolCall, ToolContext], Any]:
    """Return a tool that answers, but hangs on the given text."""

    async def answer(call: ToolCall, _: ToolContext) -> ToolResult:
        if call.arguments["text"] == text:
            reached.set()
            await asyncio.Event().wait()
        return ToolResult(call_id=call.id, name=call.name, success=True, output=f"said {call.arguments['text']}")

    return answer


async def test_resumed_run_closes_a_half_opened_session_and_opens_another(make: HarnessFactory) -> None:
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


async def test_resumed_run_without_time_left_ends_with_its_logged_steps(
    make: HarnessFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "LEAST_WALL_S", 0.5)
    reached = asyncio.Event()
    first, second = (
        make(echo_then("two", "a", "b"), answers={"echo": build_hanging_answer("b", reached)}),
        make(["never"]),
    )
    claim = await first.put(build_run(limits=RunLimits(max_wall_s=60.0)))
    await run_and_cancel(first, claim, reached)
    claim = await second.claim_by_other(claim)
    journal = await second.journal(claim)
    journal.spent_wall_s = 60.0
    outcome = await second.work.work(claim, journal, BatchDefaults(), second.run_events.append)
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.MODEL, "max_wall")
    assert (outcome.body["steps"], second.count_model_requests()) == (3, 0)


async def test_lost_sandbox_of_a_resumed_run_is_an_infrastructure_failure(make: HarnessFactory) -> None:
    reached = asyncio.Event()
    first, second = (
        make(echo_then("two", "a", "b"), answers={"echo": build_hanging_answer("b", reached)}),
        make(["a guess"]),
    )
    claim = await first.put(build_run())
    await run_and_cancel(first, claim, reached)
    assert first.sent() == ["open", "echo", "echo"], "a stopped process leaves its session open"
    second.places.locations.clear()
    outcome = await second.execute(await second.claim_by_other(claim))
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.INFRASTRUCTURE, SandboxUnavailable.code.value)
    assert second.count_model_requests() == 0


async def test_artifact_with_a_non_utf8_name_is_copied(make: HarnessFactory, tmp_path: Path) -> None:
    files = tmp_path / "made"
    files.mkdir()
    (files / "caf\udce9.txt").write_text("x")
    harness = make()

    def export(call: ToolCall, context: ToolContext) -> ToolResult:
        harness.blobs.kept["k"] = archive_of(files)
        return ToolResult(call_id=call.id, name=call.name, success=True, blob="k")

    harness.answers["export"] = export
    claim = await harness.put(with_environment(build_run(), artifacts=("*.txt",)))
    outcome = await harness.execute(claim, BatchDefaults(artifacts=str(tmp_path / "artifacts")))
    assert outcome.body["artifacts"] == ["caf\\xe9.txt"]
    assert await harness.queue.finish(claim, outcome)


@pytest.mark.parametrize("code", sorted(NOT_COPIED))
@pytest.mark.parametrize("is_local", [True, False])
async def test_an_item_whose_artifacts_cannot_be_copied_keeps_its_result_and_names_the_reason(
    make: HarnessFactory, tmp_path: Path, code: ErrorCode, is_local: bool
) -> None:
    harness = make()

    def list_files(call: ToolCall, context: ToolContext) -> ToolResult:
        listing = b"f\0out.txt\0p\0pipe.txt\0"
        harness.blobs.kept["list"] = listing
        metadata = {"returncode": 0, "stdout_bytes": len(listing), "timed_out": False}
        return ToolResult(call_id=call.id, name=call.name, success=True, blob="list", metadata=metadata)

    failure = fail_with(code, "too much")
    harness.answers |= {"exec": list_files, "export": failure, "save_files": failure}
    claim = await harness.put(with_environment(build_run(), artifacts=("*.txt",)))
    outcome = await harness.execute(claim, BatchDefaults(artifacts=str(tmp_path) if is_local else None))
    assert outcome.failure is None
    assert outcome.body is not None
    assert (outcome.body["answer"], outcome.body["artifacts"]) == ("done", [])
    [sentence] = outcome.body["artifacts_missing"]
    assert code in sentence
    assert "too much" in sentence


async def test_new_attempt_has_new_call_ids_and_a_new_session(make: HarnessFactory) -> None:
    async def stream_then_fail(request: ModelRequest) -> AsyncIterator[Chunk]:
        if len(request.messages) > 2:
            raise BrokerUnavailable("gone")
        async for chunk in ScriptedModel(echo_then("one", "a")).stream(request):
            yield chunk

    first, second = make(StreamModel(stream_then_fail)), make(echo_then("one", "a"))
    claim = await first.put(build_run())
    outcome = await first.execute(claim)
    assert (outcome.failure and outcome.failure.kind) is FailureKind.INFRASTRUCTURE
    assert first.sent() == ["open", "echo", "close"]
    next_claim = await second.claim_next_attempt(claim)
    assert (next_claim.record.attempt, next_claim.is_resumed) == (2, False)
    outcome = await second.execute(next_claim)
    assert (outcome.failure, outcome.attempt) == (None, 2)
    assert second.sent() == ["open", "echo", "close"]
    assert {call.id for call in first.transport.calls}.isdisjoint(call.id for call in second.transport.calls)
    assert {context.session for context in first.transport.contexts}.isdisjoint(
        context.session for context in second.transport.contexts
    )


async def test_new_attempt_of_a_single_call_has_a_new_id(make: HarnessFactory) -> None:
    first, second = make(answers={"echo": fail_with(ErrorCode.HOST_LOST)}), make()
    claim = await first.put(build_tool_call())
    await first.execute(claim)
    outcome = await second.execute(await second.claim_next_attempt(claim))
    assert (outcome.failure, outcome.body and outcome.body["output"]) == (None, "said x")
    calls = [call.id for harness in (first, second) for call in harness.transport.calls if call.name == "echo"]
    assert len(set(calls)) == 2


@pytest.mark.parametrize("dialect", ["native", "tags"])
@pytest.mark.parametrize("reads_tags", [None, True, False])
async def test_tags_in_replies_are_calls_unless_the_run_says_no(
    make: HarnessFactory, dialect: str, reads_tags: bool | None
) -> None:
    tag = '<tool_action name="echo"><text value="a"/></tool_action>'
    harness = make([tag, "done"])
    limits = {"enable_tool_action_parsing": reads_tags}
    outcome = await harness.execute(await harness.put(build_run(dialect=dialect, limits=limits)))
    assert outcome.failure is None
    assert outcome.body["answer"] == (tag if reads_tags is False else "done")


async def test_call_in_the_middle_of_a_reply_starts_after_the_reply_is_logged(make: HarnessFactory) -> None:
    shown, may_continue = asyncio.Event(), asyncio.Event()

    async def reply(request: ModelRequest) -> AsyncIterator[Chunk]:
        is_first = len(request.messages) < 3
        text = '<tool_action name="echo" text="a"></tool_action> then' if is_first else "done"
        yield {"choices": [{"index": 0, "delta": {"content": text}}]}
        if is_first:
            shown.set()
            await may_continue.wait()
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}

    harness = make(StreamModel(reply))
    claim = await harness.put(build_run(dialect="tags"))
    working = asyncio.create_task(harness.execute(claim))
    async with asyncio.timeout(SOON_S):
        await shown.wait()
        await asyncio.sleep(0.05)
        assert (harness.sent(), (await harness.journal(claim)).steps) == (["open"], 0)
        may_continue.set()
        assert (await working).failure is None
    assert harness.sent() == ["open", "echo", "close"]
