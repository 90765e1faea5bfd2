"""The audit: one entry per change, read newest first, by filters, from a cursor. Bounded, and without secrets."""

import json

import pytest
import redis.asyncio

from tests.support.records.builders import KEY
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.names import audit_key, switches_key, tenant_audit_key, tenants_key
from toolcrew.contract.registry import Switch
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store import audit as audit_file
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.audit import LOCAL, Actor, Audit, AuditAction, AuditEntry, build_entry, entry_text
from toolcrew.store.scripts import Script
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.tools import RedisSwitches

OPERATOR = Actor(key="0123456789abcdef", role="operator", name="ada", tenant="ops")


async def entries(client: "redis.asyncio.Redis") -> list[AuditEntry]:
    """Return the entries, oldest first."""
    return [*reversed((await Audit(client, "d").read()).entries)]


def summarize(entry: AuditEntry) -> tuple[str, str | None, str]:
    return entry.action, entry.tenant, entry.target


async def test_every_tenant_change_is_audited_with_its_new_values(client: "redis.asyncio.Redis") -> None:
    tenants = RedisTenants(client, "d", KEY)
    await tenants.add("acme", TenantPolicy(weight=2))
    await tenants.change("acme", lambda policy: policy.model_copy(update={"in_flight": 7}))
    await tenants.change(
        "acme", lambda policy: policy.model_copy(update={"queued": 9}), action="tenant.pause", reason="unpaid"
    )
    await tenants.remove("acme")
    audit_entries = await entries(client)
    assert [summarize(entry) for entry in audit_entries] == [
        (action, "acme", "acme") for action in ("tenant.add", "tenant.set", "tenant.pause", "tenant.remove")
    ]
    assert [entry.details for entry in audit_entries] == [
        {"weight": "2.0"},
        {"in_flight": "7"},
        {"queued": "9", "reason": "unpaid"},
        {},
    ]
    assert {entry.actor.key for entry in audit_entries} == {LOCAL}


async def test_unchanged_and_refused_tenant_changes_have_no_audit_entry(client: "redis.asyncio.Redis") -> None:
    tenants = RedisTenants(client, "d", KEY)
    await tenants.add("acme", TenantPolicy(weight=2))
    await tenants.change("acme", lambda policy: policy)
    await tenants.replace("acme", TenantPolicy(weight=2))
    for work in (
        tenants.add("acme", TenantPolicy()),
        tenants.replace("unknown", TenantPolicy()),
        tenants.remove("unknown"),
    ):
        with pytest.raises(ToolFailure):
            await work
    assert [summarize(entry) for entry in await entries(client)] == [("tenant.add", "acme", "acme")]


async def test_concurrent_tenant_changes_are_each_audited_once(client: "redis.asyncio.Redis") -> None:
    local_tenants, operator_tenants = RedisTenants(client, "d", KEY), RedisTenants(client, "d", KEY).acting_as(OPERATOR)
    await local_tenants.add("acme", TenantPolicy())
    attempts = list[TenantPolicy]()

    def change(policy: TenantPolicy) -> TenantPolicy:
        attempts.append(policy)
        return policy.model_copy(update={"weight": 3.0})

    original_read = local_tenants._read_present

    async def read_after_other_change(name: str) -> bytes:
        record = await original_read(name)
        if not attempts:
            await operator_tenants.replace("acme", TenantPolicy(in_flight=5))
        return record

    local_tenants._read_present = read_after_other_change  # type: ignore[method-assign]
    assert await local_tenants.change("acme", change) == TenantPolicy(in_flight=5, weight=3.0)
    audit_entries = await entries(client)
    assert len(attempts) == 2
    assert [(entry.actor.key, entry.details) for entry in audit_entries[1:]] == [
        (OPERATOR.key, {"in_flight": "5"}),
        (LOCAL, {"weight": "3.0"}),
    ]


async def test_key_creation_and_removal_are_audited_without_the_key_text(client: "redis.asyncio.Redis") -> None:
    keys = ApiKeys(client, "d", KEY)
    created = await keys.add("default", "operator", name="ci", ttl_s=60)
    with pytest.raises(ToolFailure):
        await keys.add("unknown")
    assert await keys.revoke(created.id)
    assert not await keys.revoke(created.id)
    audit_entries = await entries(client)
    assert [summarize(stored) for stored in audit_entries] == [
        ("key.add", "default", created.id),
        ("key.remove", "default", created.id),
    ]
    assert audit_entries[0].details.items() >= {("role", "operator"), ("name", "ci"), ("tail", created.text[-4:])}
    stored = str(await client.xrange(audit_key("d")))
    assert created.text not in stored
    assert created.record.digest not in stored
    assert created.text[len("tc_0123456789abcdef_") : -4] not in stored


async def test_a_change_is_refused_when_the_audit_cannot_be_written(client: "redis.asyncio.Redis") -> None:
    tenants, keys, switches = RedisTenants(client, "d", KEY), ApiKeys(client, "d", KEY), RedisSwitches(client, "d", KEY)
    await tenants.add("acme", TenantPolicy())
    created = await keys.add("acme")
    await switches.turn_off("echo", Switch())
    before = [await client.hgetall(key) for key in (tenants_key("d"), "toolcrew:d:api-keys", switches_key("d"))]
    await client.delete(audit_key("d"))
    await client.set(audit_key("d"), "not a stream")
    for work in (
        tenants.add("more", TenantPolicy()),
        tenants.replace("acme", TenantPolicy(weight=5)),
        tenants.remove("acme"),
        keys.add("acme"),
        keys.revoke(created.id),
        switches.turn_off("other", Switch()),
        switches.turn_on("echo"),
        Audit(client, "d").add(build_entry(OPERATOR, "call.kill", "c1")),
    ):
        with pytest.raises(BrokerUnavailable):
            await work
    assert [await client.hgetall(key) for key in (tenants_key("d"), "toolcrew:d:api-keys", switches_key("d"))] == before


async def fill(
    client: "redis.asyncio.Redis", number: int, tenant: str | None = None, action: AuditAction = "call.kill"
) -> None:
    log = Audit(client, "d")
    for at in range(number):
        await log.add(build_entry(OPERATOR, action, f"c{at}", tenant=tenant))


async def test_filters_find_entries_beyond_the_first_pages(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_file, "_AT_ONCE", 5)
    monkeypatch.setattr(audit_file, "MAX_ENTRIES_READ", 10)
    await fill(client, 2, tenant="acme")
    await fill(client, 30)
    log, cursor, pages, audit_entries = Audit(client, "d"), None, 0, list[AuditEntry]()
    while pages == 0 or cursor is not None:
        page = await log.read(cursor, 10, tenant="acme")
        audit_entries, cursor, pages = [*audit_entries, *page.entries], page.cursor, pages + 1
    assert [entry.target for entry in audit_entries] == ["c1", "c0"]
    assert pages == 4
    assert [entry.target for entry in (await log.read(limit=10, actions=("run.cancel",))).entries] == []
    assert [entry.target for entry in (await log.read(limit=1, target="c29")).entries] == ["c29"]


async def test_audit_entries_of_a_tenant_evict_only_its_own_entries(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    add = audit_file._ADD
    source = add.source.replace(str(audit_file.MAX_ENTRIES), "100").replace(str(audit_file.MAX_TENANT_ENTRIES), "100")
    monkeypatch.setattr(audit_file, "_ADD", Script(source, keys=add.keys, args=add.args))
    await fill(client, 50)
    log = Audit(client, "d")
    for name in ("acme", "rival"):
        await RedisTenants(client, "d", KEY).add(name, TenantPolicy())
    await log.add(build_entry(build_tenant("rival"), "skill.install", "mine", tenant="rival"))
    for at in range(500):
        await log.add(build_entry(build_tenant("acme"), "skill.install", f"s{at}", tenant="acme"))
    audit_entries = (await log.read(limit=1000)).entries
    assert [one.target for one in audit_entries if one.action == "call.kill"] == [
        f"c{at}" for at in reversed(range(50))
    ]
    assert [one.target for one in audit_entries if one.target == "mine"] == ["mine"]
    assert 100 <= sum(one.actor.tenant == "acme" for one in audit_entries) < 500
    assert [one.at for one in audit_entries] == sorted((one.at for one in audit_entries), reverse=True)


async def test_pages_list_every_entry_exactly_once(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_file, "_AT_ONCE", 3)
    log = Audit(client, "d")
    for name in ("acme", "rival"):
        await RedisTenants(client, "d", KEY).add(name, TenantPolicy())
    owners = [*["acme"] * 7, *["rival"] * 2]
    # In one stream after the other; then at the same instants in all of them.
    positions = [
        *enumerate(owners, 1),
        *((10 + at, owner) for at in range(5) for owner in ("", "acme", "default", "rival")),
    ]
    await client.delete(audit_key("d"))
    for at, owner in positions:
        actor = build_tenant(owner) if owner else OPERATOR
        key = tenant_audit_key("d", owner) if owner else audit_key("d")
        await client.xadd(key, {"entry": entry_text(build_entry(actor, "call.kill", f"{at} {owner}"))}, id=f"{at}-0")
    expected = [f"{at} {owner}" for at, owner in reversed(positions)]
    for limit in (1, 2, 5, 29):
        targets, cursor = list[str](), None
        while not targets or cursor is not None:
            page = await log.read(cursor, limit)
            targets, cursor = [*targets, *(one.target for one in page.entries)], page.cursor
        assert targets == expected
    ids = [one.id for one in (await log.read(limit=100)).entries]
    assert len(set(ids)) == len(ids)


def build_tenant(name: str) -> Actor:
    return Actor(key="0" * 16, role="tenant", tenant=name)


async def test_unknown_and_invalid_entries_are_skipped(client: "redis.asyncio.Redis") -> None:
    await fill(client, 1)
    await client.xadd(
        audit_key("d"), {"entry": json.dumps({"actor": {"key": "x", "role": "admin"}, "action": "moon.land"})}
    )
    await client.xadd(audit_key("d"), {"other": "field"})
    assert [entry.target for entry in await entries(client)] == ["c0"]


@pytest.mark.parametrize(
    ("cursor", "limit"),
    [
        *((cursor, 100) for cursor in ("", "-", "x", "1", "1-", "-1", "(1-1", "1-1-", "1-1-a b", "+", "$", "٣-٣")),
        *((cursor, 100) for cursor in (f"{2**64}-0", "9" * 5000 + "-1", "1-1\n")),
        *((None, limit) for limit in (0, -1, 1001)),
    ],
)
async def test_an_invalid_cursor_or_limit_is_refused_before_it_reaches_redis(
    client: "redis.asyncio.Redis", cursor: str | None, limit: int
) -> None:
    with pytest.raises(ToolFailure) as refused:
        await Audit(client, "d").read(cursor, limit)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


def test_an_entry_with_invalid_fields_is_refused_before_the_change() -> None:
    for target, tenant in (("x" * 300, None), ("echo", "no tenant")):
        with pytest.raises(ToolFailure) as refused:
            build_entry(OPERATOR, "tool.disable", target, tenant=tenant)
        assert "nothing was changed" in refused.value.message
