"""The worker without sandboxes.

It serves web tools and operators' tools, with network access, under Celery's time limits.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import structlog

from toolcrew.contract.errors import ConfigError, OperatorError, ToolFailure
from toolcrew.contract.names import POOL_QUEUES
from toolcrew.contract.registry import ToolRegistry
from toolcrew.contract.settings import WorkerSettings
from toolcrew.contract.specs import Catalog, ToolSpec
from toolcrew.store.clock import SharedClock
from toolcrew.store.connection import connect_once, drop_connections
from toolcrew.store.tool_state import StateStore
from toolcrew.workers.call_event_writer import open_call_events
from toolcrew.workers.control import PoolOrders, process_holder
from toolcrew.workers.executor import ExecutorMiddleware
from toolcrew.workers.host import PoolHost
from toolcrew.workers.interrupts import CallInterrupts, CancelBoard
from toolcrew.workers.mcp.server_registry import ServerRegistry, ToolSource
from toolcrew.workers.tools.base import WorkerRegistry, WorkerResources, WorkerTool
from toolcrew.workers.worker import WorkerParts, run_worker

log = structlog.get_logger(__name__)

SERVERS_AT_ONCE = 100
"""MCP servers that are asked for their tools at the same time. A silent server delays no other server."""


def run_web_worker(settings: WorkerSettings, tools: Sequence[WorkerTool], servers: Sequence[ToolSource] = ()) -> None:
    """Serve `tools`, and the tools of the MCP `servers`, until the process receives a stop signal.

    Raises ConfigError: the worker cannot start.
    """
    broker, deployment = settings.broker(), settings.deployment
    pools = choose_pools([tool.spec for tool in tools], settings.worker_queues, has_servers=bool(servers))
    registry: WorkerRegistry = ToolRegistry(tool for tool in tools if tool.spec.pool in pools)
    server_registry = None
    if servers and "tools" in pools:
        server_registry = ServerRegistry(registry, servers, settings.mcp_refresh_s, SERVERS_AT_ONCE)
        server_registry.list_due_servers()
    clock = SharedClock()
    host = PoolHost(settings, [POOL_QUEUES[pool] for pool in pools], clock)
    board = CancelBoard()

    def open_resources() -> WorkerResources:
        # Call this in the process that runs calls, because the records of calls contain its pid.
        events = partial(open_call_events, connect_once(broker), deployment, broker.signing_keys())
        return WorkerResources({}, process_holder(host.worker, os.getpid()), None, StateStore.of(broker), events)

    def open_guards() -> Sequence[ExecutorMiddleware]:
        interrupts = CallInterrupts(board, drop_connections)
        interrupts.listen()
        return [interrupts]

    run_worker(
        settings,
        WorkerParts(
            kind="web",
            host=host,
            clock=clock,
            registry=registry,
            servers=server_registry,
            build_catalogs=lambda: build_catalogs(registry),
            build_order_handler=lambda orders, ledger: PoolOrders(
                orders, ledger, board, host.worker, end_sessions=partial(_end_sessions, servers, StateStore.of(broker))
            ),
            open_resources=open_resources,
            open_guards=open_guards,
        ),
    )


def _end_sessions(servers: Sequence[ToolSource], states: StateStore, tenant: str, session: str) -> bool:
    """End the sessions at the MCP servers that the calls of a session shared, and delete their record. Try every
    server. Return whether one was ended. A server ends an abandoned session by itself, so a failure is only logged.
    """
    has_ended = False
    for server in servers:
        try:
            has_ended = server.end_session(tenant, session) or has_ended
        except (ToolFailure, OperatorError) as error:
            log.warning("mcp_session_not_ended", server=server.name, tenant=tenant, session=session, error=str(error))
    try:
        states.remove_server_sessions(tenant, session)
    except ToolFailure as error:
        # The record then expires by itself.
        log.warning("mcp_session_not_ended", server="", tenant=tenant, session=session, error=str(error))
    return has_ended


def choose_pools(specs: Sequence[ToolSpec], queues: Sequence[str] | None, *, has_servers: bool = False) -> list[str]:
    """Return the pools that a worker with these tools serves.

    `has_servers`: MCP servers may provide tools, now or later. `queues` None: all pools for which the worker has
    tools. A call in the queue of another pool would fail on this worker, although another worker could run it.

    Raises ConfigError: a queue has no tools, or there are no tools at all.
    """
    served = {spec.pool for spec in specs} | ({"tools"} if has_servers else set())
    pools = [pool for pool, queue in POOL_QUEUES.items() if (pool in served if queues is None else queue in queues)]
    for pool in pools:
        if pool not in served:
            raise ConfigError(
                f"TOOLCREW_WORKER_QUEUES contains {POOL_QUEUES[pool]}, but the worker has no tools for this queue: "
                "install their package, set their modules in TOOLCREW_TOOL_MODULES, or remove the queue"
            )
    if not pools:
        raise ConfigError("the web worker has no tools to serve: install toolcrew[worker], or a package with tools")
    return pools


def build_catalogs(registry: WorkerRegistry) -> dict[str, Catalog]:
    """Return pool -> catalog of the tools that this worker serves."""
    by_pool: dict[str, list[ToolSpec]] = defaultdict(list)
    for spec in registry.specs():
        by_pool[spec.pool].append(spec)
    return {pool: Catalog(tools=tuple(specs)) for pool, specs in by_pool.items()}
