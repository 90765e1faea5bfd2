"""Deliver a request and return its one result.

Invariant: a call never runs twice at the same time, and never runs again after it may have acted, unless its tool is
idempotent. Each attempt has a number. A worker can claim a call only if the call's record has the same number
(store/call_scripts.py). Before a call is sent again, its record gets the next number. An earlier attempt that was only
slow is then refused.

- Wait for a slot, publish the attempt, await its result.
- No worker took the attempt (the session has moved, or its host restarts): send it again, for RESEND_S.
- The attempt was lost: send the next attempt, if the lost one provably never began or the tool is idempotent.
  Otherwise the result is OUTCOME_UNKNOWN or HOST_LOST.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

from toolcrew.concurrency.tasks import Backoff
from toolcrew.contract.calls import MAX_TIMEOUT_S, RunFailure, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import EnvelopeTooLarge, decode_result, encode_arguments, encode_call
from toolcrew.contract.errors import (
    BrokerUnavailable,
    ConfigError,
    EnvelopeRefused,
    ErrorCode,
    OperatorError,
    ToolFailure,
)
from toolcrew.contract.names import POOL_QUEUES
from toolcrew.contract.signing import ResultSeal, SigningKeys
from toolcrew.orchestrator.admission import Admission, UnlimitedAdmission
from toolcrew.orchestrator.dispatch.call_event_listener import CallEventListener
from toolcrew.orchestrator.dispatch.call_monitor import CallMonitor, describe_loss
from toolcrew.orchestrator.dispatch.request import Attempt, CheckedRequest, build_cancel
from toolcrew.orchestrator.dispatch.session_locator import HostSource, SessionLocator
from toolcrew.orchestrator.dispatch.transport import (
    CallIdInUse,
    CallLost,
    CallSentAgain,
    DeliveryFailed,
    Transport,
    result_expired,
    used_for_another_call,
)
from toolcrew.orchestrator.tracing import CURRENT_CALL
from toolcrew.store.blobs import Blobs
from toolcrew.store.call_messages import NotSent
from toolcrew.store.call_records import CALL_TTL_S, MAX_ATTEMPTS, CallRecord, CallState, has_ticket, seal_ticket
from toolcrew.store.calls import CallStore
from toolcrew.store.clock import SharedClock
from toolcrew.store.sessions import SessionAddress, SessionStore
from toolcrew.store.slots import SlotRequest
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

RESEND_S = 30.0
"""Seconds for which a call that no worker has accepted is sent again. Its session may have moved, or its host may
restart.
"""
RECORD_S = CALL_TTL_S - 3600
"""Age after which a call without a record may have acted, because its record has expired. The age is one hour less than
the lifetime of a record, as a margin.
"""
MIN_WAIT_S = 1.0
"""Time, in seconds, that a call may always wait in a queue, even after a long wait for its slot."""
URGENT = frozenset({"session.close"})
"""Session verbs (calls of the SDK that are no tools) that release resources for which other calls wait."""


@dataclass(frozen=True)
class Pool:
    """Services for a program that sends calls to a pool of hosts. A program that runs functions in its own process
    has no Pool.
    """

    sessions: SessionStore
    hosts: HostSource
    calls: CallStore
    admission: Admission = field(default_factory=UnlimitedAdmission)
    events: CallEventListener | None = None
    monitor: CallMonitor | None = None
    blobs: Blobs | None = None
    clock: SharedClock = field(default_factory=SharedClock)


class Delivery:
    """Delivers requests that the dispatcher has checked. `pool` None: there are no hosts, and each request is sent
    once, to the queue that it names.
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
        self._admission = pool.admission if pool is not None else UnlimitedAdmission()
        self.clock: Callable[[], float] = pool.clock if pool is not None else SharedClock()
        """Return the time in Unix seconds of the clock that all processes of the deployment share."""

    # --- The life of a request -------------------------------------------------------------------------------------

    async def deliver(self, request: CheckedRequest) -> ToolResult:
        """Return the one result of the call. Raises DeliveryFailed, OperatorError, and ToolFailure when the call gets
        no slot or was killed before it began.
        """
        try:
            work = self._deliver(request)
            if self._monitor is None:
                return await work
            # The monitor surrounds all attempts: an order to kill the call also reaches a call that waits for its slot.
            return await self._monitor.watch(request.tenant, request.call.id, work)
        except asyncio.CancelledError:
            pool_queue = POOL_QUEUES.get(request.spec.pool)
            if pool_queue is not None and not request.keeps_result:
                # The session sends its cancel order to its own host. This call runs in a pool of workers, which needs
                # its own order. The shield lets the order leave although this task is cancelled.
                await asyncio.shield(self._cancel(request, pool_queue))
            raise

    async def _deliver(self, request: CheckedRequest) -> ToolResult:
        queue = POOL_QUEUES.get(request.spec.pool) or request.queue
        if self._calls is not None and (queue is None or not request.runs_in_session):
            return await self._deliver_to_pool(_Progress(request, self._calls))
        if queue is None:
            raise ConfigError(
                f"{request.call.name} runs in a session, and this program has no pool of hosts: connect to a pool"
            )
        try:
            return await self._send(request, queue)
        except NotSent:
            # A call without a session address can be refused for one reason only: its id already has a record.
            raise _used_before() from None
        except CallLost as lost:
            code = ErrorCode.OUTCOME_UNKNOWN if lost.has_started else ErrorCode.HOST_LOST
            raise DeliveryFailed(code, lost.reason) from None

    async def send_once(self, request: CheckedRequest, address: SessionAddress) -> ToolResult:
        """Return the result of one attempt at the address of a session. Raises NotSent, CallLost and the exceptions
        of `deliver`. The caller decides whether to try again.
        """
        result = await self._send(request, address)
        if self._calls is not None and result.has_not_run:
            code = result.error_code or ErrorCode.INTERNAL
            await self._close_record(_Progress(request, self._calls), CallState.LOST, code)
        return result

    async def send_order(self, queue: str, call: ToolCall, tenant: str, session: str | None, wait_s: float) -> None:
        """Send `session.cancel` or `session.close` to the workers of a queue. The order does not wait in the queue.
        There is no result. Raises BrokerUnavailable.
        """
        now = self.clock()
        context = ToolContext(tenant=tenant, session=session, sent_at=now, deadline_at=now + wait_s)
        await self._transport.send_order(queue, encode_call(call, context, self._keys))

    def settle(self, tenant: str, call_id: str) -> None:
        """Delete the result of a call that was made with `keeps_result`. The caller must have stored the result
        elsewhere.
        """
        self._transport.settle(tenant, call_id)

    async def _cancel(self, request: CheckedRequest, queue: str) -> None:
        """Order the pool's workers to cancel the call. If Redis does not answer, the call runs until its own limit."""
        order = build_cancel(request.call.id)
        with contextlib.suppress(BrokerUnavailable):
            await self.send_order(queue, order, request.tenant, request.session, request.queue_wait_s)

    # --- Lost, and sent again --------------------------------------------------------------------------------------

    async def _deliver_to_pool(self, progress: "_Progress") -> ToolResult:
        """Send the call until it has a result or must not be sent again.

        A lost call is sent MAX_ATTEMPTS times in total. A call that no worker takes is sent again for RESEND_S, or
        for its queue wait if that is shorter. If another process has sent the call and died, this process does not send
        the call but awaits the result of that attempt.
        """
        try:
            return await self._send_until_done(progress)
        except (OperatorError, ToolFailure) as error:
            # A first attempt that was not sent has no record; every later attempt has one. Without an end, that record
            # would say `queued` for a day. If Redis did not answer, the attempt may be in its queue.
            if progress.attempt > 1:
                state = CallState.UNKNOWN if isinstance(error, BrokerUnavailable) else progress.state
                await self._close_record(progress, state, error.code)
            raise

    async def _send_until_done(self, progress: "_Progress") -> ToolResult:
        request = progress.request
        # Only a call whose id another process may have used. Any other call skips this read of Redis.
        may_be_sent = request.sent_since is not None or bool(request.digest)
        earlier = await self._find_earlier(progress) if may_be_sent else None
        address: SessionAddress | None = None
        while True:
            if earlier is None and address is None:
                # An earlier attempt is awaited at its own queue, even if its session has moved or was closed.
                address = await self._find_address(request)
            target: SessionAddress | str
            if earlier is not None:
                # The publish has already compared the fence with the location. The value 1 only says here that the call
                # is bound to its host.
                target = SessionAddress(earlier.queue, fence=1) if request.runs_in_session else earlier.queue
                task, earlier = earlier.task, None
            else:
                target, task = address or POOL_QUEUES[request.spec.pool], None
            try:
                result = await self._send(request, target, progress.attempt, task)
            except (NotSent, CallLost, CallSentAgain) as missed:
                address, earlier = await self._prepare_next(progress, address, missed)
                continue
            except CallIdInUse:
                # Leave the record unchanged, because it belongs to the other call with this id.
                raise
            except DeliveryFailed as failed:
                # The worker may have died before it stored the end of the call.
                await self._close_record(progress, CallState.UNKNOWN, failed.code)
                raise
            if not await self._may_be_sent_again(progress, result):
                if result.has_not_run and request.digest and await self._is_superseded(progress):
                    earlier = await self._find_other(progress)
                    continue
                if result.has_not_run:
                    # The worker has not ended the record, so that another attempt is possible. There is none, so end
                    # the record here.
                    code = result.error_code or ErrorCode.INTERNAL
                    await self._close_record(progress, progress.state, code)
                return result
            address = await self._refresh(request, address, is_lost=False)

    async def _prepare_next(
        self, progress: "_Progress", address: SessionAddress | None, missed: NotSent | CallLost | CallSentAgain
    ) -> tuple[SessionAddress | None, CallRecord | None]:
        """Return the address for the next attempt, or an attempt of another process to await, after an attempt without
        a result. Raises DeliveryFailed when the call must not or cannot be sent again.
        """
        request = progress.request
        is_duplicate = isinstance(missed, NotSent) and missed.reason == "duplicate"
        is_other = is_duplicate or isinstance(missed, CallSentAgain)
        if request.digest and (is_other or await self._is_superseded(progress)):
            return address, await self._find_other(progress)
        if isinstance(missed, CallLost):
            # The reason of the loss comes from unsigned fields. "Not started" counts only with the signed ticket.
            has_started = missed.has_started or not await self._is_unstarted(progress)
            progress.count_loss(has_started)
            return await self._prepare_resend(progress, address, missed)
        # The script pushed no message, so the call may be sent to another host, even if its tool is not idempotent.
        if is_duplicate or isinstance(missed, CallSentAgain) or address is None:
            raise _used_before(progress.attempt) from None
        if not await progress.untaken.wait():
            failed = _build_not_claimed(address.queue, progress)
            await self._close_record(progress, progress.state, failed.code)
            raise failed from None
        return await self._refresh(request, address, is_lost=missed.reason == "host_lost"), None

    async def _may_be_sent_again(self, progress: "_Progress", result: ToolResult) -> bool:
        """Return whether the call may be sent again after this result: the worker did not run it, or its effects were
        lost and its tool is idempotent.
        """
        request = progress.request
        failure = result.run_failure
        is_lost = failure is RunFailure.LOST
        if is_lost:
            progress.count_loss(has_started=True)
        is_repeatable = is_lost and request.spec.idempotent and progress.losses < MAX_ATTEMPTS
        is_untaken = failure is not None and failure.is_temporary
        # The record is renewed last: after that, the call must be sent, or its record says `queued` for a day.
        return (is_untaken or is_repeatable) and await progress.untaken.wait() and await self._renew(progress)

    async def _find_other(self, progress: "_Progress") -> CallRecord | None:
        """Return what `_find_earlier` returns, after another process has sent the same call. Raises DeliveryFailed when
        this process must not send it either.
        """
        number = progress.attempt
        earlier = await self._find_earlier(progress)
        if earlier is None and progress.attempt == number:
            raise _used_before(number)
        return earlier

    async def _is_superseded(self, progress: "_Progress") -> bool:
        """Return whether another process has sent a later attempt at the call."""
        record = await progress.calls.find(progress.request.tenant, progress.request.call.id)
        return record is not None and record.attempt > progress.attempt

    async def _find_earlier(self, progress: "_Progress") -> CallRecord | None:
        """Return the record of an attempt that another process has sent and that still runs or has ended. `progress`
        then continues with that attempt. Return None if there is no such attempt. Raises DeliveryFailed when the call
        must not be sent again.
        """
        request = progress.request
        record = await progress.calls.find(request.tenant, request.call.id)
        if record is None:
            # Compare with Redis's clock, which also expires the records. The clock of this host may be wrong.
            since = request.sent_since
            if not request.spec.idempotent and since is not None and await progress.calls.now() - since > RECORD_S:
                raise DeliveryFailed(
                    ErrorCode.OUTCOME_UNKNOWN,
                    f"the call may have been sent more than {CALL_TTL_S // 3600} hours ago, and its record has "
                    "expired: it may or may not have acted; check its effects before you repeat it",
                )
            return None
        if request.digest and record.nonce and record.request_digest != request.digest:
            raise used_for_another_call(request.call.id)
        # Continue with the number in the record, even if that attempt was never published, because the scripts accept
        # only this number.
        progress.attempt = record.attempt
        if record.state is CallState.FORBIDDEN:
            raise DeliveryFailed(
                ErrorCode.CANCELLED,
                "the call was cancelled, or its deadline passed, before a worker took it; it was not run",
            )
        if not record.state.is_lost:
            # A process may die between `renew` and the publish. The nonce then still belongs to the previous attempt.
            is_published = record.nonce.partition(":")[0] == str(record.attempt)
            is_kept = not request.digest or record.state is not CallState.DONE
            if is_published and not (is_kept or await progress.calls.has_result(record.task)):
                raise result_expired(request.call.id)
            return record if is_published else None
        is_unknown = record.state is CallState.UNKNOWN
        progress.count_loss(is_unknown or not has_ticket(self._keys, request.tenant, request.call.id, record))
        if is_unknown or (progress.may_have_acted and not request.spec.idempotent):
            await self._give_up(progress, describe_loss(record))
        if not await self._renew(progress):
            if request.digest and await self._is_superseded(progress):
                return await self._find_earlier(progress)
            raise _used_before(progress.attempt + 1)
        return None

    async def _is_unstarted(self, progress: "_Progress") -> bool:
        """Return whether the signed ticket proves that no worker has begun this attempt. The state alone proves
        nothing, because any process that can write to Redis can change it.
        """
        request = progress.request
        try:
            record = await progress.calls.find(request.tenant, request.call.id)
        except BrokerUnavailable:
            # The record with the proof cannot be read, so assume that the call may have had effects.
            return False
        return (
            record is not None
            and record.attempt == progress.attempt
            and has_ticket(self._keys, request.tenant, request.call.id, record)
        )

    async def _find_address(self, request: CheckedRequest) -> SessionAddress | None:
        if not request.runs_in_session or self._locator is None:
            return None
        return await self._locator.find(request.tenant, str(request.session), request.policy)

    async def _refresh(
        self, request: CheckedRequest, address: SessionAddress | None, *, is_lost: bool
    ) -> SessionAddress | None:
        """Return the address for the next attempt after the one at `address`; None for a pool without sessions."""
        if address is None or self._locator is None:
            return await self._find_address(request)
        return await self._locator.refresh(
            request.tenant, str(request.session), address, request.policy, is_lost=is_lost
        )

    async def _prepare_resend(
        self, progress: "_Progress", address: SessionAddress | None, lost: CallLost
    ) -> tuple[SessionAddress | None, CallRecord | None]:
        """Return the address for the next attempt of a lost call, or the attempt that another process has sent. Raises
        DeliveryFailed when the call must not or cannot be sent again.
        """
        request = progress.request
        log.warning(
            "call_lost",
            call=request.call.id,
            tool=request.call.name,
            attempt=progress.attempt,
            has_started=lost.has_started,
            reason=lost.reason,
        )
        # An attempt that has not begun can no longer begin, because the record of the call gets another number.
        is_safe = request.spec.idempotent or not progress.may_have_acted
        if not is_safe or progress.losses >= MAX_ATTEMPTS:
            await self._give_up(progress, lost.reason)
        # Find the new address before the record is renewed for the next attempt. If no host can take the session, the
        # record then still says `lost`, and a worker that was only slow can still store its result.
        try:
            address = await self._refresh(request, address, is_lost=True)
        except (OperatorError, ToolFailure) as error:
            await self._give_up(progress, f"{lost.reason}, and {error}")
        if not await self._renew(progress):
            if request.digest and await self._is_superseded(progress):
                return address, await self._find_other(progress)
            raise DeliveryFailed(
                ErrorCode.OUTCOME_UNKNOWN,
                f"{lost.reason}; it was not sent again because it was cancelled, or because Redis lost its record",
            )
        return address, None

    async def _renew(self, progress: "_Progress") -> bool:
        """Increase the attempt number in the call's record. Return whether that succeeded; if not, the call must not
        be sent again.
        """
        request = progress.request
        try:
            is_renewed = await progress.calls.renew(request.tenant, request.call.id, progress.attempt)
        except BrokerUnavailable as error:
            # Redis may have renewed the record although its reply is missing. `progress` keeps the old number, and no
            # attempt is sent with the new one.
            log.warning("call_not_sent_again", call=request.call.id, error=str(error))
            return False
        progress.attempt += is_renewed
        return is_renewed

    async def _give_up(self, progress: "_Progress", reason: str) -> NoReturn:
        code = ErrorCode.OUTCOME_UNKNOWN if progress.may_have_acted else ErrorCode.HOST_LOST
        await self._close_record(progress, progress.state, code)
        attempts = f" (attempt {progress.losses} of {MAX_ATTEMPTS})" if progress.losses > 1 else ""
        hint = (
            "the call may or may not have acted; check its effects before you repeat it"
            if progress.may_have_acted
            else "the call was not run: send it again; its session continues on the host's next worker, or on "
            "another host from its last checkpoint"
        )
        raise DeliveryFailed(code, f"{reason}{attempts}: {hint}")

    async def _close_record(self, progress: "_Progress", state: CallState, code: ErrorCode) -> None:
        """Mark the call as ended in its record. If Redis does not answer, the caller still gets the result."""
        request = progress.request
        try:
            await progress.calls.give_up(request.tenant, request.call.id, progress.attempt, state, code)
        except BrokerUnavailable as error:
            log.warning("call_loss_not_recorded", call=request.call.id, error=str(error))

    # --- One attempt -----------------------------------------------------------------------------------------------

    async def _send(
        self, request: CheckedRequest, address: SessionAddress | str, number: int = 1, published_as: str | None = None
    ) -> ToolResult:
        """Return the result of one attempt at that queue or session address. `published_as`: the task id of an
        attempt that is already published. Raises NotSent, CallLost, DeliveryFailed, ToolFailure (no slot),
        BrokerUnavailable.
        """
        queue = address if isinstance(address, str) else address.queue
        fence = None if isinstance(address, str) else address.fence
        if published_as is not None:
            # The process that published the attempt requested its slot, so this process needs none.
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
                # The call was published before its slot was granted (`is_early` of Admission.slot), and was refused.
                await slot.wait()
                result = await self._exchange(request, queue, fence, number)
            # Charge the sum of both durations, which sandboxd measures. The guest reports how the sum is divided, and
            # could report a run time of zero to use slots for free.
            slot.used_s = result.clocks.sandbox_s + result.clocks.run_s
        return result

    def _slot_request(self, request: CheckedRequest, queue: str) -> SlotRequest:
        # All attempts share one wait: a call that is sent again must not wait longer than its caller allows.
        waited_s = self.clock() - request.context.sent_at
        return SlotRequest(
            tenant=request.tenant,
            policy=request.policy,
            queue=queue,
            call_id=request.call.id,
            tool=request.worker_call.name,
            priority=request.priority,
            wait_s=max(MIN_WAIT_S, request.queue_wait_s - waited_s),
            limit_s=request.context.timeout_s,
            is_urgent=request.call.name in URGENT,
        )

    async def _exchange(
        self,
        request: CheckedRequest,
        queue: str,
        fence: int | None,
        number: int,
        published_as: str | None = None,
        slot: str = "",
    ) -> ToolResult:
        """Sign and publish the call. Return its result after all its events."""
        # The wait for a slot, or a first attempt, may have taken longer than the deadline allows. Give the attempt at
        # least MIN_WAIT_S, or the worker would refuse a call that has just got its slot.
        start_by = max(request.context.deadline_at, self.clock() + MIN_WAIT_S)
        changed: dict[str, object] = {"attempt": number, "fence": fence, "deadline_at": start_by}
        spans = CURRENT_CALL.get()
        sending = spans.send(request.worker_call, queue, number) if spans is not None else None
        if sending is not None and sending.ref.is_sampled:
            changed["trace"] = str(sending.ref)
        envelope, blob = await self._encode(request, request.context.model_copy(update=changed))
        attempt = Attempt(
            tenant=request.tenant,
            call_id=request.call.id,
            number=number,
            tool=request.worker_call.name,
            queue=queue,
            start_by=start_by,
            ticket=seal_ticket(self._keys, request.tenant, request.call.id, number),
            session=request.session,
            fence=fence,
            slot=slot,
            request_digest=request.digest,
            extra_s=max(0, math.ceil(request.context.timeout_s - MAX_TIMEOUT_S)),
            request=request,
            envelope=envelope,
            published_as=published_as,
        )
        try:
            if self._events is None or not request.handlers:
                result = await self._await_result(attempt)
            else:
                # The stream of events exists only while a caller listens, so it is opened before the publish.
                async with self._events.listen(
                    request.tenant, request.call.id, request.handlers, request.wait_s
                ) as reader:
                    result = await self._await_result(attempt)
                result = result if reader is None else reader.with_hidden_count(result)
        except asyncio.CancelledError:
            if request.keeps_result:
                # Do not delete the blob with the arguments: the call continues and its worker may still read it. The
                # blob expires by itself.
                blob = None
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
                f"no result within {attempt.request.wait_s:.0f} s: the worker or its host may be lost; the call "
                "may or may not have acted, so check its effects before you repeat it",
            ) from None
        except EnvelopeRefused as error:
            raise DeliveryFailed(
                ErrorCode.ENVELOPE_REFUSED,
                f"the result was refused ({error}): use the same release and TOOLCREW_SECRET on all machines",
            ) from error
        # The signature covers the tenant and the attempt, but not the call. Compare the call id, so that the result of
        # another call of the tenant is not accepted.
        if result.call_id != attempt.call_id:
            raise DeliveryFailed(
                ErrorCode.ENVELOPE_REFUSED,
                "the result belongs to another call: check which programs write to this Redis",
            )
        return result

    async def _encode(self, request: CheckedRequest, context: ToolContext) -> tuple[str, str | None]:
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
    """State of the delivery of one request: the current attempt, the number of losses, and whether a lost attempt may
    have acted.
    """

    request: CheckedRequest
    calls: CallStore
    attempt: int = 1
    losses: int = 0
    may_have_acted: bool = False

    @property
    def state(self) -> CallState:
        """Return the final state of the call if it is not sent again."""
        return CallState.UNKNOWN if self.may_have_acted else CallState.LOST

    @cached_property
    def untaken(self) -> Backoff:
        """Backoff between attempts that no worker takes."""
        return Backoff(min(RESEND_S, self.request.queue_wait_s))

    def count_loss(self, has_started: bool) -> None:
        self.losses += 1
        self.may_have_acted = self.may_have_acted or has_started


def _build_not_claimed(queue: str, progress: _Progress) -> DeliveryFailed:
    if progress.may_have_acted:
        return DeliveryFailed(
            ErrorCode.OUTCOME_UNKNOWN,
            "an earlier attempt was lost and may have acted, and the next one did not find the session on its host, "
            f"last on {queue}; check its effects before you repeat it, and see `toolcrew hosts list`",
        )
    return DeliveryFailed(
        ErrorCode.HOST_LOST,
        f"the call was not run: no attempt found its session on the host, last on {queue}; see `toolcrew hosts list`",
    )


def _used_before(attempt: int = 1) -> DeliveryFailed:
    """Return the failure of a call whose id already has a record."""
    if attempt > 1:
        return DeliveryFailed(
            ErrorCode.OUTCOME_UNKNOWN,
            "the call could not be sent again: it was cancelled, or Redis lost its latest record; "
            "check its effects before you repeat it",
        )
    return DeliveryFailed(
        ErrorCode.OUTCOME_UNKNOWN,
        "a call with this id was sent before and was not run again: give every call its own id",
    )
