"""`toolcrew serve batches` on a real pool. Several orchestrators share the submitted batches and can start and stop
at any time. Submitted data gives no access to their hosts.
"""

import contextlib
import json
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from docker import APIClient
from pydantic import SecretStr

from tests.model_server.running import ModelServer, running_model_server
from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.log_lines import read_log
from tests.support.stack.stack import TOOLCREW, UP_S, Footprint, Stack, end_process, open_footprint
from tests.support.stack.waiting import wait_until, wait_until_async
from toolcrew.contract.run_events import CallFinished, FailureKind, RunClaimed
from toolcrew.contract.run_spec import ItemEnvironment, RunLimits
from toolcrew.contract.run_views import DurableRunState
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.approvals import AutoApprover
from toolcrew.orchestrator.batches.lines import load_lines
from toolcrew.orchestrator.runs.client_batches import ClientBatches
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.batches import BatchDefaults, BatchItem, BatchRecord, BatchState, CallBody, ItemOutcome
from toolcrew.store.connection import open_redis
from toolcrew.store.run_queue import RunQueue
from toolcrew.store.run_records import DurableRun
from toolcrew.store.tenants import RedisTenants

pytestmark = pytest.mark.stack

STEPS = 2
"""Calls of each item. Each call adds a line to a file of its workspace and counts the lines, so that a repeated
execution appears in the answer.
"""


def build_reply(step: int) -> dict[str, Any]:
    return {"calls": [{"name": "bash_tool", "arguments": {"command": f"echo {step} >> acts; sleep 0.3; wc -l < acts"}}]}


SCRIPT: list[dict[str, Any]] = [
    {"kind": "server", "key": "\\[item (\\S+)\\]"},
    {"kind": "rule", "when": {"conversation": ["endless"]}, "reply": build_reply(0)},
    *({"kind": "rule", "when": {"step": step}, "reply": build_reply(step)} for step in range(STEPS)),
    {
        "kind": "rule",
        "when": {"observation": "(?P<lines>\\d+)"},
        "reply": {"text": "{{item}} acted {{match.lines}} times"},
    },
]


class Service:
    """A `toolcrew serve batches` process, and its output."""

    def __init__(self, user_shell: "ServiceShell", *options: str) -> None:
        self._log = user_shell.folder / f"service-{secrets.token_hex(4)}.log"
        with self._log.open("wb") as log:
            argv = [TOOLCREW, "serve", "batches", *options]
            environment = user_shell.footprint.environment(user_shell.environment)
            self.process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def output(self) -> str:
        return self._log.read_text()

    def events(self, event: str) -> list[dict[str, Any]]:
        return read_log(self._log, event)

    def runs(self, event: str) -> set[str]:
        """Return the runs that the service has started, or that have ended there."""
        return {line["run"] for line in self.events(event)}

    def has_running_runs(self) -> bool:
        return bool(self.runs("run_begun") - self.runs("run_ended"))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(UP_S)


class ServiceShell:
    """A user's shell that starts commands and services. The environment names the shared stack and a model server."""

    def __init__(self, stack: Stack, footprint: Footprint, server: ModelServer, folder: Path) -> None:
        self.stack = stack
        self.footprint = footprint
        self.server = server
        self.folder = folder
        self.model_key = f"canary{secrets.token_hex(12)}"
        variables = {"TOOLCREW_REDIS_URL": stack.redis_url, "TOOLCREW_TRACES": str(folder / "traces")}
        self.environment = {**variables, **server.environment(), "OPENAI_API_KEY": self.model_key}

    @property
    def settings(self) -> OrchestratorSettings:
        return OrchestratorSettings(redis_url=SecretStr(self.stack.redis_url))

    @contextlib.contextmanager
    def service(self, *options: str) -> Iterator[Service]:
        service = Service(self, *options)
        try:
            wait_until(lambda: service.events("serving"), UP_S, service.output)
            yield service
        finally:
            end_process(service.process)

    def client(
        self, tenant: str | None = None, api_key: str | None = None
    ) -> contextlib.AbstractAsyncContextManager[ToolClient]:
        return ToolClient.connect(settings=self.settings, tenant=tenant, api_key=api_key, approver=AutoApprover())

    def write(self, batch: str, items: list[str]) -> Path:
        """Write a batch of runs."""
        file = self.folder / f"{batch}.jsonl"
        file.write_text("".join(json.dumps({"id": item, "instruction": f"[item {item}] act"}) + "\n" for item in items))
        return file

    def has_ended(self, tenant: str, batch: str) -> bool:
        with self.stack.open_redis() as client:
            return client.hget(f"toolcrew:default:t:{tenant}:batch.{batch}", "state") in (b"completed", b"cancelled")


@pytest.fixture(scope="module")
def user_shell(stack: Stack, engine: APIClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceShell]:
    with running_model_server(SCRIPT) as server, open_footprint(engine) as footprint:
        yield ServiceShell(stack, footprint, server, tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def service(user_shell: ServiceShell) -> Iterator[Service]:
    """Return a service that no test stops."""
    with user_shell.service() as service:
        yield service


async def find_outcomes(runs: ClientBatches, batch: str) -> list[ItemOutcome]:
    return [outcome async for outcome in runs.outcomes(batch)]


async def check_rows(runs: ClientBatches, batch: str, items: list[str]) -> None:
    """Fail unless each item has exactly one correct answer."""
    answers = [(outcome.body or {}).get("answer") or outcome.failure for outcome in await find_outcomes(runs, batch)]
    assert sorted(map(str, answers)) == sorted(f"{item} acted {STEPS} times" for item in items)


def dump(client: "redis.Redis") -> bytes:
    """Return all data of runs and batches in Redis."""
    readers: dict[bytes, Callable[[bytes], Any]] = {
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"stream": client.xrange,
        b"string": client.get,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"set": client.smembers,
    }
    keys = [key for kind in ("run", "batch") for key in client.scan_iter(f"toolcrew:*:{kind}.*", count=1000)]
    kinds: list[bytes] = [client.type(key) for key in keys]
    return b"\n".join(
        repr(readers[kind](key)).encode() for kind, key in zip(kinds, keys, strict=True) if kind != b"none"
    )


async def make_key(user_shell: ServiceShell) -> str:
    async with open_queue(user_shell) as (client, _):
        return (await ApiKeys(client, "default", user_shell.settings.broker().signing_keys()).add("default")).text


@contextlib.asynccontextmanager
async def open_queue(user_shell: ServiceShell) -> AsyncIterator[tuple["redis.asyncio.Redis", RunQueue]]:
    client = open_redis(user_shell.settings.broker())
    try:
        yield client, RunQueue(client, "default", user_shell.settings.broker().signing_keys())
    finally:
        await client.aclose()


async def test_orchestrators_share_batches_and_lose_nothing_when_one_is_stopped_or_killed(
    user_shell: ServiceShell,
) -> None:
    ours, theirs = [f"a{number}" for number in range(6)], [f"b{number}" for number in range(6)]
    key = await make_key(user_shell)
    with user_shell.service("--concurrency", "2") as first, user_shell.service("--concurrency", "2") as second:
        submit = ("batches", "submit", str(user_shell.write("shared", ours)), "--detach", "--id", "shared")
        done = run_toolcrew(
            user_shell.footprint, *submit, environment={**user_shell.environment, "TOOLCREW_API_KEY": key}
        )
        assert (done.returncode, done.stdout.split()) == (0, ["shared"]), done.stderr
        async with user_shell.client("zeta") as zeta:
            await zeta.batch_runs().batches.submit(
                load_lines(user_shell.write("shared", theirs)), batch="shared", is_detached=True
            )
        await wait_until_async(
            lambda: first.has_running_runs() and second.has_running_runs(),
            UP_S,
            lambda: first.output() + second.output(),
        )
        assert first.stop() == 0
        assert not first.events("runs_returned_to_queue"), "what ran was ended"
        assert first.runs("run_begun") == first.runs("run_ended")
        await wait_until_async(second.has_running_runs, UP_S, second.output)
        second.process.kill()
        second.process.wait()
        unfinished = second.runs("run_begun") - second.runs("run_ended")
        with user_shell.service("--concurrency", "6") as third:
            with user_shell.stack.open_redis() as client:
                # The runs of the killed service are released after a lease. The test shortens this wait.
                leases = client.zrange("toolcrew:default:runs:leases", 0, -1)
                client.zadd(
                    "toolcrew:default:runs:leases",
                    {one: 1.0 for one in leases if one.decode().rpartition("|")[2] in unfinished},
                )
            await wait_until_async(
                lambda: user_shell.has_ended("default", "shared") and user_shell.has_ended("zeta", "shared"),
                UP_S,
                third.output,
            )
            assert third.stop() == 0
    async with user_shell.client("zeta") as zeta, user_shell.client(api_key=key) as default:
        await check_rows(default.batch_runs(), "shared", ours)
        await check_rows(zeta.batch_runs(), "shared", theirs)
        reported_events = await default.batch_runs().batch_events("shared")
    assert len({event.orchestrator for event in reported_events if isinstance(event, RunClaimed)}) >= 2
    assert unfinished <= third.runs("run_ended")
    # A reply may have been paid for but not logged: at most one for each killed run.
    assert user_shell.server.stats()["replies_repeated"] <= len(unfinished) <= 2
    assert_no_secret(user_shell, key, "".join(service.output() for service in (first, second, third)))


def assert_no_secret(user_shell: ServiceShell, key: str, output: str) -> None:
    with user_shell.stack.open_redis() as client:
        dumped = dump(client)
    traces = b"".join(path.read_bytes() for path in (user_shell.folder / "traces").rglob("*") if path.is_file())
    assert b"[item a0] act" in dumped
    assert b"[item a0] act" in traces
    password = user_shell.stack.redis_url.partition("://:")[2].partition("@")[0]
    for secret in (user_shell.model_key, password, key, key.split("_", 2)[2]):
        assert len(secret) > 20
        assert secret not in output
        assert secret.encode() not in dumped + traces


async def test_a_cancelled_batch_ends_and_an_attached_batch_is_left_to_its_submitter(
    user_shell: ServiceShell, service: Service
) -> None:
    await write_forged_batch(user_shell, "kept", [call("k")], is_detached=False)
    async with user_shell.client() as client:
        runs, file = client.batch_runs(), load_lines(user_shell.write("cancelled", ["endless", "x", "y"]))
        defaults = BatchDefaults(limits=RunLimits(max_iterations=1000))
        await runs.batches.submit(file, batch="cancelled", concurrency=1, defaults=defaults, is_detached=True)
        await wait_until_async(service.has_running_runs, UP_S, service.output)
        assert await runs.batches.cancel("cancelled") == 2
        await wait_until_async(lambda: user_shell.has_ended("default", "cancelled"), UP_S, service.output)
        failures = [outcome.failure for outcome in await find_outcomes(runs, "cancelled")]
        assert [failure.kind for failure in failures if failure is not None] == [FailureKind.CANCELLED] * 3
        assert (await runs.batches.status("cancelled")).state is BatchState.CANCELLED
        assert await runs.queue.batches.counts("default", "kept") == {"waiting": 1, "running": 0}


def call(name: str, **harness: Any) -> BatchItem:
    body = CallBody(name="bash_tool", arguments={"command": "cat secret* */secret*"})
    return BatchItem(custom_id=name, line=1, url="/v1/tools/execute", work=body, environment=ItemEnvironment(**harness))


async def write_forged_batch(
    user_shell: ServiceShell,
    batch: str,
    items: list[BatchItem],
    *,
    is_detached: bool,
    artifacts: Path | None = None,
    tenant: str = "default",
) -> None:
    """Submit a batch as an attacker who writes records and bypasses all checks of a submission."""
    record = BatchRecord(
        state=BatchState.IN_PROGRESS,
        total=len(items),
        sha256="0" * 64,
        concurrency=9,
        defaults=BatchDefaults(artifacts=str(artifacts) if artifacts else None),
        created_at=0,
        is_detached=is_detached,
    )
    async with open_queue(user_shell) as (_, queue):
        await queue.batches.create(tenant, batch, record)
        await queue.batches.add(tenant, batch, [(f"{batch}-{number}", item) for number, item in enumerate(items)])


async def test_a_forged_batch_record_cannot_read_or_write_files_of_the_orchestrator(
    user_shell: ServiceShell, service: Service, tmp_path: Path
) -> None:
    secret, stolen = tmp_path / "secret", tmp_path / "stolen"
    secret.write_text("a-word-of-the-host")
    reading = [
        call("folder", workspace=str(tmp_path)),
        call("file", workspace=str(secret)),
        call("etc", workspace="/etc"),
    ]
    await write_forged_batch(user_shell, "reading", reading, is_detached=True)
    writing = [call("patterns", artifacts=("**",)), call("plain")]
    await write_forged_batch(user_shell, "writing", writing, is_detached=True, artifacts=stolen)
    await write_forged_batch(user_shell, "outside", [call("name")], is_detached=True, tenant="../../../out")
    ends = [("default", "reading"), ("default", "writing"), ("../../../out", "outside")]
    await wait_until_async(lambda: all(user_shell.has_ended(*end) for end in ends), UP_S, service.output)
    async with user_shell.client() as client:
        runs = client.batch_runs()
        outcomes = await find_outcomes(runs, "reading") + await find_outcomes(runs, "writing")
    refused = {
        outcome.custom_id: outcome.failure and (outcome.failure.kind, outcome.failure.code) for outcome in outcomes
    }
    names = ("folder", "file", "etc", "patterns", "plain")
    assert refused == dict.fromkeys(names, (FailureKind.INPUT, "PERMISSION_DENIED"))
    assert not stolen.exists()
    with user_shell.stack.open_redis() as redis_client:
        assert b"a-word-of-the-host" not in dump(redis_client)


async def test_an_interactive_call_does_not_wait_for_a_batch(user_shell: ServiceShell, service: Service) -> None:
    async with (
        open_queue(user_shell) as (redis_client, _),
        user_shell.client() as user,
        await user.open_session() as session,
    ):
        tenants, runs = (
            RedisTenants(redis_client, "default", user_shell.settings.broker().signing_keys()),
            user.batch_runs(),
        )
        await tenants.replace("default", TenantPolicy(in_flight=1))
        try:
            file = load_lines(user_shell.write("slow", [f"s{number}" for number in range(6)]))
            await runs.batches.submit(file, batch="slow", is_detached=True)

            async def ends() -> list[float]:
                return [event.at for event in await runs.batch_events("slow") if isinstance(event, CallFinished)]

            while len(await ends()) < 2:
                assert service.process.poll() is None
            began = time.time()
            assert (await session.call("bash_tool", {"command": "true"})).success
            passed = time.time()
            # The running item and the next item; the others wait.
            assert sum(began < at < passed for at in await ends()) <= 3
            await runs.batches.cancel("slow")
            await wait_until_async(lambda: user_shell.has_ended("default", "slow"), UP_S, service.output)
        finally:
            await tenants.replace("default", TenantPolicy())


@contextlib.contextmanager
def open_started_run(user_shell: ServiceShell, item: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `toolcrew run` until one of its calls has ended."""
    argv = [TOOLCREW, "run", f"[item {item}] act", "--max-iterations", "1000"]
    log = user_shell.folder / f"{item}.log"
    with log.open("wb") as stderr:
        environment = user_shell.footprint.environment(user_shell.environment)
        process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        )
    try:
        wait_until(lambda: "model 0." in log.read_text(), UP_S, log.read_text)
        yield process
    finally:
        end_process(process)


async def find_run(client: ToolClient, item: str) -> DurableRun:
    (run,) = [run for run in (await client.runs.list()).runs if f"[item {item}]" in run.instruction]
    return run


async def test_a_cli_run_continues_in_the_service_after_its_process_was_killed(
    user_shell: ServiceShell, service: Service
) -> None:
    async with user_shell.client() as client:
        with open_started_run(user_shell, "alone") as process:
            begun = await find_run(client, "alone")
            assert (begun.state, service.runs("run_begun") & {begun.id}) == (DurableRunState.RUNNING, set())
            process.kill()
            process.wait()
        with user_shell.stack.open_redis() as redis_client:
            # The run is released after a lease. The test shortens this wait.
            redis_client.zadd("toolcrew:default:runs:leases", {f"default|{begun.id}": 1.0})
        async for _ in client.runs.follow(begun.id):
            pass
        ended = await client.runs.get(begun.id)
        assert ended.end is not None
        assert (ended.state, ended.end.answer) == (DurableRunState.SUCCEEDED, f"alone acted {STEPS} times")
        await (await client.session(str(ended.session))).close()


async def test_an_interrupted_cli_run_is_cancelled(user_shell: ServiceShell, service: Service) -> None:
    async with user_shell.client() as client:
        with open_started_run(user_shell, "endless") as process:
            process.send_signal(signal.SIGINT)
            assert process.wait(UP_S) == 130
        stopped = await find_run(client, "endless")
        assert (stopped.state, service.runs("run_begun") & {stopped.id}) == (DurableRunState.CANCELLED, set())
