"""Items executed on a real Redis. The model follows a script, and the pool's only worker is a function."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_spec
from tests.support.records.fakes import AnsweringTransport, MemoryAsyncBlobs, StaticCatalog
from tests.support.runs.run_harness import RunHarness, build_item
from tests.support.sandboxd.fake_hosts import MemorySessionStore, StaticHosts, build_report
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.run_events import RunEvent
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.approvals import DEFAULT_POLICY, ApprovalPolicy, AutoApprover
from toolcrew.orchestrator.approvals.approvers import Approver
from toolcrew.orchestrator.dialects.model import Model
from toolcrew.orchestrator.dispatch.delivery import Pool
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.models.choice import ChosenModel
from toolcrew.orchestrator.models.scripted import ALL_CAPABILITIES, Calls, ScriptedModel, Turn
from toolcrew.orchestrator.runs.agent_builder import AgentBuilder
from toolcrew.orchestrator.runs.executor import RunExecutor
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.models import Models
from toolcrew.store.batches import BatchDefaults, BatchItem, CallBody, ItemOutcome
from toolcrew.store.call_reader import CallReader
from toolcrew.store.calls import CallStore
from toolcrew.store.run_log import RunLog
from toolcrew.store.run_queue import RunClaim
from toolcrew.store.skills import SkillStore
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.tools import RedisSwitches
from toolcrew.workers.tools.builtin import build_registry

HarnessFactory = Callable[..., "ItemHarness"]
Answer = Callable[[ToolCall, ToolContext], ToolResult | Awaitable[ToolResult]]
OPENED = {
    "host": "h1",
    "queue": "host.h1.b00t",
    "image": "default",
    "start_s": 0.5,
    "network": "none",
    "hosts": [],
    "workspace": "image",
}


def echo_then(answer: str, *texts: str) -> list[Turn]:
    """Return one step with a call of `echo` for each text, then the answer."""
    return [*(Calls([("echo", {"text": text})]) for text in texts), answer]


def fail_with(code: Any, message: str = "no") -> Answer:
    return lambda call, _: ToolResult.failed(call, code, message)


# Its schemas take a tenth of a second to check.
SPECS = tuple(build_registry().specs())


class ItemHarness(RunHarness):
    """A process with its pool. `answers`: replies by verb or tool, instead of a success. `run_events`: all events
    of its runs. `places`: shared by the processes of one pool.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        turns: Sequence[Turn] | Model = ("done",),
        *,
        approver: Approver | None = None,
        policy: ApprovalPolicy = DEFAULT_POLICY,
        places: MemorySessionStore | None = None,
        answers: Mapping[str, Answer] | None = None,
        echo: ToolSpec | None = None,
    ) -> None:
        super().__init__(client)
        self.model = turns if not isinstance(turns, Sequence) else ScriptedModel(turns)
        self.answers: dict[str, Answer] = dict(answers or {})
        self.run_events: list[RunEvent] = []
        self.places = places or MemorySessionStore()
        self.transport = AnsweringTransport(self._answer)
        self.blobs = MemoryAsyncBlobs()
        catalog: Any = StaticCatalog(*SPECS, echo or build_spec("echo"))
        blobs: Any = self.blobs
        pool = Pool(self.places, StaticHosts(build_report()), CallStore(client, "d"))
        dispatcher = Dispatcher(self.transport, TenantCatalog(catalog), KEY, queue_wait_s=60, pool=pool)
        installed = SkillStore(client, "d", KEY)
        self.pool = PoolConnection(
            client,
            KEY,
            dispatcher,
            catalog,
            blobs,
            RedisSwitches(client, "d", KEY),
            RedisTenants(client, "d", KEY),
            installed,
            TenantCatalog(catalog, installed),
            CallReader(client, "d", KEY),
        )
        settings = OrchestratorSettings(deployment="d", dialect="native", redis_url=None)
        self.builder = AgentBuilder(settings, self.pool, approver or AutoApprover(), policy)
        models = Models(settings, self.pool, ChosenModel(self.model, capabilities=ALL_CAPABILITIES))
        self.work = RunExecutor(self.pool, self.builder, models)

    def sent(self) -> list[str]:
        """Return verbs and tools, in the order in which the worker received them."""
        return [call.name.removeprefix("session.") for call in self.transport.calls]

    def count_model_requests(self) -> int:
        """Return how many replies the model was asked for."""
        assert isinstance(self.model, ScriptedModel)
        return len(self.model.requests)

    async def put(self, item: BatchItem) -> RunClaim:
        """Submit a batch with this one item and claim the item's run."""
        fields = {name: getattr(item, name) for name in ("url", "work", "environment", "grader", "task")}
        await self.submit(1, **fields)
        (claim,) = await self.queue.claim(1, ("acme", "b"))
        return claim

    async def claim_by_other(self, claim: RunClaim) -> RunClaim:
        """Return the same run, claimed by another process after the death of its holder."""
        await self.die(claim)
        (again,) = await self.other.claim(1, ("acme", "b"))
        return again

    async def claim_next_attempt(self, claim: RunClaim) -> RunClaim:
        """Return the claim of the same item's next attempt."""
        await self.queue.give_back(claim, is_new=True)
        (again,) = await self.queue.claim(1, ("acme", "b"))
        return again

    async def journal(self, claim: RunClaim) -> Journal:
        """Return the journal as the holder of the claim sees it. Losing the claim cancels the code that uses the
        journal.
        """
        task = asyncio.current_task()
        assert task is not None
        return Journal(
            await RunLog.load(self.client, "d", KEY, claim.attempt),
            task.cancel,
        )

    async def execute(self, claim: RunClaim, defaults: BatchDefaults | None = None) -> ItemOutcome:
        """Execute the item and return its outcome."""
        return await self.work.work(
            claim, await self.journal(claim), defaults or BatchDefaults(), self.run_events.append
        )

    async def _answer(self, call: ToolCall, context: ToolContext) -> ToolResult:
        name = call.name.removeprefix("session.")
        if name in self.answers:
            result = self.answers[name](call, context)
            return result if isinstance(result, ToolResult) else await result
        if name == "exec":
            # A program that prints nothing.
            metadata = {"returncode": 0, "stdout_bytes": 0, "timed_out": False}
            return ToolResult(call_id=call.id, name=call.name, success=True, metadata=metadata)
        if name in ("open", "fork"):
            return ToolResult(call_id=call.id, name=call.name, success=True, metadata=OPENED)
        return ToolResult(call_id=call.id, name=call.name, success=True, output=f"said {call.arguments.get('text')}")


def build_run(**fields: Any) -> BatchItem:
    """Return an agent run with the tool echo."""
    body = {"instruction": "say it", "tools": ("echo",), **fields}
    return build_item(1, work=RunBody.model_validate(body))


def build_tool_call(**fields: Any) -> BatchItem:
    """Return a single call of echo."""
    return build_item(1, url="/v1/tools/execute", work=CallBody(name="echo", arguments={"text": "x"}), **fields)


def with_environment(item: BatchItem, **fields: Any) -> BatchItem:
    """Return the item with this initial state."""
    return item.model_copy(update={"environment": item.environment.model_copy(update=fields)})


def archive_of(folder: Path) -> bytes:
    """Return the archive that a session exports for a workspace with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name)
    return buffer.getvalue()


@asynccontextmanager
async def open_harness_factory(redis_server: RedisProcess) -> AsyncIterator[HarnessFactory]:
    """Yield a factory of processes on one Redis that share the session locations."""
    places = MemorySessionStore()
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        with capture_logs():
            yield lambda *arguments, **options: ItemHarness(client, *arguments, places=places, **options)
