"""Works the runs and the batches of every tenant that were handed over: by itself (batch_service.py), or beside the
API.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from contract.calls import ToolCall
from contract.errors import BrokerUnavailable, ErrorCode, ModelDenied
from contract.run_events import CallFinished, CallSent, Failure, FailureKind, OnEvent, RunEvent
from orchestrator.approvals import DEFAULT_POLICY
from orchestrator.approvals.asking import choose_pool_approver, open_approvals
from orchestrator.approvals.policies import load_policy
from orchestrator.batches.detached import find_paths
from orchestrator.dispatch.pool_connection import PoolConnection
from orchestrator.models.choice import LOCAL
from orchestrator.runs.batch_runs import until_first
from orchestrator.runs.brake import NotNow
from orchestrator.runs.event_publisher import RunEventPublisher
from orchestrator.runs.item_work import ItemWork
from orchestrator.runs.journal import Journal
from orchestrator.runs.live_text import LiveText
from orchestrator.runs.models import Models
from orchestrator.runs.outcomes import judge_error, status_of
from orchestrator.runs.run_parts import RunParts
from orchestrator.runs.runner import Runner
from orchestrator.settings import OrchestratorSettings
from orchestrator.traces.opening import Traces
from store.batches import HOSTED_BATCH, BatchDefaults, BatchEventWriter, Outcome, RunBody
from store.runs import RunClaim, RunQueue
from telemetry.logs import get_logger

log = get_logger(__name__)

MAX_IDLE_MODELS = 8
"""Models that lines or batches name and no run uses now; each holds connections of its own, and anybody may name any
number.
"""


@asynccontextmanager
async def open_runner(
    settings: OrchestratorSettings,
    pool: PoolConnection,
    concurrency: int,
    *,
    tenants: tuple[str, ...] = (),
    has_traces: bool = True,
) -> AsyncIterator[Runner]:
    """What works runs and batch items of all tenants, or of those, on a pool: `concurrency` at a time, once its `run`
    is awaited. `has_traces`: each run is written down. Raises ConfigError for a policy file that is none."""
    # Nobody sits at a service: what would have to be asked about is refused, or allowed by a rule, where it is not
    # asked by the queue.
    questions = open_approvals(settings, pool.redis, pool.keys)
    approver = choose_pool_approver(settings, questions, is_interactive=False)
    policy = load_policy(settings.approval_policy) if settings.approval_policy else DEFAULT_POLICY
    queue, writer = (
        RunQueue(pool.redis, settings.deployment, pool.keys),
        BatchEventWriter(pool.redis, settings.deployment),
    )
    async with Models(settings) as models:
        parts, traces = RunParts(settings, pool, approver, policy), Traces(settings, {}) if has_traces else None
        work = ServiceWork(pool, parts, models, traces, RunEventPublisher(pool.redis, settings.deployment))
        yield Runner(pool.redis, settings.deployment, queue, work, writer, concurrency, None, tenants)


@dataclass(frozen=True)
class Stopping:
    """How a service is told to stop."""

    draining: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def interrupt(self) -> None:
        """The first time: begin nothing any more. The second time: give back what runs, now."""
        if self.draining.is_set():
            self.stopped.set()
        self.draining.set()


@dataclass(frozen=True)
class RunService:
    """A runner until it is interrupted. `grace_s`: how long what runs may go on after the first interrupt; what has not
    ended by then is given back, for another process to go on with."""

    runner: Runner
    grace_s: float = 60.0
    stopping: Stopping = field(default_factory=Stopping)

    async def run(self) -> None:
        """Until it was interrupted, and what ran has ended or is given back. Raises ModelDenied when the model refuses
        this process.
        """
        await until_first(self.runner.run(), self._until_over())

    async def _until_over(self) -> None:
        """Returns when what still runs is to be given back."""
        await self.stopping.draining.wait()
        log.info("draining", running=self.runner.running, grace_s=self.grace_s)
        self.runner.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                await self.stopping.stopped.wait()
        log.info("giving_back", running=self.runner.running)


class ServiceWork(ItemWork):
    """Works items of whoever hands some over: it reads and writes no path of this machine that a record names, whatever
    its batch says, and works for nobody who is no tenant any more."""

    def __init__(
        self,
        pool: PoolConnection,
        parts: RunParts,
        models: Models,
        traces: Traces | None,
        publisher: RunEventPublisher | None = None,
    ) -> None:
        """`publisher`: of the events of programs' runs; None: nobody hears of those."""
        super().__init__(pool, parts, models, traces)
        self._publisher = publisher
        self._users: dict[str, int] = {}
        """Of each model that is named: how many runs; those named longest ago first."""
        self._sent: dict[tuple[str, str], set[str]] = {}
        """Of each run in a session that is not its own: the calls that are under way."""

    async def work(self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, on_event: OnEvent) -> Outcome:
        log.info("run_begun", **_names(claim), is_resumed=claim.is_resumed)
        try:
            outcome = await self._checked(claim, journal, defaults, on_event)
        except (asyncio.CancelledError, NotNow, ModelDenied) as reason:
            log.info("run_put_back", **_names(claim), reason=type(reason).__name__)
            raise
        failure = outcome.failure
        log.info(
            "run_ended",
            **_names(claim),
            failure=failure.kind.value if failure else "",
            code=failure.code if failure else "",
        )
        return outcome

    async def _checked(self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, on_event: OnEvent) -> Outcome:
        work = claim.record.item.work
        model = (work.model or defaults.model) if isinstance(work, RunBody) else None
        refusal = _refuse(claim, defaults, model)
        if refusal is not None:
            await self.abandon(claim, journal)
            return _failed(
                claim, Failure(kind=FailureKind.INPUT, code=ErrorCode.PERMISSION_DENIED.value, message=refusal)
            )
        try:
            async with self._using(model):
                return await self._while_served(claim, journal, defaults, on_event)
        except ModelDenied as error:
            if model is None:
                raise
            # Who names a model that is refused must not end what others have here.
            await self.abandon(claim, journal)
            return _failed(claim, judge_error(error))

    @asynccontextmanager
    async def _using(self, model: str | None) -> AsyncIterator[None]:
        """While a run uses a model that its line or batch names; afterwards the idle ones that were used longest ago
        are closed.
        """
        if model is None:
            yield
            return
        self._users[model] = self._users.pop(model, 0) + 1
        try:
            yield
        finally:
            self._users[model] -= 1
            idle = [name for name, users in self._users.items() if users == 0]
            for name in idle[: max(0, len(idle) - MAX_IDLE_MODELS)]:
                del self._users[name]
                await self._models.close(name)

    async def _while_served(
        self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, on_event: OnEvent
    ) -> Outcome:
        """As `ItemWork.work`, ended when the tenant is served no more: its model would be asked again and again what to
        do about that.
        """
        unserved = asyncio.Event()

        def watch(event: RunEvent) -> None:
            on_event(event)
            if isinstance(event, CallFinished) and event.result.error_code is ErrorCode.UNKNOWN_TENANT:
                unserved.set()

        working = asyncio.ensure_future(super().work(claim, journal, defaults, watch))
        watching = asyncio.ensure_future(unserved.wait())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelled by itself, an item leaves its session to whoever goes on with it; so when we are.
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)
        if not unserved.is_set():
            return working.result()
        await self.abandon(claim, journal)
        gone = (
            f"tenant {claim.tenant} was removed while this item ran: register it again and retry the item, or leave it"
        )
        return _failed(claim, Failure(kind=FailureKind.INPUT, code=ErrorCode.UNKNOWN_TENANT.value, message=gone))

    async def abandon(self, claim: RunClaim, journal: Journal) -> None:
        """As `ItemWork.abandon`. Of a session that is not the run's own only the run's calls are ended."""
        await super().abandon(claim, journal)
        session = claim.record.item.ground.session
        for call in self._sent.pop((claim.tenant, claim.run), ()):
            order = ToolCall(id=secrets.token_hex(16), name="session.cancel", arguments={"call_id": call})
            # When Redis is away the call runs into its own limit.
            with suppress(BrokerUnavailable):
                await self._pool.dispatcher.command(order, claim.tenant, session)

    def drop_spans(self, claim: RunClaim) -> None:
        """As `ItemWork.drop_spans`: nothing of the run is known here any more."""
        super().drop_spans(claim)
        self._sent.pop((claim.tenant, claim.run), None)

    @asynccontextmanager
    async def _listen(self, claim: RunClaim, on_event: OnEvent) -> AsyncIterator[tuple[OnEvent, LiveText | None]]:
        if claim.record.batch != HOSTED_BATCH or self._publisher is None:
            yield on_event, None
            return
        async with self._publisher.open(claim.tenant, claim.run, claim.token, claim.record.attempt) as buffer:
            live, sent = LiveText(claim.run, buffer.on_event), set[str]()

            def tell_all(event: RunEvent) -> None:
                on_event(event)
                live.on_event(event)
                if isinstance(event, CallSent):
                    sent.add(event.call.id)
                elif isinstance(event, CallFinished):
                    sent.discard(event.result.call_id)

            if claim.record.item.ground.session is not None:
                self._sent[claim.tenant, claim.run] = sent
            yield tell_all, live


def _refuse(claim: RunClaim, defaults: BatchDefaults, model: str | None) -> str | None:
    """Why a service does not work an item, however its record came to be; None: it does."""
    if model == LOCAL:
        return "a service starts no model of its own for a batch: name one of its endpoint, or submit without --detach"
    return next(find_paths(claim.record.item, defaults.artifacts), None)


def _names(claim: RunClaim) -> dict[str, object]:
    """What is logged of a run: whose it is, and nothing of what is in it."""
    return {"tenant": claim.tenant, "batch": claim.record.batch, "run": claim.run, "attempt": claim.record.attempt}


def _failed(claim: RunClaim, failure: Failure) -> Outcome:
    record = claim.record
    return Outcome(
        custom_id=record.item.custom_id,
        run=claim.run,
        status_code=status_of(failure),
        failure=failure,
        attempt=record.attempt,
    )
