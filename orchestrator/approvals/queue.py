"""The questions that wait for people, in Redis: put there by whoever runs the calls, answered once, from any other process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from contract.errors import EnvelopeRefused, ErrorCode, OperatorError, ToolFailure
from contract.names import approval_key, approvals_key, audit_key, tenant_approvals_key
from contract.signing import SigningKeys
from orchestrator.approvals.approvers import Decision
from orchestrator.approvals.questions import (
    ID_CHARS,
    AlreadyAnswered,
    Answer,
    OtherCall,
    Question,
    QuestionOver,
    UnknownQuestion,
    build_answer,
    is_whole,
    seal,
    unseal,
)
from store.actors import Actor
from store.audit import AUDIT_LUA, build_entry, entry_text
from store.connection import RedisClient, broker_errors
from telemetry.logs import get_logger

log = get_logger(__name__)

Approvers = Literal["tenant", "operator"]
"""Who answers: also the tenant whose call it is, or operators alone."""
MAX_PENDING = 1000
"""Questions of one tenant that wait at a time."""
MAX_WAIT_S = 7 * 86_400.0
ANSWER_KEPT_S = 86_400.0
"""How long an answer stays, for a run that nobody works when it is given."""
OVER_KEPT_S = 3600.0
"""How long it is known of a question that nobody waits any more."""
MAX_PAGE = 1000
_AT_ONCE = 500
_WHAT = "the questions were not read or changed"

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_ASK = (
    _NOW
    + """
-- KEYS: question, answer, all questions, the tenant's. ARGV: id, question, digest, asker, how long it waits and how long it is known, both in ms,
-- most of a tenant.
local answer = redis.call('GET', KEYS[2])
if answer then return {'answered', answer} end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now)
if not redis.call('ZSCORE', KEYS[4], ARGV[1]) and redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[7]) then return {'full'} end
local expires_at = now + ARGV[5]
redis.call('HSETNX', KEYS[1], 'created_at', now)
redis.call('HSET', KEYS[1], 'question', ARGV[2], 'digest', ARGV[3], 'asker', ARGV[4], 'expires_at', expires_at)
redis.call('PEXPIRE', KEYS[1], ARGV[6])
for at = 3, 4 do
  redis.call('ZADD', KEYS[at], expires_at, ARGV[1])
  redis.call('PEXPIRE', KEYS[at], math.max(redis.call('PTTL', KEYS[at]), ARGV[6]))
end
return {'asked'}
"""
)
_WITHDRAW = (
    _NOW
    + """
-- KEYS: question, all questions, the tenant's. ARGV: id, asker. What another has asked again is another's.
if redis.call('HGET', KEYS[1], 'asker') ~= ARGV[2] then return 0 end
if tonumber(redis.call('HGET', KEYS[1], 'expires_at')) > now then redis.call('HSET', KEYS[1], 'expires_at', now) end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
"""
)
_ANSWER = (
    AUDIT_LUA
    + _NOW
    + """
-- KEYS: question, answer, all questions, the tenant's, audit. ARGV: id, digest, answer, how long it is kept in ms, entry.
local answer = redis.call('GET', KEYS[2])
if answer then return {'answered', answer} end
local kept = redis.call('HMGET', KEYS[1], 'digest', 'expires_at')
if not kept[1] then return {'unknown'} end
if kept[1] ~= ARGV[2] then return {'other'} end
if tonumber(kept[2]) <= now then return {'over', kept[2]} end
audit(KEYS[5], ARGV[5])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
return {'done'}
"""
)


@dataclass(frozen=True)
class Pending:
    """A question that waits. Unix seconds of Redis's clock; an answer after `expires_at` does not count."""

    question: Question
    created_at: float
    expires_at: float

    def to_json(self) -> dict[str, Any]:
        # Not by way of JSON: arguments may hold halves of characters.
        return {**self.question.model_dump(), "created_at": self.created_at, "expires_at": self.expires_at}


@dataclass(frozen=True)
class PendingPage:
    """Questions, those that expire first first. `cursor`: where the next begin, if there are any; None when there are none."""

    questions: tuple[Pending, ...]
    cursor: str | None


class ApprovalQueue:
    """The questions of one deployment. `approvers`: who answers. Every method raises BrokerUnavailable when Redis does not answer.

    An actor of the role tenant sees and answers its own tenant's; of others' questions it is not said that they are there.
    """

    def __init__(
        self,
        client: RedisClient,
        deployment: str,
        keys: SigningKeys,
        approvers: Approvers = "tenant",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._deployment, self._keys, self._approvers, self._clock = client, deployment, keys, approvers, clock
        self._ask_script, self._withdraw_script = client.register_script(_ASK), client.register_script(_WITHDRAW)
        self._answer_script = client.register_script(_ANSWER)

    async def ask(self, question: Question, asker: str, wait_s: float) -> Answer | None:
        """Put a question there, or again: then it waits anew. `asker`: the word by which whoever waits may withdraw it. The answer, when there is one.

        Raises ToolFailure(QUOTA_EXCEEDED) when too many of the tenant wait; EnvelopeRefused for an answer that nobody with the secret has given.
        """
        wait_ms = int(min(wait_s, MAX_WAIT_S) * 1000)
        args = [question.id, seal(self._keys, question), question.digest, asker, wait_ms, wait_ms + int(OVER_KEPT_S * 1000), MAX_PENDING]
        told = await self._run(self._ask_script, [*self._keys_of(question.id), *self._sets(question.tenant)], args)
        if told[0] == b"full":
            raise ToolFailure(
                ErrorCode.QUOTA_EXCEEDED,
                f"it needs approval, and {MAX_PENDING} calls of the tenant wait for one already: try again when some have been answered",
            )
        return unseal(self._keys, Answer, question.id, told[1]) if told[0] == b"answered" else None

    async def withdraw(self, question: Question, asker: str) -> None:
        """Nobody waits any more. What others have asked again meanwhile stays."""
        await self._run(self._withdraw_script, [self._keys_of(question.id)[0], *self._sets(question.tenant)], [question.id, asker])

    async def answers(self, ids: Sequence[str]) -> dict[str, Answer | EnvelopeRefused]:
        """Those of the questions that have been answered; in place of an answer that nobody with the secret has given: that."""
        found: dict[str, Answer | EnvelopeRefused] = {}
        for at in range(0, len(ids), _AT_ONCE):
            some = ids[at : at + _AT_ONCE]
            with broker_errors(_WHAT):
                told: Any = await self._client.mget([self._keys_of(id_)[1] for id_ in some])
            for id_, sealed in zip(some, told, strict=True):
                if sealed is not None:
                    found[id_] = self._opened(id_, sealed)
        return found

    async def pending(self, actor: Actor, tenant: str | None = None, cursor: str | None = None, limit: int = 50) -> PendingPage:
        """What waits, of all tenants that the actor may see, or of one. Raises ToolFailure: PERMISSION_DENIED for another tenant's, INVALID_ARGUMENTS."""
        if not 1 <= limit <= MAX_PAGE:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the limit is 1 to {MAX_PAGE}, not {limit}")
        if actor.role == "tenant":
            tenant = tenant or actor.tenant
        if not actor.may_act_for(tenant):
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED, f"the API key is for tenant {actor.tenant} and not for {tenant}: leave the tenant out"
            )
        after, found, at = _parse_cursor(cursor), list[Pending](), 0
        key = self._sets(tenant)[-1] if tenant is not None else approvals_key(self._deployment)
        after = max(after, (int(await self._now() * 1000), ""))
        while True:
            places = await self._places(key, after[0], at)
            new = [place for place in places if place > after]
            waiting = await self._read([id_ for _, id_ in new])
            for score, id_ in new:
                if id_ in waiting:
                    found.append(waiting[id_])
                    if len(found) == limit:
                        return PendingPage(tuple(found), f"{score}-{id_}")
            if len(places) < _AT_ONCE:
                return PendingPage(tuple(found), None)
            # So many of one millisecond that a look gave none that is new: further on among them.
            after, at = (new[-1], 0) if new else (after, at + len(places))

    async def get(self, id_: str, actor: Actor) -> Pending:
        """One that waits. Raises UnknownQuestion, AlreadyAnswered, QuestionOver."""
        pending = (await self._read([id_])).get(id_)
        if pending is None:
            await self._raise_answered(id_, actor)
            raise UnknownQuestion(id_)
        if not actor.may_act_for(pending.question.tenant):
            raise UnknownQuestion(id_)
        if pending.expires_at <= await self._now():
            raise QuestionOver(pending.expires_at)
        return pending

    async def decide(self, id_: str, decision: Decision, *, digest: str, actor: Actor) -> Answer:
        """Answer a question, once; `digest`: of the question as the actor saw it. The audit gets its entry in the same step.

        Raises UnknownQuestion, AlreadyAnswered, QuestionOver, OtherCall; ToolFailure: PERMISSION_DENIED where only operators answer, INVALID_ARGUMENTS for
        arguments or a reason that cannot be kept.
        """
        question = (await self.get(id_, actor)).question
        if actor.role == "tenant" and self._approvers == "operator":
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                "calls are approved by operators here (TOOLCREW_APPROVERS=operator): ask one, or cancel the run",
            )
        if digest != question.digest:
            raise OtherCall()
        answer = build_answer(question, decision, actor, self._clock())
        details = {"tool": answer.tool, "call": question.call.id, "run": question.run, "digest": digest, "reason": answer.reason}
        details["arguments"] = "changed" if answer.arguments is not None else ""
        action: Literal["approval.allow", "approval.deny"] = "approval.allow" if answer.is_allowed else "approval.deny"
        entry = build_entry(actor, action, id_, tenant=question.tenant, details=details)
        keys = [*self._keys_of(id_), *self._sets(question.tenant), audit_key(self._deployment)]
        args = [id_, digest, seal(self._keys, answer), int(ANSWER_KEPT_S * 1000), entry_text(entry)]
        told = await self._run(self._answer_script, keys, args)
        if told[0] == b"answered":
            known = self._opened(id_, told[1])
            raise AlreadyAnswered(known) if isinstance(known, Answer) else OperatorError(f"the question {id_} has an answer, and {known}")
        if told[0] == b"over":
            raise QuestionOver(float(told[1]) / 1000)
        if told[0] != b"done":
            raise OtherCall() if told[0] == b"other" else UnknownQuestion(id_)
        return answer

    async def _places(self, key: str, lowest: int, at: int) -> list[tuple[int, str]]:
        """Of what waits, when each expires, in ms, and its id; from `lowest` on, leaving out the first `at`."""
        with broker_errors(_WHAT):
            rows: Any = await self._client.zrangebyscore(key, lowest, "+inf", start=at, num=_AT_ONCE, withscores=True)
        return [(int(score), member.decode()) for member, score in rows]

    async def _read(self, ids: Sequence[str]) -> dict[str, Pending]:
        """Those questions that are there, also such as nobody waits for any more. What nobody with the secret has asked is left out, and logged."""
        pipe = self._client.pipeline(transaction=False)
        for id_ in ids:
            pipe.hmget(self._keys_of(id_)[0], ["question", "created_at", "expires_at"])
        with broker_errors(_WHAT):
            told = await pipe.execute() if ids else []
        found = {}
        for id_, (sealed, created_at, expires_at) in zip(ids, told, strict=True):
            question = self._asked(id_, sealed) if sealed is not None else None
            if question is not None:
                found[id_] = Pending(question, float(created_at) / 1000, float(expires_at) / 1000)
        return found

    def _asked(self, id_: str, sealed: bytes) -> Question | None:
        try:
            question = unseal(self._keys, Question, id_, sealed)
        except EnvelopeRefused as refused:
            log.error("question_refused", approval=id_, error=str(refused))
            return None
        # A question whose digest is that of another call is not asked.
        return question if question.id == id_ and is_whole(question) else None

    def _opened(self, id_: str, sealed: bytes) -> Answer | EnvelopeRefused:
        try:
            return unseal(self._keys, Answer, id_, sealed)
        except EnvelopeRefused as refused:
            return refused

    async def _raise_answered(self, id_: str, actor: Actor) -> None:
        answer = (await self.answers([id_])).get(id_)
        if isinstance(answer, Answer) and answer.id == id_ and actor.may_act_for(answer.tenant):
            raise AlreadyAnswered(answer)

    async def _now(self) -> float:
        with broker_errors(_WHAT):
            seconds, micros = await self._client.time()
        return float(seconds) + float(micros) / 1_000_000

    async def _run(self, script: Any, keys: list[str], args: list[Any]) -> Any:
        with broker_errors(_WHAT):
            return await script(keys=keys, args=args)

    def _keys_of(self, id_: str) -> tuple[str, str]:
        """The question's and its answer's. Raises UnknownQuestion for what is no id: it would be another key."""
        if len(id_) != ID_CHARS or not set(id_) <= set("0123456789abcdef"):
            raise UnknownQuestion(id_)
        key = approval_key(self._deployment, id_)
        return key, f"{key}:decision"

    def _sets(self, tenant: str) -> tuple[str, str]:
        return approvals_key(self._deployment), tenant_approvals_key(self._deployment, tenant)


def _parse_cursor(text: str | None) -> tuple[int, str]:
    if text is None:
        return 0, ""
    score, dash, id_ = text.partition("-")
    if not (dash and score.isascii() and score.isdecimal() and len(score) <= 15 and len(id_) == ID_CHARS):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "that is no cursor of the questions: give one as a page gave it, or leave it out")
    return int(score), id_
