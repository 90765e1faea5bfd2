"""Run all operations of a deployment as the users of `toolcrew config users`. Redis logs every forbidden command, and
the log stays empty.
"""

import asyncio
import base64
import json
import os
import secrets
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from docker import APIClient
from pydantic import SecretStr
from typer.testing import CliRunner

from tests.support.redis.redis_harness import SECRET, Server, open_server
from tests.support.stack.host_harness import Harness, HarnessProcess
from tests.support.stack.stack import UP_S, open_footprint
from tests.support.stack.waiting import wait_until, wait_until_async
from tests.support.web.web_servers import WebServer, answer, open_web_server
from toolcrew.contract.envelope import INLINE_BYTES
from toolcrew.contract.names import catalog_key, host_key, hosts_key, location_key, tombstone_key
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.approvals import AutoApprover
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.operations.drains import find_workers, follow_drain, order_drain
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.runs.batch_service import BatchService
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.batches import BatchState
from toolcrew.store.connection import open_redis
from toolcrew.store.hosts import HostStore
from toolcrew.store.tenants import RedisTenants

pytestmark = pytest.mark.stack

TOOLS = '''
"""Operations on Redis by the tools of operators."""

import time

from toolcrew import CallContext, tool


@tool
def count(context: CallContext) -> int:
    """Counts in the session's state."""
    return context.wait(context.state.update("n", lambda n: (n or 0) + 1))


@tool
def flood() -> str:
    """Writes more than travels with a message."""
    return "\\1" * 40_000


@tool
def sleep(seconds: float) -> None:
    """Sleeps."""
    time.sleep(seconds)


@tool
async def ask(context: CallContext) -> str:
    """Asks the model."""
    return (await context.require_model().complete("q")).text
'''


@dataclass
class PoolHarness:
    """Two hosts, a worker with web tools and operators' tools, and Flower, each as a separate user."""

    harness: Harness
    server: Server
    site: WebServer
    flower: HarnessProcess
    flower_port: int

    @property
    def settings(self) -> OrchestratorSettings:
        return OrchestratorSettings(redis_url=SecretStr(self.server.url("orchestrator")), secret=SecretStr(SECRET))

    def client(self, tenant: str = "default") -> Any:
        return ToolClient.connect(settings=self.settings, tenant=tenant, approver=AutoApprover())

    def toolcrew(self, *arguments: str, user: str = "orchestrator") -> Any:
        """Return the JSON output of a command. Commands run in this process, because this is faster. No event loop
        may run at the same time.
        """
        settings = {"TOOLCREW_REDIS_URL": self.server.url(user), "TOOLCREW_SECRET": SECRET}
        done = CliRunner().invoke(app, [*arguments, "--json"], env=settings)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def toolcrew_lines(self, *arguments: str) -> list[Any]:
        """Return the output of a command that prints one JSON object per line."""
        settings = {"TOOLCREW_REDIS_URL": self.server.url("orchestrator"), "TOOLCREW_SECRET": SECRET}
        done = CliRunner().invoke(app, [*arguments, "--json"], env=settings)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    def ask_flower(self, path: str) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.flower_port}{path}")
        request.add_header("Authorization", "Basic " + base64.b64encode(b"me:word").decode())
        with urllib.request.urlopen(request, timeout=20) as answered:
            return json.load(answered)

    def log_tails(self) -> str:
        return f"{self.harness.log_tails()}\n--- flower\n{self.flower.log()[-1500:]}"


@pytest.fixture(scope="module")
def pool(engine: APIClient) -> Iterator[PoolHarness]:
    with (
        open_server(users=True) as server,
        open_web_server({"/": answer("<p>a page of the site</p>")}) as site,
        open_footprint(engine) as footprint,
    ):
        settings = {"TOOLCREW_SECRET": SECRET, "TOOLCREW_CHECKPOINT_EVERY_S": "1", "PYTHONPATH": str(footprint.folder)}
        harness = Harness(footprint, engine, settings)
        harness.deployment, harness.redis_url = "default", server.url("orchestrator")
        pool = _open_pool(harness, server, site)
        try:
            harness.wait_ready()
            with server.client() as admin:
                wait_until(
                    lambda: admin.exists(*(catalog_key("default", pool) for pool in ("sandbox", "web", "tools"))) == 3,
                    UP_S,
                    pool.log_tails,
                )
            yield pool
        finally:
            pool.flower.stop()
            harness.stop()


def _open_pool(harness: Harness, server: Server, site: WebServer) -> PoolHarness:
    (harness.folder / "redis_probe_tools.py").write_text(TOOLS)
    for host in ("a", "b"):
        harness.start_host(host, redis_url=server.url("worker"))
    harness.start_tools(
        redis_url=server.url("web"),
        worker_queues="",
        tool_modules='["redis_probe_tools"]',
        webfetch_allow_hosts=json.dumps([f"127.0.0.1:{site.port}"]),
    )
    port = reserve_port()
    variables = {
        "TOOLCREW_REDIS_URL": server.url("flower"),
        "FLOWER_ADDRESS": "127.0.0.1",
        "FLOWER_PORT": str(port),
        "FLOWER_BASIC_AUTH": "me:word",
    }
    flower = HarnessProcess(
        "flower",
        [sys.executable, "-m", "toolcrew.orchestrator.operations.flower"],
        harness.environment(variables),
        harness.folder / "flower.log",
    )
    flower.start()
    return PoolHarness(harness, server, site, flower, port)


@pytest.fixture(autouse=True)
def _no_call_is_refused(pool: PoolHarness) -> Iterator[None]:
    """Fail if Redis has refused a command of any user during a test."""
    yield
    with pool.server.client() as admin:
        refused = {(entry["username"], entry["context"], entry["object"]) for entry in admin.acl_log()}
        # The clients of Flower and of `celery inspect` send CLIENT SETINFO and go on without an answer. Redis 7.0 does
        # not start with a user that may send it.
        own = {entry for entry in refused if entry[0] == "orchestrator" or not entry[2].startswith("client")}
        assert own == set()


async def wait_until_running(pool: PoolHarness, call_id: str) -> None:
    """Wait until a call runs."""
    with pool.server.client() as admin:
        key = f"toolcrew:default:t:default:call.{call_id}"
        await wait_until_async(lambda: admin.hget(key, "state") == b"running", UP_S, lambda: str(admin.hgetall(key)))


async def cancel_running_call(pool: PoolHarness, session: Session, tool: str, arguments: dict[str, Any]) -> None:
    call_id = f"cancelled-{secrets.token_hex(4)}"
    call = asyncio.create_task(session.call(tool, arguments, call_id=call_id))
    await wait_until_running(pool, call_id)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_session_calls_files_checkpoints_output_and_cancels_need_no_other_right(
    pool: PoolHarness, tmp_path: Path
) -> None:
    pieces = list[str]()
    (tmp_path / "given").write_text("given\n")
    async with pool.client() as client:
        async with await client.open_session(tmp_path) as session:
            shown = await session.call(
                "bash_tool", {"command": "cat given; echo live"}, on_output=lambda _, text: pieces.append(text)
            )
            assert (shown.output, "".join(pieces)) == ("given\nlive\n", "given\nlive\n")
            await session.write_file("/workspace/file", os.urandom(100_000))
            assert len(await session.read_file("/workspace/file")) == 100_000
            assert (await session.exec(["true"])).returncode == 0
            await session.export(tmp_path / "out")
            assert (tmp_path / "out" / "given").read_text() == "given\n"
            checkpoint = await session.checkpoint()
            await cancel_running_call(pool, session, "bash_tool", {"command": "sleep 60"})
        async with await client.open_session(restore=checkpoint) as session:
            assert (await session.call("bash_tool", {"command": "cat given"})).output == "given\n"
        assert await client.delete_checkpoint(checkpoint)


async def test_web_tools_and_operator_tools_need_no_other_right(pool: PoolHarness) -> None:
    def reply(messages: list[Any]) -> Any:
        content = str(messages[-1]["content"])
        return "an answer" if content == "q" else content if messages[-1]["role"] == "tool" else Calls([("ask", {})])

    async with pool.client() as client, await client.open_session() as session:
        page = await session.call("webfetch_tool", {"url": f"http://127.0.0.1:{pool.site.port}/"})
        assert "a page of the site" in str(page.output), page
        again = await session.call("webfetch_tool", {"url": f"http://127.0.0.1:{pool.site.port}/"})
        assert (again.success, len(pool.site.requests)) == (True, 1), "the second came from the cache"
        assert [(await session.call("count", {})).output for _ in range(2)] == ["1", "2"]
        # Each character takes six characters in the record of the result.
        assert str((await session.call("flood", {})).output).count("\1") * 6 > INLINE_BYTES
        await cancel_running_call(pool, session, "sleep", {"seconds": 60})
        assert (
            await client.run("Ask.", model=ScriptedModel(reply), dialect="native", tools=["ask"])
        ).answer == "an answer"


def test_operator_commands_need_no_other_right(pool: PoolHarness) -> None:
    for command in (
        ("tools", "list"),
        ("hosts", "list"),
        ("hosts", "list", "--full"),
        ("tenants", "list"),
        ("keys", "list"),
    ):
        pool.toolcrew(*command)
    ran = pool.toolcrew("call", "bash_tool", "command=true")
    assert pool.toolcrew("calls", "show", ran["call_id"])["state"] == "done"
    pool.toolcrew("tools", "disable", "glob_tool", "--reason", "a test", user="admin")
    asyncio.run(wait_until_glob_refused(pool.client()))
    pool.toolcrew("tools", "enable", "glob_tool")
    pool.toolcrew("tenants", "add", "acme", "--sandboxes", "1", "--tools", "bash_tool", user="admin")
    key = pool.toolcrew("keys", "create", "acme", user="admin")["key"]
    asyncio.run(wait_until_glob_refused(ToolClient.connect(settings=pool.settings, api_key=key)))
    pool.toolcrew("keys", "revoke", key.split("_")[1])
    pool.toolcrew("tenants", "remove", "acme")


async def wait_until_glob_refused(opened: Any) -> None:
    async with asyncio.timeout(UP_S), opened as client, await client.open_session() as session:
        while (await session.call("glob_tool", {"pattern": "*"})).success:
            pass
        assert (await session.call("bash_tool", {"command": "true"})).success


async def test_two_orchestrators_that_share_a_tenant_limit_need_no_other_right(pool: PoolHarness) -> None:
    redis = open_redis(pool.settings.broker())
    tenants = RedisTenants(redis, "default", pool.settings.broker().signing_keys())
    await tenants.replace("default", TenantPolicy(in_flight=1))
    try:
        async with (
            pool.client() as one,
            pool.client() as two,
            await one.open_session() as session,
            await two.open_session() as other,
        ):
            command = {"command": "sleep 0.2"}
            results = await asyncio.gather(
                *(at.call("bash_tool", command) for at in (session, other) for _ in range(2))
            )
            assert [result.error for result in results] == [None] * 4
    finally:
        await tenants.replace("default", TenantPolicy())
        await redis.aclose()


def test_batch_commands_need_no_other_right(pool: PoolHarness, tmp_path: Path) -> None:
    file, slow, out = tmp_path / "in.jsonl", tmp_path / "slow.jsonl", tmp_path / "out.jsonl"
    file.write_text(
        "".join(
            f'{{"id": "{number}", "tool": "bash_tool", "arguments": {{"command": "echo {number}"}}}}\n'
            for number in range(3)
        )
    )
    slow.write_text(
        '{"id": "s", "tool": "bash_tool", "arguments": {"command": "sleep 60"}}\n{"id": "t", "instruction": "never '
        'begun"}\n'
    )
    pool.toolcrew("batches", "submit", str(file), "--detach", "--id", "given")
    asyncio.run(serve(pool, watch_until("given", BatchState.COMPLETED)))
    assert pool.toolcrew("batches", "show", "given")["request_counts"]["completed"] == 3
    pool.toolcrew("batches", "submit", str(slow), "--detach", "--id", "stopped", "--concurrency", "1")
    asyncio.run(serve(pool, cancel_running_batch("stopped")))
    assert pool.toolcrew("batches", "show", "stopped")["failed"] == {"cancelled": 2}
    pool.toolcrew("batches", "export", "given", "--output", str(out))
    assert len(out.read_text().splitlines()) == 3
    own = tmp_path / "own.jsonl"
    pool.toolcrew_lines("batches", "submit", str(file), "--output", str(own), "--id", "own")
    pool.toolcrew_lines("batches", "resume", "own")
    assert len(own.read_text().splitlines()) == 3
    assert {line["type"] for line in pool.toolcrew_lines("batches", "show", "--logs", "own")} >= {
        "RunClaimed",
        "CallFinished",
        "RunEnded",
    }
    pool.toolcrew("batches", "export", "own", "--html", str(tmp_path / "page.html"))


async def serve(pool: PoolHarness, watch: Callable[[PoolHarness], Awaitable[None]]) -> None:
    """Run an orchestrator that processes submitted runs, until `watch` returns."""
    service = BatchService(pool.settings, concurrency=2, has_traces=False)
    async with asyncio.TaskGroup() as group:
        group.create_task(service.run())
        await watch(pool)
        service.interrupt()


def watch_until(batch: str, state: BatchState) -> Callable[[PoolHarness], Awaitable[None]]:
    async def watch(pool: PoolHarness) -> None:
        with pool.server.client() as admin:
            key = f"toolcrew:default:t:default:batch.{batch}"
            await wait_until_async(lambda: admin.hget(key, "state") == state.value.encode(), UP_S, pool.log_tails)

    return watch


def cancel_running_batch(batch: str) -> Callable[[PoolHarness], Awaitable[None]]:
    async def watch(pool: PoolHarness) -> None:
        with pool.server.client() as admin:
            await wait_until_async(
                lambda: admin.scard(f"toolcrew:default:t:default:batch.{batch}:running"), UP_S, pool.log_tails
            )
        async with pool.client() as client:
            await client.batch_runs().batches.cancel(batch)
        await watch_until(batch, BatchState.CANCELLED)(pool)

    return watch


async def test_flower_and_health_checks_need_no_other_right(pool: PoolHarness) -> None:
    await wait_until_async(lambda: is_in_flower(pool), UP_S, pool.log_tails)
    for user, node in (("worker", "a"), ("web", "web-tools")):
        destination = f"{node}@{os.uname().nodename}"
        with Celery(broker=pool.server.url(user), set_as_current=False) as asking:
            inspector = asking.control.inspect(timeout=UP_S, destination=[destination])
            assert await asyncio.to_thread(inspector.ping) == {destination: {"ok": "pong"}}


def is_in_flower(pool: PoolHarness) -> bool:
    try:
        workers, tasks = pool.ask_flower("/api/workers?refresh=1"), pool.ask_flower("/api/tasks")
    except OSError:
        return False
    return len(workers) == 3 and {"tool.bash_tool", "tool.count"} <= {task["name"] for task in tasks.values()}


async def test_a_lost_host_and_a_drained_host_need_no_other_right(pool: PoolHarness) -> None:
    async with pool.client() as client, await client.open_session() as session:
        assert (await session.call("bash_tool", {"command": "echo kept > file"})).success
        first = await session.info()
        with pool.server.client() as admin:
            place = location_key("default", "default", session.id)
            await wait_until_async(lambda: admin.hget(place, "automatic"), UP_S, pool.log_tails)
            await expire_worker(pool, first.host, first.queue)
            await wait_until_readable(session, "kept")
            assert admin.exists(tombstone_key("default", first.queue))
            pool.harness.process(f"{first.host}.worker").start()
            await wait_until_async(lambda: len(pool_queues(admin)) == 3, UP_S, pool.log_tails)
        second = await session.info()
        assert second.host != first.host
        assert await drain(pool, second.host) == "drained"
        await wait_until_readable(session, "kept")
        assert (await session.info()).host == first.host
    assert await drain(pool, "tools") == "drained"


async def expire_worker(pool: PoolHarness, host: str, queue: str) -> None:
    """Expire the worker's report at once, so that the test does not wait."""
    process = pool.harness.process(f"{host}.worker")
    process.is_restarted = False
    process.kill()
    await wait_until_async(lambda: not process.is_running, UP_S, "it is killed")
    with pool.server.client() as admin:
        admin.delete(host_key("default", queue))


def pool_queues(admin: "redis.Redis") -> list[bytes]:
    """Return the queues of the living workers."""
    return [
        queue
        for queue in admin.zrange(hosts_key("default"), 0, -1)
        if admin.exists(host_key("default", queue.decode()))
    ]


async def wait_until_readable(session: Session, word: str) -> None:
    """Wait until the session reads its file on its current host. A call to the previous host may fail, but no call
    may return wrong data.
    """
    async with asyncio.timeout(UP_S):
        while not (found := await session.call("bash_tool", {"command": "cat file"})).success:
            pass
    assert str(found.output).startswith(word), found


async def drain(pool: PoolHarness, host: str) -> str:
    """Drain the host as `toolcrew hosts drain --wait` does, and return the outcome."""
    broker = pool.settings.broker()
    redis = open_redis(broker)
    try:
        hosts = HostStore(redis, "default")
        [report] = find_workers(await hosts.read(), host)
        await order_drain(hosts, report, broker.signing_keys())
        return [state async for state, _ in follow_drain(hosts, report)][-1]
    finally:
        await redis.aclose()
