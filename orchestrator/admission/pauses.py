"""Admission that lets nothing of a paused tenant begin: its calls wait here for the operator, whoever else they would
wait for.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from contract.errors import BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from contract.tenancy import TenantPolicy
from orchestrator.admission.base import NOT_ADMITTED, Admission, Slot
from store.slots import SlotRequest
from store.tasks import begin_shared
from telemetry.logs import get_logger

log = get_logger(__name__)

LOOK_S = 0.5
"""How often it is looked whether a tenant goes on: with what is known of policies being a second old, all go on within
two.
"""
LEAST_WAIT_S = 1.0
RETRY_AFTER_S = 5.0
PLACE_MARGIN_S = 0.4
"""By how much the place of a paused call in `inner` outlasts the wait of the call."""


class PolicySource(Protocol):
    """Who knows what a tenant may have now."""

    async def policy(self, tenant: str) -> TenantPolicy: ...


class PausableAdmission:
    """Adds pauses to `inner`, which gives the slots and counts paused calls as waiting. A call whose tenant is paused
    before it is sent gives its slot back and waits."""

    def __init__(self, inner: Admission, tenants: PolicySource) -> None:
        self._inner = inner
        self._tenants = tenants
        self._waiting: Counter[str] = Counter()
        self._watches: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def slot(self, request: SlotRequest, *, is_early: bool = False) -> AsyncIterator[Slot]:
        """As promised by Admission; what only ends things passes. RATE_LIMITED, too, says that the tenant is still
        paused when `wait_s` is over.
        """
        if request.is_urgent:
            async with self._inner.slot(request, is_early=is_early) as slot:
                yield slot
            return
        until = asyncio.get_running_loop().time() + request.wait_s
        policy = request.policy
        while True:
            if policy.is_paused:
                policy = await self._until_resumed(replace(request, policy=policy), until)
                wait_s = max(LEAST_WAIT_S, until - asyncio.get_running_loop().time())
                request = replace(request, policy=policy, wait_s=wait_s)
                continue
            async with self._inner.slot(request, is_early=is_early) as slot:
                policy = await self._tenants.policy(request.tenant)
                if not policy.is_paused:
                    yield slot
                    return
                slot.used_s = 0.0

    async def aclose(self) -> None:
        """Give everything back; who waits for a tenant goes on waiting in `inner`, which fails it."""
        watches = list(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await self._inner.aclose()

    async def _until_resumed(self, request: SlotRequest, until: float) -> TenantPolicy:
        """Return the policy of the resumed tenant. Raises ToolFailure when the tenant is still paused at that instant,
        or has too many calls waiting.
        """
        tenant, left_s = request.tenant, max(0.0, until - asyncio.get_running_loop().time())
        # `inner` counts the call as waiting. Our own limit is reached first: its message says that the tenant is
        # paused.
        place = asyncio.ensure_future(self._hold_place(replace(request, wait_s=left_s + PLACE_MARGIN_S)))
        self._waiting[tenant] += 1
        try:
            watch = self._watches.get(tenant)
            if watch is None:
                watch = self._watches[tenant] = begin_shared(self._watch(tenant), f"paused-{tenant}")
            done, _ = await asyncio.wait({watch, place}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            place.cancel()
            await asyncio.gather(place, return_exceptions=True)
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        if watch in done:
            return await self._tenants.policy(tenant)
        if place in done:
            place.result()
        raise _still_paused(request, await self._tenants.policy(tenant))

    async def _hold_place(self, request: SlotRequest) -> None:
        """Wait in `inner`, which gives a paused tenant no slot. Returns only by an exception."""
        async with self._inner.slot(request):
            raise AssertionError(f"tenant {request.tenant} is paused and got a slot")

    async def _watch(self, tenant: str) -> None:
        """One for all calls of a tenant, as long as there are any."""
        try:
            # Told by Redis alone: there is nothing here that could be waited for.
            while self._waiting[tenant] and await self._is_paused(tenant):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        finally:
            del self._watches[tenant]

    async def _is_paused(self, tenant: str) -> bool:
        try:
            return (await self._tenants.policy(tenant)).is_paused
        except BrokerUnavailable as error:
            log.warning("pause_not_known", tenant=tenant, error=str(error))
            return True
        except (ToolFailure, OperatorError):
            # It is none any more, or its policy cannot be read: each of its calls is told so when it asks for itself.
            return False


def _still_paused(request: SlotRequest, policy: TenantPolicy) -> ToolFailure:
    why = f" ({policy.pause_reason})" if policy.pause_reason else ""
    sentence = (
        f"{request.tool} was not run: tenant {request.tenant} is paused{why}; its calls go on when an operator resumes "
        f"it (toolcrew resume {request.tenant})"
    )
    return ToolFailure(ErrorCode.RATE_LIMITED, sentence, retry_after_s=RETRY_AFTER_S, is_paused=True, **NOT_ADMITTED)
