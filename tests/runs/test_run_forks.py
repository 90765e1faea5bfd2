"""Forks of runs on a real Redis: what a fork takes over from its run, and what it does not repeat or count again."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.support.records.builders import KEY
from tests.support.runs.durable_run_harness import DurableRunFactory, DurableRunHarness
from tests.support.runs.item_harness import build_run, echo_then
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import (
    CallFinished,
    CallReviewed,
    ModelReplied,
    RunEvent,
    SessionOpened,
    SessionOpening,
    StateForking,
    StateKept,
)
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.run_views import DurableRunState
from toolcrew.orchestrator.dialects.call_ids import build_call_id
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.runs.run_forks import copy_steps
from toolcrew.store.batches import BatchDefaults
from toolcrew.store.run_log import RunAttempt, RunLog

KEEP_STATES_BODY = RunBody(instruction="say it", tools=("echo",), keep_states=True)


@pytest.fixture
def harness(make_durable: DurableRunFactory) -> DurableRunHarness:
    harness = make_durable(echo_then("done", "one", "two"))
    harness.runs._sessions = harness.places
    return harness


async def expect_failure(operation: Any) -> ToolFailure:
    with pytest.raises(ToolFailure) as failure:
        await operation
    return failure.value


async def run_to_end(harness: DurableRunHarness, *runs: str) -> None:
    async with harness.working():
        for run in runs:
            await harness.events(run)


def script(harness: DurableRunHarness, *turns: str) -> ScriptedModel:
    """Let the model answer the next requests with `turns`."""
    assert isinstance(harness.model, ScriptedModel)
    harness.model.turns = turns
    harness.model.requests.clear()
    return harness.model


def sent_echoes(harness: DurableRunHarness) -> list[str]:
    return [call.arguments["text"] for call in harness.transport.calls if call.name == "echo"]


@pytest.fixture
async def run(harness: DurableRunHarness) -> str:
    """Return a run that has ended and kept its states."""
    run = await harness.start(KEEP_STATES_BODY)
    await run_to_end(harness, run)
    return run


# The log of a fork


@pytest.mark.parametrize(("attempt", "name"), [("parent", "fork"), ("parent-2", "f" * 64)])
def test_copied_entries_have_the_call_ids_of_the_fork(attempt: str, name: str) -> None:
    def call_id(run: str, step: int) -> str:
        return build_call_id(run, step, 0)

    def build_step(step: int) -> list[RunEvent]:
        call = ToolCall(id=call_id(attempt, step), name="echo")
        result = ToolResult(call_id=call.id, name="echo", success=True, output=f"said {step}")
        return [
            StateForking(run="parent", step=step - 1, session=f"s{step - 1}"),
            StateKept(run="parent", step=step - 1, session=f"s{step - 1}"),
            ModelReplied(run="parent", chunks=({"step": step},)),
            CallReviewed(run="parent", call_id=call.id, approved=call),
            CallReviewed(run="parent", call_id=call.id, refused=result),
            CallFinished(run="parent", result=result),
        ]

    opened = [SessionOpening(run="parent", session="s"), SessionOpened(run="parent", session="s", info={})]
    entries = [replace(event, wall_s=5.0) for event in [*opened, *build_step(1), *build_step(2), *build_step(3)]]

    copied = copy_steps(entries, 2, attempt, "fork", name)

    events: list[Any] = copied
    step = [StateKept, ModelReplied, CallReviewed, CallReviewed, CallFinished]
    assert [type(event) for event in events] == [*step, *step, StateKept]
    assert {entry.wall_s for entry in copied} == {0.0}
    assert {event.run for event in events} == {"fork"}
    _, _, approved, refusal, finished = events[5:10]
    ids = {approved.call_id, approved.approved.id, refusal.call_id, refusal.refused.call_id, finished.result.call_id}
    assert ids == {call_id(name, 2)}
    assert events[-1] == replace(events[-1], step=2, session="s2")
    assert copy_steps(entries, 0, attempt, "fork", name) == copied[:1]


# Forks


async def test_forks_continue_from_the_kept_state_without_repeating_steps(run: str, harness: DurableRunHarness) -> None:
    assert (harness.count_model_requests(), sent_echoes(harness)) == (3, ["one", "two"])
    parent = await harness.runs.get("acme", run)
    _, entries = await harness.queue.runs.read_log("acme", run)
    states = {event.step: event.session for event in entries if isinstance(event, StateKept)}
    assert list(states) == [0, 1, 2]
    assert set(harness.places.locations) == {("acme", session) for session in states.values()}

    model = script(harness)
    model.turns = lambda messages: (
        "left" if "other" in str(messages[-1]["content"]) else Calls([("echo", {"text": "other"})])
    )
    harness.transport.calls.clear()
    forks = await harness.runs.fork("acme", run, 1, 2)
    for fork in forks:
        await run_to_end(harness, fork.id)

    forked = [call for call in harness.transport.calls if call.name == "session.fork"]
    assert sent_echoes(harness) == ["other", "other"]
    assert harness.count_model_requests() == 4
    # Each fork has a session of its own, and keeps its own state before its last request.
    assert len(forked) == 2 + 2
    for fork in forks:
        fork_run = await harness.runs.get("acme", fork.id)
        assert fork_run.state is DurableRunState.SUCCEEDED
        assert fork_run.end is not None
        assert (fork_run.forked_from and (fork_run.forked_from.run, fork_run.forked_from.step)) == (run, 1)
        assert (fork_run.end.answer, fork_run.end.steps) == ("left", 3)
        # The parent has counted the first reply.
        assert fork_run.end.usage.prompt_tokens == parent.end.usage.prompt_tokens * 2 / 3
        messages = await harness.runs.transcript("acme", fork.id)
        assert [message.get("content") for message in messages if message["role"] == "tool"] == [
            "said one",
            "said other",
        ]
        _, copied = await harness.queue.runs.read_log("acme", fork.id)
        sessions = {e.step: e.session for e in copied if isinstance(e, StateKept)}
        assert (sessions[0], sessions[1]) == (states[0], states[1])
        assert sessions[2] not in states.values()
    assert {"acme"} == {tenant for tenant, _ in harness.places.locations}


async def test_fork_tree_includes_forks_of_forks(run: str, harness: DurableRunHarness) -> None:
    script(harness, *["left"] * 3)
    (new_fork,) = await harness.runs.fork("acme", run, 2)
    (right,) = await harness.runs.fork("acme", run, 0)
    await run_to_end(harness, new_fork.id, right.id)
    (below,) = await harness.runs.fork("acme", new_fork.id, 1)
    await run_to_end(harness, below.id)

    for relative in (run, new_fork.id, right.id, below.id):
        tree = await harness.runs.tree("acme", await harness.runs.get("acme", relative))
        assert tree.name == run
        assert [(fork.step, fork.name) for fork in tree.forks] == [(0, right.id), (2, new_fork.id)]
        assert [(fork.step, fork.name) for fork in tree.forks[1].forks] == [(1, below.id)]
        assert {fork.run and fork.run.state for fork in tree.forks} == {DurableRunState.SUCCEEDED}


async def test_repeated_fork_request_with_the_same_key_starts_nothing(run: str, harness: DurableRunHarness) -> None:
    forks = await harness.runs.fork("acme", run, 1, 3, idempotency_key="k")
    assert [fork.id for fork in await harness.runs.fork("acme", run, 1, 3, idempotency_key="k")] == [
        fork.id for fork in forks
    ]
    assert len((await harness.queue.runs.forks("acme", [run]))[0]) == 3
    ttls = [await harness.client.ttl(f"toolcrew:d:t:acme:run.{run}:{part}") for part in ("forks", "log")]
    assert (ttls[0] > 0, 3600 < ttls[1] <= 86400) == (True, True)
    failure = await expect_failure(harness.runs.fork("acme", run, 2, 3, idempotency_key="k"))
    assert failure.code is ErrorCode.INVALID_ARGUMENTS


async def test_new_attempt_of_a_fork_keeps_the_shared_steps(run: str, harness: DurableRunHarness) -> None:
    script(harness, "left")
    (fork,) = await harness.runs.fork("acme", run, 2)
    claim = await harness.claim_next()
    await harness.queue.give_back(claim, is_new=True)
    await run_to_end(harness, fork.id)
    fork_run = await harness.runs.get("acme", fork.id)
    assert (fork_run.attempt, fork_run.end.answer, fork_run.end.steps) == (2, "left", 3)
    assert sent_echoes(harness) == ["one", "two"]


async def test_interrupted_copy_of_a_fork_log_is_completed_by_the_next_process(
    run: str, harness: DurableRunHarness
) -> None:
    script(harness, "left")
    (fork,) = await harness.runs.fork("acme", run, 2)
    claim = await harness.claim_next()
    _, entries = await harness.queue.runs.read_log("acme", run)
    partial = await RunLog.load(harness.client, "d", KEY, RunAttempt("acme", fork.id, 1, claim.token))
    for entry in copy_steps(entries, 2, run, fork.id, fork.id)[:3]:
        await partial.append(entry)
    await harness.die(claim)
    await run_to_end(harness, fork.id)
    fork_run = await harness.runs.get("acme", fork.id)
    assert (fork_run.end.answer, fork_run.end.steps) == ("left", 3)
    assert sent_echoes(harness) == ["one", "two"]


# Refusals


async def test_impossible_fork_is_refused_with_a_reason(harness: DurableRunHarness) -> None:
    run = await harness.start(KEEP_STATES_BODY)
    before_end = await expect_failure(harness.runs.fork("acme", run, 0))
    assert before_end.code is ErrorCode.INVALID_ARGUMENTS
    await run_to_end(harness, run)
    beyond = await expect_failure(harness.runs.fork("acme", run, 3))
    assert (beyond.code, "(0, 1, 2)" in beyond.message) == (ErrorCode.INVALID_ARGUMENTS, True)
    for n in (0, 101):
        assert (await expect_failure(harness.runs.fork("acme", run, 1, n))).code is ErrorCode.INVALID_ARGUMENTS
    foreign = await expect_failure(harness.runs.fork("rival", run, 1))
    unknown = await expect_failure(harness.runs.fork("rival", "nosuch", 1))
    assert foreign.code is unknown.code is ErrorCode.FILE_NOT_FOUND
    assert foreign.message.replace(run, "nosuch") == unknown.message
    harness.places.locations.clear()
    lost = await expect_failure(harness.runs.fork("acme", run, 1))
    assert lost.code is ErrorCode.SESSION_NOT_FOUND
    script(harness, "done")
    plain = await harness.start(RunBody(instruction="say it", tools=("echo",)))
    await run_to_end(harness, plain)
    without_states = await expect_failure(harness.runs.fork("acme", plain, 0))
    assert (without_states.code, "keep_states" in without_states.message) == (ErrorCode.INVALID_ARGUMENTS, True)


async def test_fork_of_a_run_whose_model_was_removed_is_refused(
    harness: DurableRunHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = harness.work.models
    monkeypatch.setattr(models, "get", partial(lambda get, tenant, _: get(tenant, None), models.get))
    run = await harness.start(KEEP_STATES_BODY.model_copy(update={"model": "fast"}))
    await run_to_end(harness, run)

    async def check(_: str, name: str) -> None:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"there is no model {name}")

    harness.runs.check_model = check
    assert (await expect_failure(harness.runs.fork("acme", run, 1))).message == "there is no model fast"


async def test_forks_above_the_quota_start_none(run: str, harness: DurableRunHarness) -> None:
    harness.runs._limits = (2, 100)
    assert (await expect_failure(harness.runs.fork("acme", run, 1, 3))).code is ErrorCode.QUOTA_EXCEEDED
    assert (await harness.queue.runs.forks("acme", [run]))[0] == []
    assert len(await harness.runs.fork("acme", run, 1, 2)) == 2


async def test_failed_state_copy_warns_and_the_run_continues(harness: DurableRunHarness) -> None:
    harness.answers["fork"] = lambda call, _: ToolResult.failed(call, ErrorCode.NO_SPACE, "the disk is full")
    run = await harness.start(KEEP_STATES_BODY)
    async with harness.working():
        events = await harness.events(run)
    assert [event["message"] for event in events if event["type"] == "Warned"] == [
        f"the state of the session after {count(step, 'step')} was not stored: the disk is full" for step in range(3)
    ]
    failure = await expect_failure(harness.runs.fork("acme", run, 1))
    assert "the disk is full" in failure.message


async def test_cancelled_run_leaves_no_kept_states(harness: DurableRunHarness) -> None:
    reached = asyncio.Event()

    async def hang(call: Any, _: Any) -> ToolResult:
        if call.arguments["text"] == "two":
            reached.set()
            await asyncio.get_running_loop().create_future()
        return ToolResult(call_id=call.id, name=call.name, success=True, output="said one")

    harness.answers["echo"] = hang
    run = await harness.start(KEEP_STATES_BODY)
    async with harness.working():
        await reached.wait()
        assert len(harness.places.locations) == 3
        await harness.runs.cancel("acme", run)
        await harness.events(run)
    assert harness.places.locations == {}


async def test_fork_of_a_batch_run_uses_the_batch_defaults(harness: DurableRunHarness) -> None:
    claim = await harness.put(build_run(keep_states=True))
    outcome = await harness.execute(claim, BatchDefaults())
    await harness.queue.finish(claim, outcome)
    script(harness, "left")
    (fork,) = await harness.runs.fork("acme", claim.run, 2)
    await run_to_end(harness, fork.id)
    fork_run = await harness.runs.get("acme", fork.id)
    assert (fork_run.end.answer, fork_run.forked_from and fork_run.forked_from.run) == ("left", claim.run)
