"""Admission whose state lies in Redis, so that all orchestrators of a deployment share the slots out together."""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from orchestrator.admission.base import NOT_ADMITTED, Slot
from orchestrator.admission.waiting import NOTICE_S, build_notice, waiting_listener
from store.connection import RedisClient, ScriptConnection
from store.slots import (
    LEASE_S,
    Clock,
    GrantListener,
    SlotReply,
    SlotRequest,
    SlotStore,
    WaitReason,
    grants_channel,
    renew,
    restore,
    tick,
)
from store.tasks import begin_shared, cancel_all

TICK_S = 1.0
"""How soon a queue whose slots have become more is looked at."""
RENEWALS_A_LEASE = 4
RENEW_AT_ONCE = 500
SOONEST_WAKE_S = 0.01
SETTLE_S = 2.0
MAX_RETRY_S = 60.0


@dataclass
class _Ticket:
    """One call that waits for a slot or holds it. `is_known`: Redis has it; `reason`: why Redis has queued it;
    `held_at`: on this process's clock, None while it waits."""

    call: str
    request: SlotRequest
    granted: "asyncio.Future[None]"
    is_known: bool = False
    reason: WaitReason | None = None
    held_at: float | None = field(default=None)


class SharedAdmission:
    """Weighted fair shares of each queue's slots (docs/admission.md).

    A call costs one round trip before it begins, and half a one that no caller waits for when it ends; what comes
    together goes together. `clock`: Unix seconds instead of Redis's own, for programs that play time.
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
        self._scripts, self._owns_scripts = scripts or ScriptConnection(client), scripts is None
        self.id = secrets.token_hex(6)
        self._lease_s = lease_s
        self._numbers = itertools.count(1)
        self._tickets: dict[str, _Ticket] = {}
        self._waiting: dict[str, _Ticket] = {}
        self._lines = Counter[tuple[str, str]]()
        """How many calls of each tenant wait for each queue."""
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
        """As promised by Admission. `wait_s` holds for Redis's answer, too."""
        ticket, is_sent = self._request(request, is_early=is_early)
        slot = _SharedSlot(self, ticket, is_sent)
        try:
            if not is_sent:
                await self._wait(ticket)
        except BaseException:
            self._drop(ticket, 0.0)
            raise
        try:
            yield slot
        finally:
            held_s = _instant() - ticket.held_at if ticket.held_at is not None else 0.0
            self._drop(ticket, held_s if slot.used_s is None else max(0.0, min(slot.used_s, held_s)))

    async def aclose(self) -> None:
        """Give everything back, and fail who still waits."""
        self._is_closed = True
        for ticket in list(self._tickets.values()):
            if ticket.held_at is None and not ticket.granted.done():
                ticket.granted.set_exception(_unavailable("the client was closed while this call waited for a slot"))
            self._drop(ticket, 0.0 if ticket.held_at is None else _instant() - ticket.held_at)
        if self._wake is not None:
            self._wake.cancel()
        if self._tasks:
            await self._steps.settle(SETTLE_S)
        await cancel_all(self._tasks)
        self._steps.close()
        if self._owns_scripts:
            await self._scripts.aclose()

    def _request(self, request: SlotRequest, *, is_early: bool) -> tuple[_Ticket, bool]:
        """Return the ticket, and whether its request is on its way."""
        if self._is_closed:
            raise _unavailable("the client is closed")
        self._open()
        ticket = _Ticket(f"{self.id}.{next(self._numbers)}", request, asyncio.get_running_loop().create_future())
        # A call that was published early learns of a failure by its publish.
        ticket.granted.add_done_callback(_retrieve)
        # Behind other calls of its tenant it waits as well: to publish it early would be in vain.
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
            raise _none_free(ticket.request) from None

    async def _report_wait(self, ticket: _Ticket) -> None:
        """Give the task's listener, if it has one, the reason why the call waits."""
        listener = waiting_listener()
        if listener is None:
            return
        await asyncio.wait({ticket.granted}, timeout=NOTICE_S)
        if not ticket.granted.done() and ticket.reason is not None:
            listener(build_notice(ticket.request, ticket.reason))

    def _open(self) -> None:
        """The tasks, with the first call: there is a loop then."""
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
                # Given just as the waiting ended.
                self._steps.give_back(call, 0.0)
            elif ticket.held_at is None:
                ticket.is_known, ticket.held_at = True, _instant()
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
        if self._outage is not None:
            self._outage = None
            self._reconcile()

    def _on_failure(self, error: str, requested: frozenset[str]) -> None:
        self._outage = error
        for call in requested:
            self._fail(call, _unavailable(f"Redis does not answer ({error})"))

    def _fail(self, call: str, error: Exception | None) -> None:
        ticket = self._waiting.get(call)
        if ticket is not None and error is not None and not ticket.granted.done():
            ticket.granted.set_exception(error)

    def _repair(self, unknown: Iterable[str]) -> None:
        """Redis has forgotten these: its last second, or all of it."""
        for call in unknown:
            ticket = self._tickets.get(call)
            if ticket is not None and ticket.held_at is not None:
                self._steps.add(restore(call, ticket.request))
            elif ticket is not None:
                ticket.is_known = False
                self._steps.ask(call, ticket.request)

    def _reconcile(self) -> None:
        """Compare with what Redis knows, which renews the leases."""
        held = [call for call, ticket in self._tickets.items() if ticket.held_at is not None]
        waiting = [call for call, ticket in self._waiting.items() if ticket.is_known]
        for at in range(0, len(held), RENEW_AT_ONCE):
            self._steps.add(renew(held[at : at + RENEW_AT_ONCE], ()))
        for at in range(0, len(waiting), RENEW_AT_ONCE):
            self._steps.add(renew((), waiting[at : at + RENEW_AT_ONCE]))

    async def _keep(self) -> None:
        """Renew what is held and waits; look at the queues in which something waits."""
        renewed_at = _instant()
        renew_s = self._lease_s / RENEWALS_A_LEASE
        while True:
            await asyncio.sleep(min(TICK_S, renew_s))
            if _instant() - renewed_at >= renew_s:
                renewed_at = _instant()
                self._reconcile()
            self._look()

    def _look(self) -> None:
        if queues := {ticket.request.queue for ticket in self._waiting.values()}:
            self._steps.add(tick(queues))

    def _schedule_wake(self, wake_s: float | None) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = None
        if wake_s is not None and self._waiting and not self._is_closed:
            self._wake = asyncio.get_running_loop().call_later(max(SOONEST_WAKE_S, wake_s), self._steps.add, tick(()))


class _SharedSlot(Slot):
    def __init__(self, admission: SharedAdmission, ticket: _Ticket, is_pending: bool) -> None:
        super().__init__(ticket.call if is_pending else "")
        self._admission, self._ticket = admission, ticket

    async def wait(self) -> None:
        if self.pending:
            await self._admission._wait(self._ticket)
            self.pending = ""


def _retrieve(granted: "asyncio.Future[None]") -> None:
    if not granted.cancelled():
        granted.exception()


def _instant() -> float:
    """Seconds of the event loop's clock, by which everything here waits."""
    return asyncio.get_running_loop().time()


def _unavailable(what: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"{what}; the call was not sent: send it again when Redis answers")


def _too_many(request: SlotRequest, retry_after_s: float) -> ToolFailure:
    sentence = (
        f"{request.tool} was not run: {request.policy.queued} calls of tenant {request.tenant} wait already, which is "
        f"all that may; try again in {retry_after_s:.1f} s, or with fewer calls at a time"
    )
    return ToolFailure(ErrorCode.RATE_LIMITED, sentence, retry_after_s=round(retry_after_s, 3), **NOT_ADMITTED)


def _none_free(request: SlotRequest) -> ToolFailure:
    retry_after_s = min(MAX_RETRY_S, max(1.0, request.wait_s))
    sentence = (
        f"{request.tool} was not run: none of the slots that tenant {request.tenant} may use became free within "
        f"{request.wait_s:g} s; try again in {retry_after_s:.0f} s, or with fewer calls at a time"
    )
    return ToolFailure(ErrorCode.RATE_LIMITED, sentence, retry_after_s=retry_after_s, **NOT_ADMITTED)
