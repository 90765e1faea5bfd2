"""What all requests share: the connection to the pool, as soon as there is one, and what is built on it once."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from contract.errors import BrokerUnavailable, ConfigError, OperatorError
from orchestrator.api.known_sessions import KnownSessions
from orchestrator.api.problems import ApiCode, ApiProblem
from orchestrator.api.shares import FILES_OF_A_KEY, LOOKS_OF_A_KEY, PAGES_OF_A_KEY, FairTurn, OpenStreams, Turns
from orchestrator.approvals import DEFAULT_POLICY, Approver, RefusingApprover
from orchestrator.approvals.policies import ApprovalPolicy, load_policy
from orchestrator.dispatch.pool_connection import PoolConnection, open_pool
from orchestrator.metrics.page import MetricsPage
from orchestrator.runs.hosted import HostedRuns
from orchestrator.sdk.client import ToolClient
from orchestrator.settings import OrchestratorSettings
from store.api_keys import ApiKeys, Credential
from store.approvals import ApprovalQueue
from store.tasks import SharedReads, cancel_all
from telemetry.logs import get_logger
from telemetry.settings import load_tracing_settings

MAX_KEYS = 10_000


class Rates:
    """`per_s` requests a second and `burst` at once for each key. `clock`: monotonic seconds."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> None:
        """One request of a key. Raises ApiProblem, with when to come again, for one too many."""
        now = self._clock()
        left, at = self._left.pop(key, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_s)
        is_over = left < 1.0
        # Put back behind the others: those that were used longest ago are forgotten first, and are full by then.
        self._left[key] = (left if is_over else left - 1.0, now)
        while len(self._left) > MAX_KEYS:
            del self._left[next(iter(self._left))]
        if is_over:
            wait_s = max(1, round((1.0 - left) / self._per_s + 0.5))
            raise ApiProblem(
                ApiCode.TOO_MANY_REQUESTS,
                f"more than {self._per_s:g} requests a second with this key: come again in {wait_s} s, or have the "
                "operator raise TOOLCREW_API_RATE",
                headers={"Retry-After": str(wait_s)},
            )


T = TypeVar("T")


class Fresh(Generic[T]):
    """What was found within the last `fresh_s` seconds. `clock`: monotonic seconds."""

    def __init__(self, fresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s = fresh_s
        self._clock = clock
        self._reads = SharedReads[T]()
        self._kept: tuple[T, float] | None = None

    async def get(self, look: Callable[[], Awaitable[T]]) -> T:
        """What there is, else what `look` gives. Raises what it raises, which is not kept."""
        if self._kept is not None and self._clock() - self._kept[1] < self._fresh_s:
            return self._kept[0]
        return await self._reads.read("", lambda: self._look(look))

    async def _look(self, look: Callable[[], Awaitable[T]]) -> T:
        found = await look()
        self._kept = (found, self._clock())
        return found


class BackgroundTasks:
    """The background tasks of one process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Start a task. `work` raises nothing."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self, within_s: float) -> None:
        """Wait until all tasks are done; cancel those that take longer."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            await cancel_all(late)


log = get_logger(__name__)

MAX_CLIENTS = 1000
"""That are kept for the next request: each knows its settings and secrets, which take longer to gather than a
request.
"""
AGAIN_S = 1.0
"""How often it is tried to reach a Redis that does not answer at the start."""
BACKGROUND_S = 5.0
"""How long what requests have left to be done may take once the service is told to stop."""
READY_FRESH_S = 1.0
"""Anybody may ask whether the service is ready, without a key: his asking costs Redis no more than this often."""


@dataclass(frozen=True)
class HouseParts:
    """What there is once Redis has answered."""

    pool: PoolConnection
    keys: ApiKeys
    approvals: ApprovalQueue
    runs: HostedRuns
    metrics: MetricsPage


Beside = Callable[[HouseParts], AbstractAsyncContextManager[None]]
"""What runs beside the API while it is connected."""


class House:
    """One process of the API. It serves from the first moment: requests that need Redis fail with 503 until it
    answers.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self.settings = settings
        self.rates = Rates(settings.api_rate, settings.api_burst)
        self._clients: dict[tuple[str, str], ToolClient] = {}
        self.sessions = KnownSessions()
        self.readiness = Fresh[Mapping[str, str]](READY_FRESH_S)
        self.streams = OpenStreams()
        self.background = BackgroundTasks()
        self.files, self.pages = Turns(FILES_OF_A_KEY), Turns(PAGES_OF_A_KEY)
        # One skill at a time, because each takes up to half a GiB of memory.
        self.examining = FairTurn()
        self.looks = Turns(LOOKS_OF_A_KEY)
        # Nobody sits at a service: what a program calls is its own decision, and runs ask through the approvals queue.
        self._approver: Approver = RefusingApprover()
        self._policy: ApprovalPolicy = (
            load_policy(settings.approval_policy) if settings.approval_policy else DEFAULT_POLICY
        )
        self._parts: HouseParts | None = None
        self._trouble = "Redis has not answered yet"

    @property
    def parts(self) -> HouseParts:
        """Raises ApiProblem while there is no connection."""
        if self._parts is None:
            raise ApiProblem(
                ApiCode.NOT_READY, f"the service is not connected to its Redis: {self._trouble}; try again in a moment"
            )
        return self._parts

    @property
    def is_connected(self) -> bool:
        return self._parts is not None

    def client(self, tenant: str, credential: Credential, *, key: str | None = None) -> ToolClient:
        """The pool as a tenant has it. `key`: the id of the API key that has been shown, by which the same client is
        given again.
        """
        pool = self.parts.pool
        kept = self._clients.pop((tenant, key), None) if key is not None else None
        client = kept or ToolClient(self.settings, pool, tenant, self._approver, None, self._policy, credential)
        if key is not None:
            # Put back behind the others: those that were used longest ago go first.
            self._clients[tenant, key] = client
            while len(self._clients) > MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]
        return client

    def check(self) -> None:
        """Raises ConfigError for what waiting for Redis does not mend."""
        self.settings.broker().signing_keys()
        load_tracing_settings()

    @asynccontextmanager
    async def open(self, beside: Beside) -> AsyncIterator[None]:
        """Connected as soon as that can be had, with `beside` running from then on."""
        is_over = asyncio.Event()
        keeping = asyncio.create_task(self._keep(beside, is_over))
        try:
            yield
        finally:
            is_over.set()
            await keeping

    async def _keep(self, beside: Beside, is_over: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            parts = await self._connected(stack, is_over)
            if parts is None:
                return
            stack.push_async_callback(parts.runs.hub.close)
            stack.push_async_callback(self.background.end, BACKGROUND_S)
            await stack.enter_async_context(beside(parts))
            self._parts = parts
            log.info("api_connected")
            try:
                await is_over.wait()
            finally:
                self._parts = None

    def _built(self, pool: PoolConnection) -> HouseParts:
        settings, deployment = self.settings, self.settings.deployment
        approvals = ApprovalQueue(pool.redis, deployment, pool.keys, settings.approvers)
        metrics = MetricsPage(pool.redis, deployment, has_tenants=settings.metrics_tenants)
        return HouseParts(
            pool, ApiKeys(pool.redis, deployment, pool.keys), approvals, HostedRuns.on(pool, deployment), metrics
        )

    async def _connected(self, stack: AsyncExitStack, is_over: asyncio.Event) -> HouseParts | None:
        """None when the service is to end before."""
        settings = self.settings
        told = ""
        while not is_over.is_set():
            try:
                opening = open_pool(
                    settings.broker(), queue_wait_s=settings.queue_wait_s, needs_workers=False, settings=settings
                )
                pool = await stack.enter_async_context(opening)
                return self._built(pool)
            except (BrokerUnavailable, ConfigError) as error:
                self._trouble = _first_sentence(error)
                if str(error) != told:
                    told = str(error)
                    log.warning("pool_not_there", error=told)
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await is_over.wait()
        return None


def _first_sentence(error: OperatorError) -> str:
    """What clients are told of it: not where Redis is."""
    return "it is away" if isinstance(error, BrokerUnavailable) else "the service is set up wrongly, its log says how"
