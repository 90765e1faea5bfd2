"""`toolcrew doctor` of a deployment with one fault at a time: the report names the fault and its fix, and nothing
else is reported as broken.
"""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from tests.support.redis.redis_harness import broker_for, open_server
from tests.support.sandboxd.fake_hosts import build_report
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.names import (
    api_keys_key,
    catalog_key,
    catalog_names_key,
    host_key,
    hosts_key,
    open_sessions_key,
    refusals_key,
    slots_key,
    switches_key,
    tenants_key,
)
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import Catalog, seal_catalog
from toolcrew.contract.tenancy import SandboxPolicy, TenantPolicy, seal_policy
from toolcrew.orchestrator.operations import doctor_deep
from toolcrew.orchestrator.operations.doctor import examine
from toolcrew.orchestrator.operations.doctor_deep import examine_hosts, judge_clock
from toolcrew.orchestrator.operations.doctor_pool import examine_pool
from toolcrew.orchestrator.operations.doctor_redis import examine_redis
from toolcrew.orchestrator.operations.findings import CheckResult, Report
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.approvals import approvals_key
from toolcrew.store.connection import open_redis
from toolcrew.store.tenants import RedisTenants
from toolcrew.workers.tools.builtin import build_registry

D = "default"
DISK = 100 * 1024**3
Client = redis.asyncio.Redis


@pytest.fixture
def broker(redis_server: RedisProcess) -> BrokerSettings:
    return BrokerSettings.model_validate({"redis_url": redis_server.url})


@pytest.fixture
async def client(broker: BrokerSettings) -> AsyncIterator[Client]:
    client = open_redis(broker)
    yield client
    await client.aclose()


async def report_host(client: Client, name: str = "h1", **fields: Any) -> None:
    report = build_report(name, **{"disk_free_bytes": DISK, **fields})
    await client.zadd(hosts_key(D), {report.queue: time.time()})
    await client.set(host_key(D, report.queue), report.model_dump_json())
    await client.set(slots_key(D, report.queue), 4)


async def set_up_deployment(client: Client) -> None:
    """Set up a deployment without faults."""
    await report_host(client)
    specs = (build_spec("bash_tool", pool="sandbox"),)
    await client.set(catalog_key(D, "sandbox"), seal_catalog(keys_of(client), "sandbox", Catalog(tools=specs)))
    await client.set(catalog_names_key(D, "sandbox"), json.dumps(["bash_tool"]))


def keys_of(client: Client) -> SigningKeys:
    return SigningKeys.of(client.connection_pool.connection_kwargs["password"], deployment=D)


async def examine_deployment(client: Client) -> Report:
    report = Report()
    await examine_pool(client, D, keys_of(client), report)
    return report


def findings_of(report: Report, name: str) -> list[CheckResult]:
    return [finding for finding in report.findings if finding.name == name]


def list_bad(report: Report) -> list[tuple[str, bool]]:
    """Return the checks that are not good, except the checks for pools without workers: name, and whether the check
    is broken.
    """
    return [
        (finding.name, finding.needed)
        for finding in report.findings
        if not finding.is_good and finding.name != "workers"
    ]


async def test_a_deployment_without_faults_is_healthy(client: Client, broker: BrokerSettings) -> None:
    await set_up_deployment(client)
    report = await examine_deployment(client)
    assert await examine_redis(client, broker, report)

    assert list_bad(report) == []
    assert report.is_healthy
    assert {finding.name for finding in report.findings} == {
        "hosts", "workers", "queues", "tenants", "audit", "redis", "memory", "persistence", "secret", "clock",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "name", "is_broken", "message", "remedy"),
    [
        ({"maxmemory-policy": "allkeys-lru"}, "memory", True, "delete calls and results", "noeviction"),
        ({"maxmemory": "1"}, "memory", True, "about to refuse calls", "raise maxmemory"),
        ({"appendonly": "no"}, "persistence", False, "lost when Redis ends", "appendonly yes"),
    ],
    ids=["evicts", "full", "not persistent"],
)
async def test_an_unsafe_redis_setting_is_reported(
    client: Client,
    broker: BrokerSettings,
    settings: dict[str, str],
    name: str,
    is_broken: bool,
    message: str,
    remedy: str,
) -> None:
    before = {key: (await client.config_get(key))[key] for key in settings}
    for key, value in settings.items():
        await client.config_set(key, value)
    report = Report()
    try:
        await examine_redis(client, broker, report)
    finally:
        for key, value in before.items():
            await client.config_set(key, value)

    finding = next(one for one in findings_of(report, name) if not one.is_good)
    assert finding.needed is is_broken
    assert message in finding.text
    assert remedy in finding.remedy
    assert report.is_healthy is not is_broken


async def test_a_secret_rotation_and_refused_signatures_are_reported(client: Client, broker: BrokerSettings) -> None:
    await client.hset(refusals_key(D), mapping={"signature": 3, "expired": 90})
    rotating = broker.model_copy(update={"secrets_previous": ("older",)})
    report = Report()
    await examine_redis(client, BrokerSettings.model_validate(rotating.model_dump()), report)
    finding = [(one.needed, one.text, one.remedy) for one in findings_of(report, "secret") if not one.is_good]

    assert [needed for needed, *_ in finding] == [False] * len(finding)
    assert sum("TOOLCREW_SECRETS_PREVIOUS" in remedy for *_, remedy in finding) == 1
    assert sum("signature: 3" in text for _, text, _ in finding) == 1
    assert not any("expired" in text for _, text, _ in finding)


async def test_the_orchestrator_redis_user_can_run_every_check() -> None:
    with open_server(users=True) as server:
        settings = {"redis_url": server.url("orchestrator")}
        report, without = [
            await examine(OrchestratorSettings.model_validate({**settings, **secret}), "deployment")
            for secret in ({"secret": "s" * 20}, {})
        ]

    assert [finding for finding in report.findings if finding.needed and not finding.is_good] == []
    assert any("user orchestrator" in finding.text for finding in findings_of(report, "redis"))
    assert {"hosts", "queues", "tenants", "audit", "memory"} <= {finding.name for finding in report.findings}
    bad_secrets = [
        finding
        for finding in findings_of(without, "secret")
        if "TOOLCREW_SECRET" in finding.text and not finding.is_good
    ]
    assert [finding.needed for finding in bad_secrets] == [True]


async def test_a_redis_replica_or_unreachable_redis_is_reported() -> None:
    with (
        open_server() as master,
        open_server(f"replicaof 127.0.0.1 {master.port}", f"masterauth {master.password}") as replica,
    ):
        settings = OrchestratorSettings.model_validate({"redis_url": replica.url()})
        report = await examine(settings, "deployment")
    assert any("replica" in finding.text and finding.needed for finding in findings_of(report, "redis"))
    settings = OrchestratorSettings.model_validate({"redis_url": f"redis://:x@127.0.0.1:{reserve_port()}/0"})
    report = await examine(settings, "deployment")
    assert [finding.is_good for finding in findings_of(report, "redis")] == [False]
    assert not report.is_healthy


@pytest.mark.parametrize(
    ("fields", "is_broken", "message", "remedy"),
    [
        ({"release": "0"}, True, "release 0", "docs/deploy.md"),
        (
            {"healthy": False, "problem": "sandboxd does not answer"},
            True,
            "sandboxd does not answer",
            "toolcrew doctor",
        ),
        ({"worker": "", "draining": True}, False, "next worker", "start its worker"),
        ({"draining": True}, False, "no new sessions", "wait"),
        ({"memory_free_bytes": 1}, False, "memory are left", "TOOLCREW_MAX_SANDBOXES"),
        ({"disk_free_bytes": 1}, False, "disk are left", "TOOLCREW_SANDBOXD_STATE"),
        ({"sessions": 100}, False, "all 100 sessions are taken", "add a host"),
        ({"images": ("base",)}, False, "", ""),
    ],
    ids=["release", "unhealthy", "restarting", "draining", "memory", "disk", "full", "images"],
)
async def test_a_host_with_a_problem_is_reported_with_a_remedy(
    client: Client, fields: dict[str, Any], is_broken: bool, message: str, remedy: str
) -> None:
    await set_up_deployment(client)
    await report_host(client, "h2", **fields)
    report = await examine_deployment(client)

    assert list_bad(report) == [("hosts", is_broken)]
    finding = next(one for one in findings_of(report, "hosts") if not one.is_good)
    assert finding.text.startswith("h2 (") or "images" in fields
    assert message in finding.text
    assert remedy in finding.remedy


async def test_only_the_queue_of_a_lost_host_is_reported_as_unserved(client: Client) -> None:
    await set_up_deployment(client)
    await client.zadd(hosts_key(D), {"host.new.b00t": time.time(), "host.gone.b00t": time.time() - 100})
    assert list_bad(await examine_deployment(client)) == []
    await client.set(host_key(D, "host.new.b00t"), '{"surprise": 1}')
    await client.lpush("host.new.b00t", "{}")
    await client.lpush("host.gone.b00t", "{}")

    report = await examine_deployment(client)
    assert sorted(list_bad(report)) == [("hosts", True), ("queues", True)]
    assert "host.new.b00t" in next(finding.text for finding in findings_of(report, "hosts") if not finding.is_good)
    assert "host.gone.b00t: 1 call of" in findings_of(report, "queues")[0].text
    assert not any("no longer reports" in finding.text and "host.new" in finding.text for finding in report.findings)


@pytest.mark.parametrize(
    ("slots", "age_s", "is_broken"), [(0, 0, True), (4, 3600, True), (4, 0, False)], ids=["unserved", "old", "fresh"]
)
async def test_calls_without_a_worker_are_reported(client: Client, slots: int, age_s: float, is_broken: bool) -> None:
    await set_up_deployment(client)
    call = f"toolcrew:{D}:t:acme:call.c1"
    await client.hset(call, "queued_at", str(time.time() - age_s))
    await client.lpush("pool.web", json.dumps({"body": "x", "headers": {"call_key": call}}))
    if slots:
        await client.set(slots_key(D, "pool.web"), slots)

    report = await examine_deployment(client)
    assert list_bad(report) == ([("queues", True)] if is_broken else [])


@pytest.mark.parametrize(
    "message", ["", "{", '{"headers": {"call_key": "other:key"}}', '{"headers": {"call_key": "toolcrew:default:x"}}']
)
async def test_an_invalid_queue_message_does_not_stop_the_check(client: Client, message: str) -> None:
    await set_up_deployment(client)
    await client.set(slots_key(D, "pool.web"), 4)
    await client.hset(f"toolcrew:{D}:x", "queued_at", "yesterday")
    await client.lpush("pool.web", message)
    assert list_bad(await examine_deployment(client)) == []


async def test_unserved_hidden_and_disabled_tools_and_open_approvals_are_reported(client: Client) -> None:
    await set_up_deployment(client)
    await client.set(catalog_names_key(D, "web"), json.dumps(["webfetch_tool"]))
    hidden = (build_spec("bash_tool", pool="tools"),)
    await client.set(catalog_key(D, "tools"), seal_catalog(keys_of(client), "tools", Catalog(tools=hidden)))
    await client.hset(switches_key(D), "bash_toll", json.dumps({"reason": "r", "at": 0.0}))
    now_ms = time.time() * 1000
    await client.zadd(approvals_key(D), {"over": now_ms - 60_000, "open": now_ms + 60_000})
    report = await examine_deployment(client)
    assert [finding.text for finding in findings_of(report, "approvals")] == ["1 call waits for a person"]

    messages = [finding.text for finding in findings_of(report, "tools")]
    assert len(messages) == 4
    assert "bash_tool of the pool tools" in messages[0]
    assert messages[1] == "no longer served: webfetch_tool"
    assert messages[2] == "disabled: bash_toll"
    assert "no worker publishes them: bash_toll" in messages[3]
    assert [finding.needed for finding in findings_of(report, "tools")] == [True, False, False, False]


async def test_a_served_tool_for_sessions_is_not_reported(client: Client) -> None:
    await set_up_deployment(client)
    await client.set(catalog_names_key(D, "web"), json.dumps(["webhook.send"]))
    notice = build_spec("webhook.send", pool="web", audience="session")
    await client.set(catalog_key(D, "web"), seal_catalog(keys_of(client), "web", Catalog(tools=(notice,))))
    assert findings_of(await examine_deployment(client), "tools") == []


@pytest.mark.parametrize(
    ("policy", "is_broken", "message"),
    [
        (b"{", True, "cannot be verified"),
        (TenantPolicy(sandbox=SandboxPolicy(tenant_class="gold")), True, "no host has the class 'gold' of acme"),
        (TenantPolicy(sandbox=SandboxPolicy(images=("mine",))), True, "no host allows an image"),
        (TenantPolicy(is_paused=True, pause_reason="unpaid"), False, "acme is paused: unpaid"),
    ],
    ids=["unreadable", "class", "image", "paused"],
)
async def test_a_tenant_that_is_not_served_is_reported(
    client: Client, policy: bytes | TenantPolicy, is_broken: bool, message: str
) -> None:
    await set_up_deployment(client)
    record = policy if isinstance(policy, bytes) else seal_policy(keys_of(client), "acme", policy)
    await client.hset(
        tenants_key(D), mapping={"acme": record, "fine": seal_policy(keys_of(client), "fine", TenantPolicy())}
    )
    report = await examine_deployment(client)

    assert list_bad(report) == [("tenants", is_broken)]
    assert message in findings_of(report, "tenants")[0].text


async def test_expiring_expired_and_unverifiable_keys_are_reported(client: Client) -> None:
    await set_up_deployment(client)
    await RedisTenants(client, D, keys_of(client)).add("acme", TenantPolicy())
    keys = ApiKeys(client, D, keys_of(client))
    await keys.add("acme", name="lasting")
    await keys.add("acme", name="ci", ttl_s=3 * 86_400)
    await ApiKeys(client, D, keys_of(client), clock=lambda: time.time() - 1000).add("acme", name="old", ttl_s=60)
    await client.hset(api_keys_key(D), "feedfeedfeedfeed", "{}")
    report = await examine_deployment(client)

    output = sorted(finding.text for finding in findings_of(report, "keys"))
    assert len(output) == 3
    assert [
        fragment
        for fragment in ("(ci) of acme expires in 3.0 days", "(old) of acme has expired", "cannot be verified")
        if not any(fragment in one for one in output)
    ] == []
    assert report.is_healthy


@pytest.mark.parametrize(
    ("expected", "is_reported", "message"),
    [
        (b"1000.5\n", False, ""),
        (b"900\n", True, "behind"),
        (b"1100\n", True, "ahead of"),
        (b"now?\n", True, "did not print"),
        (b"nan", True, "ahead of"),
    ],
)
def test_a_clock_difference_of_a_sandbox_is_reported(expected: bytes, is_reported: bool, message: str) -> None:
    report = Report()
    judge_clock("h1", expected, 1000.0, 1001.0, report)
    assert [message in finding.text for finding in report.findings] == ([True] if is_reported else [])


async def test_a_host_that_accepts_no_calls_is_reported_and_its_session_removed(
    redis_server: RedisProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await set_up_deployment(client)
    await client.set(
        catalog_key(D, "sandbox"),
        seal_catalog(keys_of(client), "sandbox", Catalog(tools=tuple(build_registry().specs()))),
    )
    monkeypatch.setattr(doctor_deep, "QUEUE_WAIT_S", 0.5)
    report = Report()
    await examine_hosts(broker_for(redis_server.url), [build_report()], report)
    assert [(finding.name, finding.is_good, finding.needed, finding.text[:3]) for finding in report.findings] == [
        ("calls", False, True, "h1:")
    ]
    assert await client.zcard(open_sessions_key(D)) == 0
