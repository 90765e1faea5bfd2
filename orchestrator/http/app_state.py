"""State that all requests of one HTTP service share: the connection to the pool, clients and rate limits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, OperatorError
from toolcrew.contract.settings import OrchestratorSettings, load_tracing_settings
from toolcrew.orchestrator.approvals import DEFAULT_POLICY, Approver, RefusingApprover
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, load_policy
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection, wait_for_pool
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.orchestrator.http.session_cache import SessionCache
from toolcrew.orchestrator.metrics.page import MetricsPage
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.orchestrator.runs.endpoints import ModelNames
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.streams import Streams
from toolcrew.store.api_keys import ApiKeys, Credential
from toolcrew.store.approvals import ApprovalQueue
from toolcrew.store.model_endpoints import ModelEndpoints
from toolcrew.telemetry.logs import get_logger

MAX_KEYS = 10_000
BURST_S = 2.0
"""A client may send as many requests at once as its rate allows in this number of seconds."""


class RateLimiter:
    """Allows each key `per_s` requests a second, and `burst` requests at once."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> None:
        """Count one request of a key. Raises ApiProblem with Retry-After when the key exceeds its rate."""
        now = time.monotonic()
        tokens, at = self._tokens.pop(key, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - at) * self._per_s)
        is_over = tokens < 1.0
        # Insertion at the end keeps the dict in order of last use. The key that was used longest ago is dropped first.
        # A dropped key loses nothing, because its burst is full again.
        self._tokens[key] = (tokens if is_over else tokens - 1.0, now)
        while len(self._tokens) > MAX_KEYS:
            del self._tokens[next(iter(self._tokens))]
        if is_over:
            wait_s = max(1, round((1.0 - tokens) / self._per_s + 0.5))
            raise ApiProblem(
                ApiCode.TOO_MANY_REQUESTS,
                f"more than {self._per_s:g} requests a second with this key: send it again in {wait_s} s, or have the "
                "operator raise TOOLCREW_API_RATE",
                headers={"Retry-After": str(wait_s)},
            )


class BackgroundTasks:
    """Background tasks that requests start in one process and do not wait for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Start a task. `work` must not raise."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self, within_s: float) -> None:
        """Wait until all tasks are done, for at most `within_s` seconds. Cancel the other tasks."""
        if self._tasks:
            _, unfinished = await asyncio.wait(self._tasks, timeout=within_s)
            await cancel_all(unfinished)


log = get_logger(__name__)

MAX_CLIENTS = 1000
"""Limit of the cached clients. Building a client takes longer than a request."""
BACKGROUND_S = 5.0
"""Time in seconds that background tasks have to end after the service stops."""


@dataclass(frozen=True)
class ConnectedParts:
    """Parts of a service that need a connection to Redis."""

    pool: PoolConnection
    keys: ApiKeys
    approvals: ApprovalQueue
    runs: DurableRuns
    metrics: MetricsPage
    streams: Streams


ConnectedWork = Callable[[ConnectedParts], AbstractAsyncContextManager[None]]
"""Background work that a service runs while it is connected to Redis."""


class AppState:
    """Shared state of one process.

    The state exists before Redis answers. Requests that need Redis fail with 503 until the service is connected.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self.settings = settings
        self.rates = RateLimiter(settings.api_rate, max(1, round(BURST_S * settings.api_rate)))
        self._clients: dict[tuple[str, str], ToolClient] = {}
        self.sessions = SessionCache()
        self.background = BackgroundTasks()
        # No person answers questions at a service. A program decides about its own calls, and runs ask through the
        # approvals queue.
        self._approver: Approver = RefusingApprover()
        self._policy: ApprovalPolicy = (
            load_policy(settings.approval_policy) if settings.approval_policy else DEFAULT_POLICY
        )
        self._parts: ConnectedParts | None = None
        self._problem = "Redis has not answered yet"

    @property
    def parts(self) -> ConnectedParts:
        """Return the connected parts. Raises ApiProblem while the service is not connected."""
        if self._parts is None:
            raise ApiProblem(
                ApiCode.NOT_READY, f"the service is not connected to Redis: {self._problem}; try again in a moment"
            )
        return self._parts

    @property
    def is_connected(self) -> bool:
        """Return whether the service is connected to Redis."""
        return self._parts is not None

    def client(self, tenant: str, credential: Credential, *, key: str | None = None) -> ToolClient:
        """Return a client of the pool for a tenant.

        `key`: the id of the request's API key. Requests with the same key share one client.
        """
        pool = self.parts.pool
        cached = self._clients.pop((tenant, key), None) if key is not None else None
        client = cached or ToolClient(self.settings, pool, tenant, self._approver, self._policy, credential)
        if key is not None:
            # Insertion at the end keeps the dict in order of last use. The client that was used longest ago is
            # dropped.
            self._clients[tenant, key] = client
            while len(self._clients) > MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]
        return client

    def check(self) -> None:
        """Raise ConfigError for settings that can never serve a request, even after Redis answers."""
        if self.settings.api_key is not None:
            raise ConfigError("TOOLCREW_API_KEY is set, but this service uses the API keys of its requests: unset it")
        self.settings.broker().signing_keys()
        load_tracing_settings()

    @asynccontextmanager
    async def open(self, work: ConnectedWork) -> AsyncIterator[None]:
        """Connect as soon as Redis answers, and run `work` while connected."""
        is_over = asyncio.Event()
        keeping = asyncio.create_task(self._keep(work, is_over))
        try:
            yield
        finally:
            is_over.set()
            await keeping

    async def _keep(self, work: ConnectedWork, is_over: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            pool = await wait_for_pool(stack, self.settings, is_over, needs_workers=False, on_problem=self._set_problem)
            if pool is None:
                return
            parts = self._built(pool)
            stack.push_async_callback(parts.runs.hub.close)
            stack.push_async_callback(parts.streams.close)
            stack.push_async_callback(self.background.end, BACKGROUND_S)
            await stack.enter_async_context(work(parts))
            # Set `_parts` last, because requests are served as soon as it is set.
            self._parts = parts
            log.info("api_connected")
            try:
                await is_over.wait()
            finally:
                self._parts = None

    def _set_problem(self, error: OperatorError) -> None:
        self._problem = _first_sentence(error)

    def _built(self, pool: PoolConnection) -> ConnectedParts:
        settings, deployment = self.settings, self.settings.deployment
        approvals = ApprovalQueue(pool.redis, deployment, pool.keys, settings.approvers)
        metrics = MetricsPage(pool.redis, deployment)
        runs = DurableRuns.on(pool, settings)
        endpoints = ModelEndpoints(pool.redis, deployment, pool.keys)
        runs.check_model = ModelNames(settings, endpoints, pool.tenants).check
        keys, streams = ApiKeys(pool.redis, deployment, pool.keys), Streams(pool, deployment)
        return ConnectedParts(pool, keys, approvals, runs, metrics, streams)


def _first_sentence(error: OperatorError) -> str:
    """Return the reason for clients, without the address of Redis."""
    return (
        "Redis does not answer"
        if isinstance(error, BrokerUnavailable)
        else "the configuration is wrong, and the log of the service contains the error"
    )
