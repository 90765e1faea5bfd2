"""Admission: divides the workers' slots among the tenants, in weighted fair shares.

Invariant: a call is sent only with a slot, and a slot is returned exactly once, whatever ends the call. If this process
dies, the leases of its slots end. If Redis loses its data, the renewals restore the slots of calls that run.

The state is in Redis (store/slots.py), so all orchestrators of a deployment share the slots. The dispatcher requests a
slot before it sends a call.
"""

import asyncio
import itertools
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from toolcrew.concurrency.tasks import SharedReads, begin_shared, cancel_all
from toolcrew.contract.calls import RunFailure, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.plurals import count, plural
from toolcrew.store.connection import RedisClient
from toolcrew.store.scripts import ScriptConnection
from toolcrew.store.slots import (
    LEASE_S,
    Clock,
    GrantListener,
    SlotReply,
    SlotRequest,
    SlotStore,
    WaitReason,
    find_reasons,
    grants_channel,
    renew,
    restore,
    tick,
)
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

NOT_ADMITTED = RunFailure.ADMISSION.metadata
"""Metadata of a result that admission created when it refused the call."""
NOTICE_S = 0.5
"""Waiting time, in seconds, after which users are informed that a call waits for a slot. Short waits are not reported:
in a busy pool, most calls wait for some milliseconds.
"""
PAUSED_RETRY_S = 5.0
TICK_S = 1.0
"""Interval at which a queue with waiting calls is checked for new slots, in seconds."""
RENEWALS_A_LEASE = 4
RENEW_AT_ONCE = 500
SOONEST_WAKE_S = 0.01
SETTLE_S = 2.0
MAX_RETRY_S = 60.0
LONGEST_PAUSE_S = 5.0
"""Maximum pause between two attempts of `until_admitted`, in seconds."""


def was_not_admitted(result: ToolResult) -> bool:
    """Return whether admission refused the call. Such a call was not sent, and may be sent again under its own id.

    The error code RATE_LIMITED alone does not show this, because a tool can return that code too, and its call was
    sent.
    """
    return result.error_code is ErrorCode.RATE_LIMITED and result.run_failure is RunFailure.ADMISSION


class Slot:
    """The slot of one call.

    `used_s`: seconds of worker time that count for the tenant's fair share, from the durations in the result. None: the
    time for which the slot was held counts. `pending`: the id of the request until Redis has answered it; then "".
    """

    def __init__(self, pending: str = "") -> None:
        self.used_s: float | None = None
        self.pending = pending

    async def wait(self) -> None:
        """Wait until the call has the slot. Raises the same errors as `Admission.slot`."""


class Admission(Protocol):
    """Interface that grants the workers' slots to calls, in fair shares for the tenants."""

    def slot(self, request: SlotRequest, *, is_early: bool = False) -> AbstractAsyncContextManager[Slot]:
        """Wait for a slot and hold it until the block ends. A request of a paused tenant gets no slot.

        `is_early`: the block may begin as soon as the request is sent. A call that is published at once then reaches
        Redis in the same pipeline as the request. The publish names the request `Slot.pending`, and Redis publishes the
        call only if that request has its slot. Otherwise `Slot.wait` waits for the slot.

        Raises ToolFailure(RATE_LIMITED) with `retry_after_s` in its metadata: too many calls of the tenant wait, or no
        slot became free within `wait_s`. Raises BrokerUnavailable when Redis does not answer.
        """
        ...

    async def aclose(self) -> None:
        """Release all slots and requests."""
        ...


class UnlimitedAdmission:
    """Admission for programs without a pool. Every call gets a slot at once."""

    @asynccontextmanager
    async def slot(self, request: SlotRequest, *, is_early: bool = False) -> AsyncIterator[Slot]:
        yield Slot()

    async def aclose(self) -> None:
        """Do nothing, because no slot is held."""


@dataclass(frozen=True)
class WaitNotice:
    """A call that waits for a slot. `message`: one sentence for users that says why the call waits."""

    call_id: str
    tenant: str
    tool: str
    reason: WaitReason
    message: str


OnWaiting = Callable[[WaitNotice], None]
_listener: ContextVar[OnWaiting | None] = ContextVar("on_waiting", default=None)


@contextmanager
def report_waiting(listener: OnWaiting) -> Iterator[None]:
    """Context manager: call `listener` for every call, of this task and of tasks that start in the block, that waits
    longer than NOTICE_S.

    A context variable holds the listener, because some calls are made indirectly: for example, to open a session.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def waiting_listener() -> OnWaiting | None:
    """Return the listener of the innermost `report_waiting` block; None outside of such a block."""
    return _listener.get()


def once_per_reason(listener: OnWaiting) -> OnWaiting:
    """Return a listener that forwards only the first notice of each tenant and reason."""
    reported: set[tuple[str, WaitReason]] = set()

    def report(notice: WaitNotice) -> None:
        if (notice.tenant, notice.reason) not in reported:
            reported.add((notice.tenant, notice.reason))
            listener(notice)

    return report


def build_notice(request: SlotRequest, reason: WaitReason) -> WaitNotice:
    """Return the notice about a call that waits for that reason."""
    tenant, policy, rate = request.tenant, request.policy, request.policy.rate_per_s or 0
    pause = f" ({policy.pause_reason})" if policy.pause_reason else ""
    causes = {
        WaitReason.PAUSED: (
            f"tenant {tenant} is paused{pause}; an operator can resume it (toolcrew tenants resume {tenant})"
        ),
        WaitReason.IN_FLIGHT: f"tenant {tenant} has {count(policy.in_flight, 'call')} in flight, which is its limit",
        WaitReason.RATE: f"tenant {tenant} may begin at most {rate:g} {plural(rate, 'call')} per second",
        WaitReason.SLOTS: f"the workers have no free slot for tenant {tenant} now",
    }
    message = f"{request.tool} waits: {causes[reason]}; it waits at most {request.wait_s:.0f} s"
    return WaitNotice(request.call_id, tenant, request.tool, reason, message)


@dataclass
class _Ticket:
    """A call that waits for a slot or holds a slot. `is_known`: Redis has the request. `reason`: why the call waits.
    `granted_at`: the start of the slot in seconds of the event loop's clock; None while the call waits.
    """

    call: str
    request: SlotRequest
    granted: "asyncio.Future[None]"
    is_known: bool = False
    reason: WaitReason | None = None
    granted_at: float | None = field(default=None)


class SharedAdmission:
    """Grants weighted fair shares of each queue's slots (docs/design.md).

    Each call needs one round trip to Redis before it is sent. The release of its slot does not wait for the reply.
    Requests of the same iteration of the event loop share a pipeline. `clock`: Unix seconds in place of Redis's clock,
    for simulations.

    Invariant: every ticket is in `_tickets` until it is dropped, and dropping a ticket sends exactly one release. If a
    grant arrives for a dropped ticket, `_grant` therefore releases the slot at once.
    """

    def __init__(
        self,
        client: RedisClient,
        deployment: str,
        *,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
        scripts: ScriptConnection | None = None,
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._reasons = SharedReads[dict[tuple[str, str], WaitReason]]()
        self._scripts = scripts or ScriptConnection(client)
        self._owns_scripts = scripts is None
        self.id = secrets.token_hex(6)
        self._lease_s = lease_s
        self._numbers = itertools.count(1)
        self._tickets: dict[str, _Ticket] = {}
        self._waiting: dict[str, _Ticket] = {}
        self._lines = Counter[tuple[str, str]]()
        """Number of waiting calls for each pair of tenant and queue."""
        self._steps = SlotStore(
            self._scripts,
            deployment,
            self.id,
            self._on_answer,
            self._on_failure,
            lease_s=lease_s,
            clock=clock,
        )
        self._listener = GrantListener(client, grants_channel(deployment, self.id), self._grant, self._reconcile)
        self._tasks: list[asyncio.Task[None]] = []
        self._wake: asyncio.TimerHandle | None = None
        self._outage: str | None = None
        self._is_closed = False

    @asynccontextmanager
    async def slot(self, request: SlotRequest, *, is_early: bool = False) -> AsyncIterator[Slot]:
        """Wait for a slot as Admission.slot does. `wait_s` includes the time until Redis answers."""
        ticket, is_sent = self._request(request, is_early=is_early)
        slot = _SharedSlot(self, ticket, is_sent)
        try:
            if not is_sent:
                await self._wait(ticket)
        except BaseException:
            # Redis may just have granted the slot. `_drop` sends the release after the request, and `_grant` returns a
            # slot that arrives without a ticket.
            self._drop(ticket, 0.0)
            raise
        try:
            yield slot
        finally:
            # Charge at most the time for which the slot was held, because `used_s` comes from a result that a worker
            # wrote.
            slot_s = _instant() - ticket.granted_at if ticket.granted_at is not None else 0.0
            self._drop(ticket, slot_s if slot.used_s is None else max(0.0, min(slot.used_s, slot_s)))

    async def aclose(self) -> None:
        """Release all slots. Waiting calls fail."""
        # Set this first, so that no new ticket is added while the releases are sent.
        self._is_closed = True
        for ticket in list(self._tickets.values()):
            if ticket.granted_at is None and not ticket.granted.done():
                ticket.granted.set_exception(_unavailable("the client was closed while this call waited for a slot"))
            self._drop(ticket, 0.0 if ticket.granted_at is None else _instant() - ticket.granted_at)
        if self._wake is not None:
            self._wake.cancel()
        if self._tasks:
            await self._steps.settle(SETTLE_S)
        await cancel_all(self._tasks)
        self._steps.close()
        if self._owns_scripts:
            await self._scripts.aclose()

    def _request(self, request: SlotRequest, *, is_early: bool) -> tuple[_Ticket, bool]:
        """Return a new ticket, and whether its request was sent."""
        if self._is_closed:
            raise _unavailable("the client is closed")
        self._open()
        ticket = _Ticket(f"{self.id}.{next(self._numbers)}", request, asyncio.get_running_loop().create_future())
        # A call that was published early gets a failure from its publish, so no task awaits this future. The callback
        # prevents asyncio's warning about an unread exception.
        ticket.granted.add_done_callback(_retrieve)
        # A call behind other calls of its tenant must wait, so early publishing would be useless.
        is_in_line = self._lines[request.tenant, request.queue] > 0
        self._tickets[ticket.call] = self._waiting[ticket.call] = ticket
        self._lines[request.tenant, request.queue] += 1
        is_early = is_early and not is_in_line
        return ticket, self._steps.ask(ticket.call, request, is_early=is_early, is_in_line=is_in_line)

    async def _wait(self, ticket: _Ticket) -> None:
        try:
            async with asyncio.timeout(ticket.request.wait_s):
                await self._report_wait(ticket)
                await ticket.granted
        except TimeoutError:
            if self._outage is not None:
                raise _unavailable(f"Redis does not answer ({self._outage})") from None
            raise _still_waits(ticket.request, await self._find_reason(ticket)) from None

    async def _find_reason(self, ticket: _Ticket) -> WaitReason | None:
        """Return why the call waits now, or the last known reason if Redis does not answer."""
        pair = (ticket.request.tenant, ticket.request.queue)
        try:
            # Many calls of a tenant may reach their limits at the same time.
            reasons = await self._reasons.read(
                "|".join(pair), lambda: find_reasons(self._client, self._deployment, [pair])
            )
        except BrokerUnavailable:
            return ticket.reason
        return reasons[pair]

    async def _report_wait(self, ticket: _Ticket) -> None:
        """Report the reason for the wait to the listener of the task, if there is one."""
        listener = waiting_listener()
        if listener is None:
            return
        await asyncio.wait({ticket.granted}, timeout=NOTICE_S)
        if not ticket.granted.done() and ticket.reason is not None:
            listener(build_notice(ticket.request, ticket.reason))

    def _open(self) -> None:
        """Start the tasks with the first call, because no event loop runs before it."""
        if not self._tasks:
            works = {"grants": self._listener.run(), "leases": self._keep()}
            self._tasks = [begin_shared(work, f"admission-{name}") for name, work in works.items()]

    def _drop(self, ticket: _Ticket, used_s: float) -> None:
        if self._tickets.pop(ticket.call, None) is not None:
            self._end_wait(ticket)
            self._steps.give_back(ticket.call, used_s)

    def _end_wait(self, ticket: _Ticket) -> None:
        if self._waiting.pop(ticket.call, None) is not None:
            line = (ticket.request.tenant, ticket.request.queue)
            self._lines[line] -= 1
            if not self._lines[line]:
                del self._lines[line]

    def _grant(self, calls: Sequence[str]) -> None:
        for call in calls:
            ticket = self._tickets.get(call)
            if ticket is None:
                # Redis granted the slot after the caller had stopped waiting.
                self._steps.give_back(call, 0.0)
            elif ticket.granted_at is None:
                # A second grant of the same ticket changes nothing. Redis repeats grants with each renewal, because it
                # cannot know whether they have arrived.
                ticket.is_known, ticket.granted_at = True, _instant()
                self._end_wait(ticket)
                if not ticket.granted.done():
                    ticket.granted.set_result(None)

    def _on_answer(self, answer: SlotReply, requested: frozenset[str]) -> None:
        for call in requested & self._waiting.keys():
            self._waiting[call].is_known = True
        for call, reason in answer.waiting.items():
            if call in self._waiting:
                self._waiting[call].reason = reason
        self._grant(answer.granted)
        for call, retry_after_s in answer.refused.items():
            self._fail(call, _too_many(self._waiting[call].request, retry_after_s) if call in self._waiting else None)
        self._repair(answer.unknown)
        self._schedule_wake(answer.wake_s)
        # Redis answers again after an outage. Grants may have been missed, so all leases are checked.
        if self._outage is not None:
            self._outage = None
            self._reconcile()

    def _on_failure(self, error: str, requested: frozenset[str]) -> None:
        # Only the requests in the failed step fail. Calls that Redis has already queued keep their place, and wait
        # until their own limit.
        self._outage = error
        for call in requested:
            self._fail(call, _unavailable(f"Redis does not answer ({error})"))

    def _fail(self, call: str, error: Exception | None) -> None:
        ticket = self._waiting.get(call)
        if ticket is not None and error is not None and not ticket.granted.done():
            ticket.granted.set_exception(error)

    def _repair(self, unknown: Iterable[str]) -> None:
        """Repeat the requests and grants that Redis has lost: its last second of writes, or all of its data."""
        for call in unknown:
            ticket = self._tickets.get(call)
            if ticket is not None and ticket.granted_at is not None:
                # Redis has lost the slot of a call that runs. Add the slot again; otherwise Redis would grant too many
                # slots of the queue.
                self._steps.add(restore(call, ticket.request))
            elif ticket is not None:
                ticket.is_known = False
                self._steps.ask(call, ticket.request)

    def _reconcile(self) -> None:
        """Renew all leases. Redis returns the ids that it does not know."""
        granted_calls = [call for call, ticket in self._tickets.items() if ticket.granted_at is not None]
        waiting = [call for call, ticket in self._waiting.items() if ticket.is_known]
        # Send the ids in several operations, because Lua limits the number of arguments of one command.
        for at in range(0, len(granted_calls), RENEW_AT_ONCE):
            self._steps.add(renew(granted_calls[at : at + RENEW_AT_ONCE], ()))
        for at in range(0, len(waiting), RENEW_AT_ONCE):
            self._steps.add(renew((), waiting[at : at + RENEW_AT_ONCE]))

    async def _keep(self) -> None:
        """Renew the leases of this process, and check the queues in which its calls wait, until cancelled."""
        renewed_at = _instant()
        renew_s = self._lease_s / RENEWALS_A_LEASE
        while True:
            await asyncio.sleep(min(TICK_S, renew_s))
            if _instant() - renewed_at >= renew_s:
                renewed_at = _instant()
                self._reconcile()
            self._add_tick()

    def _add_tick(self) -> None:
        if queues := {ticket.request.queue for ticket in self._waiting.values()}:
            self._steps.add(tick(queues))

    def _schedule_wake(self, wake_s: float | None) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = None
        # Use the wake time of the last reply, because it covers all tenants. Every orchestrator with waiting calls has
        # this timer, so the death of one delays no other.
        if wake_s is not None and self._waiting and not self._is_closed:
            self._wake = asyncio.get_running_loop().call_later(max(SOONEST_WAKE_S, wake_s), self._steps.add, tick(()))


class _SharedSlot(Slot):
    def __init__(self, admission: SharedAdmission, ticket: _Ticket, is_pending: bool) -> None:
        super().__init__(ticket.call if is_pending else "")
        self._admission = admission
        self._ticket = ticket

    async def wait(self) -> None:
        if self.pending:
            await self._admission._wait(self._ticket)
            self.pending = ""


def _retrieve(granted: "asyncio.Future[None]") -> None:
    if not granted.cancelled():
        granted.exception()


def _instant() -> float:
    """Return seconds of the event loop's clock. Every time limit in this module uses this clock."""
    return asyncio.get_running_loop().time()


def _unavailable(problem: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"{problem}; the call was not sent: send it again when Redis answers")


def _too_many(request: SlotRequest, retry_after_s: float) -> ToolFailure:
    limit = request.policy.queued
    sentence = (
        f"{request.tool} was not run: {count(limit, 'call')} of tenant {request.tenant} already "
        f"{plural(limit, 'waits', 'wait')}, which is the limit; try again in {retry_after_s:.1f} s, or with fewer "
        "calls at a time"
    )
    return ToolFailure(ErrorCode.RATE_LIMITED, sentence, retry_after_s=round(retry_after_s, 3), **NOT_ADMITTED)


def _still_waits(request: SlotRequest, reason: WaitReason | None) -> ToolFailure:
    """Return the failure of a call that has waited for its whole time."""
    if reason is WaitReason.PAUSED:
        return _still_paused(request)
    retry_after_s = min(MAX_RETRY_S, max(1.0, request.wait_s))
    sentence = (
        f"{request.tool} was not run: none of the slots that tenant {request.tenant} may use became free within "
        f"{request.wait_s:g} s; try again in {retry_after_s:.0f} s, or with fewer calls at a time"
    )
    return ToolFailure(ErrorCode.RATE_LIMITED, sentence, retry_after_s=retry_after_s, **NOT_ADMITTED)


def _still_paused(request: SlotRequest) -> ToolFailure:
    reason = f" ({request.policy.pause_reason})" if request.policy.pause_reason else ""
    sentence = (
        f"{request.tool} was not run: tenant {request.tenant} is paused{reason}; its calls continue when an operator "
        f"resumes it (toolcrew tenants resume {request.tenant})"
    )
    return ToolFailure(ErrorCode.RATE_LIMITED, sentence, retry_after_s=PAUSED_RETRY_S, is_paused=True, **NOT_ADMITTED)


async def until_admitted(send: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
    """Send a call repeatedly until admission accepts it, and return its result. Random pauses keep refused callers
    from returning at the same moment.
    """
    while True:
        result = await send()
        retry_after_s = result.metadata.get("retry_after_s")
        if not was_not_admitted(result) or not isinstance(retry_after_s, int | float):
            return result
        await asyncio.sleep(min(LONGEST_PAUSE_S, max(0.0, retry_after_s)) * random.uniform(1.0, 1.5))
