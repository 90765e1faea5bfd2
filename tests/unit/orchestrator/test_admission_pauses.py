"""Admission of paused tenants: no call of such a tenant starts, and no call is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator import admission
from toolcrew.orchestrator.admission import NOT_ADMITTED, PausableAdmission, Slot, until_admitted
from toolcrew.store.slots import SlotRequest

PAUSED = TenantPolicy(is_paused=True, pause_reason="the bill is open")


class Tenants:
    """A store with the policy of one tenant. `error`: the exception to raise instead of returning the policy."""

    def __init__(self, policy: TenantPolicy = TenantPolicy()) -> None:  # noqa: B008
        self.now = policy
        self.error: Exception | None = None
        self.was_read = asyncio.Event()

    async def policy(self, tenant: str) -> TenantPolicy:
        self.was_read.set()
        if self.error is not None:
            raise self.error
        return self.now


class Slots:
    """Grants every request a slot after `free` is set. A request of a paused tenant waits, and fails with `error`
    once `error` is set.
    """

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.requests: list[SlotRequest] = []
        self.used_s: list[float | None] = []
        self.released = asyncio.Event()
        self.paused: list[SlotRequest] = []
        self.is_full = asyncio.Event()
        self.is_closed = False

    @asynccontextmanager
    async def slot(self, request: SlotRequest, *, is_early: bool = False) -> AsyncIterator[Slot]:
        if request.policy.is_paused and not request.is_urgent:
            self.paused.append(request)
            try:
                await self.is_full.wait()
                raise ToolFailure(ErrorCode.RATE_LIMITED, "too many calls wait", **NOT_ADMITTED)
            finally:
                self.paused.remove(request)
        self.requests.append(request)
        await self.free.wait()
        slot = Slot()
        try:
            yield slot
        finally:
            self.used_s.append(slot.used_s)
            self.released.set()

    async def aclose(self) -> None:
        self.is_closed = True


def build_request(policy: TenantPolicy, *, wait_s: float = 60.0, is_urgent: bool = False) -> SlotRequest:
    return SlotRequest("acme", policy, "host.a.b1", "c1", "bash_tool", "interactive", wait_s, 30.0, is_urgent)


async def run_call(admission: PausableAdmission, request: SlotRequest) -> str:
    async with admission.slot(request) as slot:
        slot.used_s = 2.0
        return "ran"


async def start_paused_call(admission: PausableAdmission, tenants: Tenants) -> "asyncio.Task[str]":
    """Start a call of a paused tenant. Return when the admission has read the policy of the tenant."""
    call = asyncio.create_task(run_call(admission, build_request(PAUSED)))
    await asyncio.wait_for(tenants.was_read.wait(), SOON_S)
    return call


@pytest.fixture(autouse=True)
def short_poll_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PAUSE_POLL_S", 0.01)


async def test_calls_of_a_paused_tenant_wait_and_run_when_the_tenant_is_resumed() -> None:
    slots, tenants = Slots(), Tenants(PAUSED)
    admission = PausableAdmission(slots, tenants)
    calls = [asyncio.create_task(run_call(admission, build_request(PAUSED))) for _ in range(50)]
    await asyncio.wait_for(tenants.was_read.wait(), SOON_S)
    assert (slots.requests, len(slots.paused)) == ([], 50)
    tenants.now = TenantPolicy()
    assert await asyncio.wait_for(asyncio.gather(*calls), SOON_S) == ["ran"] * 50
    assert (len(slots.used_s), slots.paused) == (50, [])


async def test_a_slot_granted_after_the_tenant_was_paused_is_released_unused() -> None:
    slots, tenants = Slots(), Tenants()
    slots.free.clear()
    admission = PausableAdmission(slots, tenants)
    call = asyncio.create_task(run_call(admission, build_request(TenantPolicy())))
    await asyncio.sleep(0)
    tenants.now = PAUSED
    slots.free.set()
    await asyncio.wait_for(tenants.was_read.wait(), SOON_S)
    await asyncio.wait_for(slots.released.wait(), SOON_S)
    assert (slots.used_s, call.done()) == ([0.0], False)
    tenants.now = TenantPolicy()
    assert await asyncio.wait_for(call, SOON_S) == "ran"
    assert slots.used_s == [0.0, 2.0]


async def test_a_call_that_waits_past_its_limit_fails_with_the_pause_reason() -> None:
    slots = Slots()
    with pytest.raises(
        ToolFailure, match=r"acme is paused \(the bill is open\).*toolcrew tenants resume acme"
    ) as refused:
        await run_call(PausableAdmission(slots, Tenants(PAUSED)), build_request(PAUSED, wait_s=0.05))
    assert (refused.value.code, refused.value.metadata["not_run"]) == (ErrorCode.RATE_LIMITED, "admission")
    assert isinstance(refused.value.metadata["retry_after_s"], float)
    assert slots.requests == []


async def test_an_urgent_call_of_a_paused_tenant_runs() -> None:
    slots = Slots()
    assert await run_call(PausableAdmission(slots, Tenants(PAUSED)), build_request(PAUSED, is_urgent=True)) == "ran"


async def test_a_waiting_call_survives_a_short_redis_outage() -> None:
    slots, tenants = Slots(), Tenants(PAUSED)
    tenants.error = BrokerUnavailable("away")
    with capture_logs():
        call = await start_paused_call(PausableAdmission(slots, tenants), tenants)
        assert not call.done()
        tenants.error, tenants.now = None, TenantPolicy()
        assert await asyncio.wait_for(call, SOON_S) == "ran"


async def test_a_waiting_call_fails_when_its_paused_tenant_is_removed() -> None:
    tenants = Tenants(PAUSED)
    call = await start_paused_call(PausableAdmission(Slots(), tenants), tenants)
    tenants.error = ToolFailure(ErrorCode.UNKNOWN_TENANT, "there is no tenant acme")
    with pytest.raises(ToolFailure, match="there is no tenant acme"):
        await asyncio.wait_for(call, SOON_S)


async def test_polling_of_a_tenant_stops_when_no_call_waits() -> None:
    tenants = Tenants(PAUSED)
    admission = PausableAdmission(Slots(), tenants)
    call = await start_paused_call(admission, tenants)
    watch = admission._watches["acme"]
    call.cancel()
    await asyncio.wait_for(watch, SOON_S)
    assert (dict(admission._watches), dict(admission._waiting)) == ({}, {})


CALL = ToolCall(id="c", name="bash_tool", arguments={})


def build_refusal(code: ErrorCode, **metadata: float | str) -> ToolResult:
    return ToolResult.failed(CALL, code, "no", metadata=dict(metadata))


@pytest.mark.parametrize(
    ("results", "sent"),
    [
        (
            [
                build_refusal(ErrorCode.RATE_LIMITED, retry_after_s=0.0, **NOT_ADMITTED),
                build_refusal(ErrorCode.RATE_LIMITED, retry_after_s=-1.0, **NOT_ADMITTED),
                build_refusal(ErrorCode.TIMEOUT),
            ],
            3,
        ),
        ([build_refusal(ErrorCode.RATE_LIMITED, retry_after_s=0.0)], 1),
        ([build_refusal(ErrorCode.QUOTA_EXCEEDED, retry_after_s=0.0, **NOT_ADMITTED)], 1),
    ],
    ids=["admitted after two refusals", "rate limit of the tool", "another error code"],
)
async def test_a_call_is_sent_again_only_after_an_admission_refusal(results: list[ToolResult], sent: int) -> None:
    remaining = list(results)

    async def send() -> ToolResult:
        return remaining.pop(0)

    assert await until_admitted(send) is results[-1]
    assert len(results) - len(remaining) == sent


async def test_closing_the_admission_with_waiting_calls_closes_its_slots() -> None:
    slots, tenants = Slots(), Tenants(PAUSED)
    admission = PausableAdmission(slots, tenants)
    call = await start_paused_call(admission, tenants)
    await asyncio.wait_for(admission.aclose(), SOON_S)
    assert slots.is_closed
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_call_of_a_paused_tenant_is_refused_when_the_queue_is_full() -> None:
    slots = Slots()
    slots.is_full.set()
    with pytest.raises(ToolFailure, match="too many calls wait"):
        await asyncio.wait_for(run_call(PausableAdmission(slots, Tenants(PAUSED)), build_request(PAUSED)), SOON_S)
