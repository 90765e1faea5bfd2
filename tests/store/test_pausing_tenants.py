"""Pausing a tenant: the policy stays paused until a resume, no run of the tenant is claimed, and the audit has an
entry. Over a real Redis.
"""

import json

import pytest
import redis.asyncio
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.run_harness import RunHarness
from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.names import audit_key, tenants_key
from toolcrew.contract.tenancy import TenantPolicy, seal_policy
from toolcrew.orchestrator.command import app
from toolcrew.store.tenants import RedisTenants


@pytest.fixture
async def harness(client: "redis.asyncio.Redis") -> RunHarness:
    return RunHarness(client)


async def claim_names(harness: RunHarness, most: int = 10) -> list[str]:
    return [f"{claim.tenant}/{claim.run}" for claim in await harness.queue.claim(most)]


async def test_pause_survives_policy_changes_until_resume(client: "redis.asyncio.Redis") -> None:
    tenants = RedisTenants(client, "d", KEY)
    await tenants.add("acme", TenantPolicy(weight=2))
    for _ in range(2):
        await tenants.pause("acme", "the bill is open")
    await tenants.change("acme", lambda policy: policy.model_copy(update={"weight": 3.0}))
    assert await tenants.policy("acme") == TenantPolicy(weight=3, is_paused=True, pause_reason="the bill is open")
    await tenants.replace("acme", TenantPolicy(weight=4))
    assert await tenants.policy("acme") == TenantPolicy(weight=4, is_paused=True, pause_reason="the bill is open")
    with pytest.raises(ToolFailure, match="the maximum is 500"):
        await tenants.pause("acme", "x" * 501)
    for _ in range(2):
        await tenants.resume("acme")
    # Earlier releases read the policy of a tenant that is not paused.
    assert await client.hget(tenants_key("d"), "acme") == seal_policy(KEY, "acme", TenantPolicy(weight=4)).encode()
    entries = [json.loads(fields[b"entry"]) for _, fields in await client.xrange(audit_key("d"))]
    assert [(entry["action"], entry["details"].get("reason")) for entry in entries if "weight" not in str(entry)] == [
        ("tenant.pause", "the bill is open"),
        ("tenant.resume", None),
    ]


async def test_runs_of_a_paused_tenant_are_not_claimed(harness: RunHarness) -> None:
    tenants = RedisTenants(harness.client, "d", KEY)
    for name in ("acme", "bolt"):
        await tenants.add(name, TenantPolicy())
        await harness.submit(2, tenant=name)
    await tenants.pause("acme")
    assert await claim_names(harness) == ["bolt/b-1", "bolt/b-2"]
    assert await claim_names(harness) == []
    await tenants.resume("acme")
    assert await claim_names(harness) == ["acme/b-1", "acme/b-2"]


async def test_lost_run_of_a_paused_tenant_waits_and_continues(harness: RunHarness) -> None:
    tenants = RedisTenants(harness.client, "d", KEY)
    await tenants.add("acme", TenantPolicy())
    await harness.submit(1)
    [claim] = await harness.queue.claim(1)
    await harness.die(claim)
    await tenants.pause("acme")
    assert await harness.other.claim(1) == []
    assert await harness.queue.batches.counts("acme", "b") == {"waiting": 1, "running": 0}
    await tenants.resume("acme")
    [resumed_claim] = await harness.other.claim(1)
    assert (resumed_claim.run, resumed_claim.record.losses) == (claim.run, 1)


async def test_many_paused_batches_do_not_block_other_tenants(harness: RunHarness) -> None:
    tenants = RedisTenants(harness.client, "d", KEY)
    for name in ("acme", "bolt"):
        await tenants.add(name, TenantPolicy())
    async with harness.client.pipeline(transaction=False) as pipe:
        for number in range(700):
            pipe.hset(
                f"toolcrew:d:t:acme:batch.a{number}",
                mapping={"state": "in_progress", "concurrency": "9", "is_detached": "1", "total": "1"},
            )
            pipe.zadd(f"toolcrew:d:t:acme:batch.a{number}:waiting", {"r": 1.0})
            pipe.zadd("toolcrew:d:runs:batches", {f"acme|a{number}": 1.0})
        await pipe.execute()
    await harness.submit(1, tenant="bolt")
    await tenants.pause("acme")
    claims = [await claim_names(harness) for _ in range(2)]
    assert [] in claims
    assert ["bolt/b-1"] in claims


async def test_text_in_a_policy_cannot_pause_a_tenant(harness: RunHarness) -> None:
    """The aim: to stop a tenant by the name of a tool."""
    await RedisTenants(harness.client, "d", KEY).add(
        "acme", TenantPolicy(tools=('x","is_paused":true,"y":"', '"is_paused":true'))
    )
    await harness.submit(1)
    assert await claim_names(harness) == ["acme/b-1"]


def test_commands_pause_and_resume_a_tenant(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    paused = run("tenants", "pause", "default", "--reason", "the bill is open")
    assert (paused.exit_code, "is paused" in paused.stderr) == (0, True)
    [row] = json.loads(run("tenants", "list", "--json").stdout)["tenants"]
    assert (row["policy"]["is_paused"], row["policy"]["pause_reason"]) == (True, "the bill is open")
    assert "paused" in run("tenants", "list").stdout
    assert json.loads(run("tenants", "resume", "default", "--json").stdout) == {"name": "default", "is_paused": False}
    assert run("tenants", "pause", "unknown").exit_code == 1
