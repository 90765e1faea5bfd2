"""The worker without sandboxes: serves web tools and operators' tools, with the network and under Celery's own limits."""

import os
import secrets
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import structlog

from contract.clock import SharedClock
from contract.errors import ConfigError
from contract.names import POOL_QUEUES, pool_worker
from contract.registry import ToolRegistry
from contract.specs import Catalog, ToolSpec
from store.blobs import WorkerBlobs
from store.calls import RefusalCounter, WorkerCallStore
from store.connection import connect, connect_once, drop_connections
from store.hosts import WorkerControlStore
from store.switches import WorkerSwitches
from store.tenants import WorkerTenants
from store.tool_state import StateStore
from telemetry.spans import Tracer
from workers.call_events import open_call_events
from workers.call_policy import CallPolicy
from workers.catalog import CatalogPublisher
from workers.celery_edge.app import build_app, choose_pool, claim_node, run_worker
from workers.celery_edge.tasks import register_tasks
from workers.executor import CallMiddleware, Executor
from workers.held_calls import ClaimConfirmation, HeldCalls
from workers.interrupts import CancelBoard, Interrupts
from workers.mcp.shelf import ServerShelf, Source
from workers.pool_control import PoolControlListener, process_holder
from workers.pool_life import PoolLife
from workers.settings import WorkerSettings
from workers.tools.base import WorkerRegistry, WorkerResources, WorkerTool
from workers.tracing import CallTracing, open_process_tracer

log = structlog.get_logger(__name__)

SERVERS_AT_ONCE = 100
"""MCP servers that are asked for their tools at a time: one that is silent keeps no other waiting."""


def run_web_worker(settings: WorkerSettings, tools: Sequence[WorkerTool], servers: Sequence[Source] = ()) -> None:
    """Serves `tools`, and those that the MCP `servers` have, in the queues of their pools until it is told to stop. Raises ConfigError when it cannot
    start."""
    broker = settings.broker()
    key = broker.signing_keys()
    pools = choose_pools([tool.spec for tool in tools], settings.worker_queues, has_servers=bool(servers))
    registry: WorkerRegistry = ToolRegistry(tool for tool in tools if tool.spec.pool in pools)
    shelf = ServerShelf(registry, servers if "tools" in pools else (), settings.mcp_refresh_s, SERVERS_AT_ONCE)
    shelf.ask_due()
    worker = pool_worker(settings.host, secrets.token_hex(4))
    board = CancelBoard()
    pool = choose_pool("web", settings.worker_pool)
    clock = SharedClock()
    tracer = open_process_tracer("web")
    node = claim_node(f"web-{settings.host}", broker)
    queues = [POOL_QUEUES[pool] for pool in pools]
    life = PoolLife(settings, worker, queues, clock)
    refusals = RefusalCounter(connect_once(broker), settings.deployment)
    app = build_app(broker, refusals.count)
    executor = partial(_build_executor, settings, registry, worker, board, clock, tracer, node)
    register_tasks(app, registry, key, executor, refusals.count, settings.deployment, shelf.look if servers else None)
    publisher = CatalogPublisher(connect(broker), settings.deployment, key, build_catalogs(registry))
    shelf.on_change = lambda: publisher.replace(build_catalogs(registry))
    ledger = WorkerCallStore(connect(broker), settings.deployment, clock)
    control = PoolControlListener(
        WorkerControlStore(connect(broker)), ledger, board, worker, queues, key, clock=clock, on_refused=refusals.count
    )
    control.serve_drain(life.drain)

    def start_threads() -> None:
        publisher.start()
        control.start()
        life.start()
        shelf.start()

    def stop_threads() -> None:
        shelf.stop()
        control.stop()
        publisher.stop()
        life.stop()
        end_spans()

    def end_spans() -> None:
        if tracer is not None:
            tracer.close()

    log.info("worker_starting", queues=queues, tools=[spec.name for spec in registry.specs()], concurrency=settings.concurrency)
    run_worker(
        app,
        node,
        queues,
        settings.concurrency,
        settings.log_level,
        pool=pool,
        on_ready=start_threads,
        on_stop=stop_threads,
        on_process_stop=end_spans,
    )


def choose_pools(specs: Sequence[ToolSpec], queues: Sequence[str] | None, *, has_servers: bool = False) -> list[str]:
    """The pools that a worker with these tools serves. `has_servers`: there may be tools of MCP servers, now or later. `queues` None: all that it has tools for, since a call in the queue of any other
    would fail here and not where it could run.

    Raises ConfigError for a queue without tools, and for no tools at all.
    """
    served = {spec.pool for spec in specs} | ({"tools"} if has_servers else set())
    chosen = [pool for pool, queue in POOL_QUEUES.items() if (pool in served if queues is None else queue in queues)]
    for pool in chosen:
        if pool not in served:
            advice = "install their package beside the worker or name their modules in TOOLCREW_TOOL_MODULES, or leave it out"
            raise ConfigError(f"TOOLCREW_WORKER_QUEUES names {POOL_QUEUES[pool]}, but there are no tools for it: {advice}")
    if not chosen:
        raise ConfigError("a worker of the kind web found no tools to serve: install toolcrew[web], or a package with tools")
    return chosen


def build_catalogs(registry: WorkerRegistry) -> dict[str, Catalog]:
    """Pool -> what it serves here."""
    by_pool: dict[str, list[ToolSpec]] = defaultdict(list)
    for spec in registry.specs():
        by_pool[spec.pool].append(spec)
    return {pool: Catalog(tools=tuple(specs)) for pool, specs in by_pool.items()}


def _build_executor(
    settings: WorkerSettings,
    registry: WorkerRegistry,
    worker: str,
    board: CancelBoard,
    clock: SharedClock,
    tracer: Tracer | None,
    node: str,
) -> Executor:
    """Called in the process that runs the calls: the ledger names it."""
    broker, deployment = settings.broker(), settings.deployment
    client, once, keys = connect(broker), connect_once(broker), broker.signing_keys()
    interrupts = Interrupts(board, drop_connections)
    interrupts.listen()
    resources = WorkerResources(
        {}, process_holder(worker, os.getpid()), None, StateStore.of(broker), partial(open_call_events, once, deployment)
    )
    claims = WorkerCallStore(client, deployment, clock, node)
    middleware: list[CallMiddleware] = [interrupts, ClaimConfirmation(HeldCalls(), claims, resources.holder)]
    if tracer is not None:
        middleware.append(CallTracing(tracer, resources.facts))
    count_refusal = RefusalCounter(once, deployment).count
    policy = CallPolicy(registry, WorkerSwitches(client, deployment, keys), WorkerTenants(client, deployment, keys), count_refusal)
    return Executor(registry, claims, WorkerBlobs(client, deployment, "web"), resources, policy, middleware, clock)
