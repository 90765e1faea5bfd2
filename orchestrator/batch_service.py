"""An orchestrator as a service: works what others have handed over, of every tenant, until it is told to stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ModelDenied
from orchestrator.approvals import DEFAULT_POLICY, choose_approver
from orchestrator.approvals.policies import load_policy
from orchestrator.batch_runs import until_first
from orchestrator.batches.detached import find_paths
from orchestrator.batches.happenings import CallDone, Happening
from orchestrator.batches.items import Failure, FailureKind, Outcome, RunBody
from orchestrator.logs import get_logger
from orchestrator.models.choice import LOCAL
from orchestrator.pool_connection import PoolConnection, open_pool
from orchestrator.run_parts import RunParts
from orchestrator.runs.brake import NotNow
from orchestrator.runs.happening_stream import HappeningWriter
from orchestrator.runs.item_work import ItemWork, Tell
from orchestrator.runs.journal import Journal
from orchestrator.runs.models import Models
from orchestrator.runs.outcomes import judge_error, status_of
from orchestrator.runs.records import BatchDefaults
from orchestrator.runs.run_queue import Claim, RunQueue
from orchestrator.runs.runner import Runner
from orchestrator.settings import OrchestratorSettings
from orchestrator.traces.opening import Traces

log = get_logger(__name__)

MAX_IDLE_MODELS = 8
"""Models that lines or batches name and no run uses now; each holds connections of its own, and anybody may name any number."""
POOL_AGAIN_S = 2.0
"""How often it is looked for a pool that is not there yet."""


class ServiceWork(ItemWork):
    """Works items of whoever hands some over: it reads and writes no path of this machine that a record names, whatever its batch says, and works
    for nobody who is no tenant any more."""

    def __init__(self, pool: PoolConnection, parts: RunParts, models: Models, traces: Traces | None) -> None:
        super().__init__(pool, parts, models, traces)
        self._users: dict[str, int] = {}
        """Of each model that is named: how many runs; those named longest ago first."""

    async def work(self, claim: Claim, journal: Journal, defaults: BatchDefaults, tell: Tell) -> Outcome:
        log.info("run_begun", **_names(claim), is_resumed=claim.is_resumed)
        try:
            outcome = await self._checked(claim, journal, defaults, tell)
        except (asyncio.CancelledError, NotNow, ModelDenied) as reason:
            log.info("run_put_back", **_names(claim), reason=type(reason).__name__)
            raise
        failure = outcome.failure
        log.info("run_ended", **_names(claim), failure=failure.kind.value if failure else "", code=failure.code if failure else "")
        return outcome

    async def _checked(self, claim: Claim, journal: Journal, defaults: BatchDefaults, tell: Tell) -> Outcome:
        work = claim.record.item.work
        model = (work.model or defaults.model) if isinstance(work, RunBody) else None
        refusal = _refuse(claim, defaults, model)
        if refusal is not None:
            await self.abandon(claim, journal)
            return _failed(claim, Failure(kind=FailureKind.INPUT, code=ErrorCode.PERMISSION_DENIED.value, message=refusal))
        try:
            async with self._using(model):
                return await self._while_served(claim, journal, defaults, tell)
        except ModelDenied as error:
            if model is None:
                raise
            # Who names a model that is refused must not end what others have here.
            await self.abandon(claim, journal)
            return _failed(claim, judge_error(error))

    @asynccontextmanager
    async def _using(self, model: str | None) -> AsyncIterator[None]:
        """While a run uses a model that its line or batch names; afterwards the idle ones that were used longest ago are closed."""
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

    async def _while_served(self, claim: Claim, journal: Journal, defaults: BatchDefaults, tell: Tell) -> Outcome:
        """As `ItemWork.work`, ended when the tenant is served no more: its model would be asked again and again what to do about that."""
        unserved = asyncio.Event()

        def heed(happening: Happening) -> None:
            tell(happening)
            if isinstance(happening, CallDone) and happening.error_code == ErrorCode.UNKNOWN_TENANT.value:
                unserved.set()

        working = asyncio.ensure_future(super().work(claim, journal, defaults, heed))
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
        gone = f"tenant {claim.tenant} was removed while this item ran: register it again and retry the item, or leave it"
        return _failed(claim, Failure(kind=FailureKind.INPUT, code=ErrorCode.UNKNOWN_TENANT.value, message=gone))


@dataclass
class BatchService:
    """`concurrency`: runs at a time here. `tenants`: those that are served; none: all. `grace_s`: how long what runs may go on after the first
    `interrupt`; what has not ended by then is given back, for another process to go on with. `has_traces`: each run is written down."""

    settings: OrchestratorSettings
    concurrency: int
    tenants: tuple[str, ...] = ()
    grace_s: float = 60.0
    has_traces: bool = True
    _draining: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def interrupt(self) -> None:
        """The first time: begin nothing any more. The second time: give back what runs, now."""
        if self._draining.is_set():
            self._stopped.set()
        self._draining.set()

    async def run(self) -> None:
        """Until it was interrupted. Raises ConfigError for settings with which nothing can be served; a pool that is not there is waited for."""
        _check(self.settings)
        async with AsyncExitStack() as stack:
            pool = await self._pool(stack)
            if pool is None:
                return
            runner = await stack.enter_async_context(self._runner(pool))
            log.info("serving", orchestrator=runner.queue.owner, concurrency=self.concurrency, tenants=",".join(self.tenants) or "all")
            await until_first(runner.run(), self._until_over(runner))
        log.info("stopped", orchestrator=runner.queue.owner)

    async def _pool(self, stack: AsyncExitStack) -> PoolConnection | None:
        """The pool, as soon as Redis answers and a worker is there; None when it is interrupted before."""
        told = ""
        while not self._draining.is_set():
            try:
                return await stack.enter_async_context(open_pool(self.settings.broker(), queue_wait_s=self.settings.queue_wait_s))
            except (BrokerUnavailable, ConfigError) as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("pool_not_there", error=told)
            with suppress(TimeoutError):
                async with asyncio.timeout(POOL_AGAIN_S):
                    await self._draining.wait()
        return None

    @asynccontextmanager
    async def _runner(self, pool: PoolConnection) -> AsyncIterator[Runner]:
        settings = self.settings
        # Nobody sits at a service: what would have to be asked about is refused, or allowed by a rule.
        approver = choose_approver(settings.approvals, is_interactive=False)
        policy = load_policy(settings.approval_policy) if settings.approval_policy else DEFAULT_POLICY
        queue, writer = RunQueue(pool.redis, settings.deployment), HappeningWriter(pool.redis, settings.deployment)
        async with Models(settings) as models:
            work = ServiceWork(pool, RunParts(settings, pool, approver, policy), models, Traces(settings, {}) if self.has_traces else None)
            yield Runner(pool.redis, settings.deployment, queue, work, writer, self.concurrency, None, self.tenants)

    async def _until_over(self, runner: Runner) -> None:
        """Returns when what still runs is to be given back."""
        await self._draining.wait()
        log.info("draining", running=runner.running, grace_s=self.grace_s)
        runner.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                await self._stopped.wait()
        log.info("giving_back", running=runner.running)


def _check(settings: OrchestratorSettings) -> None:
    """Raises ConfigError for what waiting does not mend."""
    if settings.api_key is not None:
        raise ConfigError(
            "TOOLCREW_API_KEY is set, and a key is one tenant's, while this serves every tenant with the deployment's own secret: unset it "
            "(`toolcrew batch resume` works a batch of one tenant)"
        )
    if settings.redis_url is None:
        raise ConfigError(
            "TOOLCREW_REDIS_URL is not set, and a stack that ends with this command has no batches to serve: set it to the pool's Redis"
        )
    settings.broker().signing_keys()


def _refuse(claim: Claim, defaults: BatchDefaults, model: str | None) -> str | None:
    """Why a service does not work an item, however its record came to be; None: it does."""
    if model == LOCAL:
        return "a service starts no model of its own for a batch: name one of its endpoint, or submit without --detach"
    return next(find_paths(claim.record.item, defaults.artifacts), None)


def _names(claim: Claim) -> dict[str, object]:
    """What is logged of a run: whose it is, and nothing of what is in it."""
    return {"tenant": claim.tenant, "batch": claim.record.batch, "run": claim.run, "attempt": claim.record.attempt}


def _failed(claim: Claim, failure: Failure) -> Outcome:
    record = claim.record
    return Outcome(custom_id=record.item.custom_id, run=claim.run, status_code=status_of(failure), failure=failure, attempt=record.attempt)
