"""A connection to a pool of hosts: everything that a dispatcher needs, opened and closed together."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import redis.asyncio

from contract.clock import SharedClock
from contract.settings import BrokerSettings
from orchestrator.admission import SharedAdmission
from orchestrator.blobs import Blobs
from orchestrator.call_events import CallEvents
from orchestrator.call_ledger import CallLedger
from orchestrator.call_watch import CallWatch
from orchestrator.catalog import RedisCatalog
from orchestrator.celery_transport import CeleryTransport
from orchestrator.dispatcher import Dispatcher, Pool
from orchestrator.hosts import RedisHosts
from orchestrator.places import Places
from orchestrator.redis_connection import check_redis, open_redis
from orchestrator.results import ResultHub
from orchestrator.switches import RedisSwitches
from orchestrator.tenants import RedisTenants


@dataclass(frozen=True)
class PoolConnection:
    """What a client of a pool uses."""

    redis: "redis.asyncio.Redis"
    dispatcher: Dispatcher
    catalog: RedisCatalog
    blobs: Blobs
    switches: RedisSwitches
    tenants: RedisTenants


@asynccontextmanager
async def open_pool(broker: BrokerSettings, *, queue_wait_s: float, needs_workers: bool = True) -> AsyncIterator[PoolConnection]:
    """Connected, with a worker there, unless only Redis is to be asked. Raises ConfigError (nothing to sign with, no worker), BrokerUnavailable."""
    keys, deployment = broker.signing_keys(), broker.deployment
    async with AsyncExitStack() as stack:
        redis = open_redis(broker)
        stack.push_async_callback(redis.aclose)
        await check_redis(redis, broker)
        catalog = RedisCatalog(redis, deployment)
        if needs_workers:
            await catalog.specs()
        clock, events, switches = SharedClock(), CallEvents(redis, deployment), RedisSwitches(redis, deployment)
        stack.push_async_callback(events.close)
        hub = ResultHub(redis)
        await hub.start()
        stack.push_async_callback(hub.close)
        watch = CallWatch(redis, deployment, hub.fail)
        await watch.start()
        stack.push_async_callback(watch.close)
        blobs, tenants = Blobs(redis, deployment), RedisTenants(redis, deployment)
        transport = CeleryTransport(broker, hub, watch, clock)
        stack.push_async_callback(transport.aclose)
        admission = SharedAdmission(redis, deployment)
        stack.push_async_callback(admission.aclose)
        dispatcher = Dispatcher(
            transport,
            catalog,
            keys,
            queue_wait_s=queue_wait_s,
            events=events,
            switches=switches,
            tenants=tenants,
            admission=admission,
            pool=Pool(Places(redis, deployment), RedisHosts(redis, deployment), CallLedger(redis, deployment)),
            clock=clock,
        )
        yield PoolConnection(redis, dispatcher, catalog, blobs, switches, tenants)
