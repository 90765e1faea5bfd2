"""Has a call made, whoever dies meanwhile: sent to where its session lives by now, sent again when that is safe, and
else an honest error.
"""

from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from contract.calls import RunFailure, ToolResult
from contract.errors import BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from contract.ledger import CALL_TTL_S, MAX_ATTEMPTS, CallRecord, CallState
from contract.names import POOL_QUEUES
from orchestrator.dispatch.call_watch import describe_loss
from orchestrator.dispatch.carrier import Carrier, Errand
from orchestrator.dispatch.session_locator import SessionLocator
from orchestrator.dispatch.transport import CallIdInUse, CallLost, DeliveryFailed
from store.publisher import NotSent
from store.sessions import SessionAddress
from store.tasks import Backoff
from telemetry.logs import get_logger

log = get_logger(__name__)

RESEND_S = 30.0
"""How long a call that nobody took is sent again: its session has moved, or its host is just being restarted."""
RECORD_S = CALL_TTL_S - 3600
"""A call without a record that may have been sent longer ago may have acted. An hour less than the record lives, for
the time between.
"""


class CallBook(Protocol):
    """What is known of calls, and what becomes of lost ones (orchestrator/dispatch/call_ledger.py)."""

    async def find(self, tenant: str, call_id: str) -> CallRecord | None: ...

    async def now(self) -> float: ...

    async def renew(self, tenant: str, call_id: str, attempt: int) -> bool: ...

    async def give_up(
        self, tenant: str, call_id: str, attempt: int, state: CallState, code: ErrorCode
    ) -> CallState | None: ...


class Recovery:
    """Carries errands of a pool of hosts. Raises as the Carrier, but neither NotSent nor CallLost."""

    def __init__(self, carrier: Carrier, locator: SessionLocator, ledger: CallBook) -> None:
        self._carrier = carrier
        self._locator = locator
        self._ledger = ledger

    async def carry(self, errand: Errand) -> ToolResult:
        """The one result of the call. A lost call is sent again when it has surely not begun, or its tool is
        idempotent, MAX_ATTEMPTS times in all; one that nobody took is sent again for RESEND_S, or as long as it may
        wait in a queue. One that a process sent which died since is awaited in its place."""
        losses = _Losses()
        try:
            return await self._until_answered(errand, losses)
        except (OperatorError, ToolFailure) as error:
            # Of the first attempt there is no record, if it was not sent; of another one there is.
            if losses.attempt > 1:
                state = CallState.UNKNOWN if isinstance(error, BrokerUnavailable) else losses.state
                await self._noted(errand, losses.attempt, state, error.code)
            raise

    async def _until_answered(self, errand: Errand, losses: "_Losses") -> ToolResult:
        until = Backoff(min(RESEND_S, errand.queue_wait_s))
        earlier = await self._begun(errand, losses) if errand.sent_since is not None else None
        address = await self._find(errand)
        while True:
            target: SessionAddress | str = address or POOL_QUEUES[errand.spec.pool]
            task = None
            if earlier is not None:
                # Where it was sent, wherever its session is by now.
                target = replace(address, queue=earlier.queue) if address is not None else earlier.queue
                task, earlier = earlier.task, None
            try:
                result = await self._carrier.carry(errand, target, losses.attempt, task)
            except NotSent as refused:
                if refused.reason == "duplicate" or address is None:
                    raise repeated(losses.attempt) from None
                if not await until.wait():
                    never_taken = _never_taken(address.queue, losses)
                    await self._noted(errand, losses.attempt, losses.state, never_taken.code)
                    raise never_taken from None
                address = await self._refresh(errand, address, is_lost=refused.reason == "host_lost")
                continue
            except CallLost as lost:
                losses.note(lost.has_started or not await self._is_unstarted(errand, losses.attempt))
                address = await self._after_loss(errand, address, losses, lost)
                continue
            except CallIdInUse:
                raise
            except DeliveryFailed as failed:
                # Its worker may have died before it stored the end.
                await self._noted(errand, losses.attempt, CallState.UNKNOWN, failed.code)
                raise
            if not await self._may_go_again(errand, result, losses, until):
                await self.note_end(errand, result, losses.attempt, losses.state)
                return result
            address = await self._refresh(errand, address, is_lost=False) if address is not None else None

    async def note_end(
        self, errand: Errand, result: ToolResult, attempt: int = 1, state: CallState = CallState.LOST
    ) -> None:
        """This answer is the call's last: a worker that did not run it has left its record open, for another
        attempt.
        """
        if result.has_not_run:
            await self._noted(errand, attempt, state, result.error_code or ErrorCode.INTERNAL)

    async def _may_go_again(self, errand: Errand, result: ToolResult, losses: "_Losses", until: "Backoff") -> bool:
        """Whether a worker's answer only says that the call was not run there, or what it did was lost and may be done
        again.
        """
        failure = result.run_failure
        is_lost = failure is RunFailure.LOST
        if is_lost:
            losses.note(has_started=True)
        is_repeatable = is_lost and errand.spec.idempotent and losses.times < MAX_ATTEMPTS
        is_untaken = failure is not None and failure.is_temporary
        return (is_untaken or is_repeatable) and await until.wait() and await self._renewed(errand, losses)

    async def _begun(self, errand: Errand, losses: "_Losses") -> CallRecord | None:
        """The record of an attempt that is on its way, or has ended; `losses` then speaks of the one to go on with.
        Raises DeliveryFailed when the call is not to be sent again."""
        record = await self._ledger.find(errand.context.tenant, errand.call.id)
        if record is None:
            # By Redis's clock, which the records expire by: this host's may be wrong.
            if not errand.spec.idempotent and await self._ledger.now() - (errand.sent_since or 0.0) > RECORD_S:
                raise DeliveryFailed(
                    ErrorCode.OUTCOME_UNKNOWN,
                    f"the call may have been sent more than {CALL_TTL_S // 3600} hours ago, and its record has "
                    "expired: it may or may not have acted; look before you repeat it",
                )
            return None
        losses.attempt = record.attempt
        if record.state in (CallState.QUEUED, CallState.RUNNING, CallState.DONE):
            is_published = record.nonce.partition(":")[0] == str(record.attempt)
            return record if is_published else None
        if record.state is CallState.FORBIDDEN:
            raise DeliveryFailed(
                ErrorCode.CANCELLED, "the call was cancelled, or too late, before a worker took it, and was not run"
            )
        losses.note(
            record.state is CallState.UNKNOWN
            or not self._carrier.has_ticket(errand.context.tenant, errand.call.id, record)
        )
        told = describe_loss(record)
        if record.state is CallState.UNKNOWN or (losses.may_have_acted and not errand.spec.idempotent):
            await self._give_up(errand, losses, told)
        if not await self._renewed(errand, losses):
            raise repeated(losses.attempt + 1)
        return None

    async def _is_unstarted(self, errand: Errand, attempt: int) -> bool:
        """Whether it is proved that no worker has begun this attempt. Anyone who can write to Redis can claim it; only
        the signed ticket proves it.
        """
        try:
            record = await self._ledger.find(errand.context.tenant, errand.call.id)
        except BrokerUnavailable:
            return False
        return (
            record is not None
            and record.attempt == attempt
            and self._carrier.has_ticket(errand.context.tenant, errand.call.id, record)
        )

    async def _find(self, errand: Errand) -> SessionAddress | None:
        if not errand.is_sticky:
            return None
        return await self._locator.find(errand.context.tenant, str(errand.context.session), errand.policy)

    async def _refresh(self, errand: Errand, address: SessionAddress, *, is_lost: bool) -> SessionAddress:
        return await self._locator.refresh(
            errand.context.tenant, str(errand.context.session), address, errand.policy, is_lost=is_lost
        )

    async def _after_loss(
        self, errand: Errand, address: SessionAddress | None, losses: "_Losses", lost: CallLost
    ) -> SessionAddress | None:
        """Where the call may be sent next. Raises DeliveryFailed when it may not be sent again, or cannot be."""
        call = errand.call
        log.warning(
            "call_lost",
            call=call.id,
            tool=call.name,
            attempt=losses.attempt,
            has_started=lost.has_started,
            told=lost.told,
        )
        # What has not begun can never begin any more: its record is no longer of that attempt.
        is_safe = errand.spec.idempotent or not losses.may_have_acted
        if not is_safe or losses.times >= MAX_ATTEMPTS:
            await self._give_up(errand, losses, lost.told)
        try:
            address = await self._refresh(errand, address, is_lost=True) if address is not None else None
        except (OperatorError, ToolFailure) as error:
            await self._give_up(errand, losses, f"{lost.told}, and {error}")
        if not await self._renewed(errand, losses):
            raise DeliveryFailed(
                ErrorCode.OUTCOME_UNKNOWN,
                f"{lost.told}; it was not sent again: it was cancelled meanwhile, or Redis knows nothing of it",
            )
        return address

    async def _renewed(self, errand: Errand, losses: "_Losses") -> bool:
        """Whether the call may be sent again, as the next attempt; not, when that cannot be noted."""
        try:
            is_renewed = await self._ledger.renew(errand.context.tenant, errand.call.id, losses.attempt)
        except BrokerUnavailable as error:
            log.warning("call_not_sent_again", call=errand.call.id, error=str(error))
            return False
        losses.attempt += is_renewed
        return is_renewed

    async def _give_up(self, errand: Errand, losses: "_Losses", told: str) -> NoReturn:
        await self._noted(
            errand,
            losses.attempt,
            losses.state,
            ErrorCode.OUTCOME_UNKNOWN if losses.may_have_acted else ErrorCode.HOST_LOST,
        )
        tried = f" (attempt {losses.times} of {MAX_ATTEMPTS})" if losses.times > 1 else ""
        if losses.may_have_acted:
            raise DeliveryFailed(
                ErrorCode.OUTCOME_UNKNOWN,
                f"{told}{tried}: the call may or may not have acted; look before you repeat it",
            )
        raise DeliveryFailed(
            ErrorCode.HOST_LOST,
            f"{told}{tried}: the call was not run: send it again; its session is served by the host's next worker, or "
            "elsewhere from its last checkpoint",
        )

    async def _noted(self, errand: Errand, attempt: int, state: CallState, code: ErrorCode) -> None:
        """Store how the call ended, unless Redis does not answer: the caller gets the result in any case."""
        try:
            await self._ledger.give_up(errand.context.tenant, errand.call.id, attempt, state, code)
        except BrokerUnavailable as error:
            log.warning("call_not_given_up", call=errand.call.id, error=str(error))


@dataclass
class _Losses:
    """Which attempt at a call is on its way, how often it was lost, and whether one of its attempts may have acted."""

    attempt: int = 1
    times: int = 0
    may_have_acted: bool = False

    @property
    def state(self) -> CallState:
        """What the call is when it is not sent again."""
        return CallState.UNKNOWN if self.may_have_acted else CallState.LOST

    def note(self, has_started: bool) -> None:
        self.times += 1
        self.may_have_acted = self.may_have_acted or has_started


def _never_taken(queue: str, losses: _Losses) -> DeliveryFailed:
    if losses.may_have_acted:
        words = (
            "an earlier attempt was lost and may have acted, and the session was never where the call was sent again"
        )
        return DeliveryFailed(
            ErrorCode.OUTCOME_UNKNOWN, f"{words}, last to {queue}; look before you repeat it, and see `toolcrew hosts`"
        )
    return DeliveryFailed(
        ErrorCode.HOST_LOST,
        f"the call was not run: its session was never where it was sent, last to {queue}; see `toolcrew hosts`",
    )


def repeated(attempt: int = 1) -> DeliveryFailed:
    """What is told of a call that the ledger knows already."""
    if attempt > 1:
        words = (
            "the call could not be sent again: it was cancelled meanwhile, or Redis has forgotten that it was to be "
            "sent"
        )
        return DeliveryFailed(ErrorCode.OUTCOME_UNKNOWN, f"{words}; look before you repeat it")
    return DeliveryFailed(
        ErrorCode.OUTCOME_UNKNOWN,
        "a call of this id has been sent before, and was not run again: give every call an id of its own",
    )
