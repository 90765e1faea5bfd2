"""A question that people are asked about a call, and the answer that one of them has given, as they are kept: signed, bounded, bound to one call."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from contract.calls import Identifier, Record, ToolCall
from contract.clock import format_instant
from contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from contract.signing import SigningKeys
from orchestrator.approvals.approvers import ApprovalRequest, Decision
from orchestrator.approvals.gate import digest_call
from store.actors import Actor

MAX_QUESTION_BYTES = 128 * 1024
"""Of what is shown, arguments and all. A person who is to read more cannot judge it."""
MAX_ARGUMENT_BYTES = 128 * 1024
"""Of the arguments that an approver gives instead."""
MAX_REASON_CHARS = 1024
ID_CHARS = 32

Kept = TypeVar("Kept", bound=Record)


class Question(Record):
    """What is asked: may this call run, with exactly these arguments? `command`: the shell command of the call, where its tool takes one. `reason`: why
    it is asked; `warning`: why it is dangerous, "" when it is not. `digest`: what the answer is bound to."""

    id: str = Field(pattern=rf"^[0-9a-f]{{{ID_CHARS}}}$")
    tenant: Identifier
    session: str | None = None
    run: str = ""
    call: ToolCall
    command: str | None = None
    reason: str = ""
    warning: str = ""
    digest: str


class Answer(Record):
    """What was decided about the call with that digest, by whom and when (Unix seconds). `arguments`: it is to run with these instead."""

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

    def told(self) -> str:
        """As a sentence's part."""
        return f"{'allowed' if self.is_allowed else 'refused'} by {self.by.label()} at {format_instant(self.at)}"


class UnknownQuestion(ToolFailure):
    """There is none of that id, or it is another tenant's: which of the two is not said."""

    def __init__(self, id_: str) -> None:
        shown = id_ if len(id_) == ID_CHARS and id_.isalnum() else "of that id"
        super().__init__(ErrorCode.INVALID_ARGUMENTS, f"there is no question {shown}: list those that wait (toolcrew approve ls)")


class AlreadyAnswered(ToolFailure):
    """A call is decided once."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(ErrorCode.INVALID_ARGUMENTS, f"it was {answer.told()} already, and a call is decided once: nothing was changed")
        self.answer = answer


class QuestionOver(ToolFailure):
    """Nobody waits for the answer any more."""

    def __init__(self, at: float) -> None:
        super().__init__(
            ErrorCode.INVALID_ARGUMENTS,
            f"nobody waits for this answer any more since {format_instant(at)}: its time was up, or its run has ended; answer another",
        )


class OtherCall(ToolFailure):
    """The answer is to a call that is not the one that is asked about."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.INVALID_ARGUMENTS,
            "the digest is not that of the call that is asked about: look at the question again, and answer that",
        )


def question_id(tenant: str, run: str, digest: str) -> str:
    """The id of the question about a call: the same for whoever goes on with the run. The digest has tenant, session, call id, tool and arguments."""
    return hashlib.sha256(_plain(["toolcrew question v1", tenant, run, digest]).encode()).hexdigest()[:ID_CHARS]


def build_record(request: ApprovalRequest) -> Question:
    """The question as it is kept. Raises ToolFailure(INVALID_ARGUMENTS) for a call that is too long to be read by anybody."""
    question = Question(
        id=question_id(request.tenant, request.run, request.digest),
        tenant=request.tenant,
        session=request.session,
        run=request.run,
        call=request.call,
        command=request.command,
        reason=request.reason,
        warning=request.warning or ("this tool is marked dangerous" if request.spec.dangerous else ""),
        digest=request.digest,
    )
    size = len(_plain(question.model_dump()))
    if size > MAX_QUESTION_BYTES:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"it needs approval, and with its {size} bytes it is longer than the {MAX_QUESTION_BYTES} that people are asked to read: make it shorter",
        )
    return question


def build_answer(question: Question, decision: Decision, by: Actor, at: float) -> Answer:
    """Raises ToolFailure(INVALID_ARGUMENTS) for arguments or a reason that cannot be kept."""
    arguments = dict(decision.arguments) if decision.arguments is not None else None
    if arguments is not None and not decision.is_allowed:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "a call that is refused runs with no arguments: leave them out, or allow it")
    try:
        text = _plain(arguments)
        # As the call has them when it runs, so that nothing is kept that it could not have.
        checked = ToolCall(id=question.call.id, name=question.call.name, arguments=json.loads(text) or {})
        answer = Answer(
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
        first = error.errors(include_url=False, include_input=False)[0]
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the answer cannot be kept: {first['loc'][0]}: {first['msg']}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the arguments are no plain JSON: {error}; write one JSON object") from error
    if len(text) > MAX_ARGUMENT_BYTES:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the arguments are {len(text)} bytes as JSON; at most {MAX_ARGUMENT_BYTES} are kept: write less"
        )
    return answer


def seal(keys: SigningKeys, record: Question | Answer) -> str:
    """Sign the record for its id, which names tenant, run and call: it is valid for no other question."""
    return keys.seal(_purpose(type(record), record.id), _plain(record.model_dump(exclude_defaults=True)))


def unseal(keys: SigningKeys, kind: type[Kept], id_: str, sealed: bytes) -> Kept:
    """Return the record. Raises EnvelopeRefused when it is not signed for the question of that id."""
    text = keys.unseal(_purpose(kind, id_), sealed)
    try:
        return kind.model_validate(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise EnvelopeRefused("this record is of another release: upgrade the program that reads it", "version") from error


def is_whole(question: Question) -> bool:
    """Whether the digest is that of the call that is shown."""
    return question.digest == digest_call(question.call, question.tenant, question.session)


def _purpose(kind: type[Record], id_: str) -> str:
    return f"approval {kind.__name__} {id_}"


def _plain(value: Mapping[str, Any] | list[Any] | None) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
