"""An orchestrator that serves all tenants: the work that it accepts, and the tenants for which it stops."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio
from pydantic import SecretStr

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.run_harness import RunHarness, build_outcome
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode, ModelDenied, ToolFailure
from toolcrew.contract.run_events import CallFinished, Failure, FailureKind, OnEvent, RunEvent, SessionOpening
from toolcrew.contract.run_spec import ItemEnvironment
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.batches.detached import check_detached
from toolcrew.orchestrator.batches.lines import BadBatch, load_lines
from toolcrew.orchestrator.runs.batch_service import BatchService
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.executor import RunExecutor
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.models import MAX_IDLE_MODELS, Models
from toolcrew.orchestrator.runs.run_service import ServiceGuard, build_service_executor
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.store.batches import BatchDefaults, ItemOutcome
from toolcrew.store.run_log import RunLog
from toolcrew.store.run_queue import RunClaim


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[RunHarness]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        yield RunHarness(client)


def test_a_detached_batch_with_paths_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(
        '{"id": "a", "instruction": "x"}\n{"id": "b", "instruction": "x", "workspace": "."}\n'
        '{"id": "c", "instruction": "x", "artifacts": ["out/**"]}\n{"id": "d", "instruction": "x", "restore": "c1"}'
    )
    with pytest.raises(BadBatch) as refused:
        check_detached(load_lines(file), "/srv/out", "in.jsonl")
    text = str(refused.value).splitlines()
    assert text[0].startswith("in.jsonl has 2 errors")
    assert "--artifacts" in text[1]
    assert text[2].strip().startswith("line 2: the workspace or")


async def test_expired_attached_runs_do_not_block_the_claim_of_a_detached_run(harness: RunHarness) -> None:
    await harness.submit(1100, batch="attached", is_detached=False, concurrency=2000)
    claims = [claim for _ in range(6) for claim in await harness.queue.claim(200, ("acme", "attached"))]
    assert len(claims) == 1100
    await harness.submit(1, batch="detached")
    (expired_claim,) = await harness.queue.claim(1)
    await harness.client.zadd(
        "toolcrew:d:runs:leases", {f"acme|{claim.run}": 1.0 for claim in claims} | {"acme|detached-1": 2.0}
    )
    claimed = [claim.run for _ in range(2) for claim in await harness.other.claim(9)]
    assert claimed == [expired_claim.run]
    # They wait for theirs, as they were.
    assert (await harness.queue.batches.counts("acme", "attached"))["waiting"] == 1100
    assert not await harness.queue.give_back(claims[0])
    assert [claim.run for claim in await harness.other.claim(2, ("acme", "attached"))] == ["attached-1", "attached-2"]


async def test_an_unreadable_run_record_does_not_block_other_runs(
    harness: RunHarness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.submit(2)
    await harness.client.hset("toolcrew:d:t:acme:run.b-1", "item", '{"of": "tomorrow"}')
    assert [claim.run for claim in await harness.queue.claim(9)] == ["b-2"]
    assert await harness.queue.claim(9) == []
    assert await harness.client.hget("toolcrew:d:t:acme:run.b-1", "claim") == b""
    assert "run_not_readable" in caplog.text
    assert "tomorrow" not in caplog.text


class Tenants:
    """Serves the tenants of a list."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    async def policy(self, tenant: str) -> TenantPolicy:
        if tenant not in self.names:
            raise ToolFailure(ErrorCode.UNKNOWN_TENANT, f"there is no tenant {tenant}: register it")
        return TenantPolicy()


class FakePool:
    """A pool that knows its tenants and counts the sessions that are removed. Any other access raises AttributeError."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self.abandoned: list[tuple[str, str]] = []
        self.dispatcher = self
        self.tracer = None

    async def capacity(self, *_: Any) -> int:
        return 1

    async def abandon_session(self, tenant: str, session: str) -> None:
        self.abandoned.append((tenant, session))


async def claim_run(harness: RunHarness, /, **fields: Any) -> tuple[RunClaim, Journal]:
    await harness.submit(1, **fields)
    (claim,) = await harness.queue.claim(1)
    run_log = await RunLog.load(harness.client, "d", KEY, claim.attempt)
    return claim, Journal(run_log, lambda: None)


class NoModels:
    """Models of runs that need none."""

    @asynccontextmanager
    async def use(self, _: str | None) -> AsyncIterator[None]:
        yield


def service_of(pool: FakePool) -> RunExecutor:
    return build_service_executor(cast(Any, pool), cast(Any, None), cast(Any, NoModels()), None, None)


async def test_a_run_of_a_removed_tenant_fails_and_its_session_is_removed(harness: RunHarness) -> None:
    claim, journal = await claim_run(harness)
    await journal.record(SessionOpening, session="s1")
    pool = FakePool(Tenants("zeta"))
    outcome = await service_of(pool).work(claim, journal, BatchDefaults(), lambda _: None)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.INPUT, "UNKNOWN_TENANT")
    assert pool.abandoned == [("acme", "s1")]


async def test_removing_the_tenant_during_a_run_fails_the_run(harness: RunHarness) -> None:
    claim, journal = await claim_run(harness)
    await journal.record(SessionOpening, session="s1")
    pool, events = FakePool(Tenants("acme")), list[RunEvent]()
    service = service_of(pool)
    guard = service.guard

    async def execute(on_event: OnEvent) -> ItemOutcome:
        refused = ToolResult.failed(ToolCall(id="c1", name="bash_tool"), ErrorCode.UNKNOWN_TENANT, "it was removed")
        on_event(CallFinished(run=claim.run, result=refused))
        await asyncio.get_running_loop().create_future()
        raise AssertionError("no code sets it")

    service.guard = lambda claim, defaults, on_event, _: guard(claim, defaults, on_event, execute)
    async with asyncio.timeout(SOON_S):
        outcome = await service.work(claim, journal, BatchDefaults(), events.append)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code) == (FailureKind.INPUT, "UNKNOWN_TENANT")
    assert "register it again and retry the item" in outcome.failure.message
    assert (len(events), pool.abandoned) == (1, [("acme", "s1")])


async def test_a_service_does_not_start_a_local_model(harness: RunHarness) -> None:
    claim, journal = await claim_run(harness)
    outcome = await service_of(FakePool(Tenants("acme"))).work(
        claim, journal, BatchDefaults(model="local"), lambda _: None
    )
    assert outcome.failure is not None
    assert (outcome.failure.kind, "without --detach" in outcome.failure.message) == (FailureKind.INPUT, True)


def build_models(harness: RunHarness) -> Models:
    settings = OrchestratorSettings.model_validate({"openai_base_url": "http://127.0.0.1:9/v1", "deployment": "d"})
    pool: Any = FakePool(Tenants("acme"))
    pool.redis, pool.keys = harness.client, KEY
    return Models(settings, pool)


async def test_idle_models_above_the_limit_are_closed(harness: RunHarness) -> None:
    claim, _ = await claim_run(harness)
    async with build_models(harness) as models:

        async def open_model(model: str, may_end: asyncio.Event | None = None) -> ItemOutcome | Failure:
            async def execute(_: OnEvent) -> ItemOutcome:
                await models.get(claim.tenant, model)
                if may_end is not None:
                    await may_end.wait()
                return build_outcome(claim)

            return await ServiceGuard(models)(claim, BatchDefaults(model=model), lambda _: None, execute)

        may_end = asyncio.Event()
        held_run = asyncio.create_task(open_model("held", may_end))
        for number in range(MAX_IDLE_MODELS + 2):
            await open_model(f"m{number}")
        assert models.names == {"held", *(f"m{number}" for number in range(2, MAX_IDLE_MODELS + 2))}
        may_end.set()
        assert (await held_run).failure is None


async def test_a_denied_model_fails_only_its_item(harness: RunHarness) -> None:
    claim, _ = await claim_run(harness)

    async def execute(_: OnEvent) -> ItemOutcome:
        raise ModelDenied("the key is not good for it: give another")

    async with build_models(harness) as models:
        guard, defaults = ServiceGuard(models), BatchDefaults(model="refused")
        failure = await guard(claim, defaults, lambda _: None, execute)
        with pytest.raises(ModelDenied):
            await guard(claim, BatchDefaults(), lambda _: None, execute)
    assert isinstance(failure, Failure)
    assert failure.message == "the key is not good for it: give another"


class EndlessWork(RunExecutor):
    """Never ends by itself. `begun`: set when a run starts."""

    has_started: asyncio.Event

    async def work(self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, on_event: OnEvent) -> ItemOutcome:
        self.has_started.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("no code sets it")


class EndlessService(BatchService):
    """Batch service whose work never ends. It has no pool."""

    def __init__(self, harness: RunHarness, grace_s: float) -> None:
        super().__init__(
            OrchestratorSettings(redis_url=SecretStr("redis://:a-password@127.0.0.1:1/0")), 1, grace_s=grace_s
        )
        self.harness = harness
        self.work = EndlessWork(cast(Any, FakePool(Tenants("acme"))), cast(Any, None), cast(Any, None))
        self.work.has_started = asyncio.Event()

    async def _pool(self, stack: AsyncExitStack) -> Any:
        return FakePool(Tenants("acme"))

    @asynccontextmanager
    async def _runner(self, pool: Any) -> AsyncIterator[Runner]:
        writer = RunEventPublisher(self.harness.client, "d")
        yield Runner(
            self.harness.client, "d", self.harness.queue, self.work, writer, self.concurrency, None, self.tenants
        )


@pytest.mark.parametrize(("grace_s", "interrupts"), [(3600.0, 2), (0.0, 1)])
async def test_a_second_interrupt_or_the_grace_period_returns_runs_to_the_queue(
    harness: RunHarness, grace_s: float, interrupts: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await harness.submit(2)
    service = EndlessService(harness, grace_s)
    running = asyncio.create_task(service.run())
    async with asyncio.timeout(SOON_S):
        await service.work.has_started.wait()
        service.interrupt()
        if interrupts == 2:
            await wait_until_async(lambda: "draining" in caplog.text, SOON_S, lambda: caplog.text)
            assert not running.done()
            service.interrupt()
        await running
    assert await harness.queue.batches.counts("acme", "b") == {"waiting": 2, "running": 0}
    assert [claim.run for claim in await harness.other.claim(9)] == ["b-1", "b-2"]


def test_a_service_with_invalid_settings_does_not_start() -> None:
    url = SecretStr("redis://:a-password@127.0.0.1:1/0")
    with_api_key = OrchestratorSettings(redis_url=url, api_key=SecretStr("tc_x"))
    without_redis_url = OrchestratorSettings(redis_url=None)
    without_secret = OrchestratorSettings(redis_url=SecretStr("redis://127.0.0.1:1/0"), secret=None)
    for settings, message in (
        (with_api_key, "TOOLCREW_API_KEY is set"),
        (without_redis_url, "TOOLCREW_REDIS_URL is not set"),
        (without_secret, "TOOLCREW_SECRET"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            asyncio.run(BatchService(settings, 1).run())


async def test_a_service_that_waits_for_workers_can_be_interrupted(
    redis_server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    # No worker has published tools there.
    service = BatchService(OrchestratorSettings(redis_url=SecretStr(redis_server.url)), 1)
    running = asyncio.create_task(service.run())
    await wait_until_async(lambda: "no worker has published its tools" in caplog.text, SOON_S, lambda: caplog.text)
    service.interrupt()
    async with asyncio.timeout(SOON_S):
        await running


@pytest.mark.parametrize(
    ("fields", "folder"),
    [
        (ItemEnvironment(workspace="/etc"), None),
        (ItemEnvironment(), "/srv/out"),
        (ItemEnvironment(artifacts=("x",)), "/srv/out"),
    ],
)
async def test_a_stored_run_with_a_path_is_refused(
    harness: RunHarness, fields: ItemEnvironment, folder: str | None
) -> None:
    claim, journal = await claim_run(harness, environment=fields)
    pool = FakePool(Tenants("acme"))
    outcome = await service_of(pool).work(claim, journal, BatchDefaults(artifacts=folder), lambda _: None)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.code, outcome.status_code) == (
        FailureKind.INPUT,
        "PERMISSION_DENIED",
        400,
    )


async def test_a_service_claims_only_detached_runs_of_its_tenants(harness: RunHarness) -> None:
    await harness.submit(1, batch="attached", is_detached=False)
    await harness.submit(1, batch="detached")
    await harness.submit(1, batch="theirs", tenant="zeta")
    assert [claim.run for claim in await harness.queue.claim(9, None, ("zeta", "unknown"))] == ["theirs-1"]
    assert [claim.run for claim in await harness.queue.claim(9)] == ["detached-1"]
    assert [claim.run for claim in await harness.queue.claim(9, ("acme", "attached"))] == ["attached-1"]
