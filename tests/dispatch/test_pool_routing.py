"""The route of a call: to the queue of the tool's pool, with the limits of that pool; and the merged catalog of all
pools.
"""

import asyncio
import json
from typing import Any

import pytest
from celery import Celery

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call, build_spec
from tests.support.records.fakes import AnsweringTransport, StaticCatalog
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import POOL_GRACE_S, ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode
from toolcrew.contract.names import CATALOG_POOLS, POOL_QUEUES, POOL_TOOLS, POOL_WEB, catalog_key, catalog_names_key
from toolcrew.contract.registry import Tool, ToolRegistry
from toolcrew.contract.specs import Catalog, ToolSpec
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.operations.doctor_pool import examine_workers
from toolcrew.orchestrator.operations.findings import Report
from toolcrew.store import tools as catalog_module
from toolcrew.store.connection import open_redis
from toolcrew.store.tools import CATALOG_TTL_S, RedisCatalog, WorkerCatalogStore
from toolcrew.workers.celery_edge.tasks import register_tasks
from toolcrew.workers.tools.base import Outcome, WorkerTool
from toolcrew.workers.web_worker import build_catalogs, choose_pools

ROUTE = ("acme", "s1", "host.h1.b00t")
WEB, TOOLS = build_spec("web_tool", pool="web"), build_spec("own_tool", pool="tools")


def answer_done(call: ToolCall, _: ToolContext) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output="done")


def dispatcher(transport: AnsweringTransport, *specs: ToolSpec) -> Dispatcher:
    return Dispatcher(transport, TenantCatalog(StaticCatalog(*specs)), KEY, queue_wait_s=5)


@pytest.mark.parametrize(
    ("pool", "queue", "limit_s"),
    [("sandbox", ROUTE[2], None), ("web", POOL_WEB, 3.0), ("tools", POOL_TOOLS, 3.0), ("local", ROUTE[2], None)],
)
async def test_pool_of_a_tool_sets_queue_and_limit(pool: Any, queue: str, limit_s: float | None) -> None:
    transport = AnsweringTransport(answer_done)
    result = await dispatcher(transport, build_spec(pool=pool)).dispatch(Request(build_call(), *ROUTE, timeout_s=3))
    [delivery], [context] = transport.deliveries, transport.contexts
    assert (result.success, delivery.queue, delivery.request.celery_limit_s) == (True, queue, limit_s)
    assert (context.tenant, context.session, context.timeout_s) == ("acme", "s1", 3.0)


async def test_cancelled_call_sends_a_cancel_to_its_pool() -> None:
    is_sent = asyncio.Event()

    async def answer_never(call: ToolCall, context: ToolContext) -> ToolResult:
        is_sent.set()
        await asyncio.Event().wait()
        return answer_done(call, context)

    transport = AnsweringTransport(answer_never)
    request = Request(build_call("web_tool", call_id="c7"), *ROUTE)
    running = asyncio.create_task(dispatcher(transport, WEB).dispatch(request))
    await is_sent.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    [(queue, order)] = transport.commands
    assert (queue, order.name, order.arguments) == (POOL_WEB, "session.cancel", {"call_id": "c7"})


def test_pool_tasks_have_celery_time_limits() -> None:
    app = Celery("test", broker="memory://", set_as_current=False)
    spec = build_spec("web_tool", pool="web", max_timeout_s=40)
    register_tasks(
        app, ToolRegistry([Tool(spec, lambda *_: Outcome())]), KEY, lambda: pytest.fail("nothing runs"), [].append, "d"
    )
    task = app.tasks["tool.web_tool"]
    assert (task.soft_time_limit, task.time_limit) == (40, 40 + POOL_GRACE_S)


def test_worker_publishes_one_catalog_per_pool() -> None:
    def nothing(*_: Any) -> Outcome:
        return Outcome()

    registry = ToolRegistry([WorkerTool(WEB, nothing), WorkerTool(TOOLS, nothing)])
    assert {pool: [spec.name for spec in catalog.tools] for pool, catalog in build_catalogs(registry).items()} == {
        "web": ["web_tool"],
        "tools": ["own_tool"],
    }
    assert set(POOL_QUEUES) < set(CATALOG_POOLS)


@pytest.mark.parametrize(
    ("specs", "queues", "pools"),
    [
        ((WEB, TOOLS), None, ["web", "tools"]),
        ((WEB,), None, ["web"]),
        ((TOOLS,), None, ["tools"]),
        ((WEB, TOOLS), ["pool.tools"], ["tools"]),
        ((WEB, TOOLS), ["pool.tools", "pool.web"], ["web", "tools"]),
        ((WEB,), ["pool.tools"], "contains pool.tools"),
        ((), None, "no tools to serve"),
    ],
)
def test_worker_chooses_its_pools_from_tools_and_queues(
    specs: tuple[ToolSpec, ...], queues: list[str] | None, pools: list[str] | str
) -> None:
    if isinstance(pools, list):
        assert choose_pools(specs, queues) == pools
    else:
        with pytest.raises(ConfigError, match=pools):
            choose_pools(specs, queues)


class Pools:
    """The catalogs that workers publish, on a real Redis, and an orchestrator that reads them."""

    def __init__(self, server: RedisProcess) -> None:
        self.store = server.client()
        self._async = open_redis(BrokerSettings.model_validate({"redis_url": server.url}))
        self.catalog = RedisCatalog(self._async, "d", KEY)

    def publish(self, **pools: "tuple[ToolSpec, ...]") -> None:
        catalogs = {pool: Catalog(tools=specs) for pool, specs in pools.items()}
        WorkerCatalogStore(self.store, "d", KEY).publish(catalogs)

    async def names(self) -> list[str]:
        return [spec.name for spec in await self.catalog.specs()]

    async def close(self) -> None:
        self.store.close()
        await self._async.aclose()


@pytest.fixture
async def pools(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(catalog_module, "FRESH_S", -1.0)
    opened = Pools(redis_server)
    yield opened
    await opened.close()


async def test_concurrent_catalog_reads_are_shared_and_cached_until_a_change(pools: Pools) -> None:
    pools.publish(sandbox=(build_spec("bash"),))
    pools.store.config_resetstat()
    read = await asyncio.gather(*(pools.catalog.specs() for _ in range(50)))
    commands = pools.store.info("commandstats")
    assert commands["cmdstat_mget"]["calls"] == 1
    assert not {"cmdstat_get", "cmdstat_keys", "cmdstat_scan"} & commands.keys()
    assert (await pools.catalog.specs())[0] is read[0][0]
    pools.publish(sandbox=(build_spec("bash", description="Another."),))
    assert [spec.description for spec in await pools.catalog.specs()] == ["Another."]


async def test_tool_of_a_pool_without_workers_names_the_worker_to_start(pools: Pools) -> None:
    pools.publish(sandbox=(build_spec("bash"),), web=(WEB,))
    assert 0 < pools.store.ttl(catalog_key("d", "web")) <= CATALOG_TTL_S <= 15
    assert await pools.names() == ["bash", "web_tool"]
    pools.store.delete(catalog_key("d", "web"))  # as its time to live would
    assert await pools.names() == ["bash"]

    missing = Dispatcher(AnsweringTransport(answer_done), TenantCatalog(pools.catalog), KEY, queue_wait_s=5)
    result = await missing.dispatch(Request(build_call("web_tool"), *ROUTE))
    assert result.error_code == ErrorCode.CONFIG_MISSING
    assert result.error == "no worker serves web_tool now: start one with `toolcrew serve worker --kind web`"
    pools.store.delete(catalog_key("d", "sandbox"), catalog_names_key("d", "sandbox"))
    pools.publish(web=(WEB,))
    assert await pools.names() == ["web_tool"]
    assert "a sandboxd" in (pools.catalog.explain_missing("session.open") or "")


async def test_sandbox_tool_wins_over_a_duplicate_name(pools: Pools, caplog: pytest.LogCaptureFixture) -> None:
    pools.publish(tools=(build_spec("bash", pool="tools"),), sandbox=(build_spec("bash"),))
    for _ in range(3):
        assert [spec.pool for spec in await pools.catalog.specs()] == ["sandbox"]
    messages = [record.getMessage() for record in caplog.records if "tool_published_twice" in record.getMessage()]
    assert len(messages) == 1


@pytest.mark.parametrize("names_json", ["", "null", "7", "[[", '{"a": 1}', '[1, null, "web_tool"]'])
async def test_invalid_tool_names_in_redis_do_not_break_the_catalog(pools: Pools, names_json: str) -> None:
    pools.publish(sandbox=(build_spec("bash"),))
    pools.store.set(f"{catalog_key('d', 'web')}:names", names_json)
    assert await pools.names() == ["bash"]
    assert (pools.catalog.explain_missing("web_tool") is not None) == ("web_tool" in names_json)


async def test_catalog_of_another_version_is_refused(pools: Pools) -> None:
    pools.publish(sandbox=(build_spec("bash"),))
    pools.store.set(catalog_key("d", "web"), KEY.seal("catalog web", json.dumps({"tools": [{"surprise": 1}]})))
    with pytest.raises(ConfigError, match="cannot be read"):
        await pools.names()


async def test_doctor_lists_pools_with_tools_and_missing_workers(pools: Pools) -> None:
    pools.publish(sandbox=(build_spec("bash"), build_spec("session.open", audience="session")))
    report = Report()
    await examine_workers(pools.catalog, report)
    findings = {finding.text: finding.is_good for finding in report.findings}
    assert findings["sandbox: bash"] is True
    assert findings["web: no worker; start one with `toolcrew serve worker --kind web`"] is False
    assert report.is_healthy
