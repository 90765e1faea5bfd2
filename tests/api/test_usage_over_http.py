"""Usage and budgets over HTTP and on the page: who may read them, and refused runs."""

import time
from datetime import UTC, datetime

import pytest

from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness
from toolcrew.contract.calls import SessionUsage
from toolcrew.store.usage import WorkerUsageStore


@pytest.fixture
def stored_usage(redis_server: RedisProcess, api: ApiHarness) -> None:
    with redis_server.client() as client:
        for tenant, cpu_s in (("acme", 90.0), ("rival", 54_321.0)):
            usage = SessionUsage(meter="m", cpu_s=cpu_s, written_bytes=7, sandbox_s=120.5)
            WorkerUsageStore(client, "default").count([(f"{tenant}:s1", usage)])


@pytest.mark.usefixtures("stored_usage")
async def test_a_tenant_reads_only_its_own_usage(api: ApiHarness) -> None:
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    report = (await api["acme"].get("/v1/tenants/acme/usage", params={"from": today})).json()
    assert [(one["start"][:10], one["cpu_s"], one["sandbox_s"]) for one in report["data"]] == [(today, 90.0, 120.5)]
    assert (report["total"]["written_bytes"], report["budgets"]) == (7, [])
    assert (await api["acme"].get("/v1/tenants/rival/usage")).status_code == 403
    assert (await api["operator"].get("/v1/tenants/rival/usage")).json()["total"]["cpu_s"] == 54_321.0
    hours = (await api["acme"].get("/v1/tenants/acme/usage", params={"by": "hour", "from": today})).json()["data"]
    assert sum(one["cpu_s"] for one in hours) == 90.0
    for wrong in ({"from": "2020-01-01", "by": "hour"}, {"from": "2030-01-02", "to": "2030-01-01"}, {"by": "minute"}):
        assert (await api["acme"].get("/v1/tenants/acme/usage", params=wrong)).status_code in (400, 422)
    assert (await api["admin"].get("/v1/tenants/unknown/usage")).status_code == 404


@pytest.mark.usefixtures("stored_usage")
async def test_a_run_above_the_budget_is_refused_with_the_reset_time(api: ApiHarness) -> None:
    policy = {"budgets": {"cpu_s_per_day": 60.0, "tokens_per_month": 5}}
    assert (await api["admin"].put("/v1/tenants/acme", json=policy)).status_code == 200
    refused = await api["acme"].post("/v1/runs", json={"instruction": "act"})
    assert (refused.status_code, refused.json()["code"]) == (429, "BUDGET_EXCEEDED")
    assert 0 < int(refused.headers["retry-after"]) <= 86_400
    assert time.strftime("%Y-%m", time.gmtime()) in refused.json()["detail"] or "-01T" in refused.json()["detail"]
    budgets = (await api["acme"].get("/v1/tenants/acme/usage")).json()["budgets"]
    assert [(one["name"], one["used"], one["is_used_up"]) for one in budgets] == [
        ("tokens_per_month", 0.0, False),
        ("cpu_s_per_day", 90.0, True),
    ]
    actions = [one["action"] for one in (await api["operator"].get("/v1/audit")).json()["data"]]
    assert actions.count("budget.exceed") == 1
    assert (await api["rival"].post("/v1/runs", json={"instruction": "act"})).status_code == 202
