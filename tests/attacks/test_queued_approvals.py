"""Attacks of tenants, approvers and processes with write access to Redis on the queue of approval questions. No
engine is needed.
"""

import asyncio
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call
from tests.support.redis.approval_harness import (
    ACME,
    ADMIN,
    OTHER,
    SHELL,
    ApprovalHarness,
    build_question,
    build_request,
    open_harness,
)
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.approvals import Decision
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import audit_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.approvals.asking import QueueApprover
from toolcrew.orchestrator.approvals.gate import review
from toolcrew.orchestrator.operations.redis_users import ROLES
from toolcrew.store import approvals as queue_file
from toolcrew.store.approvals import (
    MAX_ARGUMENT_BYTES,
    MAX_QUESTION_BYTES,
    AlreadyAnswered,
    ApprovalAnswer,
    OtherCall,
    UnknownQuestion,
    approval_key,
    approvals_key,
    build_answer,
    seal,
    tenant_approvals_key,
)

YES, NO = Decision(True), Decision(False, "no")
WRONG_KEYS = SigningKeys.of("a guess of the secret, as long as it takes")


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApprovalHarness]:
    async with open_harness(redis_server, monkeypatch) as opened:
        yield opened


async def call_with_forged_answer(harness: ApprovalHarness, command: str = "git push --force") -> ToolResult:
    """Return the result of a call whose question is answered as the attacker has prepared."""
    call = build_call("bash_tool", command=command)
    async with asyncio.timeout(SOON_S):
        result = await review(call, SHELL, QueueApprover(harness.queue()), tenant="acme", session="s1", run="run-1")
    assert isinstance(result, ToolResult)
    assert result.error_code is ErrorCode.PERMISSION_DENIED
    return result


async def test_only_one_of_many_concurrent_decisions_is_accepted(harness: ApprovalHarness) -> None:
    question = build_question()
    await harness.queue().ask(question, "x", 60)
    result = await asyncio.gather(
        *(
            harness.queue().decide(question.id, YES if at % 2 else NO, digest=question.digest, actor=ADMIN)
            for at in range(20)
        ),
        return_exceptions=True,
    )
    (answer,) = [one for one in result if isinstance(one, ApprovalAnswer)]
    assert sum(isinstance(one, AlreadyAnswered) for one in result) == 19
    assert all(one.answer == answer for one in result if isinstance(one, AlreadyAnswered))
    assert len(await harness.entries()) == 1


async def test_a_refusal_cannot_be_changed_by_asking_or_deciding_again(harness: ApprovalHarness) -> None:
    queue, question = harness.queue(), build_question()
    await queue.ask(question, "x", 60)
    await queue.decide(question.id, NO, digest=question.digest, actor=ADMIN)
    for _ in range(2):
        answer = await queue.ask(question, "again", 60)
        assert answer is not None
        assert not answer.is_allowed
        with pytest.raises(AlreadyAnswered):
            await queue.decide(question.id, YES, digest=question.digest, actor=ADMIN)


async def test_a_decision_with_another_digest_is_refused(harness: ApprovalHarness) -> None:
    queue, harmless, harmful = harness.queue(), build_question("ls"), build_question("rm -rf /data")
    await queue.ask(harmful, "x", 60)
    for digest in (harmless.digest, "", harmful.digest[:-1], harmful.digest.upper()):
        with pytest.raises(OtherCall):
            await queue.decide(harmful.id, YES, digest=digest, actor=ADMIN)
    assert (await queue.get(harmful.id, ADMIN)).question == harmful


async def test_approval_questions_of_another_tenant_look_unknown(harness: ApprovalHarness) -> None:
    queue, waits, answered = harness.queue(), build_question(number=1), build_question(number=2)
    for question in (waits, answered):
        await queue.ask(question, "x", 60)
    await queue.decide(answered.id, NO, digest=answered.digest, actor=ADMIN)
    result = set()
    for id_, digest in ((waits.id, waits.digest), (answered.id, answered.digest), ("0" * 32, "")):
        for attempt in (queue.get(id_, OTHER), queue.decide(id_, YES, digest=digest, actor=OTHER)):
            with pytest.raises(UnknownQuestion) as unknown:
                await attempt
            result.add(str(unknown.value).replace(id_, "ID"))
    assert len(result) == 1
    assert (await queue.get(waits.id, ACME)).question == waits


NESTED: dict[str, Any] = {}
_at = NESTED
for _ in range(5000):
    _at["a"] = _at = {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": float("nan")},
        {"command": float("inf")},
        {"command": {1, 2}},
        {"command": b"bytes"},
        {("a", "b"): 1},
        NESTED,
        {"command": "x" * MAX_ARGUMENT_BYTES},
    ],
    ids=["nan", "inf", "set", "bytes", "key", "nested", "huge"],
)
async def test_hostile_arguments_are_refused_and_the_question_keeps_waiting(
    harness: ApprovalHarness, arguments: Any
) -> None:
    queue, question = harness.queue(), build_question()
    await queue.ask(question, "x", 60)
    with pytest.raises(ToolFailure) as failure:
        await queue.decide(question.id, Decision(True, arguments=arguments), digest=question.digest, actor=ACME)
    assert failure.value.code is ErrorCode.INVALID_ARGUMENTS
    assert await harness.entries() == []
    assert (await queue.get(question.id, ACME)).question == question


async def test_a_refusal_with_arguments_and_an_overlong_reason_are_rejected(harness: ApprovalHarness) -> None:
    queue, question = harness.queue(), build_question()
    await queue.ask(question, "x", 60)
    for decision in (Decision(False, arguments={"command": "ls"}), Decision(True, "x" * 2000)):
        with pytest.raises(ToolFailure):
            await queue.decide(question.id, decision, digest=question.digest, actor=ACME)
    assert await harness.entries() == []


async def test_the_limit_of_waiting_questions_applies_to_each_tenant(
    harness: ApprovalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_file, "MAX_PENDING", 5)
    queue = harness.queue()
    for number in range(5):
        await queue.ask(build_question(number=number), "x", 60)
    decision = await QueueApprover(harness.queue()).decide(build_request(number=6))
    assert not decision.is_allowed
    assert "5 calls of the tenant already wait" in decision.reason
    # A waiting question may be asked again, and another tenant can still ask.
    assert await queue.ask(build_question(number=1), "y", 60) is None
    assert await queue.ask(build_question(tenant="other"), "x", 60) is None
    question = build_question(number=2)
    await queue.decide(question.id, NO, digest=question.digest, actor=ACME)
    assert await queue.ask(build_question(number=6), "x", 60) is None


async def test_a_question_above_the_size_limit_is_refused(harness: ApprovalHarness) -> None:
    decision = await QueueApprover(harness.queue()).decide(build_request("true;" * (MAX_QUESTION_BYTES // 5)))
    assert not decision.is_allowed
    assert "shorten the arguments" in decision.reason
    assert [key async for key in harness.client.scan_iter("*")] == []


# Attackers with write access to Redis, but without the secret


def test_no_worker_role_can_write_approvals_or_the_audit_log() -> None:
    for tenant in ("acme", "approval", "session", "call", "web"):
        keys = (approvals_key("d"), tenant_approvals_key("d", tenant), approval_key("d", "0" * 32), audit_key("d"))
        for role in (ROLES["worker"], ROLES["web"], ROLES["flower"]):
            patterns = [*(f"toolcrew:d:{own}" for own in role.own), *role.keys]
            assert [
                (key, pattern)
                for key in (*keys, f"{keys[2]}:decision")
                for pattern in patterns
                if fnmatchcase(key, pattern)
            ] == []


async def test_an_approval_decision_without_a_valid_signature_is_ignored(harness: ApprovalHarness) -> None:
    call = build_call("bash_tool", command="git push --force")
    question = build_question().model_copy(update={"call": call})
    real = asyncio.create_task(call_with_forged_answer(harness))
    (question,) = await harness.until_pending()
    forged = seal(WRONG_KEYS, build_answer(question, YES, ADMIN, 0.0))
    await harness.client.set(f"toolcrew:d:approval:{question.id}:decision", forged)
    await real


async def test_a_forged_decision_stored_before_the_question_is_ignored(harness: ApprovalHarness) -> None:
    waiting = asyncio.create_task(call_with_forged_answer(harness))
    (question,) = await harness.until_pending()
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=SOON_S)
    for forged in (
        seal(WRONG_KEYS, build_answer(question, YES, ADMIN, 0.0)),
        "",
        "junk",
        "a.b.{}",
        '{"is_allowed": true}',
    ):
        await harness.client.set(f"toolcrew:d:approval:{question.id}:decision", forged)
        await call_with_forged_answer(harness)


async def test_a_decision_copied_from_another_question_is_ignored(harness: ApprovalHarness) -> None:
    harmless = build_question("ls")
    await harness.queue().ask(harmless, "x", 60)
    await harness.queue().decide(harmless.id, YES, digest=harmless.digest, actor=ADMIN)
    genuine = await harness.client.get(f"toolcrew:d:approval:{harmless.id}:decision")
    waiting = asyncio.create_task(call_with_forged_answer(harness))
    (question,) = await harness.until_pending()
    await harness.client.set(f"toolcrew:d:approval:{question.id}:decision", genuine)
    assert not isinstance((await harness.queue().answers([question.id]))[question.id], ApprovalAnswer)
    await waiting


async def test_a_changed_or_forged_question_is_not_shown(harness: ApprovalHarness) -> None:
    queue, question, harmless = harness.queue(), build_question(), build_question("ls")
    await queue.ask(question, "x", 60)
    key = f"toolcrew:d:approval:{question.id}"
    genuine = (await harness.client.hget(key, "question")).decode()
    result = genuine.replace("it removes files", "it shows files")
    assert result != genuine
    for shown in (
        result,
        seal(WRONG_KEYS, question),
        seal(KEY, harmless),
        "junk",
        genuine.replace("rm -rf /data", "ls"),
    ):
        await harness.client.hset(key, "question", shown)
        assert (await queue.pending(ADMIN)).questions == ()
        with pytest.raises(UnknownQuestion):
            await queue.decide(question.id, YES, digest=question.digest, actor=ADMIN)
    # A signed question with the digest of another call.
    await harness.client.hset(key, "question", seal(KEY, question.model_copy(update={"call": harmless.call})))
    assert (await queue.pending(ADMIN)).questions == ()


async def test_a_decision_of_another_deployment_is_ignored(harness: ApprovalHarness) -> None:
    question = build_question()
    await harness.queue().ask(question, "x", 60)
    await harness.queue().decide(question.id, YES, digest=question.digest, actor=ADMIN)
    elsewhere = harness.queue(SigningKeys.of("the secret of the other deployment, its own"))
    assert not isinstance((await elsewhere.answers([question.id]))[question.id], ApprovalAnswer)
