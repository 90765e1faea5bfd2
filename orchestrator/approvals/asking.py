"""Asks people through the approvals queue in Redis.

A person answers from any process, while the call waits in this one.
"""

import asyncio
import math
import secrets
import time

from toolcrew.concurrency.tasks import begin_shared
from toolcrew.contract.approvals import Decision
from toolcrew.contract.errors import BrokerUnavailable, EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.approvals.approvers import ApprovalRequest, Approver, choose_approver
from toolcrew.store.approvals import (
    MAX_QUESTION_BYTES,
    MAX_WAIT_S,
    ApprovalAnswer,
    ApprovalQuestion,
    ApprovalQueue,
    dump_plain,
    question_id,
)
from toolcrew.store.connection import RedisClient
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

POLL_S = 0.2
"""Interval in seconds between two reads of answers. One read covers all waiting questions."""
POLL_PER_QUESTION_S = 0.0002
"""Minimum interval between two reads for each waiting question, in seconds. With many questions the interval is longer
than POLL_S, because a read of thousands of answers is expensive.
"""
RETRY_S = 0.5
ARRIVAL_S = 1.0
"""Seconds by which a question ends before the call stops waiting, so that an answer at the last moment still arrives in
time.
"""
WITHDRAW_S = 2.0


class QueueApprover:
    """Puts each question into the queue and waits for its answer.

    A question is withdrawn when the call stops waiting for the answer. If the process dies instead, the question stays
    until it expires. The process that resumes the run finds the question, or the answer that arrived in the meantime.
    """

    def __init__(self, queue: ApprovalQueue) -> None:
        self._queue = queue
        self._waiting: dict[str, set[asyncio.Future[ApprovalAnswer]]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def decide(self, request: ApprovalRequest) -> Decision:
        try:
            question = build_record(request)
        except ToolFailure as failure:
            return Decision(False, failure.message)
        asker, is_answered = secrets.token_hex(8), False
        try:
            answer = await self._ask(question, asker, request.expires_at)
            if answer is None:
                answer = await self._await_answer(question.id)
            is_answered = True
        except ToolFailure as failure:
            return Decision(False, failure.message)
        finally:
            # Cancellation reaches this block too, so that people never see a question that has no waiter.
            if not is_answered:
                await self._withdraw(question, asker)
        # The signature proves only that this deployment wrote the answer. This check binds the answer to this call, so
        # that an answer copied to another question in Redis approves nothing.
        if (answer.id, answer.digest) != (question.id, question.digest):
            raise EnvelopeRefused(
                "the answer belongs to another question: another process has copied it in Redis", "signature"
            )
        return answer.to_decision()

    async def _ask(self, question: ApprovalQuestion, asker: str, expires_at: float) -> ApprovalAnswer | None:
        """Put the question into the queue, and retry while Redis is unavailable.

        The caller's own time limit ends the retries. Return the answer when the question already has one. Raises
        ToolFailure, EnvelopeRefused.
        """
        while True:
            remaining_s = expires_at - time.time() if math.isfinite(expires_at) else MAX_WAIT_S
            try:
                return await self._queue.ask(question, asker, max(remaining_s - ARRIVAL_S, remaining_s / 2, 0.0))
            except BrokerUnavailable as error:
                log.warning("question_not_stored", approval=question.id, error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _await_answer(self, id_: str) -> ApprovalAnswer:
        """Wait for the answer and return it. Raises EnvelopeRefused."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(id_, set()).add(future)
        if self._reading is None or self._reading.done():
            self._reading = begin_shared(self._read_answers(), "approvals")
            self._reading.add_done_callback(self._fail_waiters)
        try:
            answer: ApprovalAnswer = await future
            return answer
        finally:
            self._forget(id_, future)

    async def _read_answers(self) -> None:
        """Read the answers of all waiting questions until no question waits."""
        while self._waiting:
            await asyncio.sleep(max(POLL_S, POLL_PER_QUESTION_S * len(self._waiting)))
            try:
                answers = await self._queue.answers(list(self._waiting))
            except BrokerUnavailable as error:
                log.warning("approvals_not_read", waiting=len(self._waiting), error=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            for id_, answer in answers.items():
                for future in self._waiting.pop(id_, set()):
                    _settle(future, answer)

    def _fail_waiters(self, looking: "asyncio.Task[None]") -> None:
        """Pass an error of the task that reads answers to all calls that wait, because no answer reaches them without
        that task.
        """
        error = None if looking.cancelled() else looking.exception()
        if error is not None:
            # Each waiter raises the error, and its call is refused.
            for future in [future for futures in self._waiting.values() for future in futures]:
                _settle(future, error)

    def _forget(self, id_: str, future: "asyncio.Future[ApprovalAnswer]") -> None:
        futures = self._waiting.get(id_, set())
        futures.discard(future)
        if not futures:
            self._waiting.pop(id_, None)
        if not self._waiting and self._reading is not None:
            # A new waiter must start a new task. A task that is being cancelled still counts as running.
            looking, self._reading = self._reading, None
            looking.cancel()

    async def _withdraw(self, question: ApprovalQuestion, asker: str) -> None:
        """Withdraw the question within WITHDRAW_S. A question that could not be withdrawn stays until it expires."""
        try:
            async with asyncio.timeout(WITHDRAW_S):
                await self._queue.withdraw(question, asker)
        except (BrokerUnavailable, TimeoutError) as error:
            log.warning("question_not_withdrawn", approval=question.id, error=str(error))


def open_approvals(settings: OrchestratorSettings, redis: RedisClient, keys: SigningKeys) -> ApprovalQueue:
    """Return the approvals queue of a pool."""
    return ApprovalQueue(redis, settings.deployment, keys, settings.approvers)


def choose_pool_approver(settings: OrchestratorSettings, queue: ApprovalQueue, *, is_interactive: bool) -> Approver:
    """Return the approver that TOOLCREW_APPROVALS names."""
    if settings.approvals == "queue":
        return QueueApprover(queue)
    return choose_approver(settings.approvals, is_interactive=is_interactive)


def choose_people_approver(settings: OrchestratorSettings, queue: ApprovalQueue) -> Approver:
    """Return the approver of runs that ask people.

    The operator's setting `auto` or `never` overrides the request of the run.
    """
    if settings.approvals in ("auto", "never"):
        return choose_pool_approver(settings, queue, is_interactive=False)
    return QueueApprover(queue)


def build_record(request: ApprovalRequest) -> ApprovalQuestion:
    """Build the question that the queue stores.

    Raises ToolFailure(INVALID_ARGUMENTS) when the call is too long for a person to read.
    """
    question = ApprovalQuestion(
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
    size = len(dump_plain(question.model_dump()))
    if size > MAX_QUESTION_BYTES:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"the call needs approval, but it has {size} bytes, and a question can have at most "
            f"{MAX_QUESTION_BYTES}: shorten the arguments",
        )
    return question


def _settle(future: "asyncio.Future[ApprovalAnswer]", answer: ApprovalAnswer | BaseException) -> None:
    if not future.done():
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)
