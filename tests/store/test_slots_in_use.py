"""The pages, the metrics and `tenants ls` show the same numbers of slots in use and of calls in flight."""

import re
import time

import pytest
import redis.asyncio
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.redis.admission_harness import DEPLOYMENT, Harness, set_slots
from tests.support.sandboxd.fake_hosts import build_report
from tests.support.stack.metric_harness import nonzero_samples, read_page
from toolcrew.contract.names import POOL_WEB, host_key, hosts_key
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.api.pages.rendering import Viewer, build
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.metrics.page import MetricsPage
from toolcrew.store.overview import Overview, OverviewReader
from toolcrew.store.slots import count_slots_in_use
from toolcrew.store.tenants import RedisTenants

QUEUE = "host.h1.b00t"


@pytest.mark.parametrize(("in_flight", "slots", "in_use"), [(0, 4, 0), (3, 4, 3), (4, 4, 4), (6, 4, 4), (3, 0, 0)])
def test_slots_in_use_never_exceed_the_slots(in_flight: int, slots: int, in_use: int) -> None:
    assert count_slots_in_use(in_flight, slots) == in_use


async def fill(client: "redis.asyncio.Redis", server: RedisProcess) -> None:
    """Add two workers whose reports are older than the calls: 3 calls in flight on 4 slots, and 3 on 2 slots."""
    reports = [
        build_report("h1", queue=QUEUE, slots=4, busy=0, pools=()),
        build_report("w1", queue=POOL_WEB, kind="web", slots=2, busy=0),
    ]
    for report in reports:
        await client.zadd(hosts_key(DEPLOYMENT), {report.queue: time.time()})
        await client.set(host_key(DEPLOYMENT, report.queue), report.model_dump_json())
    await RedisTenants(client, DEPLOYMENT, KEY).add("acme", TenantPolicy(in_flight=100))
    with server.client() as blocking:
        harness = Harness(blocking, now=time.time())
        for queue, slots in ((QUEUE, 4), (POOL_WEB, 2)):
            set_slots(blocking, slots, queue)
            for _ in range(3):
                harness.ask("acme", queue=queue, limit_s=0.5, policy=TenantPolicy(in_flight=100))


async def test_overview_pages_and_metrics_show_the_same_slots(redis_server: RedisProcess) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=10) as client:
        await fill(client, redis_server)
        overview = await OverviewReader(client, DEPLOYMENT, KEY).read()
        metrics = read_page(await MetricsPage(client, DEPLOYMENT).render())

    assert (overview.slots_in_use, overview.slots) == (5, 6)
    assert {queue.queue: (queue.slots_in_use, queue.slots) for queue in overview.queues if queue.slots} == {
        QUEUE: (3, 4),
        POOL_WEB: (2, 2),
    }
    check_pages(overview)
    in_use = nonzero_samples(metrics, "toolcrew_queue_slots_in_use")
    assert {name: number for (name,), number in in_use.items() if number} == {QUEUE: 3, POOL_WEB: 2}
    assert nonzero_samples(metrics, "toolcrew_tenant_calls")["in_flight", "acme"] == overview.tenants[0].held == 6


def check_pages(overview: Overview) -> None:
    viewer = Viewer("ann", "operator", None, "token")
    values = {"tenants": [], "live": [], "batches": [], "approvals": "0", "seen": 0, "unseen": 0}
    page = build("overview.part.html", viewer, snapshot=overview, **values)
    assert re.search(r"<dt>Slots in use</dt><dd>5 <small>of 6</small>", page)
    assert re.search(rf"{re.escape(QUEUE)}</th><td data-label=\"Slots in use\" class=\"number\">3 of 4</td>", page)
    assert re.search(rf"{re.escape(POOL_WEB)}</th><td data-label=\"Slots in use\" class=\"number\">2 of 2</td>", page)
    (summary,) = (tenant for tenant in overview.tenants if tenant.held)
    values = {"keys": None, "left": 0, "is_open": False}
    rows = build("tenants.part.html", viewer, tenants=[{"summary": summary, "sessions": 0}], **values)
    assert '<td data-label="In flight" class="number">6 of 100</td>' in rows


def test_tenants_list_shows_calls_in_flight(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TOOLCREW_DEPLOYMENT", DEPLOYMENT)
    assert CliRunner().invoke(app, ["tenants", "add", "acme", "--in-flight", "2", "--queued", "9"]).exit_code == 0
    with redis_server.client() as blocking:
        harness = Harness(blocking, now=time.time())
        for _ in range(3):
            harness.ask("acme", limit_s=0.5, policy=TenantPolicy(in_flight=2, queued=9))

    lines = CliRunner().invoke(app, ["tenants", "list"]).stdout.splitlines()

    assert [line.split()[:4] for line in lines] == [
        ["name", "weight", "in-flight", "waiting"],
        ["default", "1", "0/1000", "0/10000"],
        ["acme", "1", "2/2", "1/9"],
    ]
