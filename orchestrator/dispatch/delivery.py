"""Delivers a request and returns its one result.

    waits for a slot -> published -> awaited -> its result
                            |            |
                            |            +-- lost: sent again as the next attempt, when it has surely not begun or its
                            |                tool is idempotent; otherwise OUTCOME_UNKNOWN or HOST_LOST
                            +-- not taken there (the session has moved, its host restarts): sent again, for RESEND_S

Only one attempt at a call can start: each has a number, which its record must have when a worker claims the call
(store/calls.py). So an attempt that seemed lost and was only slow is refused, and never acts beside the next one.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn, Protocol

from contract.calls import RunFailure, ToolCall, ToolContext, ToolResult
from contract.envelope import EnvelopeTooLarge, decode_result, encode_arguments, encode_call
from contract.errors import BrokerUnavailable, ConfigError, EnvelopeRefused, ErrorCode, OperatorError, ToolFailure
from contract.names import POOL_QUEUES, BlobPool
from contract.signing import ResultSeal, SigningKeys
from orchestrator.admission import Admission, Unlimited
from orchestrator.dispatch.call_events import CallEventListener
from orchestrator.dispatch.call_monitor import CallMonitor, describe_loss
from orchestrator.dispatch.request import Attempt, Request
from orchestrator.dispatch.session_locator import HostSource, SessionLocator
from orchestrator.dispatch.transport import CallIdInUse, CallLost, DeliveryFailed, Transport
from orchestrator.tracing import CURRENT_CALL
from store.calls import CALL_TTL_S, MAX_ATTEMPTS, CallRecord, CallState, has_ticket, seal_ticket
from store.connection import SharedClock
from store.publisher import NotSent
from store.sessions import SessionAddress, SessionStore
from store.slots import SlotRequest
from store.tasks import Backoff
from telemetry.logs import get_logger

log = get_logger(__name__)

RESEND_S = 30.0
"""How long a call that no worker took is sent again: its session has moved, or its host restarts."""
RECORD_S = CALL_TTL_S - 3600
"""A call without a record that may have been sent longer ago may have acted. An hour less than the record lives, for
the time between.
"""
LEAST_WAIT_S = 1.0
"""What is left of the wait in a queue for a call that has waited long for its slot."""
URGENT = frozenset({"session.close"})
"""Verbs that free what other calls wait for."""


class CallRecords(Protocol):
    """The records of calls, as far as a sender needs them (store/calls.py)."""

    async def find(self, tenant: str, call_id: str) -> CallRecord | None: ...

    async def now(self) -> float: ...

    async def renew(self, tenant: str, call_id: str, attempt: int) -> bool: ...

    async def give_up(
        self, tenant: str, call_id: str, attempt: int, state: CallState, code: ErrorCode
    ) -> CallState | None: ...


class ArgumentStore(Protocol):
    """Stores arguments that are too large for an envelope (store/blobs.py)."""

    async def leave(self, tenant: str, data: bytes, pool: BlobPool = ...) -> str: ...

    async def drop(self, key: str) -> None: ...


@dataclass(frozen=True)
class Pool:
    """What a program that sends calls to a pool of hosts has. A program that runs functions in its own process has
    none of it.
    """

    sessions: SessionStore
    hosts: HostSource
    calls: CallRecords
    admission: Admission = field(default_factory=Unlimited)
    events: CallEventListener | None = None
    monitor: CallMonitor | None = None
    blobs: ArgumentStore | None = None
    clock: SharedClock = field(default_factory=SharedClock)


class Delivery:
    """Delivers requests that the dispatcher has checked. `pool` None: there are no hosts; a request goes to its own
    queue, once.
    """

    def __init__(
        self, transport: Transport, keys: SigningKeys, pool: Pool | None, locator: SessionLocator | None
    ) -> None:
        self._transport = transport
        self._keys = keys
        self._locator = locator
        self._calls = pool.calls if pool is not None else None
        self._monitor = pool.monitor if pool is not None else None
        self._events = pool.events if pool is not None else None
        self._blobs = pool.blobs if pool is not None else None
        self._admission = pool.admission if pool is not None else Unlimited()
        self.clock: Callable[[], float] = pool.clock if pool is not None else SharedClock()
        """Unix seconds by the clock that all processes of the deployment share."""

    # --- The life of a request -------------------------------------------------------------------------------------

    async def deliver(self, request: Request) -> ToolResult:
        """Return the one result of the call. Raises DeliveryFailed, ToolFailure (no slot, or killed before it began),
        OperatorError.
        """
        try:
            work = self._deliver(request)
            if self._monitor is None:
                return await work
            return await self._monitor.watch(request.tenant, request.call.id, work)
        except asyncio.CancelledError:
            pool_queue = POOL_QUEUES.get(request.spec.pool)
            if pool_queue is not None and not request.keeps_result:
                # The session tells its own host, which does not run this call.
                await asyncio.shield(self._cancel(request, pool_queue))
            raise

    async def _deliver(self, request: Request) -> ToolResult:
        queue = POOL_QUEUES.get(request.spec.pool) or request.queue
        if self._calls is not None and (queue is None or not request.runs_in_session):
            return await self._deliver_to_pool(_Progress(request, self._calls))
        if queue is None:
            raise ConfigError(
                f"{request.call.name} runs where its session lives, and this program has no pool of hosts"
            )
        try:
            return await self._send(request, queue)
        except NotSent:
            # Without an address that is the only reason.
            raise _used_before() from None
        except CallLost as lost:
            code = ErrorCode.OUTCOME_UNKNOWN if lost.has_started else ErrorCode.HOST_LOST
            raise DeliveryFailed(code, lost.reason) from None

    async def send_once(self, request: Request, address: SessionAddress) -> ToolResult:
        """Return the result of one attempt at the address of a session. Raises NotSent, CallLost and what `deliver`
        raises; the caller decides what follows.
        """
        result = await self._send(request, address)
        if self._calls is not None and result.has_not_run:
            code = result.error_code or ErrorCode.INTERNAL
            await self._close_record(_Progress(request, self._calls), CallState.LOST, code)
        return result

    async def command(self, queue: str, call: ToolCall, tenant: str, session: str | None, wait_s: float) -> None:
        """Send `session.cancel` or `session.close` to the workers of a queue at once, past the queue. There is no
        result. Raises BrokerUnavailable.
        """
        now = self.clock()
        context = ToolContext(tenant=tenant, session=session, sent_at=now, deadline_at=now + wait_s)
        await self._transport.command(queue, encode_call(call, context, self._keys))

    def settle(self, tenant: str, call_id: str) -> None:
        """Let Redis drop the result of a call that was made with `keeps_result`: it is safe elsewhere."""
        self._transport.settle(tenant, call_id)

    async def _cancel(self, request: Request, queue: str) -> None:
        """If Redis does not answer, the call runs into its own limit."""
        order = ToolCall(id=secrets.token_hex(16), name="session.cancel", arguments={"call_id": request.call.id})
        with contextlib.suppress(BrokerUnavailable):
            await self.command(queue, order, request.tenant, request.session, request.queue_wait_s)

    # --- Lost, and sent again --------------------------------------------------------------------------------------

    async def _deliver_to_pool(self, progress: "_Progress") -> ToolResult:
        """Send the call until it has a result, or must not be sent again.

        A lost call is sent MAX_ATTEMPTS times in all; a call that no worker took for RESEND_S, or as long as it may
        wait in a queue. A call that another process sent, which died since, is awaited where it was sent.
        """
        try:
            return await self._send_until_done(progress)
        except (OperatorError, ToolFailure) as error:
            # The first attempt has no record if it was not sent; a later one has.
            if progress.attempt > 1:
                state = CallState.UNKNOWN if isinstance(error, BrokerUnavailable) else progress.state
                await self._close_record(progress, state, error.code)
            raise

    async def _send_until_done(self, progress: "_Progress") -> ToolResult:
        request = progress.request
        earlier = await self._find_earlier(progress) if request.sent_since is not None else None
        address = await self._find_address(request)
        while True:
            target: SessionAddress | str = address or POOL_QUEUES[request.spec.pool]
            task = None
            if earlier is not None:
                # To where it was sent, wherever its session is by now.
                target = replace(address, queue=earlier.queue) if address is not None else earlier.queue
                task, earlier = earlier.task, None
            try:
                result = await self._send(request, target, progress.attempt, task)
            except NotSent as refused:
                if refused.reason == "duplicate" or address is None:
                    raise _used_before(progress.attempt) from None
                if not await progress.untaken.wait():
                    never_taken = _never_taken(address.queue, progress)
                    await self._close_record(progress, progress.state, never_taken.code)
                    raise never_taken from None
                address = await self._refresh(request, address, is_lost=refused.reason == "host_lost")
                continue
            except CallLost as lost:
                has_started = lost.has_started or not await self._is_unstarted(progress)
                progress.note_loss(has_started)
                address = await self._prepare_resend(progress, address, lost)
                continue
            except CallIdInUse:
                # The record is that of the call in flight.
                raise
            except DeliveryFailed as failed:
                # Its worker may have died before it stored the end.
                await self._close_record(progress, CallState.UNKNOWN, failed.code)
                raise
            if not await self._may_be_sent_again(progress, result):
                if result.has_not_run:
                    # The worker left the record open, for another attempt.
                    code = result.error_code or ErrorCode.INTERNAL
                    await self._close_record(progress, progress.state, code)
                return result
            address = await self._refresh(request, address, is_lost=False) if address is not None else None

    async def _may_be_sent_again(self, progress: "_Progress", result: ToolResult) -> bool:
        """Return whether a worker's result only says that the call was not run there, or that what it did was lost and
        may be done again.
        """
        request = progress.request
        failure = result.run_failure
        is_lost = failure is RunFailure.LOST
        if is_lost:
            progress.note_loss(has_started=True)
        is_repeatable = is_lost and request.spec.idempotent and progress.losses < MAX_ATTEMPTS
        is_untaken = failure is not None and failure.is_temporary
        return (is_untaken or is_repeatable) and await progress.untaken.wait() and await self._renew(progress)

    async def _find_earlier(self, progress: "_Progress") -> CallRecord | None:
        """Return the record of an attempt by another process that is on its way, or has ended; `progress` then
        continues with it. None: nothing is on its way. Raises DeliveryFailed when the call must not be sent again.
        """
        request = progress.request
        record = await progress.calls.find(request.tenant, request.call.id)
        if record is None:
            # By Redis's clock, by which the records expire: this host's may be wrong.
            if not request.spec.idempotent and await progress.calls.now() - (request.sent_since or 0.0) > RECORD_S:
                raise DeliveryFailed(
                    ErrorCode.OUTCOME_UNKNOWN,
                    f"the call may have been sent more than {CALL_TTL_S // 3600} hours ago, and its record has "
                    "expired: it may or may not have acted; look before you repeat it",
                )
            return None
        progress.attempt = record.attempt
        if record.state is CallState.FORBIDDEN:
            raise DeliveryFailed(
                ErrorCode.CANCELLED, "the call was cancelled, or too late, before a worker took it, and was not run"
            )
        if not record.state.is_lost:
            is_published = record.nonce.partition(":")[0] == str(record.attempt)
            return record if is_published else None
        is_unknown = record.state is CallState.UNKNOWN
        progress.note_loss(is_unknown or not has_ticket(self._keys, request.tenant, request.call.id, record))
        if is_unknown or (progress.may_have_acted and not request.spec.idempotent):
            await self._give_up(progress, describe_loss(record))
        if not await self._renew(progress):
            raise _used_before(progress.attempt + 1)
        return None

    async def _is_unstarted(self, progress: "_Progress") -> bool:
        """Return whether it is proved that no worker has begun this attempt. Any process that can write to Redis can
        claim it; only the signed ticket proves it.
        """
        request = progress.request
        try:
            record = await progress.calls.find(request.tenant, request.call.id)
        except BrokerUnavailable:
            return False
        return (
            record is not None
            and record.attempt == progress.attempt
            and has_ticket(self._keys, request.tenant, request.call.id, record)
        )

    async def _find_address(self, request: Request) -> SessionAddress | None:
        if not request.runs_in_session or self._locator is None:
            return None
        return await self._locator.find(request.tenant, str(request.session), request.policy)

    async def _refresh(self, request: Request, address: SessionAddress, *, is_lost: bool) -> SessionAddress:
        assert self._locator is not None, "only a locator gives addresses"
        return await self._locator.refresh(
            request.tenant, str(request.session), address, request.policy, is_lost=is_lost
        )

    async def _prepare_resend(
        self, progress: "_Progress", address: SessionAddress | None, lost: CallLost
    ) -> SessionAddress | None:
        """Return where to send a lost call next. Raises DeliveryFailed when it must not be sent again, or cannot be."""
        request = progress.request
        log.warning(
            "call_lost",
            call=request.call.id,
            tool=request.call.name,
            attempt=progress.attempt,
            has_started=lost.has_started,
            reason=lost.reason,
        )
        # An attempt that has not begun can never begin after this: its record no longer has its number.
        is_safe = request.spec.idempotent or not progress.may_have_acted
        if not is_safe or progress.losses >= MAX_ATTEMPTS:
            await self._give_up(progress, lost.reason)
        try:
            address = await self._refresh(request, address, is_lost=True) if address is not None else None
        except (OperatorError, ToolFailure) as error:
            await self._give_up(progress, f"{lost.reason}, and {error}")
        if not await self._renew(progress):
            raise DeliveryFailed(
                ErrorCode.OUTCOME_UNKNOWN,
                f"{lost.reason}; it was not sent again: it was cancelled meanwhile, or Redis has lost its record",
            )
        return address

    async def _renew(self, progress: "_Progress") -> bool:
        """Return whether the call may be sent again, as the next attempt. Not when Redis cannot store that."""
        request = progress.request
        try:
            is_renewed = await progress.calls.renew(request.tenant, request.call.id, progress.attempt)
        except BrokerUnavailable as error:
            log.warning("call_not_sent_again", call=request.call.id, error=str(error))
            return False
        progress.attempt += is_renewed
        return is_renewed

    async def _give_up(self, progress: "_Progress", reason: str) -> NoReturn:
        code = ErrorCode.OUTCOME_UNKNOWN if progress.may_have_acted else ErrorCode.HOST_LOST
        await self._close_record(progress, progress.state, code)
        attempts = f" (attempt {progress.losses} of {MAX_ATTEMPTS})" if progress.losses > 1 else ""
        hint = (
            "the call may or may not have acted; look before you repeat it"
            if progress.may_have_acted
            else "the call was not run: send it again; its session is served by the host's next worker, or elsewhere "
            "from its last checkpoint"
        )
        raise DeliveryFailed(code, f"{reason}{attempts}: {hint}")

    async def _close_record(self, progress: "_Progress", state: CallState, code: ErrorCode) -> None:
        """Store how the call ended. If Redis does not answer, the caller gets the result all the same."""
        request = progress.request
        try:
            await progress.calls.give_up(request.tenant, request.call.id, progress.attempt, state, code)
        except BrokerUnavailable as error:
            log.warning("call_not_given_up", call=request.call.id, error=str(error))

    # --- One attempt -----------------------------------------------------------------------------------------------

    async def _send(
        self, request: Request, address: SessionAddress | str, number: int = 1, published_as: str | None = None
    ) -> ToolResult:
        """Return the result of one attempt, by that queue or at the address of its session. `published_as`: the attempt
        is there already, under that task id. Raises NotSent, CallLost, DeliveryFailed, ToolFailure (no slot),
        BrokerUnavailable.
        """
        queue = address if isinstance(address, str) else address.queue
        fence = None if isinstance(address, str) else address.fence
        if published_as is not None:
            # The process that sent it had its slot.
            return await self._exchange(request, queue, fence, number, published_as=published_as)
        spans = CURRENT_CALL.get()
        waiting = spans.wait(request.call.name, request.context, request.priority) if spans is not None else None
        async with self._admission.slot(self._slot_request(request, queue), is_early=waiting is None) as slot:
            if waiting is not None:
                waiting.end()
            try:
                result = await self._exchange(request, queue, fence, number, slot=slot.pending)
            except NotSent as refused:
                if refused.reason != "no_slot":
                    raise
                await slot.wait()
                result = await self._exchange(request, queue, fence, number)
            slot.used_s = result.clocks.sandbox_s + result.clocks.run_s
        return result

    def _slot_request(self, request: Request, queue: str) -> SlotRequest:
        waited_s = self.clock() - request.context.sent_at
        return SlotRequest(
            tenant=request.tenant,
            policy=request.policy,
            queue=queue,
            call_id=request.call.id,
            tool=request.worker_call.name,
            priority=request.priority,
            wait_s=max(LEAST_WAIT_S, request.queue_wait_s - waited_s),
            limit_s=request.context.timeout_s,
            is_urgent=request.call.name in URGENT,
        )

    async def _exchange(
        self,
        request: Request,
        queue: str,
        fence: int | None,
        number: int,
        published_as: str | None = None,
        slot: str = "",
    ) -> ToolResult:
        """Sign and publish the call, and return its result after all its events."""
        start_by = max(request.context.deadline_at, self.clock() + LEAST_WAIT_S)
        changed: dict[str, object] = {"attempt": number, "fence": fence, "deadline_at": start_by}
        spans = CURRENT_CALL.get()
        sending = spans.send(request.worker_call, queue, number) if spans is not None else None
        if sending is not None and sending.ref.is_sampled:
            changed["trace"] = str(sending.ref)
        envelope, blob = await self._encode(request, request.context.model_copy(update=changed))
        ticket = seal_ticket(self._keys, request.tenant, request.call.id, number)
        attempt = Attempt(request, queue, envelope, start_by, number, fence, published_as, ticket, slot)
        try:
            if self._events is None or not request.handlers:
                result = await self._await_result(attempt)
            else:
                async with self._events.listen(
                    request.tenant, request.call.id, request.handlers, request.wait_s
                ) as reader:
                    result = await self._await_result(attempt)
                result = result if reader is None else reader.note(result)
        except asyncio.CancelledError:
            if request.keeps_result:
                blob = None  # The call continues, and its worker may still have to read the blob, which expires.
            raise
        finally:
            if blob is not None and self._blobs is not None:
                await self._blobs.drop(blob)
        if sending is not None:
            sending.end(error=result.error_code.value if result.error_code is not None else None)
        return result

    async def _await_result(self, attempt: Attempt) -> ToolResult:
        try:
            result = decode_result(
                await self._transport.deliver(attempt), ResultSeal(self._keys, attempt.tenant, attempt.number)
            )
        except TimeoutError:
            raise DeliveryFailed(
                ErrorCode.OUTCOME_UNKNOWN,
                f"no result within {attempt.request.wait_s:.0f} s: the worker or its host may be lost, and the call "
                "may or may not have acted",
            ) from None
        except EnvelopeRefused as error:
            raise DeliveryFailed(ErrorCode.ENVELOPE_REFUSED, f"the result was refused: {error}") from error
        if result.call_id != attempt.call_id:
            raise DeliveryFailed(ErrorCode.ENVELOPE_REFUSED, "the result belongs to another call")
        return result

    async def _encode(self, request: Request, context: ToolContext) -> tuple[str, str | None]:
        """Return the envelope, and the key of the blob with the call's arguments if they do not fit into it."""
        call = request.worker_call
        try:
            try:
                return encode_call(call, context, self._keys), None
            except EnvelopeTooLarge:
                if self._blobs is None:
                    raise
            data = encode_arguments(call.arguments)
            blob = await self._blobs.leave(context.tenant, data, "sandbox" if request.runs_in_session else "web")
            signed = context.model_copy(update={"arguments_blob": blob})
            return encode_call(call.model_copy(update={"arguments": {}}), signed, self._keys), blob
        except ValueError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, str(error)) from error


@dataclass
class _Progress:
    """Which attempt at a request is on its way, how often the call was lost, and whether one of its attempts may have
    acted.
    """

    request: Request
    calls: CallRecords
    attempt: int = 1
    losses: int = 0
    may_have_acted: bool = False

    @property
    def state(self) -> CallState:
        """The end of the call if it is not sent again."""
        return CallState.UNKNOWN if self.may_have_acted else CallState.LOST

    @cached_property
    def untaken(self) -> Backoff:
        """How long the call is sent again to workers that do not take it."""
        return Backoff(min(RESEND_S, self.request.queue_wait_s))

    def note_loss(self, has_started: bool) -> None:
        self.losses += 1
        self.may_have_acted = self.may_have_acted or has_started


def _never_taken(queue: str, progress: _Progress) -> DeliveryFailed:
    if progress.may_have_acted:
        return DeliveryFailed(
            ErrorCode.OUTCOME_UNKNOWN,
            "an earlier attempt was lost and may have acted, and the session was never where the call was sent again, "
            f"last to {queue}; look before you repeat it, and see `toolcrew hosts list`",
        )
    return DeliveryFailed(
        ErrorCode.HOST_LOST,
        f"the call was not run: its session was never where it was sent, last to {queue}; see `toolcrew hosts list`",
    )


def _used_before(attempt: int = 1) -> DeliveryFailed:
    """Return the failure of a call whose id has a record already."""
    if attempt > 1:
        return DeliveryFailed(
            ErrorCode.OUTCOME_UNKNOWN,
            "the call could not be sent again: it was cancelled meanwhile, or Redis has forgotten that it was to be "
            "sent; look before you repeat it",
        )
    return DeliveryFailed(
        ErrorCode.OUTCOME_UNKNOWN,
        "a call of this id has been sent before, and was not run again: give every call an id of its own",
    )
