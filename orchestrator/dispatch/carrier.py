"""One attempt at a call: a slot, a signed envelope, its answer. Where it goes and what follows when it is lost is
decided by others.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from contract.calls import GRACE_S, ToolCall, ToolContext, ToolResult
from contract.clock import SharedClock
from contract.envelope import EnvelopeTooLarge, decode_result, encode_arguments, encode_call
from contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from contract.ledger import CallRecord, has_ticket, seal_ticket
from contract.names import POOL_QUEUES, BlobPool, task_name
from contract.signing import ResultSeal, SigningKeys
from contract.specs import ToolSpec
from contract.tenancy import TenantPolicy
from orchestrator.admission import Admission
from orchestrator.dispatch.call_events import CallEventListener, Handler
from orchestrator.dispatch.transport import Delivery, DeliveryFailed, Sticky, Transport
from orchestrator.tracing import current_call
from store.publisher import NotSent
from store.sessions import SessionAddress
from store.slots import Priority, SlotRequest

SANDBOX_GRACE_S = 20.0
"""Beyond a call's limit and grace: sandboxd may have to remove a container, which the engine may do slowly."""
LEAST_WAIT_S = 1.0
"""What is left of the wait in a queue for a call that has waited long for its slot."""
URGENT = frozenset({"session.close"})
"""Verbs that free what others wait for."""


@dataclass(frozen=True)
class Errand:
    """A call that may be made: checked, its arguments prepared, its limit known. `context.sent_at` is when it began to
    wait.
    """

    call: ToolCall
    context: ToolContext
    spec: ToolSpec
    policy: TenantPolicy
    queue_wait_s: float
    priority: Priority
    handlers: Mapping[str, Handler]
    aliases: list[str]
    """By which other names its parameters were given."""
    keeps_result: bool = False
    sent_since: float | None = None
    """Unix seconds of the first moment at which another process may have sent the call; None: it was never sent."""
    shown_as: str | None = None
    """The name of the tool as the caller knows it, when the call is sent to another tool."""

    @property
    def is_sticky(self) -> bool:
        """Whether it goes where its session lives."""
        return self.spec.pool not in POOL_QUEUES

    @property
    def wait_s(self) -> float:
        """How long its sender waits, from sending on."""
        return self.queue_wait_s + self.context.timeout_s + GRACE_S + SANDBOX_GRACE_S


class ArgumentStore(Protocol):
    """Stores arguments that are too large for an envelope (store/blobs.py)."""

    async def leave(self, tenant: str, data: bytes, pool: BlobPool = ...) -> str: ...

    async def drop(self, key: str) -> None: ...


class Carrier:
    """Sends errands. Raises NotSent, CallLost, DeliveryFailed, ToolFailure (no slot), BrokerUnavailable."""

    def __init__(
        self,
        transport: Transport,
        keys: SigningKeys,
        admission: Admission,
        clock: SharedClock,
        events: CallEventListener | None = None,
        *,
        is_traced: bool = False,
        blobs: ArgumentStore | None = None,
    ) -> None:
        self._blobs = blobs
        self._transport = transport
        self._keys = keys
        self._admission = admission
        self._clock = clock
        self._events = events
        self._is_traced = is_traced

    async def carry(
        self, errand: Errand, address: SessionAddress | str, attempt: int = 1, published_as: str | None = None
    ) -> ToolResult:
        """The call's result from that queue, or from the address of its session. `published_as`: this attempt is there
        already, under that task id.
        """
        queue = address if isinstance(address, str) else address.queue
        if published_as is not None:
            # Whoever sent it had its slot.
            return await self._sent(errand, address, queue, attempt, published_as)
        spans = current_call() if self._is_traced else None
        waiting = spans.wait(errand.call.name, errand.context, errand.priority) if spans is not None else None
        async with self._admission.slot(self._request(errand, queue), is_early=waiting is None) as slot:
            if waiting is not None:
                waiting.end()
            try:
                result = await self._sent(errand, address, queue, attempt, slot=slot.pending)
            except NotSent as refused:
                if refused.reason != "no_slot":
                    raise
                await slot.wait()
                result = await self._sent(errand, address, queue, attempt)
            slot.used_s = result.clocks.sandbox_s + result.clocks.run_s
        return result

    async def command(self, queue: str, call: ToolCall, context: ToolContext) -> None:
        """Tell whoever serves a queue at once, past it. Raises BrokerUnavailable."""
        await self._transport.command(queue, encode_call(call, context, self._keys))

    def _request(self, errand: Errand, queue: str) -> SlotRequest:
        waited_s = self._clock() - errand.context.sent_at
        return SlotRequest(
            tenant=errand.context.tenant,
            policy=errand.policy,
            queue=queue,
            call_id=errand.call.id,
            tool=errand.call.name,
            priority=errand.priority,
            wait_s=max(LEAST_WAIT_S, errand.queue_wait_s - waited_s),
            limit_s=errand.context.timeout_s,
            is_urgent=errand.call.name in URGENT,
        )

    def has_ticket(self, tenant: str, call_id: str, record: CallRecord) -> bool:
        """Whether the record proves that no worker has begun this attempt."""
        return has_ticket(self._keys, tenant, call_id, record)

    def settle(self, tenant: str, call_id: str) -> None:
        """The result of an errand that keeps it is safe elsewhere."""
        self._transport.settle(tenant, call_id)

    async def _sent(
        self,
        errand: Errand,
        address: SessionAddress | str,
        queue: str,
        attempt: int,
        published_as: str | None = None,
        slot: str = "",
    ) -> ToolResult:
        context, call = errand.context, errand.call
        start_by = max(context.deadline_at, self._clock() + LEAST_WAIT_S)
        sticky = (
            Sticky(context.tenant, str(context.session), address.fence) if isinstance(address, SessionAddress) else None
        )
        changed: dict[str, object] = {
            "attempt": attempt,
            "fence": sticky.fence if sticky else None,
            "deadline_at": start_by,
        }
        spans = current_call() if self._is_traced else None
        sending = spans.send(call, queue, attempt) if spans is not None else None
        if sending is not None and sending.ref.is_sampled:
            changed["trace"] = str(sending.ref)
        context = context.model_copy(update=changed)
        envelope, blob = await self._encoded(errand, context)
        delivery = Delivery(
            task=task_name(call.name),
            queue=queue,
            tenant=context.tenant,
            call_id=call.id,
            envelope=envelope,
            start_by=start_by,
            wait_s=errand.wait_s,
            attempt=attempt,
            sticky=sticky,
            limit_s=None if errand.is_sticky else context.timeout_s,
            keeps_result=errand.keeps_result,
            published_as=published_as,
            ticket=seal_ticket(self._keys, context.tenant, call.id, attempt),
            run=context.run,
            session=context.session,
            shown_as=errand.shown_as,
            slot=slot,
        )
        try:
            result = await self._heard(delivery, errand)
        except asyncio.CancelledError:
            if errand.keeps_result:
                blob = None  # The call goes on, and may still have to be read: the blob expires.
            raise
        finally:
            if blob is not None and self._blobs is not None:
                await self._blobs.drop(blob)
        if sending is not None:
            sending.end(error=result.error_code.value if result.error_code is not None else None)
        return result

    async def _heard(self, delivery: Delivery, errand: Errand) -> ToolResult:
        """The result, after all that the call had to say."""
        if self._events is None:
            return await self._delivered(delivery)
        async with self._events.listen(delivery.tenant, delivery.call_id, errand.handlers, delivery.wait_s) as reader:
            result = await self._delivered(delivery)
        return result if reader is None else reader.note(result)

    async def _delivered(self, delivery: Delivery) -> ToolResult:
        try:
            result = decode_result(
                await self._transport.deliver(delivery), ResultSeal(self._keys, delivery.tenant, delivery.attempt)
            )
        except TimeoutError:
            raise DeliveryFailed(
                ErrorCode.OUTCOME_UNKNOWN,
                f"no result within {delivery.wait_s:.0f} s: the worker or its host may be gone, and the call may or "
                "may not have acted",
            ) from None
        except EnvelopeRefused as error:
            raise DeliveryFailed(ErrorCode.ENVELOPE_REFUSED, f"the result was refused: {error}") from error
        if result.call_id != delivery.call_id:
            raise DeliveryFailed(ErrorCode.ENVELOPE_REFUSED, "the result belongs to another call")
        return result

    async def _encoded(self, errand: Errand, context: ToolContext) -> tuple[str, str | None]:
        """Return the envelope, and the key of the blob with the call's arguments if they do not fit into it."""
        call = errand.call
        try:
            try:
                return encode_call(call, context, self._keys), None
            except EnvelopeTooLarge:
                if self._blobs is None:
                    raise
            data = encode_arguments(call.arguments)
            blob = await self._blobs.leave(context.tenant, data, "sandbox" if errand.is_sticky else "web")
            signed = context.model_copy(update={"arguments_blob": blob})
            return encode_call(call.model_copy(update={"arguments": {}}), signed, self._keys), blob
        except ValueError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, str(error)) from error
