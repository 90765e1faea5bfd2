"""Workers as orchestrators and operators see them, and the order that takes a worker out of service."""

import json
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.sandboxd.fake_host import DEPLOYMENT, HostHarness, build_report
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.envelope import decode_call
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, OperatorError
from toolcrew.contract.names import POOL_WEB, control_queue, host_key, hosts_key, tombstone_key
from toolcrew.contract.session_spec import LargestOptions
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.operations import drains
from toolcrew.orchestrator.operations.drains import find_workers, follow_drain, order_drain
from toolcrew.store import hosts as hosts_module
from toolcrew.store.connection import open_redis
from toolcrew.store.hosts import HostStore, WorkerControlStore
from toolcrew.workers.celery_edge.app import parse_session_of
from toolcrew.workers.control import ControlListener
from toolcrew.workers.reports import build_host_report, build_pool_report, find_free_memory

KEY = SigningKeys.of("k" * 32, deployment=DEPLOYMENT)
QUEUE = "host.a.b1"


@pytest.fixture
def harness(redis_server: RedisProcess) -> HostHarness:
    return HostHarness(redis_server)


@pytest.fixture
async def hosts(redis_server: RedisProcess) -> AsyncIterator[HostStore]:
    client = open_redis(BrokerSettings.model_validate({"redis_url": redis_server.url}))
    yield HostStore(client, DEPLOYMENT)
    await client.aclose()


async def test_only_reporting_workers_are_listed(harness: HostHarness, hosts: HostStore) -> None:
    for queue in ("host.b.b1", "host.a.b1"):
        harness.hosts().report(build_report(queue))
    harness.redis.zadd(hosts_key(DEPLOYMENT), {"host.gone.b1": 1.0})
    assert [report.queue for report in await hosts.reports()] == ["host.a.b1", "host.b.b1"]


async def test_instances_that_do_not_report_are_silent_until_declared_lost(
    harness: HostHarness, hosts: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "FRESH_S", 0.0)
    harness.hosts().report(build_report())
    harness.hosts().report(build_report("host.b.b1"))
    assert await hosts.silent() == []
    harness.redis.delete(host_key(DEPLOYMENT, QUEUE))
    harness.redis.set(host_key(DEPLOYMENT, "host.b.b1"), "the report of another release")
    assert await hosts.silent() == [QUEUE]
    harness.redis.set(tombstone_key(DEPLOYMENT, QUEUE), "1")
    assert await hosts.silent() == []


async def test_reports_are_cached_for_a_short_time(
    harness: HostHarness, hosts: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await hosts.reports() == []
    harness.hosts().report(build_report())
    assert await hosts.reports() == []
    monkeypatch.setattr(hosts_module, "FRESH_S", 0.0)
    assert len(await hosts.reports()) == 1


async def test_an_unreadable_host_report_is_skipped_and_logged_once(
    harness: HostHarness, hosts: HostStore, caplog: pytest.LogCaptureFixture
) -> None:
    harness.hosts().report(build_report())
    harness.redis.set(host_key(DEPLOYMENT, QUEUE), json.dumps({"queue": QUEUE, "slots": "many"}))
    assert (await hosts.read(), await hosts.read()) == ([], [])
    assert ["host_report_unreadable" in record.getMessage() for record in caplog.records] == [True]


async def test_an_unreachable_redis_is_reported_when_hosts_are_listed() -> None:
    client = open_redis(BrokerSettings.model_validate({"redis_url": "redis://:x@127.0.0.1:1/0"}))
    with pytest.raises(BrokerUnavailable, match="Redis does not answer"):
        await HostStore(client, DEPLOYMENT).reports()
    await client.aclose()


def test_an_unknown_host_is_refused_with_the_known_hosts() -> None:
    reports = [build_report("host.a.b1"), build_report("pool.a.x", kind="web"), build_report("host.b.b1")]
    assert [report.queue for report in find_workers(reports, "a")] == ["host.a.b1", "pool.a.x"]
    assert [report.queue for report in find_workers(reports, "pool.a.x")] == ["pool.a.x"]
    with pytest.raises(ConfigError, match="no worker of a host 'c' reports; these hosts report: a, b"):
        find_workers(reports, "c")
    with pytest.raises(ConfigError, match="start one"):
        find_workers([], "c")


class NoHandler:
    """The handler of a worker that obeys only the order to drain."""

    verbs: frozenset[str] = frozenset()
    needs_session = True


class Worker:
    """The control list of a worker that answers orders as `answer` says."""

    def __init__(self, harness: HostHarness, server: RedisProcess, queue: str = QUEUE, *others: str) -> None:
        self.harness = harness
        self.orders: list[bool] = []
        self.refused: list[str] = []
        self.refusal = threading.Event()
        self.answers = True
        self.queue = queue
        self.reader = ControlListener(
            WorkerControlStore(server.client()), (queue, *others), KEY, NoHandler(), self.drain, on_refused=self.note
        )
        self.reader.start()
        harness.hosts().report(build_report(queue, store="shared"))

    def note(self, reason: str) -> None:
        self.refused.append(reason)
        self.refusal.set()

    def drain(self, lossy: bool) -> bool:
        self.orders.append(lossy)
        if self.answers:
            self.harness.hosts().report(
                build_report(self.queue, store="shared", draining=True, problem="draining: 2 sessions left")
            )
        return self.answers


@pytest.fixture
def worker(harness: HostHarness, redis_server: RedisProcess) -> Iterator[Worker]:
    with capture_logs():
        opened = Worker(harness, redis_server)
        yield opened
        opened.reader.stop()


async def test_a_drain_order_that_is_not_accepted_is_reported(
    worker: Worker, hosts: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "ACCEPTED_WITHIN_S", 0.5)
    worker.answers = False
    (report,) = await hosts.read()
    with pytest.raises(OperatorError, match="see the log of its worker"):
        await order_drain(hosts, report, KEY)


async def test_a_host_with_local_files_is_drained_only_with_lossy(worker: Worker, hosts: HostStore) -> None:
    report = build_report(store="local")
    with pytest.raises(ConfigError, match="set TOOLCREW_WORKSPACE_STORE"):
        await order_drain(hosts, report, KEY)
    assert worker.orders == []
    await order_drain(hosts, report, KEY, lossy=True)
    assert worker.orders == [True]


async def test_a_misdirected_or_forged_drain_order_is_refused(
    worker: Worker, hosts: HostStore, harness: HostHarness
) -> None:
    other = build_report("host.b.b1", store="shared")
    harness.hosts().report(other.model_copy(update={"draining": True}))
    await order_drain(hosts, other, KEY)
    order_for_b = harness.redis.rpop(control_queue("host.b.b1"))
    assert isinstance(order_for_b, bytes)
    assert decode_call(order_for_b.decode(), KEY)[0].arguments["queue"] == "host.b.b1"
    harness.redis.lpush(control_queue(QUEUE), order_for_b)
    assert worker.refusal.wait(10)
    worker.refusal.clear()
    harness.hosts().report(build_report(store="shared", draining=True))
    (report, *_) = await hosts.read()
    await order_drain(hosts, report, SigningKeys.of("a guess"))
    assert worker.refusal.wait(10)
    assert (worker.refused, worker.orders) == (["wrong_task", "signature"], [])


async def test_a_finished_drain_is_distinguished_from_a_lost_host(
    worker: Worker, hosts: HostStore, harness: HostHarness
) -> None:
    (report,) = await hosts.read()
    await order_drain(hosts, report, KEY)
    messages = []
    async for state, last in follow_drain(hosts, report):
        messages.append((state, last.problem))
        if state == "draining":
            harness.hosts().leave("drained", report)
    assert messages == [("draining", "draining: 2 sessions left"), ("drained", "draining: 2 sessions left")]

    harness.hosts().report(report)
    harness.redis.delete(host_key(DEPLOYMENT, QUEUE))
    assert [state async for state, _ in follow_drain(hosts, report)] == ["lost"]


@pytest.fixture
def environment(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TOOLCREW_DEPLOYMENT", DEPLOYMENT)
    monkeypatch.setenv("TOOLCREW_SECRET", "k" * 32)


@pytest.mark.usefixtures("environment")
def test_hosts_lists_each_worker_with_its_state_and_iso_times(harness: HostHarness) -> None:
    harness.hosts().report(
        build_report("host.a.b1", sessions=3, max_sessions=10, busy=2, pools=(POOL_WEB,), images=("python",))
    )
    harness.redis.lpush(POOL_WEB, "one", "two")
    harness.hosts().report(build_report("host.b.b1", healthy=False))
    harness.hosts().report(build_report("pool.a.x", kind="web", draining=True, pools=(POOL_WEB,)))
    harness.hosts().report(build_report("host.c.b1"))
    harness.hosts().leave("restarting", build_report("host.c.b1"))

    result = CliRunner().invoke(app, ["hosts", "list"])
    rows = json.loads(CliRunner().invoke(app, ["hosts", "list", "--json"]).stdout)["hosts"]

    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:5] == ["host", "kind", "state", "busy", "sessions"]
    assert lines[1][:5] == ["a", "sandbox", "serving", "2/4", "3/10"]
    assert [row["state"] for row in rows] == ["serving", "unhealthy", "restarting", "draining"]
    assert rows[0]["started_at"] == "1970-01-01T00:00:01Z"
    assert "process" not in rows[0]
    assert rows[0]["waiting"] == {QUEUE: 0, POOL_WEB: 2}
    full_list = CliRunner().invoke(app, ["hosts", "list", "--full"])
    assert "images             python" in full_list.stdout


@pytest.mark.usefixtures("environment")
def test_hosts_commands_report_missing_workers_and_settings(harness: HostHarness) -> None:
    assert "no worker reports: start one" in CliRunner().invoke(app, ["hosts", "list"]).stdout
    unknown = CliRunner().invoke(app, ["hosts", "drain", "c"])
    assert (unknown.exit_code, unknown.stderr) == (
        1,
        "toolcrew: no worker reports: start one (toolcrew serve worker)\n",
    )
    harness.hosts().report(build_report())
    refused_drain = CliRunner().invoke(app, ["hosts", "drain", "a", "--json"])
    assert refused_drain.exit_code == 1
    assert json.loads(refused_drain.stdout)["error"]["code"] == "CONFIG_MISSING"


@pytest.mark.usefixtures("environment")
def test_hosts_drain_sends_the_order(worker: Worker) -> None:
    result = CliRunner().invoke(app, ["hosts", "drain", "a", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "host": "a",
        "workers": [{"queue": QUEUE, "kind": "sandbox", "state": "draining"}],
    }
    assert worker.orders == [False]


@pytest.mark.usefixtures("environment")
def test_a_worker_that_waits_for_its_restart_is_not_drained(harness: HostHarness) -> None:
    harness.hosts().report(build_report(worker="", store="shared"))
    result = CliRunner().invoke(app, ["hosts", "drain", "a"])
    assert result.exit_code == 1
    assert "has ended, and the pool waits 30 s for its restart" in result.stderr


def test_a_host_report_contains_the_status_or_silence_of_sandboxd() -> None:
    status = {
        "boot": "b1",
        "sessions": 3,
        "max_sessions": 9,
        "classes": ["default"],
        "largest": {"default": {"cpus": 8.0, "timeout_s": 7200.0}},
        "images": ["python"],
        "memory_free_bytes": 7,
        "store": "shared",
    }
    worker_fields = {"host": "a", "queue": QUEUE, "worker": "w1", "slots": 4, "started_at": 1.0}
    report = build_host_report(status, is_silent=False, **worker_fields)
    assert (report.sessions, report.max_sessions, report.classes) == (3, 9, ("default",))
    assert (report.memory_free_bytes, report.store) == (7, "shared")
    assert report.largest == {"default": LargestOptions(cpus=8, timeout_s=7200)}
    assert report.healthy
    assert report.problem == ""
    silent_report = build_host_report(
        {"boot": "b1", "sessions": [], "classes": "default", "max_sessions": -3}, is_silent=True, **worker_fields
    )
    assert (silent_report.healthy, silent_report.sessions, silent_report.max_sessions) == (False, 0, 0)
    assert (silent_report.classes, silent_report.store) == ((), "local")
    assert "largest" not in silent_report.model_dump(), (
        "earlier releases read the report of a host without larger classes"
    )
    assert "check its log" in silent_report.problem
    report_with_trouble = build_host_report(status, is_silent=False, problem="x" * 501, **worker_fields)
    assert (len(report_with_trouble.problem), report_with_trouble.problem[-2:]) == (500, "x…"), (
        "a worker reports, whatever its problem"
    )
    assert silent_report.memory_free_bytes > 0


def test_a_worker_without_sandboxes_reports_its_memory() -> None:
    report = build_pool_report(host="a", queue="pool.a.x", worker="x", slots=2, started_at=1.0)
    assert report.kind == "web"
    assert report.memory_free_bytes == pytest.approx(find_free_memory(), rel=0.5)


def test_a_task_without_a_session_call_has_no_session() -> None:
    envelopes = (7, "v3.a.b", "v3.a.b.{", 'v3.a.b.{"context": []}')
    for arguments in ({}, None, *({"envelope": envelope} for envelope in envelopes)):
        assert parse_session_of(arguments) is None
