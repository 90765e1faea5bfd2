"""A call that waits for a slot is counted as waiting, and its caller learns why it waits."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import redis.asyncio
import typer

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_spec
from tests.support.redis.admission_harness import DEPLOYMENT, QUEUE, build_request
from tests.support.redis.switched_pool import SwitchedPool
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.run_events import CallFinished, RunEvent, Warned
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.admission import (
    SharedAdmission,
    WaitNotice,
    build_notice,
    report_waiting,
    waiting_listener,
)
from toolcrew.orchestrator.api.calls import NewCall, _stream
from toolcrew.orchestrator.cli.clients import show_waiting
from toolcrew.orchestrator.cli.runner import run_work
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.connection import open_redis
from toolcrew.store.overview import OverviewReader, TenantSummary
from toolcrew.store.pressure import Pressure
from toolcrew.store.slots import WaitReason
from toolcrew.store.tenants import RedisTenants
from toolcrew.workers.tools.base import Outcome, WorkerTool


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator["redis.asyncio.Redis"]:
    client = open_redis(BrokerSettings.model_validate({"redis_url": redis_server.url}))
    await client.set(f"toolcrew:{DEPLOYMENT}:slots:{QUEUE}", 4)
    yield client
    await client.aclose()


@pytest.fixture
def tenants(client: "redis.asyncio.Redis") -> RedisTenants:
    return RedisTenants(client, DEPLOYMENT, KEY)


@pytest.fixture
async def admission(client: "redis.asyncio.Redis", tenants: RedisTenants) -> AsyncIterator[SharedAdmission]:
    opened = SharedAdmission(client, DEPLOYMENT)
    yield opened
    await opened.aclose()


class Caller:
    """A call that keeps its slot until `may_end` is set, and the notices about its wait."""

    def __init__(self, admission: SharedAdmission, policy: TenantPolicy, **fields: object) -> None:
        self.notices: asyncio.Queue[WaitNotice] = asyncio.Queue()
        self.has_slot = asyncio.Event()
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, build_request("acme", policy=policy, **fields)))

    async def _run(self, admission: SharedAdmission, request: object) -> None:
        with report_waiting(self.notices.put_nowait):
            async with admission.slot(request):  # type: ignore[arg-type]
                self.has_slot.set()
                await self.may_end.wait()

    async def notice(self) -> WaitNotice:
        return await asyncio.wait_for(self.notices.get(), SOON_S)

    async def end(self) -> None:
        self.may_end.set()
        await asyncio.wait_for(self.task, SOON_S)


async def read_tenant(client: "redis.asyncio.Redis") -> TenantSummary:
    overview = await OverviewReader(client, DEPLOYMENT, KEY).read()
    (tenant,) = (tenant for tenant in overview.tenants if tenant.tenant != "default")
    assert overview.waiting == tenant.waiting
    return tenant


async def test_a_call_of_a_paused_tenant_is_counted_as_waiting_and_reported(
    client: "redis.asyncio.Redis", tenants: RedisTenants, admission: SharedAdmission
) -> None:
    await tenants.add("acme", TenantPolicy())
    await tenants.pause("acme", "unpaid")

    caller = Caller(admission, await tenants.policy("acme"))
    notice = await caller.notice()

    assert (notice.reason, notice.tenant, notice.tool) == (WaitReason.PAUSED, "acme", "bash_tool")
    assert "tenant acme is paused (unpaid)" in notice.message
    assert "toolcrew tenants resume acme" in notice.message
    assert notice.message.endswith("it waits at most 30 s")
    tenant = await read_tenant(client)
    assert (tenant.waiting, tenant.held, tenant.is_paused) == (1, 0, True)
    pressure = await Pressure(client, DEPLOYMENT).queue(QUEUE)
    assert (pressure.waiting, pressure.stopped) == (0, 1)

    await tenants.resume("acme")
    await asyncio.wait_for(caller.has_slot.wait(), SOON_S)
    tenant = await read_tenant(client)
    assert (tenant.waiting, tenant.held) == (0, 1)
    await caller.end()


@pytest.mark.parametrize(
    ("policy", "reason", "message"),
    [
        (TenantPolicy(in_flight=1), WaitReason.IN_FLIGHT, "has 1 call in flight, which is its limit"),
        (TenantPolicy(rate_per_s=0.001, burst=1), WaitReason.RATE, "at most 0.001 calls per second"),
    ],
)
async def test_the_wait_notice_names_the_tenant_limit(
    tenants: RedisTenants, admission: SharedAdmission, policy: TenantPolicy, reason: WaitReason, message: str
) -> None:
    await tenants.add("acme", policy)
    first = Caller(admission, policy)
    await asyncio.wait_for(first.has_slot.wait(), SOON_S)

    second = Caller(admission, policy)
    notice = await second.notice()

    assert notice.reason is reason
    assert message in notice.message
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    await first.end()
    assert first.notices.empty()


async def test_a_run_warns_once_that_its_tenant_is_paused(redis_server: RedisProcess) -> None:
    pool = SwitchedPool(redis_server, WorkerTool(build_spec("echo"), lambda _arguments, _bench: Outcome("done")))
    tenants = RedisTenants(pool_redis := open_redis(pool.broker), "default", KEY)
    await tenants.add("acme", TenantPolicy())
    await tenants.pause("acme", "unpaid")
    events: list[RunEvent] = []
    warned = asyncio.Event()

    def on_event(event: RunEvent) -> None:
        events.append(event)
        if isinstance(event, Warned):
            warned.set()

    async with pool.client(has_admission=True) as client:
        model = ScriptedModel([Calls([("echo", {})]), "ok"])
        run = asyncio.create_task(client.run("go", session=await client.open_session(), model=model, on_event=on_event))
        await asyncio.wait_for(warned.wait(), SOON_S)
        await tenants.resume("acme")
        await asyncio.wait_for(run, SOON_S)
    await pool_redis.aclose()

    assert ["tenant acme is paused (unpaid)" in event.message for event in events if isinstance(event, Warned)] == [
        True
    ]
    assert [event.result.success for event in events if isinstance(event, CallFinished)] == [True]


def test_a_command_prints_one_line_per_wait(redis_server: RedisProcess, capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        client = open_redis(BrokerSettings.model_validate({"redis_url": redis_server.url}))
        admission = SharedAdmission(client, DEPLOYMENT)
        policy = TenantPolicy(in_flight=1)
        try:
            async with admission.slot(build_request(policy=policy)):
                for _ in range(2):
                    with pytest.raises(ToolFailure):
                        async with admission.slot(build_request(policy=policy, wait_s=0.8)):
                            pass
                raise ToolFailure(ErrorCode.RATE_LIMITED, "it was not run")
        finally:
            await admission.aclose()
            await client.aclose()

    with pytest.raises(typer.Exit), show_waiting():
        run_work(work(), as_json=False)

    assert capsys.readouterr().err.splitlines() == [
        "toolcrew: bash_tool waits: tenant acme has 1 call in flight, which is its limit; it waits at most 1 s",
        "toolcrew: it was not run",
    ]


class WaitingSession:
    """A session whose call waits for a slot before the call runs."""

    async def call(self, *_: Any, **__: Any) -> ToolResult:
        listener = waiting_listener()
        assert listener is not None
        listener(build_notice(build_request(), WaitReason.SLOTS))
        return ToolResult(call_id="c", name="bash_tool", success=True)


async def test_the_http_event_stream_reports_why_a_call_waits() -> None:
    events = [event async for event in _stream(cast(Session, WaitingSession()), NewCall(name="bash_tool"), None)]

    assert [event.event for event in events] == ["waiting", "result"]
    data = cast(dict[str, Any], events[0].data)
    assert data["reason"] == "slots"
    assert "no free slot" in data["message"]
