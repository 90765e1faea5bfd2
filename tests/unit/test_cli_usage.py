"""`toolcrew tenants usage`: rows of periods, their sum, and the tenant's budgets."""

import json
import time

import pytest
from typer.testing import CliRunner

from contract.calls import SessionUsage
from orchestrator.command import app
from store.usage import WorkerUsageStore
from tests.conftest import RedisProcess


def test_usage_is_printed_with_its_sum_and_budgets(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    runner = CliRunner()
    with redis_server.client() as client:
        WorkerUsageStore(client, "default").count([("acme:s1", SessionUsage(meter="m", cpu_s=90.0, read_bytes=5))])
    assert runner.invoke(app, ["tenants", "add", "acme", "--cpu-s-per-day", "120"]).exit_code == 0

    report = json.loads(runner.invoke(app, ["tenants", "usage", "--tenant", "acme", "--by", "hour", "--json"]).stdout)
    (period,) = report["data"]
    assert period["start"].startswith(time.strftime("%Y-%m-%dT%H", time.gmtime()))
    assert (period["cpu_s"], period["read_bytes"], report["total"]["cpu_s"]) == (90.0, 5, 90.0)
    (budget,) = report["budgets"]
    assert (budget["name"], budget["used"], budget["limit"]) == ("cpu_s_per_day", 90.0, 120.0)

    lines = runner.invoke(app, ["tenants", "usage", "--tenant", "acme"]).stdout.splitlines()
    assert lines[0].split()[:3] == ["from", "calls", "cpu"]
    assert lines[-1].split()[:4] == ["cpu_s_per_day", "90", "120", "75%"]
    assert runner.invoke(app, ["tenants", "usage", "--tenant", "acme", "--from", "2020-01-01"]).exit_code == 1
