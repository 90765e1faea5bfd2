"""The outcome of an item: completed, resumed after a lost process, or started anew without a trace of the previous
attempt.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contract.calls import ToolResult
from contract.errors import ContextWindowExceeded, ErrorCode, ModelRefused
from contract.run_events import FailureKind
from orchestrator.dialects.model import Chunk, ModelRequest
from orchestrator.models.scripted import ScriptedModel
from store.batches import RunLimits
from tests.fakes import StreamModel
from tests.item_harness import Made, build_run, build_tool_call, echo_then, failed, with_harness

# How items end


async def test_a_run_that_answers_is_a_success_and_its_session_is_closed(make: Made) -> None:
    harness = make(echo_then("two", "a", "b"))
    outcome = await harness.worked(await harness.put(build_run()))
    assert (outcome.failure, outcome.status_code, outcome.attempt) == (None, 200, 1)
    assert outcome.body is not None
    assert (outcome.body["answer"], outcome.body["steps"]) == ("two", 3)
    assert harness.sent() == ["open", "echo", "echo", "close"]


async def test_a_single_call_is_made_in_a_session_of_its_own(make: Made) -> None:
    harness = make()
    outcome = await harness.worked(await harness.put(build_tool_call()))
    assert (outcome.failure, outcome.body and outcome.body["output"]) == (None, "said x")
    assert harness.sent() == ["open", "echo", "close"]
    (delivery,) = [sent for sent in harness.transport.deliveries if sent.request.call.name == "echo"]
    assert delivery.request.keeps_result
    assert harness.transport.settled == [("acme", delivery.call_id)]
    assert harness.asked() == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.NETWORK_ERROR, FailureKind.TOOL),
        (ErrorCode.FILE_NOT_FOUND, FailureKind.TOOL),
        (ErrorCode.HOST_LOST, FailureKind.INFRASTRUCTURE),
        (ErrorCode.SESSION_NOT_FOUND, FailureKind.INFRASTRUCTURE),
    ],
)
async def test_a_failed_single_call_sets_the_kind_of_failure(make: Made, code: ErrorCode, kind: FailureKind) -> None:
    harness = make(answers={"echo": failed(code, "a sentence")})
    outcome = await harness.worked(await harness.put(build_tool_call()))
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code, outcome.failure.message) == (kind, code.value, "a sentence")


async def test_a_run_that_reaches_a_limit_is_a_failure_of_the_model_with_what_there_is(make: Made) -> None:
    harness = make(echo_then("never", "a", "b", "c"))
    outcome = await harness.worked(await harness.put(build_run(limits=RunLimits(max_iterations=2))))
    assert (outcome.failure and outcome.failure.kind) == FailureKind.MODEL
    assert (outcome.failure and outcome.failure.code) == "max_iterations"
    assert outcome.body is not None
    assert outcome.body["steps"] == 2


@pytest.mark.parametrize("error", [ContextWindowExceeded("too long"), ModelRefused("not that")])
async def test_a_request_that_the_model_refuses_is_a_failure_of_the_model(make: Made, error: Exception) -> None:
    async def refuse(request: ModelRequest) -> AsyncIterator[Chunk]:
        raise error
        yield {}

    outcome = await make(StreamModel(refuse)).worked(await make().put(build_run()))
    assert (outcome.failure and outcome.failure.kind, outcome.body) == (FailureKind.MODEL, None)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.SANDBOX_UNAVAILABLE, FailureKind.INFRASTRUCTURE),
        (ErrorCode.NO_SPACE, FailureKind.INFRASTRUCTURE),
        (ErrorCode.PERMISSION_DENIED, FailureKind.INPUT),
        (ErrorCode.FILE_NOT_FOUND, FailureKind.INPUT),
    ],
)
async def test_a_session_that_cannot_be_opened_fails_its_item(make: Made, code: ErrorCode, kind: FailureKind) -> None:
    harness = make(answers={"open": failed(code)})
    outcome = await harness.worked(await harness.put(build_run()))
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code) == (kind, code.value)
    assert harness.asked() == 0


async def test_a_workspace_that_is_not_there_is_the_lines_own_fault(make: Made, tmp_path: Path) -> None:
    harness = make()
    outcome = await harness.worked(await harness.put(with_harness(build_run(), workspace=str(tmp_path / "missing"))))
    assert (outcome.failure and outcome.failure.kind, harness.sent()) == (FailureKind.INPUT, [])


async def test_limits_that_do_not_go_together_are_the_lines_own_fault(make: Made) -> None:
    harness = make()
    outcome = await harness.worked(await harness.put(build_run(limits=RunLimits(max_cost=1.0))))
    assert outcome.failure is not None
    assert (outcome.failure.kind, "prices" in outcome.failure.message) == (FailureKind.INPUT, True)
    assert harness.sent() == ["open", "close"]


async def test_a_bug_ends_the_item_and_not_the_batch(make: Made) -> None:
    def stumble(messages: list[Any]) -> str:
        raise KeyError("oops")

    harness = make([stumble])
    outcome = await harness.worked(await harness.put(build_run()))
    assert outcome.failure is not None
    assert (outcome.failure.code, outcome.failure.kind) == ("INTERNAL", FailureKind.INFRASTRUCTURE)
    assert harness.sent() == ["open", "close"]


async def test_a_session_that_cannot_be_closed_takes_no_answer_away(make: Made) -> None:
    harness = make(answers={"close": failed(ErrorCode.SANDBOX_UNAVAILABLE)})
    assert (await harness.worked(await harness.put(build_run()))).failure is None


async def test_a_session_of_whose_closing_nothing_is_known_is_closed_for_everybody(make: Made) -> None:
    async def never_answers(*_: object) -> ToolResult:
        raise TimeoutError

    harness = make(answers={"close": never_answers})
    assert (await harness.worked(await harness.put(build_run()))).failure is None
    (opened, *_) = harness.transport.contexts
    assert [queue for queue, _ in harness.transport.commands] == ["host.h1.b00t"]
    assert await harness.places.find("acme", str(opened.session)) is None


# Chats


def build_chat() -> Any:
    """Return the run that a line for /v1/chat/completions becomes."""
    item = build_run(
        instruction="hi",
        tools=(),
        history=({"role": "system", "content": "be brief"},),
        limits=RunLimits(max_iterations=1),
    )
    return item.model_copy(update={"url": "/v1/chat/completions"})


async def test_a_chat_asks_for_no_sandbox_and_says_what_its_line_says(make: Made) -> None:
    harness = make(["hello"])
    outcome = await harness.worked(await harness.put(build_chat()))
    assert (outcome.failure, outcome.body and outcome.body["object"]) == (None, "chat.completion")
    assert harness.sent() == []
    assert isinstance(harness.model, ScriptedModel)
    (request,) = harness.model.requests
    assert request.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert request.tools == []


async def test_a_model_that_calls_a_tool_in_a_chat_runs_nothing(make: Made) -> None:
    harness = make(echo_then("never", "x"))
    outcome = await harness.worked(await harness.put(build_chat()))
    assert (outcome.failure and outcome.failure.kind, harness.sent()) == (FailureKind.MODEL, [])


async def test_a_run_without_tools_has_a_sandbox_only_for_files(make: Made, tmp_path: Path) -> None:
    harness = make(["hello"] * 2)
    assert (await harness.worked(await harness.put(build_run(tools=())))).failure is None
    assert harness.sent() == []
    other = with_harness(build_run(tools=()), image="python")
    await harness.client.flushall()
    assert (await harness.worked(await harness.put(other))).failure is None
    assert harness.sent() == ["open", "close"]
