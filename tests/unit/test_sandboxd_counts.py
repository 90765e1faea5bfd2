"""Counts of sandboxd become the deployment's metrics: once, whichever worker collects them, and whenever Redis is
available.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from contract.errors import SandboxUnavailable
from orchestrator.metrics.page import MetricsPage
from store.metrics import WorkerMetricsStore
from tests.conftest import RedisProcess
from tests.fake_engine import echoing
from tests.fake_hosts import build_report
from tests.fake_sandboxd import PLAN, open_host, running_sandboxd
from tests.metric_harness import Key, counted, key, read_page
from tests.unit.test_metric_page import report
from tests.unit.test_sandboxd_hostile_guest import answering, call
from tests.unit.test_sandboxd_sessions import lose, stillborn
from workers.host_duties import SandboxdMetrics
from workers.sandboxd.sessions import NewSession

QUEUE = "host.h1.b00t"


@pytest.fixture
def client(redis_server: RedisProcess) -> Iterator["redis.Redis"]:
    with redis_server.client() as opened:
        yield opened


async def read(server: RedisProcess) -> dict[Key, float]:
    async with redis.asyncio.Redis.from_url(server.url) as opened:
        return dict(read_page(await MetricsPage(opened, "d").render()))


def build_status(boot: str = "b00t", **counts: Any) -> dict[str, Any]:
    pool = {"ready": 2, "target": 3, "handed_out": 4, "turned_away": 0}
    return {
        "boot": boot,
        "counts": {"starts": {}, "failed_starts": 0, "oom": 0, "kills": {}, "lost": {}, **counts},
        "pool": pool,
        "states": {"warm": 2},
    }


def build_taker(client: "redis.Redis", *events: dict[str, Any]) -> tuple[SandboxdMetrics, list[dict[str, Any]]]:
    """Return a worker's collector and the list whose last element is sandboxd's report."""
    statuses = list(events)
    return SandboxdMetrics(WorkerMetricsStore(client, "d"), "h1", QUEUE, lambda: statuses[-1]), statuses


async def test_starts_failures_and_losses_are_counted(tmp_path: Path) -> None:
    async with open_host(tmp_path, echoing, stillborn, echoing) as host:
        await host.sessions.open("s", NewSession(PLAN, 60))
        with pytest.raises(SandboxUnavailable):
            await host.sessions.open("t", NewSession(PLAN, 60))
        await lose(host.sessions)
        counts = host.factory.counts.describe()
    assert (counts["starts"]["count"], counts["failed_starts"]) == (1, 1)
    assert counts["starts"]["sum"] > 0
    # The stillborn one was lost before it was anybody's.
    assert counts["lost"] == {"ended": 2}


@pytest.mark.parametrize(
    ("survivors", "oom", "kills"), [(0, True, {"tree": 1}), (1, False, {"container": 1})], ids=["memory", "survivors"]
)
async def test_kills_are_counted_once_per_call(
    tmp_path: Path, survivors: int, oom: bool, kills: dict[str, int]
) -> None:
    kill = {"signalled": 2, "survivors": survivors, "method": "tree", "ms": 3.0}
    async with running_sandboxd(tmp_path, answering({"ev": "done", "oom": oom, "kill": kill})) as daemon:
        client, name = await daemon.open()
        await call(client, name)
        counts = daemon.host.factory.counts.describe()
    assert (counts["oom"], counts["kills"]) == (int(oom), kills)


async def test_a_guest_that_breaks_the_protocol_is_counted_as_such(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, answering({"ev": "nonsense"})) as daemon:
        client, name = await daemon.open()
        assert (await call(client, name))["sandbox_lost"]
        counts = daemon.host.factory.counts.describe()
    assert counts["lost"] == {"guest_broke_protocol": 1}


async def test_counts_of_sandboxd_are_added_once(redis_server: RedisProcess, client: "redis.Redis") -> None:
    report(client, build_report("h1"))
    starts = {"count": 2.0, "sum": 1.5, "le:1": 2.0}
    first, statuses = build_taker(
        client, build_status(oom=2, starts=starts, kills={"tree": 1}, lost={"ended": 1, "invented": 9})
    )
    first.keep()
    first.keep()
    statuses.append(build_status(oom=5, starts=starts, failed_starts=1))
    second, _ = build_taker(client, statuses[-1])
    second.keep()
    counts = await read(redis_server)
    assert counts[key("toolcrew_sandbox_oom_total")] == 5
    assert counts[key("toolcrew_sandbox_start_seconds_count")] == 2
    assert counts[key("toolcrew_sandbox_start_seconds_bucket", le="1.0")] == 2
    assert counts[key("toolcrew_sandbox_start_failures_total")] == 1
    assert counted(counts, "toolcrew_sandbox_kills_total") == {("tree",): 1}
    assert counted(counts, "toolcrew_sandbox_lost_total") == {("ended",): 1}
    assert counted(counts, "toolcrew_warm_sandboxes_total") == {("handed_out",): 4}


async def test_states_are_shown_while_the_worker_reports(redis_server: RedisProcess, client: "redis.Redis") -> None:
    report(client, build_report("h1"))
    build_taker(client, build_status())[0].keep()
    counts = await read(redis_server)
    assert counted(counts, "toolcrew_sandbox_active") == {("h1", "warm"): 2}
    assert counts[key("toolcrew_warm_pool_target", host="h1")] == 3


@pytest.mark.parametrize(
    "status",
    [
        {"boot": "b"},
        {"boot": "b", "counts": 3},
        {"boot": "b", "counts": {"oom": "x", "starts": [], "kills": {"tree": -1}}},
    ],
)
async def test_a_sandboxd_of_another_release_reports_what_it_can(
    redis_server: RedisProcess, client: "redis.Redis", status: dict[str, Any]
) -> None:
    build_taker(client, status)[0].keep()
    assert (await read(redis_server))[key("toolcrew_sandbox_oom_total")] == 0
