"""A run whose process dies at any entry of its log: another process ends it as if nothing had happened.

The process stops for good right before an entry is written, or right after. It runs no clean-up, as after `kill -9`.
tests/chaos kills real processes.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.records.builders import KEY
from tests.support.runs.grader_harness import Sandboxes, with_grader
from tests.support.runs.item_harness import (
    HarnessFactory,
    ItemHarness,
    archive_of,
    build_run,
    build_tool_call,
    echo_then,
    with_environment,
)
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.run_events import (
    PROGRESS_EVENTS,
    ArtifactsCopied,
    CallFinished,
    CallReviewed,
    ModelReplied,
    RunEvent,
    RunReady,
    SessionOpened,
    SessionOpening,
    StateForking,
    StateKept,
    StepFinished,
    SubmissionTaken,
)
from toolcrew.orchestrator.approvals import ApprovalPolicy, Decision, Rule
from toolcrew.orchestrator.approvals.approvers import ApprovalRequest
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.store.batches import BatchDefaults, ItemOutcome
from toolcrew.store.run_log import LOGGED, RunLog
from toolcrew.store.run_queue import RunClaim
from toolcrew.store.usage import DAY_S, ReplySpending, UsageStore

STEP = [ModelReplied, CallReviewed, CallFinished]
ENTRIES = [SessionOpening, SessionOpened, *STEP, *STEP, ModelReplied, ArtifactsCopied]
GRADED_ENTRIES = [SessionOpening, SessionOpened, CallFinished, SubmissionTaken, SessionOpening, SessionOpened]
STATE = [StateForking, StateKept]
KEPT_STATE_ENTRIES = [SessionOpening, SessionOpened, *STATE, ModelReplied, CallFinished, *STATE, ModelReplied]
TURNS = echo_then("two", "a", "b")


class RunWorld:
    """The outside world of a run: counts payments, questions and actions."""

    def __init__(self, make: HarnessFactory, folder: Path) -> None:
        self._make = make
        self._folder = folder
        (folder / "made").mkdir()
        (folder / "made" / "out.txt").write_text("x")
        self.reviews: list[str] = []
        self.processes: list[ItemHarness] = []

    async def decide(self, request: ApprovalRequest) -> Decision:
        self.reviews.append(request.call.id)
        return Decision(True)

    def open_process(self, asked_before: int = 0) -> ItemHarness:
        """Return a process whose model continues the conversation after the given number of replies."""

        def export(call: ToolCall, _: ToolContext) -> ToolResult:
            process.blobs.kept["k"] = archive_of(self._folder / "made")
            return ToolResult(call_id=call.id, name=call.name, success=True, blob="k")

        policy = ApprovalPolicy((Rule("ask", "echo"),))
        process: ItemHarness = self._make(
            TURNS[asked_before:], approver=self, policy=policy, answers={"export": export}
        )
        self.processes.append(process)
        return process

    async def work(self, process: ItemHarness, claim: RunClaim, run_log: RunLog) -> ItemOutcome:
        task = asyncio.current_task()
        assert task is not None
        defaults = BatchDefaults(artifacts=str(self._folder / "artifacts"))
        return await process.work.work(claim, Journal(run_log, task.cancel), defaults, process.run_events.append)

    def sent(self, verb: str) -> list[str]:
        """Return the ids of the calls of that tool or verb that all processes have sent."""
        return [
            call.id
            for process in self.processes
            for call in process.transport.calls
            if call.name.removeprefix("session.") == verb
        ]


class StoppingLog:
    """A log whose process stops permanently at one entry."""

    def __init__(self, run_log: RunLog, position: int, *, is_written: bool) -> None:
        self.stopped = asyncio.Event()
        self._append = run_log.append
        self._position = position
        self._is_written = is_written
        self._run_log = run_log
        run_log.append = self.append  # type: ignore[method-assign]

    async def append(self, entry: RunEvent, spending: ReplySpending | None = None) -> None:
        is_last = len(self._run_log.entries) == self._position
        if not is_last or self._is_written:
            await self._append(entry, spending)
        if is_last:
            self.stopped.set()
            await asyncio.Event().wait()


def test_every_kind_of_log_entry_is_covered() -> None:
    assert {*ENTRIES, *GRADED_ENTRIES, *KEPT_STATE_ENTRIES} == set(LOGGED)


@pytest.mark.parametrize("is_written", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("position", range(len(ENTRIES)), ids=lambda at: f"{at}-{ENTRIES[at].__name__}")
async def test_resumed_run_repeats_no_logged_step(
    make: HarnessFactory, tmp_path: Path, position: int, is_written: bool
) -> None:
    world = RunWorld(make, tmp_path)
    first = world.open_process()
    claim = await first.put(with_environment(build_run(), artifacts=("*.txt",)))
    run_log = await RunLog.load(first.client, "d", KEY, claim.attempt)
    stopping = StoppingLog(run_log, position, is_written=is_written)
    working = asyncio.create_task(world.work(first, claim, run_log))
    async with asyncio.timeout(SOON_S):
        await stopping.stopped.wait()

    logged = ENTRIES[: position + is_written]
    second = world.open_process(logged.count(ModelReplied))
    resumed_claim = await second.claim_by_other(claim)
    continued = await RunLog.load(second.client, "d", KEY, resumed_claim.attempt)
    assert [type(event) for event in continued.entries] == logged
    async with asyncio.timeout(SOON_S):
        outcome = await world.work(second, resumed_claim, continued)

    assert outcome.failure is None
    body: dict[str, Any] = dict(outcome.body or {})
    assert (body["answer"], body["steps"], body["artifacts"]) == ("two", 3, ["out.txt"])
    # Work whose result was not logged is done again: one reply, one review, or one call under the same id.
    lost = None if is_written else ENTRIES[position]
    assert first.count_model_requests() + second.count_model_requests() == 3 + (lost is ModelReplied)
    assert len(world.reviews) == 2 + (lost is CallReviewed)
    assert len(world.sent("echo")) == 2 + (lost is CallFinished)
    assert len(set(world.sent("echo"))) == 2
    rows = await UsageStore(second.client, "d").read("acme", time.time() - DAY_S, time.time() + DAY_S)
    assert sum(row.amounts.get("prompt_tokens", 0) for row in rows) == 3  # each logged reply once
    assert len(world.sent("export")) == 1 + (lost is ArtifactsCopied)
    counted = [type(event) for event in second.run_events if isinstance(event, PROGRESS_EVENTS)]
    assert counted == [RunReady, CallFinished, StepFinished, CallFinished, StepFinished, StepFinished]
    is_opened_again = logged == [SessionOpening]
    assert len(world.sent("open")) == (2 if is_opened_again and lost is SessionOpened else 1)
    assert second.places.locations == {}
    expected = [SessionOpening, *ENTRIES] if is_opened_again else ENTRIES
    assert [type(event) for event in continued.entries] == expected

    # The stopped process, if it lives after all, changes nothing any more.
    working.cancel()
    await asyncio.wait({working}, timeout=SOON_S)


@pytest.mark.parametrize("is_written", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("position", range(len(GRADED_ENTRIES)), ids=lambda at: f"{at}-{GRADED_ENTRIES[at].__name__}")
async def test_resumed_run_is_graded_in_a_new_session(
    make: HarnessFactory, tmp_path: Path, position: int, is_written: bool
) -> None:
    world = RunWorld(make, tmp_path)
    first, second = world.open_process(), world.open_process()
    sandboxes = [Sandboxes(process, reward=b"0.5") for process in (first, second)]
    claim = await first.put(with_grader(build_tool_call(), reward_file="/workspace/reward"))
    run_log = await RunLog.load(first.client, "d", KEY, claim.attempt)
    stopping = StoppingLog(run_log, position, is_written=is_written)
    working = asyncio.create_task(world.work(first, claim, run_log))
    async with asyncio.timeout(SOON_S):
        await stopping.stopped.wait()
        resumed_claim = await second.claim_by_other(claim)
        outcome = await world.work(
            second, resumed_claim, await RunLog.load(second.client, "d", KEY, resumed_claim.attempt)
        )

    assert (outcome.grade.reward, outcome.failure) == (0.5, None)
    lost = None if is_written else GRADED_ENTRIES[position]
    assert len(world.sent("echo")) == 1 + (lost is CallFinished)
    assert len(world.sent("export")) == 1 + (lost is SubmissionTaken)
    assert [len(one.graded) for one in sandboxes] == [0, 1]
    assert second.places.locations == {}
    working.cancel()
    await asyncio.wait({working}, timeout=SOON_S)


@pytest.mark.parametrize("is_written", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "position", range(len(KEPT_STATE_ENTRIES)), ids=lambda at: f"{at}-{KEPT_STATE_ENTRIES[at].__name__}"
)
async def test_resumed_run_keeps_each_state_once(make: HarnessFactory, position: int, is_written: bool) -> None:
    turns = echo_then("done", "a")
    first = make(turns)
    claim = await first.put(build_run(keep_states=True))
    run_log = await RunLog.load(first.client, "d", KEY, claim.attempt)
    stopping = StoppingLog(run_log, position, is_written=is_written)
    task = asyncio.create_task(
        first.work.work(claim, Journal(run_log, lambda: None), BatchDefaults(), first.run_events.append)
    )
    async with asyncio.timeout(SOON_S):
        await stopping.stopped.wait()

    logged = KEPT_STATE_ENTRIES[: position + is_written]
    second = make(turns[logged.count(ModelReplied) :])
    resumed_claim = await second.claim_by_other(claim)
    continued = await RunLog.load(second.client, "d", KEY, resumed_claim.attempt)
    async with asyncio.timeout(SOON_S):
        outcome = await second.work.work(
            resumed_claim, Journal(continued, lambda: None), BatchDefaults(), second.run_events.append
        )

    assert outcome.failure is None
    lost = None if is_written else KEPT_STATE_ENTRIES[position]
    assert first.count_model_requests() + second.count_model_requests() == 2 + (lost is ModelReplied)
    events = continued.entries
    states = [event for event in events if isinstance(event, StateKept)]
    assert [event.step for event in states] == [0, 1]
    # A fork whose process died before it logged the fork is removed, and the state is forked again.
    assert sum(isinstance(event, StateForking) for event in events) == 2 + (logged[-1:] == [StateForking])
    assert set(second.places.locations) == {("acme", event.session) for event in states}
    task.cancel()
    await asyncio.wait({task}, timeout=SOON_S)
