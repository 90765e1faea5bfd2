"""Connection to a pool of hosts: all objects that a dispatcher needs, opened and closed together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, OperatorError
from toolcrew.contract.masking import passwords_of
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.admission import SharedAdmission
from toolcrew.orchestrator.dispatch.call_event_listener import CallEventListener
from toolcrew.orchestrator.dispatch.call_monitor import CallMonitor
from toolcrew.orchestrator.dispatch.celery_transport import CeleryTransport, describe_sender
from toolcrew.orchestrator.dispatch.delivery import Pool
from toolcrew.orchestrator.dispatch.dispatcher import CallMiddleware, Dispatcher
from toolcrew.orchestrator.dispatch.middleware import CallMeter, TracedCalls
from toolcrew.orchestrator.dispatch.session_locator import HostSource
from toolcrew.orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog
from toolcrew.orchestrator.metrics.tally import Tally
from toolcrew.orchestrator.tracing import open_process_tracer
from toolcrew.store.blobs import Blobs
from toolcrew.store.call_messages import ResultHub
from toolcrew.store.call_reader import CallReader
from toolcrew.store.calls import CallStore
from toolcrew.store.clock import SharedClock
from toolcrew.store.connection import RedisClient, check_redis, open_redis
from toolcrew.store.hosts import HostStore
from toolcrew.store.scripts import ScriptConnection
from toolcrew.store.sessions import SessionStore
from toolcrew.store.skills import SkillStore
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.tools import RedisCatalog, RedisSwitches
from toolcrew.telemetry.logs import get_logger
from toolcrew.telemetry.spans import Tracer

log = get_logger(__name__)

RETRY_S = 1.0
"""Interval, in seconds, between the attempts to connect to a pool that is not up yet."""


@dataclass(frozen=True)
class PoolConnection:
    """Objects that a client of a pool uses."""

    redis: RedisClient
    keys: SigningKeys
    dispatcher: Dispatcher
    catalog: RedisCatalog
    blobs: Blobs
    switches: RedisSwitches
    tenants: RedisTenants
    installed: SkillStore
    offers: TenantCatalog
    calls: CallReader
    tracer: Tracer | None = None
    """Tracer of the calls; None: tracing is off."""
    meter: CallMeter | None = None
    """Meter of this process's calls; None: metrics are off."""


@asynccontextmanager
async def open_pool(
    broker: BrokerSettings,
    *,
    queue_wait_s: float,
    needs_workers: bool = True,
    settings: OrchestratorSettings | None = None,
    secrets: Mapping[str, str] | None = None,
    hosts: HostSource | None = None,
) -> AsyncIterator[PoolConnection]:
    """Connect to the pool. Check that the pool has a worker, unless `needs_workers` is False. Raises ConfigError (no
    signing key, no worker), BrokerUnavailable.

    The values in `settings` and `secrets` (kind -> value) are masked in the content of spans, if content is traced.
    `hosts`: the hosts that new sessions may use; None: all hosts that report.
    """
    keys, deployment = broker.signing_keys(), broker.deployment
    tracer = open_process_tracer(
        settings, {**passwords_of("Redis password", broker.redis_url.get_secret_value()), **(secrets or {})}
    )
    async with AsyncExitStack() as stack:
        if tracer is not None:
            stack.push_async_callback(asyncio.to_thread, tracer.close)
        redis = open_redis(broker)
        stack.push_async_callback(redis.aclose)
        await check_redis(redis, broker)
        tally = Tally(redis, deployment)
        tally.start()
        stack.push_async_callback(tally.aclose)
        catalog = RedisCatalog(redis, deployment, keys)
        if needs_workers:
            await catalog.specs()
        clock, events, switches = (
            SharedClock(),
            CallEventListener(redis, deployment, keys),
            RedisSwitches(redis, deployment, keys),
        )
        stack.push_async_callback(events.close)
        hub = ResultHub(redis)
        await hub.start()
        stack.push_async_callback(hub.close)
        calls, host_store = CallStore(redis, deployment, describe_sender()), HostStore(redis, deployment)
        monitor = CallMonitor(calls, host_store, hub.fail)
        await monitor.start()
        stack.push_async_callback(monitor.close)
        blobs, tenants = Blobs(redis, deployment), RedisTenants(redis, deployment, keys)
        # One connection for both, so that the request for a slot and its call are sent in one pipeline.
        scripts = ScriptConnection(redis)
        stack.push_async_callback(scripts.aclose)
        transport = CeleryTransport(broker, hub, monitor, clock, scripts)
        stack.push_async_callback(transport.aclose)
        admission = SharedAdmission(redis, deployment, scripts=scripts)
        stack.push_async_callback(admission.aclose)
        installed = SkillStore(redis, deployment, keys)
        offers = TenantCatalog(catalog, installed)
        meter = CallMeter(tally.counts)
        middleware: list[CallMiddleware] = [meter]
        if tracer is not None:
            middleware.append(TracedCalls(tracer))
        dispatcher = Dispatcher(
            transport,
            offers,
            keys,
            queue_wait_s=queue_wait_s,
            rules=CallRules(tenants, switches),
            pool=Pool(
                SessionStore(redis, deployment), hosts or host_store, calls, admission, events, monitor, blobs, clock
            ),
            middleware=middleware,
        )
        reader = CallReader(redis, deployment, keys, settings.flower_url if settings is not None else None)
        yield PoolConnection(
            redis, keys, dispatcher, catalog, blobs, switches, tenants, installed, offers, reader, tracer, meter
        )


async def wait_for_pool(
    stack: AsyncExitStack,
    settings: OrchestratorSettings,
    is_over: asyncio.Event,
    *,
    needs_workers: bool = True,
    on_problem: Callable[[OperatorError], None] = lambda _: None,
) -> PoolConnection | None:
    """Open the pool in `stack` as soon as Redis answers and, with `needs_workers`, a worker is up. Return None if
    `is_over` is set before that. `on_problem` receives the error of each failed attempt.
    """
    logged = ""
    while not is_over.is_set():
        try:
            return await stack.enter_async_context(
                open_pool(
                    settings.broker(),
                    queue_wait_s=settings.queue_wait_s,
                    needs_workers=needs_workers,
                    settings=settings,
                )
            )
        except (BrokerUnavailable, ConfigError) as error:
            on_problem(error)
            # Log a reason once, not at each attempt.
            if str(error) != logged:
                logged = str(error)
                log.warning("pool_not_available", error=logged)
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await is_over.wait()
    return None
