"""Items whose calls wait for approval by people: the queue of questions, also after the death of the process that
runs the item.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_spec
from tests.support.redis.approval_harness import ADMIN, ApprovalHarness
from tests.support.runs.item_harness import (
    OPENED,
    HarnessFactory,
    ItemHarness,
    build_run,
    echo_then,
    open_harness_factory,
)
from tests.support.stack.waiting import SOON_S, until, wait_until_async
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.orchestrator.approvals import ApprovalPolicy, Decision, Rule, asking
from toolcrew.orchestrator.models.scripted import Calls
from toolcrew.orchestrator.runs.agent_builder import AgentBuilder
from toolcrew.store.approvals import ApprovalQuestion, ApprovalQueue
from toolcrew.store.batches import BatchDefaults, ItemOutcome, parse_batch, seal_defaults

ASK_POLICY = ApprovalPolicy((Rule("ask", tool="echo"),))
ASK_DEFAULTS = BatchDefaults(asks_people=True)


@pytest.fixture
async def make(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HarnessFactory]:
    monkeypatch.setattr(asking, "POLL_S", 0.01)
    async with open_harness_factory(redis_server) as maker:
        yield maker


async def find_question(harness: ItemHarness) -> ApprovalQuestion:
    (question,) = await ApprovalHarness(harness.client).until_pending()
    return question


async def decide(harness: ItemHarness, decision: Decision) -> None:
    question = await find_question(harness)
    await ApprovalHarness(harness.client).queue().decide(question.id, decision, digest=question.digest, actor=ADMIN)


async def wait_for_outcome(working: "asyncio.Task[ItemOutcome]") -> ItemOutcome:
    async with asyncio.timeout(SOON_S):
        return await working


def find_arguments(harness: ItemHarness) -> list[Any]:
    """Return the argument of the tool's call."""
    return [call.arguments["text"] for call in harness.transport.calls if call.name == "echo"]


@pytest.mark.parametrize(
    ("approvals", "defaults", "calls"), [("auto", BatchDefaults(), ["a"]), ("never", ASK_DEFAULTS, [])]
)
async def test_item_without_approval_requests_asks_nobody(
    make: HarnessFactory, approvals: str, defaults: BatchDefaults, calls: list[str]
) -> None:
    harness = make(echo_then("done", "a"), policy=ASK_POLICY)
    settings = harness.builder._settings.model_copy(update={"approvals": approvals})
    harness.work.builder = AgentBuilder(settings, harness.pool, harness.builder.reviewer.approver, ASK_POLICY)
    outcome = await wait_for_outcome(asyncio.create_task(harness.execute(await harness.put(build_run()), defaults)))
    assert outcome.body is not None
    assert find_arguments(harness) == calls
    assert [key async for key in harness.client.scan_iter("*approval*")] == []


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_decision_is_kept_when_its_process_dies(
    make: HarnessFactory, monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    async def withdraw_nothing(*_: Any) -> None:
        """Do nothing: a killed process withdraws no question."""

    first, second = make(echo_then("one", "a"), policy=ASK_POLICY), make(["two"], policy=ASK_POLICY)
    claim = await first.put(build_run())
    with monkeypatch.context() as patch:
        patch.setattr(ApprovalQueue, "withdraw", withdraw_nothing)
        working = asyncio.create_task(first.execute(claim, ASK_DEFAULTS))
        await find_question(first)
        working.cancel()
        await asyncio.wait({working}, timeout=SOON_S)
    resumed_claim = await second.claim_by_other(claim)
    await decide(second, Decision(is_allowed, "said meanwhile"))
    outcome = await wait_for_outcome(asyncio.create_task(second.execute(resumed_claim, ASK_DEFAULTS)))
    assert outcome.body["answer"] == "two"
    assert find_arguments(second) == (["a"] if is_allowed else [])
    assert find_arguments(first) == []


async def test_resumed_run_asks_the_same_question(make: HarnessFactory) -> None:
    first, second = make(echo_then("one", "a"), policy=ASK_POLICY), make(["two"], policy=ASK_POLICY)
    claim = await first.put(build_run())
    first_work = asyncio.create_task(first.execute(claim, ASK_DEFAULTS))
    before = await find_question(first)
    asker = await find_asker(first, before)
    resumed_claim = await second.claim_by_other(claim)
    working = asyncio.create_task(second.execute(resumed_claim, ASK_DEFAULTS))
    await wait_until_async(
        lambda: find_asker(first, before), SOON_S, "the second asks", 0.01, lambda found: found != asker
    )
    # The first, which has lost the run, ends late: it takes nothing away that the second waits for.
    first_work.cancel()
    await asyncio.wait({first_work}, timeout=SOON_S)
    assert await find_question(second) == before
    await decide(second, Decision(True))
    assert (await wait_for_outcome(working)).body is not None
    assert find_arguments(second) == ["a"]


async def find_asker(harness: ItemHarness, question: ApprovalQuestion) -> Any:
    return await harness.client.hget(f"toolcrew:d:approval:{question.id}", "asker")


def test_batch_without_asks_people_is_readable_by_older_releases() -> None:
    assert "asks_people" not in BatchDefaults().model_dump_json()
    assert "asks_people" not in BatchDefaults().model_dump()
    fields = {"state": "in_progress", "total": "1", "sha256": "x", "concurrency": "1", "created_at": "0"}
    for defaults in (BatchDefaults(), ASK_DEFAULTS):
        entries = {
            name.encode(): value.encode()
            for name, value in {**fields, "defaults": seal_defaults(KEY, "acme", "b", defaults)}.items()
        }
        assert parse_batch(KEY, "acme", "b", entries).defaults == defaults


async def test_approval_stays_valid_while_the_run_waits_for_a_slot(
    make: HarnessFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, runs = make(echo_then("done", "a"), policy=ASK_POLICY), [None]
    monkeypatch.setattr(
        harness.builder, "_settings", harness.builder._settings.model_copy(update={"approval_wait_s": 3.0})
    )
    harness.work.slots.configure(1, runs)
    working = asyncio.create_task(harness.execute(await harness.put(build_run()), ASK_DEFAULTS))
    await find_question(harness)
    over_at = time.monotonic() + 3.2
    assert harness.work.slots.count_free() == 1
    # Another run has the place until the question is long over.
    runs.append(None)
    await decide(harness, Decision(True))
    await asyncio.sleep(over_at - time.monotonic())
    assert find_arguments(harness) == []
    runs.pop()
    assert harness.work.slots.count_free() == 0
    await wait_for_outcome(working)
    assert find_arguments(harness) == ["a"]


async def test_running_call_keeps_the_slot_while_another_call_waits(make: HarnessFactory) -> None:
    runs, may_end = asyncio.Event(), asyncio.Event()

    async def answer(call: ToolCall, _: ToolContext) -> ToolResult:
        runs.set()
        await may_end.wait()
        return ToolResult(call_id=call.id, name=call.name, success=True, output="said")

    both = Calls([("echo", {"text": "a"}), ("echo", {"text": "b"})])
    harness = make([both, "done"], policy=ASK_POLICY, answers={"echo": answer}, echo=build_spec("echo", read_only=True))
    room = harness.work.slots.count_free
    harness.work.slots.configure(1, [None])
    working = asyncio.create_task(harness.execute(await harness.put(build_run()), ASK_DEFAULTS))
    first, _ = await ApprovalHarness(harness.client).until_pending(2)
    assert room() == 1
    await ApprovalHarness(harness.client).queue().decide(first.id, Decision(True), digest=first.digest, actor=ADMIN)
    async with asyncio.timeout(SOON_S):
        await runs.wait()
        assert room() == 0
        may_end.set()
        # The end of a call has no event of ours.
        await until(lambda: room() > 0)
    await decide(harness, Decision(True))
    outcome = await wait_for_outcome(working)
    assert (outcome.body["answer"], room()) == ("done", 0)


async def test_continuing_run_uses_the_slot_of_an_item_without_sandbox(make: HarnessFactory) -> None:
    is_opening, may_open = asyncio.Event(), asyncio.Event()

    async def open_late(call: ToolCall, _: ToolContext) -> ToolResult:
        is_opening.set()
        await may_open.wait()
        return ToolResult(call_id=call.id, name=call.name, success=True, metadata=OPENED)

    harness = make(answers={"open": open_late})
    slots, runs = harness.work.slots, {"other", "item"}
    slots.configure(1, runs)
    async with slots.run() as other, other.call("call"):
        other.rest("call")
        working = asyncio.create_task(harness.execute(await harness.put(build_run())))
        async with asyncio.timeout(SOON_S):
            await is_opening.wait()
            await other.wait("call")
    may_open.set()
    runs.discard("other")
    slots.count_free()
    assert (await wait_for_outcome(working)).failure is None
