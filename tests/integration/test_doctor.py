"""`toolcrew doctor --deep` on a real stack: signed calls on its host, and the report when the secret is wrong."""

import json

import pytest

from tests.support.cli.command_server import run_toolcrew
from tests.support.redis.redis_harness import broker_for
from tests.support.stack.stack import Stack
from toolcrew.orchestrator.operations import doctor_deep
from toolcrew.orchestrator.operations.doctor_deep import examine_hosts
from toolcrew.orchestrator.operations.findings import Report
from toolcrew.store.connection import open_redis
from toolcrew.store.hosts import HostStore


def test_a_whole_deployment_is_examined_and_its_hosts_answer_signed_calls(stack: Stack) -> None:
    done = run_toolcrew(
        stack.footprint,
        "doctor",
        "--only",
        "deployment",
        "--deep",
        "--json",
        environment={"TOOLCREW_REDIS_URL": stack.redis_url},
    )
    report = json.loads(done.stdout)

    assert done.returncode == 0, report
    assert report["healthy"]
    found = {one["name"]: one for one in report["findings"]}
    assert {
        "redis",
        "memory",
        "persistence",
        "secret",
        "clock",
        "hosts",
        "workers",
        "queues",
        "tenants",
        "audit",
        "model",
        "tracing",
    } <= set(found)
    assert "a signed call was answered" in found["calls"]["text"]
    assert "python" not in found


async def test_a_different_secret_is_detected_by_a_call_and_named(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_deep, "QUEUE_WAIT_S", 3.0)
    monkeypatch.setattr(doctor_deep, "HOST_S", 30.0)
    broker = broker_for(stack.redis_url)
    client = open_redis(broker)
    report = Report()
    try:
        await examine_hosts(broker, await HostStore(client, broker.deployment).read(), report)
    finally:
        await client.aclose()

    assert [(found.is_good, found.needed, "TOOLCREW_SECRET" in found.remedy) for found in report.findings] == [
        (False, True, True)
    ]
