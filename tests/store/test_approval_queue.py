"""The queue of approval questions: asked, listed and answered once, also from other processes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.conftest import RedisProcess
from tests.support.records.builders import build_call
from tests.support.redis.approval_harness import (
    ACME,
    ADMIN,
    OPERATOR,
    SHELL,
    ApprovalHarness,
    build_question,
    build_request,
    open_harness,
)
from tests.support.stack.waiting import SOON_S, until
from toolcrew.contract.approvals import Decision
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.approvals.approvers import AutoApprover, RefusingApprover
from toolcrew.orchestrator.approvals.asking import QueueApprover, choose_people_approver, choose_pool_approver
from toolcrew.orchestrator.approvals.gate import review
from toolcrew.store import approvals as queue_file
from toolcrew.store.approvals import AlreadyAnswered, ApprovalQueue, OtherCall, QuestionOver, UnknownQuestion

YES, NO = Decision(True), Decision(False, "not today")


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApprovalHarness]:
    async with open_harness(redis_server, monkeypatch) as opened:
        yield opened


async def test_a_question_lists_the_exact_call_and_another_process_answers(harness: ApprovalHarness) -> None:
    decision_task = asyncio.create_task(QueueApprover(harness.queue()).decide(request := build_request()))
    (question,) = await harness.until_pending()
    assert (question.tenant, question.session, question.run, question.call) == ("acme", "s1", "run-1", request.call)
    assert (question.command, question.reason) == ("rm -rf /data", "it is dangerous")
    assert question.warning == "it removes files"
    answer = await harness.queue().decide(question.id, YES, digest=question.digest, actor=ACME)
    async with asyncio.timeout(SOON_S):
        assert await decision_task == Decision(True, digest=request.digest)
    assert answer.describe().startswith("allowed by ann at ")
    assert (await harness.queue().pending(ADMIN)).questions == ()


async def test_a_question_is_withdrawn_when_its_call_is_cancelled(harness: ApprovalHarness) -> None:
    decision_task = asyncio.create_task(QueueApprover(harness.queue()).decide(build_request()))
    (question,) = await harness.until_pending()
    decision_task.cancel()
    await asyncio.wait({decision_task}, timeout=SOON_S)
    assert decision_task.cancelled()
    with pytest.raises(QuestionOver):
        await harness.queue().decide(question.id, YES, digest=question.digest, actor=ADMIN)
    assert (await harness.queue().pending(ADMIN)).questions == ()


async def test_an_unanswered_question_is_denied_and_cannot_be_answered_later(harness: ApprovalHarness) -> None:
    call = build_call("bash_tool", command="git push --force")
    result = await review(
        call, SHELL, QueueApprover(harness.queue()), tenant="acme", session="s1", run="run-1", ttl_s=0.3
    )
    assert isinstance(result, ToolResult)
    assert "no approver answered within 0.3 s" in (result.error or "")
    question = build_question("git push --force")
    question = question.model_copy(update={"call": call})
    assert (await harness.queue().pending(ADMIN)).questions == ()
    keys = [key async for key in harness.client.scan_iter("toolcrew:d:approval:*")]
    assert len(keys) == 1
    with pytest.raises(QuestionOver):
        await harness.queue().decide(keys[0].decode().rsplit(":", 1)[1], YES, digest="", actor=ADMIN)
    assert 0 < await harness.client.pttl(keys[0]) <= queue_file.CLOSED_QUESTION_TTL_S * 1000 + 1000


async def test_concurrent_questions_get_their_own_answers(
    harness: ApprovalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_file, "_AT_ONCE", 7)
    queue, batch_sizes = harness.queue(), list[int]()

    class CountingQueue(ApprovalQueue):
        async def answers(self, ids):  # type: ignore[no-untyped-def]
            batch_sizes.append(len(ids))
            return await super().answers(ids)

    queue.__class__ = CountingQueue
    approver = QueueApprover(queue)
    decision_task = [asyncio.create_task(approver.decide(build_request(number=number))) for number in range(40)]
    await harness.until_pending(40)
    for number in range(40):
        question = build_question(number=number)
        await harness.queue().decide(
            question.id, Decision(number % 2 == 0, str(number)), digest=question.digest, actor=ADMIN
        )
    async with asyncio.timeout(SOON_S):
        result = await asyncio.gather(*decision_task)
    assert [(one.is_allowed, one.reason) for one in result] == [(number % 2 == 0, str(number)) for number in range(40)]
    assert max(batch_sizes) > 1


async def test_a_question_survives_redis_failures_while_it_waits(harness: ApprovalHarness) -> None:
    class FlakyQueue(ApprovalQueue):
        failures = 3

        async def ask(self, question, asker, wait_s):  # type: ignore[no-untyped-def]
            self._fail()
            return await super().ask(question, asker, wait_s)

        async def answers(self, ids):  # type: ignore[no-untyped-def]
            self._fail()
            return await super().answers(ids)

        def _fail(self) -> None:
            self.failures -= 1
            if self.failures >= 0:
                raise BrokerUnavailable("Redis is away")

    queue = harness.queue()
    queue.__class__ = FlakyQueue
    decision_task = asyncio.create_task(QueueApprover(queue).decide(build_request()))
    (question,) = await harness.until_pending()
    queue.failures = 3  # type: ignore[attr-defined]
    # Failed polls have no event of ours.
    await until(lambda: queue.failures < 0, SOON_S)  # type: ignore[attr-defined]
    await harness.queue().decide(question.id, YES, digest=question.digest, actor=ADMIN)
    async with asyncio.timeout(SOON_S):
        assert (await decision_task).is_allowed


async def test_a_waiter_that_starts_while_the_last_one_stops_gets_its_answer(harness: ApprovalHarness) -> None:
    approver, question = QueueApprover(harness.queue()), build_question()
    await harness.queue().ask(question, "alice", SOON_S)
    first = asyncio.create_task(approver._await_answer("another"))
    await asyncio.sleep(0)  # It waits now.
    first.cancel()
    second = asyncio.create_task(approver._await_answer(question.id))
    await asyncio.gather(first, return_exceptions=True)
    await harness.queue().decide(question.id, YES, digest=question.digest, actor=ADMIN)
    async with asyncio.timeout(SOON_S):
        assert (await second).to_decision().is_allowed


async def test_an_unexpected_error_while_polling_ends_the_wait(harness: ApprovalHarness) -> None:
    class BrokenQueue(ApprovalQueue):
        async def answers(self, ids):  # type: ignore[no-untyped-def]
            raise RuntimeError("a bug")

    queue = harness.queue()
    queue.__class__ = BrokenQueue
    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(SOON_S):
            await QueueApprover(queue).decide(build_request())
    assert (await harness.queue().pending(ADMIN)).questions == ()


async def test_an_answer_is_audited_once_and_a_refused_one_is_not(harness: ApprovalHarness) -> None:
    queue, question = harness.queue(), build_question()
    await queue.ask(question, "x", 60)
    with pytest.raises(OtherCall):
        await queue.decide(question.id, YES, digest="0" * 64, actor=ADMIN)
    await queue.decide(question.id, Decision(True, "fine", {"command": "ls"}), digest=question.digest, actor=OPERATOR)
    with pytest.raises(AlreadyAnswered):
        await queue.decide(question.id, NO, digest=question.digest, actor=ADMIN)
    (stored_entry,) = await harness.entries()
    entry = stored_entry
    assert (entry.actor, entry.action, entry.tenant, entry.target) == (OPERATOR, "approval.allow", "acme", question.id)
    assert entry.details == {
        "tool": "bash_tool",
        "call": "run-1-1",
        "run": "run-1",
        "digest": question.digest,
        "reason": "fine",
        "arguments": "changed",
    }


async def test_pages_list_questions_in_order_of_expiry(
    harness: ApprovalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_file, "_AT_ONCE", 4)
    queue = harness.queue()
    questions = [build_question(number=number) for number in range(30)]
    for at, question in enumerate(questions):
        await queue.ask(question, "x", 60 + at // 10)
    # Ten each at the very same moment: more than one look holds.
    for at, question in enumerate(questions):
        moment = 2_000_000_000_000 + at // 10
        await harness.client.hset(f"toolcrew:d:approval:{question.id}", "expires_at", moment)
        await harness.client.zadd("toolcrew:d:approvals", {question.id: moment})
    ids, cursor, pages = list[str](), None, 0
    while pages == 0 or cursor is not None:
        page = await queue.pending(ADMIN, cursor=cursor, limit=7)
        ids, cursor, pages = [*ids, *(one.question.id for one in page.questions)], page.cursor, pages + 1
    assert ids == [id_ for at in (0, 10, 20) for id_ in sorted(one.id for one in questions[at : at + 10])]
    assert pages == 5


@pytest.mark.parametrize(
    "cursor", ["", "x", "1", "-", f"x-{'0' * 32}", f"{'9' * 40}-{'0' * 32}", "1-2", f"٣-{'0' * 32}"]
)
async def test_an_invalid_cursor_is_refused(harness: ApprovalHarness, cursor: str) -> None:
    with pytest.raises(ToolFailure) as refused:
        await harness.queue().pending(ADMIN, cursor=cursor)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


async def test_a_redis_error_is_reported_as_broker_unavailable(harness: ApprovalHarness) -> None:
    queue, question = harness.queue(), build_question()
    await harness.client.set("toolcrew:d:approvals", "not a sorted set")
    for work in (queue.ask(question, "x", 60), queue.pending(ADMIN)):
        with pytest.raises(BrokerUnavailable):
            await work


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("auto", AutoApprover), ("never", RefusingApprover), ("ask", QueueApprover), ("queue", QueueApprover)],
)
async def test_the_approvals_setting_selects_the_approver(harness: ApprovalHarness, mode: str, kind: type) -> None:
    settings = OrchestratorSettings.model_validate({"approvals": mode, "deployment": "d"})
    queue = harness.queue()
    assert isinstance(choose_people_approver(settings, queue), kind)
    expected = RefusingApprover if mode == "ask" else kind
    assert isinstance(choose_pool_approver(settings, queue, is_interactive=False), expected)


async def test_an_unknown_or_malformed_question_id_is_refused(harness: ApprovalHarness) -> None:
    for id_ in ("0" * 32, "", "x", "..", "0" * 31 + "\n", "A" * 32, "٣" * 32):
        with pytest.raises(UnknownQuestion):
            await harness.queue().get(id_, ADMIN)
