"""Questions about calls that need approval, in Redis. The process that runs a call asks the question; any other
process can answer.

Invariant: a call is decided once, and only with the arguments that the approver has seen. Questions and answers are
signed, limited in size, and bound to one call by its digest.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from toolcrew.contract.approvals import Decision, digest_call
from toolcrew.contract.calls import Identifier, Record, ToolCall
from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.names import account_key, audit_key, deployment_key, tenant_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.audit import AUDIT_LUA, Actor, build_entry, entry_text
from toolcrew.store.clock import read_clock
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.memory import MEMORY_LUA, no_memory
from toolcrew.store.scripts import Script
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


def approvals_key(deployment: str) -> str:
    """Return the key of the sorted set of open questions, by the expiry in Unix milliseconds."""
    return deployment_key(deployment, "approvals")


def tenant_approvals_key(deployment: str, tenant: str) -> str:
    """Return the key of the sorted set of one tenant's open questions."""
    return tenant_key(deployment, tenant, "approvals")


def approval_key(deployment: str, approval: str) -> str:
    """Return the key of the hash of one question. The key of its answer has the suffix `:decision`."""
    return deployment_key(deployment, f"approval:{approval}")


Approvers = Literal["tenant", "operator"]
"""The people who may answer: "tenant": operators and the tenant of the call; "operator": operators only."""
MAX_PENDING = 1000
"""Limit of the open questions of one tenant."""
MAX_WAIT_S = 7 * 86_400.0
ANSWER_TTL_S = 86_400.0
"""Lifetime of an answer, in seconds. The lifetime is long because it is possible that no process executes the run when
the answer arrives; the answer then waits for the next one.
"""
CLOSED_QUESTION_TTL_S = 3600.0
"""Lifetime of a withdrawn or expired question, in seconds. During this time, an answer to the question gets the error
QuestionOver.
"""
MAX_PAGE = 1000
_AT_ONCE = 500
MAX_QUESTION_BYTES = 128 * 1024
"""Limit of a question with its arguments, in bytes. A person cannot judge a longer one."""
MAX_ARGUMENT_BYTES = 128 * 1024
"""Limit of the arguments that an approver supplies in place of the call's own, in bytes."""
MAX_REASON_CHARS = 1024
ID_CHARS = 32
SealedRecord = TypeVar("SealedRecord", bound=Record)
_WHAT = "the questions were not read or changed"
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_ASK = Script(
    _NOW
    + MEMORY_LUA
    + """
-- `text`: the question. `ttl_ms`: of its record. `account`, here and below: memory of the tenant.
local given = redis.call('GET', answer)
if given then return {'answered', given} end
redis.call('ZREMRANGEBYSCORE', all_questions, '-inf', now)
redis.call('ZREMRANGEBYSCORE', tenant_questions, '-inf', now)
local is_new = not redis.call('ZSCORE', tenant_questions, id)
if is_new and redis.call('ZCARD', tenant_questions) >= tonumber(max_questions) then return {'full'} end
if redis.call('EXISTS', question) == 0 and not has_room(account, now / 1000, RUNNING_WORK) then return {'memory'} end
local expires_at = now + wait_ms
redis.call('HSETNX', question, 'created_at', now)
redis.call('HSET', question, 'question', text, 'digest', digest, 'asker', asker, 'expires_at', expires_at)
redis.call('PEXPIRE', question, ttl_ms)
set_bytes(account, now / 1000, question, 'bytes', #text + RECORD_BYTES, (now + ttl_ms) / 1000)
for _, questions in ipairs({all_questions, tenant_questions}) do
  redis.call('ZADD', questions, expires_at, id)
  redis.call('PEXPIRE', questions, math.max(redis.call('PTTL', questions), ttl_ms))
end
return {'asked'}
""",
    keys=("question", "answer", "all_questions", "tenant_questions", "account"),
    args=("id", "text", "digest", "asker", "wait_ms", "ttl_ms", "max_questions"),
)
_WITHDRAW = Script(
    _NOW
    + """
-- Keeps a question that another process has asked again.
if redis.call('HGET', question, 'asker') ~= asker then return 0 end
if tonumber(redis.call('HGET', question, 'expires_at')) > now then redis.call('HSET', question, 'expires_at', now) end
redis.call('ZREM', all_questions, id)
redis.call('ZREM', tenant_questions, id)
return 1
""",
    keys=("question", "all_questions", "tenant_questions"),
    args=("id", "asker"),
)
_ANSWER = Script(
    AUDIT_LUA
    + _NOW
    + MEMORY_LUA
    + """
-- `text`: the answer.
local given = redis.call('GET', answer)
if given then return {'answered', given} end
local stored = redis.call('HMGET', question, 'digest', 'expires_at')
if not stored[1] then return {'unknown'} end
if stored[1] ~= digest then return {'other'} end
if tonumber(stored[2]) <= now then return {'over', stored[2]} end
audit(audit_log, entry)
redis.call('SET', answer, text, 'PX', ttl_ms)
add_bytes(account, now / 1000, #text + ENTRY_BYTES, (now + ttl_ms) / 1000)
set_bytes(account, now / 1000, question, 'bytes', 0)
redis.call('DEL', question)
redis.call('ZREM', all_questions, id)
redis.call('ZREM', tenant_questions, id)
return {'done'}
""",
    keys=("question", "answer", "all_questions", "tenant_questions", "audit_log", "account"),
    args=("id", "digest", "text", "ttl_ms", "entry"),
)


class ApprovalQuestion(Record):
    """The question whether a call may run with exactly these arguments. `command`: the shell command of the call, if
    its tool takes one. `reason`: why approval is needed. `warning`: why the call is dangerous; "" if the call is not
    dangerous. `digest`: the answer must repeat this digest.
    """

    id: str = Field(pattern=rf"^[0-9a-f]{{{ID_CHARS}}}$")
    tenant: Identifier
    session: str | None = None
    run: str = ""
    call: ToolCall
    command: str | None = None
    reason: str = ""
    warning: str = ""
    digest: str


class ApprovalAnswer(Record):
    """The decision about the call with that digest, its author and its time in Unix seconds. `arguments`: arguments
    that replace those of the call.
    """

    id: str
    tenant: Identifier
    tool: str
    digest: str
    is_allowed: bool
    reason: str = Field(default="", max_length=MAX_REASON_CHARS)
    arguments: dict[str, Any] | None = None
    by: Actor
    at: float

    def to_decision(self) -> Decision:
        return Decision(self.is_allowed, self.reason, self.arguments, self.digest)

    def describe(self) -> str:
        """Return the answer as a clause, such as "denied by NAME", for an error message."""
        return f"{'allowed' if self.is_allowed else 'denied'} by {self.by.label()} at {format_instant(self.at)}"


class UnknownQuestion(ToolFailure):
    """The question does not exist, or belongs to another tenant. The error does not reveal which of the two."""

    def __init__(self, id_: str) -> None:
        shown = id_ if len(id_) == ID_CHARS and id_.isalnum() else "of that id"
        super().__init__(
            ErrorCode.INVALID_ARGUMENTS,
            f"the question {shown} does not exist: list the open questions (toolcrew approvals list)",
        )


class AlreadyAnswered(ToolFailure):
    """The question has an answer already. A call is decided once."""

    def __init__(self, answer: ApprovalAnswer) -> None:
        super().__init__(
            ErrorCode.INVALID_ARGUMENTS,
            f"the call was already {answer.describe()}, and a call is decided once: nothing was changed",
        )
        self.answer = answer


class QuestionOver(ToolFailure):
    """The call no longer waits for the answer."""

    def __init__(self, at: float) -> None:
        super().__init__(
            ErrorCode.INVALID_ARGUMENTS,
            f"the question has been closed since {format_instant(at)}, because its time limit was reached or its "
            "run has ended: answer another",
        )


class OtherCall(ToolFailure):
    """The digest in the answer is not the digest of the question, so the answer is about another call."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.INVALID_ARGUMENTS,
            "the digest does not match the call in question: read the question again, then send its digest",
        )


@dataclass(frozen=True)
class PendingQuestion:
    """An open question. Times are Unix seconds of Redis's clock. An answer after `expires_at` does not count."""

    question: ApprovalQuestion
    created_at: float
    expires_at: float


@dataclass(frozen=True)
class QuestionPage:
    """A page of open questions, the first to expire first. `cursor`: the start of the next page; None if there is
    none.
    """

    questions: tuple[PendingQuestion, ...]
    cursor: str | None


class ApprovalQueue:
    """The questions of one deployment. `approvers`: the role that may answer. Every method raises BrokerUnavailable
    when Redis does not answer.

    An actor with the role tenant sees and answers only questions of its own tenant. For such an actor, other questions
    do not exist.
    """

    def __init__(
        self,
        client: RedisClient,
        deployment: str,
        keys: SigningKeys,
        approvers: Approvers = "tenant",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys
        self._approvers = approvers
        self._clock = clock

    async def ask(self, question: ApprovalQuestion, asker: str, wait_s: float) -> ApprovalAnswer | None:
        """Add a question, or extend the time of an existing one. Return the answer, if there is one. `asker`: a token
        with which the caller may withdraw the question.

        Raises ToolFailure(QUOTA_EXCEEDED): the tenant has too many open questions. Raises EnvelopeRefused: the answer
        has a wrong signature.
        """
        wait_ms = int(min(wait_s, MAX_WAIT_S) * 1000)
        with broker_errors(_WHAT):
            reply = await _ASK.run(
                self._client,
                **self._script_keys(question.id, question.tenant),
                id=question.id,
                text=seal(self._keys, question),
                digest=question.digest,
                asker=asker,
                wait_ms=wait_ms,
                ttl_ms=wait_ms + int(CLOSED_QUESTION_TTL_S * 1000),
                max_questions=MAX_PENDING,
            )
        if reply[0] == b"memory":
            raise no_memory("the call needs approval, and the question was not stored")
        if reply[0] == b"full":
            raise ToolFailure(
                ErrorCode.QUOTA_EXCEEDED,
                f"the call needs approval, but {MAX_PENDING} calls of the tenant already wait for one: try again "
                "after some have been answered",
            )
        return unseal(self._keys, ApprovalAnswer, question.id, reply[1]) if reply[0] == b"answered" else None

    async def withdraw(self, question: ApprovalQuestion, asker: str) -> None:
        """Close a question, unless another process has asked the same question since then."""
        all_questions, tenant_questions = self._sets(question.tenant)
        with broker_errors(_WHAT):
            await _WITHDRAW.run(
                self._client,
                question=self._keys_of(question.id)[0],
                all_questions=all_questions,
                tenant_questions=tenant_questions,
                id=question.id,
                asker=asker,
            )

    async def answers(self, ids: Sequence[str]) -> dict[str, ApprovalAnswer | EnvelopeRefused]:
        """Return the answers to these questions. Questions without an answer are left out. An answer with a wrong
        signature is replaced by an EnvelopeRefused.
        """
        answers: dict[str, ApprovalAnswer | EnvelopeRefused] = {}
        for at in range(0, len(ids), _AT_ONCE):
            some = ids[at : at + _AT_ONCE]
            with broker_errors(_WHAT):
                replies: Any = await self._client.mget([self._keys_of(id_)[1] for id_ in some])
            for id_, sealed in zip(some, replies, strict=True):
                if sealed is not None:
                    answers[id_] = self._opened(id_, sealed)
        return answers

    async def pending(
        self, actor: Actor, tenant: str | None = None, cursor: str | None = None, limit: int = 50
    ) -> QuestionPage:
        """Return open questions of all tenants that the actor may see, or of one tenant. Raises
        ToolFailure(PERMISSION_DENIED): the actor may not see that tenant. Raises ToolFailure(INVALID_ARGUMENTS):
        invalid limit or cursor.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the limit {limit} is invalid: use 1 to {MAX_PAGE}")
        if actor.role == "tenant":
            tenant = tenant or actor.tenant
        if not actor.may_act_for(tenant):
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                f"the API key belongs to tenant {actor.tenant}, not to {tenant}: omit the tenant",
            )
        after, questions, at = _parse_cursor(cursor), list[PendingQuestion](), 0
        key = self._sets(tenant)[-1] if tenant is not None else approvals_key(self._deployment)
        # Expired questions stay in the set until the next `ask`, so the page starts at the present time.
        after = max(after, (int(await read_clock(self._client) * 1000), ""))
        while True:
            positions = await self._read_positions(key, after[0], at)
            new = [position for position in positions if position > after]
            waiting = await self._read([id_ for _, id_ in new])
            for score, id_ in new:
                if id_ in waiting:
                    questions.append(waiting[id_])
                    if len(questions) == limit:
                        return QuestionPage(tuple(questions), f"{score}-{id_}")
            if len(positions) < _AT_ONCE:
                return QuestionPage(tuple(questions), None)
            # If a whole read found only known questions, all of them expire in the same millisecond. Then the next read
            # skips as many questions of that millisecond as were read.
            after, at = (new[-1], 0) if new else (after, at + len(positions))

    async def get(self, id_: str, actor: Actor) -> PendingQuestion:
        """Return an open question. Raises UnknownQuestion, AlreadyAnswered or QuestionOver."""
        pending = (await self._read([id_])).get(id_)
        if pending is None:
            await self._raise_answered(id_, actor)
            raise UnknownQuestion(id_)
        if not actor.may_act_for(pending.question.tenant):
            raise UnknownQuestion(id_)
        if pending.expires_at <= await read_clock(self._client):
            raise QuestionOver(pending.expires_at)
        return pending

    async def decide(self, id_: str, decision: Decision, *, digest: str, actor: Actor) -> ApprovalAnswer:
        """Answer a question once. `digest`: the digest of the question that the actor has seen. The same step writes
        the audit entry.

        Raises UnknownQuestion, AlreadyAnswered, QuestionOver or OtherCall. Raises ToolFailure(PERMISSION_DENIED): only
        operators may answer. Raises ToolFailure(INVALID_ARGUMENTS): the arguments or the reason cannot be stored.
        """
        question = (await self.get(id_, actor)).question
        if actor.role == "tenant" and self._approvers == "operator":
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                "only operators approve calls here (TOOLCREW_APPROVERS=operator): ask an operator, or cancel the run",
            )
        if digest != question.digest:
            raise OtherCall()
        answer = build_answer(question, decision, actor, self._clock())
        details = {
            "tool": answer.tool,
            "call": question.call.id,
            "run": question.run,
            "digest": digest,
            "reason": answer.reason,
        }
        details["arguments"] = "changed" if answer.arguments is not None else ""
        action: Literal["approval.allow", "approval.deny"] = "approval.allow" if answer.is_allowed else "approval.deny"
        entry = build_entry(actor, action, id_, tenant=question.tenant, details=details)
        # The script checks digest and expiry again: another process may have changed the question since `get`.
        with broker_errors(_WHAT):
            reply = await _ANSWER.run(
                self._client,
                **self._script_keys(id_, question.tenant),
                audit_log=audit_key(self._deployment),
                id=id_,
                digest=digest,
                text=seal(self._keys, answer),
                ttl_ms=int(ANSWER_TTL_S * 1000),
                entry=entry_text(entry),
            )
        if reply[0] == b"answered":
            existing = self._opened(id_, reply[1])
            if isinstance(existing, ApprovalAnswer):
                raise AlreadyAnswered(existing)
            raise OperatorError(
                f"the question {id_} has a decision that cannot be verified ({existing}): check which programs "
                f"write to this Redis"
            )
        if reply[0] == b"over":
            raise QuestionOver(float(reply[1]) / 1000)
        if reply[0] != b"done":
            raise OtherCall() if reply[0] == b"other" else UnknownQuestion(id_)
        return answer

    async def _read_positions(self, key: str, lowest: int, at: int) -> list[tuple[int, str]]:
        """Return expiry in milliseconds and id of open questions, from `lowest` on, without the first `at`
        questions.
        """
        with broker_errors(_WHAT):
            rows: Any = await self._client.zrangebyscore(key, lowest, "+inf", start=at, num=_AT_ONCE, withscores=True)
        return [(int(score), member.decode()) for member, score in rows]

    async def _read(self, ids: Sequence[str]) -> dict[str, PendingQuestion]:
        """Return the stored questions, including expired ones. A question with a wrong signature is omitted and
        logged.
        """
        pipe = self._client.pipeline(transaction=False)
        for id_ in ids:
            pipe.hmget(self._keys_of(id_)[0], ["question", "created_at", "expires_at"])
        with broker_errors(_WHAT):
            rows = await pipe.execute() if ids else []
        questions = {}
        for id_, (sealed, created_at, expires_at) in zip(ids, rows, strict=True):
            question = self._unseal_question(id_, sealed) if sealed is not None else None
            if question is not None:
                questions[id_] = PendingQuestion(question, float(created_at) / 1000, float(expires_at) / 1000)
        return questions

    def _unseal_question(self, id_: str, sealed: bytes) -> ApprovalQuestion | None:
        try:
            question = unseal(self._keys, ApprovalQuestion, id_, sealed)
        except EnvelopeRefused as refused:
            log.error("question_refused", approval=id_, error=str(refused))
            return None
        # A question with the digest of another call is ignored: the approver would see one call and approve another.
        return question if question.id == id_ and is_whole(question) else None

    def _opened(self, id_: str, sealed: bytes) -> ApprovalAnswer | EnvelopeRefused:
        try:
            return unseal(self._keys, ApprovalAnswer, id_, sealed)
        except EnvelopeRefused as refused:
            return refused

    async def _raise_answered(self, id_: str, actor: Actor) -> None:
        answer = (await self.answers([id_])).get(id_)
        if isinstance(answer, ApprovalAnswer) and answer.id == id_ and actor.may_act_for(answer.tenant):
            raise AlreadyAnswered(answer)

    def _script_keys(self, id_: str, tenant: str) -> dict[str, str]:
        """Return the keys of a question by their names in the scripts."""
        question, answer = self._keys_of(id_)
        all_questions, tenant_questions = self._sets(tenant)
        return {
            "question": question,
            "answer": answer,
            "all_questions": all_questions,
            "tenant_questions": tenant_questions,
            "account": account_key(self._deployment, tenant),
        }

    def _keys_of(self, id_: str) -> tuple[str, str]:
        """Return the keys of a question and its answer. Raises UnknownQuestion: the id is invalid. An invalid id could
        name another key.
        """
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
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "the cursor does not belong to the list of questions: use the cursor of the previous page, or omit it",
        )
    return int(score), id_


def question_id(tenant: str, run: str, digest: str) -> str:
    """Return the id of the question about a call. Every process that continues the run uses the same id. The digest
    covers tenant, session, call id, tool and arguments.
    """
    return hashlib.sha256(dump_plain(["toolcrew question v1", tenant, run, digest]).encode()).hexdigest()[:ID_CHARS]


def build_answer(question: ApprovalQuestion, decision: Decision, by: Actor, at: float) -> ApprovalAnswer:
    """Return the record of a decision. Raises ToolFailure(INVALID_ARGUMENTS): the arguments or the reason cannot be
    stored.
    """
    arguments = dict(decision.arguments) if decision.arguments is not None else None
    if arguments is not None and not decision.is_allowed:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, "a denied call has no arguments: omit the arguments, or allow the call"
        )
    try:
        text = dump_plain(arguments)
        # The arguments are checked as a call would check them, so that every stored answer can run.
        checked = ToolCall(id=question.call.id, name=question.call.name, arguments=json.loads(text) or {})
        answer = ApprovalAnswer(
            id=question.id,
            tenant=question.tenant,
            tool=question.call.name,
            digest=question.digest,
            is_allowed=decision.is_allowed,
            reason=decision.reason,
            arguments=checked.arguments if arguments is not None else None,
            by=by,
            at=at,
        )
    except ValidationError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the decision is invalid ({describe_invalid(error)}): correct it"
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the arguments are not plain JSON: {error}. Send one JSON object"
        ) from error
    if len(text) > MAX_ARGUMENT_BYTES:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"the arguments have {len(text)} bytes as JSON, and the maximum is {MAX_ARGUMENT_BYTES}: send smaller "
            "arguments",
        )
    return answer


def seal(keys: SigningKeys, record: ApprovalQuestion | ApprovalAnswer) -> str:
    """Sign a record for its id. The id depends on tenant, run and call, so the record is valid for no other
    question.
    """
    return keys.seal(_purpose(type(record), record.id), dump_plain(record.model_dump(exclude_defaults=True)))


def unseal(keys: SigningKeys, kind: type[SealedRecord], id_: str, sealed: bytes) -> SealedRecord:
    """Return a record. Raises EnvelopeRefused: the record is not signed for the question with that id, or belongs to
    another release.
    """
    text = keys.unseal(_purpose(kind, id_), sealed)
    try:
        return kind.model_validate(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise EnvelopeRefused(
            "another release wrote this record: upgrade the program that reads it", "version"
        ) from error


def is_whole(question: ApprovalQuestion) -> bool:
    """Return whether the digest belongs to the call in the question."""
    return question.digest == digest_call(question.call, question.tenant, question.session)


def _purpose(kind: type[Record], id_: str) -> str:
    return f"approval {'Question' if kind is ApprovalQuestion else 'Answer'} {id_}"


def dump_plain(value: Mapping[str, Any] | list[Any] | None) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
