"""A client and an administrator of a pool without queue and sandbox. Switches and catalog are in a real Redis, and
the worker's executor is real.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.records.fakes import (
    AnsweringTransport,
    FakeSandboxClient,
    MemoryAsyncBlobs,
    MemoryBlobs,
    MemoryLedger,
    build_executor,
)
from tests.support.sandboxd.fake_hosts import build_pool
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.names import catalog_key
from toolcrew.contract.registry import ToolRegistry
from toolcrew.contract.session_locations import seal_start
from toolcrew.contract.session_spec import EMPTY_SESSION
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.specs import Catalog, seal_catalog
from toolcrew.orchestrator.admission import SharedAdmission, UnlimitedAdmission
from toolcrew.orchestrator.dispatch.call_event_listener import CallEventListener
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session, SessionInfo
from toolcrew.store.blobs import Blobs
from toolcrew.store.call_messages import NotSent
from toolcrew.store.call_reader import CallReader
from toolcrew.store.connection import connect_once, open_redis
from toolcrew.store.skills import SkillStore
from toolcrew.store.tenants import OpenTenants, RedisTenants
from toolcrew.store.tools import RedisCatalog, RedisSwitches, WorkerSwitches
from toolcrew.workers.call_event_writer import open_call_events
from toolcrew.workers.executor import CallPolicy, CallRepeated
from toolcrew.workers.tools.base import WorkerTool

SESSION = "s1"


class SwitchedPool:
    """A worker with `tools`, and any number of clients. Each client has its own cached state of the switches."""

    def __init__(self, server: RedisProcess, *tools: WorkerTool) -> None:
        self.broker = BrokerSettings.model_validate({"redis_url": server.url, "deployment": "default"})
        self.registry = ToolRegistry(tools)
        self.redis = server.client()
        self.executor = build_executor(
            self.registry,
            FakeSandboxClient(),
            MemoryLedger(),
            MemoryBlobs(),
            {"host": "h", "queue": "q"},
            policy=CallPolicy(self.registry, WorkerSwitches(self.redis, "default", KEY)),
            open_events=partial(open_call_events, connect_once(self.broker), "default", KEY),
        )
        self.transport = LateTransport(self._execute)
        catalog = Catalog(tools=tuple(state.spec for state in self.registry.describe()))
        self.redis.set(catalog_key("default", "sandbox"), seal_catalog(KEY, "sandbox", catalog))

    async def _execute(self, call: Any, context: Any) -> Any:
        try:
            return await asyncio.to_thread(self.executor.execute, call, context)
        except CallRepeated:
            raise NotSent("duplicate") from None  # as the queue, which accepts each id once

    @asynccontextmanager
    async def client(self, *, has_admission: bool = False) -> AsyncIterator[ToolClient]:
        """Yield a client as `ToolClient.connect` creates one, but without the queue. `has_admission`: calls need
        slots, and tenants have policies.
        """
        redis = open_redis(self.broker)
        catalog, switches = RedisCatalog(redis, "default", KEY), RedisSwitches(redis, "default", KEY)
        events = CallEventListener(redis, "default", KEY)
        hosts, blobs = build_pool(), cast(Blobs, MemoryAsyncBlobs())
        await hosts.sessions.open(
            "acme", SESSION, "q", start=seal_start(KEY, "acme", SESSION, EMPTY_SESSION), ttl_s=60, limit=1
        )
        tenants = RedisTenants(redis, "default", KEY)
        admission = SharedAdmission(redis, "default") if has_admission else UnlimitedAdmission()
        installed = SkillStore(redis, "default", KEY)
        offers = TenantCatalog(catalog, installed)
        dispatcher = Dispatcher(
            self.transport,
            offers,
            KEY,
            queue_wait_s=10,
            rules=CallRules(tenants if has_admission else OpenTenants(), switches),
            pool=replace(hosts, events=events, admission=admission),
        )
        calls = CallReader(redis, "default", KEY)
        connection = PoolConnection(redis, KEY, dispatcher, catalog, blobs, switches, tenants, installed, offers, calls)
        settings = OrchestratorSettings.model_validate({"redis_url": self.broker.redis_url, "approvals": "auto"})
        try:
            yield _Client(settings, connection, "acme", None, None)
        finally:
            if admission is not None:
                await admission.aclose()
            await events.close()
            await redis.aclose()


class LateTransport(AnsweringTransport):
    """A transport to which a call that is published before its slot is granted always comes too early."""

    async def deliver(self, attempt: Attempt) -> Any:
        if attempt.slot:
            raise NotSent("no_slot")
        return await super().deliver(attempt)


class _Client(ToolClient):
    """A client whose sessions need no sandbox."""

    async def open_session(self, *_: Any, **__: Any) -> Session:
        info = SessionInfo(
            session=SESSION, tenant=self.tenant, host="h", queue="q", image="image", sandbox=None, start_s=0.0
        )
        session = Session(self._dispatcher, self._blobs, self.tenant, info)
        session._closed = True
        return session
