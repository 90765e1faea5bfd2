"""The list of calls: waiting calls with the reason, running calls, ended calls, and the owner of each."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_attempt, publish_arguments
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import call_key, slots_key
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store import call_reader
from toolcrew.store.call_messages import Publisher
from toolcrew.store.call_reader import CallReader
from toolcrew.store.clock import SharedClock
from toolcrew.store.scripts import ScriptConnection
from toolcrew.store.slots import SlotRequest, WaitReason, enqueue, load_script, script_arguments
from toolcrew.store.tenants import RedisTenants

QUEUE = "pool.web"


class Calls:
    """The calls of one deployment."""

    def __init__(self, client: "redis.asyncio.Redis", publisher: Publisher) -> None:
        self.client = client
        self.publisher = publisher
        self.list = CallReader(client, "d", KEY)

    async def ask_for_slot(
        self, call: str, policy: TenantPolicy, tenant: str = "acme", tool: str = "bash_tool"
    ) -> None:
        request = SlotRequest(tenant, policy, QUEUE, call, tool, "interactive", 60.0, 30.0)
        await load_script().run(self.client, **script_arguments("d", "o1", [enqueue(f"o1.{tenant}-{call}", request)]))

    async def publish(self, call: str, tool: str = "bash_tool", **record: Any) -> None:
        """Publish a call, and give its record these fields afterwards."""
        attempt = build_attempt(tool, call_id=call, queue=QUEUE, envelope="{}")
        await self.publisher.publish(*publish_arguments(attempt, f"task-{call}"))
        if record:
            await self.client.hset(call_key("d", "acme", call), mapping=record)

    async def read(self, *tenants: str, limit: int = 100) -> list[tuple[str, str]]:
        page = await self.list.read_page(tenants or ["acme"], limit)
        return [(one.id, one.state) for one in page.data]


@pytest.fixture
async def calls(redis_server: RedisProcess) -> AsyncIterator[Calls]:
    client = redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5)
    scripts = ScriptConnection(client)
    yield Calls(client, Publisher(scripts, "d", SharedClock()))
    await scripts.aclose()
    await client.aclose()


async def test_waiting_calls_are_listed_before_running_and_ended_calls(calls: Calls) -> None:
    await calls.publish("old", state="done", ended_at="100.0")
    await calls.publish("late", state="done", ended_at="200.0", code="TIMEOUT")
    await calls.publish("works", state="running", started_at="300.0", holder="host.h1.b1/w1")
    await calls.publish("lies")
    await calls.client.set(slots_key("d", QUEUE), 1)
    for number in range(5):
        await calls.ask_for_slot(f"w{number}", TenantPolicy(in_flight=1))

    listed = await calls.read()

    assert listed == [
        *((f"w{number}", "waiting") for number in range(1, 5)),
        *(("lies", "queued"), ("works", "running"), ("late", "done"), ("old", "done")),
    ]
    page = await calls.list.read_page(["acme"], 100)
    by_name = {one.id: one for one in page.data}
    assert not page.has_more
    assert by_name["w1"].reason is WaitReason.IN_FLIGHT
    assert (by_name["works"].since, by_name["works"].host) == (300.0, "h1")
    assert by_name["late"].error_code == "TIMEOUT"


async def test_waiting_calls_show_the_admission_reason(calls: Calls) -> None:
    await calls.client.set(slots_key("d", QUEUE), 10)
    policies = {
        "few": TenantPolicy(in_flight=1),
        "slow": TenantPolicy(rate_per_s=0.01, burst=1),
        "debtor": TenantPolicy(is_paused=True),
        "many": TenantPolicy(),
    }
    await RedisTenants(calls.client, "d", KEY).add("debtor", policies["debtor"])
    for tenant, policy in policies.items():
        for number in range(30):
            await calls.ask_for_slot(f"c{number}", policy, tenant)

    page = await calls.list.read_page(list(policies), 200)

    reasons = {one.tenant: one.reason for one in page.data if one.state == "waiting"}
    assert reasons == {
        "few": WaitReason.IN_FLIGHT,
        "slow": WaitReason.RATE,
        "many": WaitReason.SLOTS,
        "debtor": WaitReason.PAUSED,
    }


async def test_a_tenant_lists_only_its_own_tool_calls(calls: Calls) -> None:
    await calls.publish("mine")
    await calls.publish("opening", tool="session.open")
    for number in range(12):
        await calls.ask_for_slot(f"o{number}", TenantPolicy(), "other")
        await calls.ask_for_slot(f"s{number}", TenantPolicy(), "acme", "session.close")

    assert await calls.read() == [("mine", "queued")]
    assert {state for _, state in await calls.read("other")} == {"waiting"}


async def test_the_call_list_is_bounded_and_reports_more_entries(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_reader, "MAX_LISTED", 1)
    monkeypatch.setattr(call_reader, "_SCAN_COUNT", 1)
    for number in range(4):
        await calls.publish(f"c{number}", state="done", ended_at=f"{number}.0")

    page = await calls.list.read_page(["acme"], 3)

    assert [one.id for one in page.data] == ["c3", "c2", "c1"]
    assert page.has_more


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
async def test_pages_list_every_call_once_in_order(calls: Calls, limit: int) -> None:
    await calls.client.set(slots_key("d", QUEUE), 1)
    for number in range(3):
        await calls.ask_for_slot(f"w{number}", TenantPolicy(in_flight=1))
    # The order of the ends differs from the order in which the calls were sent, and two calls ended together.
    for name, ended_at in (("d1", 300.5), ("d2", 100.0), ("d3", 200.0), ("d4", 200.0)):
        await calls.publish(name, state="done", ended_at=str(ended_at))
    listed, position = list[str](), None
    while True:
        page = await calls.list.read_page(["acme"], limit, position)
        listed += [call.id for call in page.data]
        if (position := page.next_position) is None:
            break
    assert listed == ["w1", "w2", "d1", "d3", "d4", "d2"]


@pytest.mark.parametrize("position", ["", "x", "9", "1|nan|acme|c", "1|1.0|a b|c", "1|1.0|acme|", "11|1.0|acme|c"])
async def test_invalid_position_is_refused(calls: Calls, position: str) -> None:
    with pytest.raises(ToolFailure) as refused:
        await calls.list.read_page(["acme"], 1, position)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


async def test_the_newest_thousand_calls_are_listed_and_unknown_records_skipped(calls: Calls) -> None:
    attempt = build_attempt("bash_tool", queue=QUEUE, envelope="{}")
    for number in range(1005):
        await calls.publisher.publish(replace(attempt, call_id=f"c{number}"), f"task-{number}", "{}")
    await calls.client.hset(call_key("d", "acme", "c1004"), mapping={"state": "frozen"})

    page = await calls.list.read_page(["acme"], 2000)

    assert len(page.data) == 999
    assert "c1004" not in {one.id for one in page.data}
    assert "c4" not in {one.id for one in page.data}
