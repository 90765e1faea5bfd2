"""Start of one Celery worker of either kind: it serves calls, runs the host's duties and reads the control list."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import structlog

from toolcrew.contract.settings import WorkerSettings
from toolcrew.contract.specs import Catalog
from toolcrew.store.blobs import WorkerBlobs
from toolcrew.store.calls import WorkerCallStore
from toolcrew.store.clock import SharedClock
from toolcrew.store.connection import connect, connect_once
from toolcrew.store.hosts import WorkerControlStore
from toolcrew.store.metrics import RefusalCounter
from toolcrew.store.tenants import WorkerTenants
from toolcrew.store.tools import WorkerCatalogStore, WorkerSwitches
from toolcrew.telemetry.spans import Tracer
from toolcrew.workers.celery_edge.app import POOL_OF_KIND, build_app, reserve_node_name, run_celery_worker
from toolcrew.workers.celery_edge.tasks import register_tasks
from toolcrew.workers.control import ControlListener, OrderHandler
from toolcrew.workers.duties import Duty
from toolcrew.workers.executor import CallPolicy, ClaimConfirmation, Executor, ExecutorMiddleware, UnconfirmedCalls
from toolcrew.workers.host import Host
from toolcrew.workers.mcp.server_registry import ServerRegistry
from toolcrew.workers.tools.base import WorkerRegistry, WorkerResources
from toolcrew.workers.tracing import CallTracing, open_process_tracer

log = structlog.get_logger(__name__)

PUBLISH_EVERY_S = 4.0
"""Seconds between two publications of the worker's catalogs.

A catalog in Redis expires after its last worker stops publishing.
"""


@dataclass(frozen=True)
class WorkerParts:
    """The parts in which a sandbox worker and a web worker differ.

    - `servers`: the MCP servers; None when the worker has no MCP servers.
    - `build_catalogs`: returns pool -> catalog of the tools that this worker serves.
    - `open_resources`, `open_guards`: called in the process or thread that runs calls. Guards (the middleware that
      interrupts calls) are the innermost middleware.
    """

    kind: Literal["sandbox", "web"]
    host: Host
    clock: SharedClock
    registry: WorkerRegistry
    servers: ServerRegistry | None
    build_catalogs: Callable[[], dict[str, Catalog]]
    build_order_handler: Callable[[WorkerControlStore, WorkerCallStore], OrderHandler]
    open_resources: Callable[[], WorkerResources]
    open_guards: Callable[[], Sequence[ExecutorMiddleware]] = tuple


def run_worker(settings: WorkerSettings, parts: WorkerParts) -> None:
    """Serve calls until the process receives a stop signal."""
    broker, deployment, keys, host = (
        settings.broker(),
        settings.deployment,
        settings.broker().signing_keys(),
        parts.host,
    )
    pool = POOL_OF_KIND[parts.kind]
    node = reserve_node_name(settings.host if parts.kind == "sandbox" else f"web-{settings.host}", broker)
    tracer = open_process_tracer(parts.kind)
    refusals = RefusalCounter(connect_once(broker), deployment)
    app = build_app(broker, refusals.count)
    # Each process of the pool builds its own executor. A Redis connection must not be shared over a fork.
    build_executor = partial(_build_executor, settings, parts, node, UnconfirmedCalls(), tracer)
    copy_updates = parts.servers.copy_updates if parts.servers is not None else None
    register_tasks(app, parts.registry, keys, build_executor, refusals.count, deployment, copy_updates)
    stop = threading.Event()
    catalogs = WorkerCatalogStore(connect(broker), deployment, keys)
    publishing = Duty(
        "catalog",
        PUBLISH_EVERY_S,
        lambda: catalogs.publish(parts.build_catalogs()),
        "catalog_not_published",
        stop,
        is_first_at_once=True,
    )
    orders = WorkerControlStore(connect(broker))
    handler = parts.build_order_handler(orders, WorkerCallStore(connect(broker), deployment, parts.clock))
    control = ControlListener(orders, host.control_queues, keys, handler, host.drain, parts.clock, refusals.count)

    def start() -> None:
        publishing.start()
        control.start()
        host.start()
        if parts.servers is not None:
            parts.servers.on_change = publishing.run_soon
            parts.servers.start()

    def end() -> None:
        if parts.servers is not None:
            parts.servers.stop()
        control.stop()
        stop.set()
        host.stop()
        end_spans()

    def end_spans() -> None:
        if tracer is not None:
            tracer.close()

    tools = [spec.name for spec in parts.registry.specs()]
    log.info("worker_starting", queues=host.queues, worker=host.worker, tools=tools, concurrency=settings.concurrency)
    run_celery_worker(
        app,
        node,
        host.queues,
        settings.concurrency,
        settings.log_level,
        pool=pool,
        on_ready=start,
        on_stop=end,
        on_process_stop=end_spans,
    )


def _build_executor(
    settings: WorkerSettings, parts: WorkerParts, node: str, unconfirmed: UnconfirmedCalls, tracer: Tracer | None
) -> Executor:
    """Return the executor of one pool process or thread. Must be called in that process or thread."""
    broker, deployment = settings.broker(), settings.deployment
    client, keys = connect(broker), broker.signing_keys()
    resources = parts.open_resources()
    claims = WorkerCallStore(client, deployment, parts.clock, node)
    middleware = [*parts.open_guards(), ClaimConfirmation(unconfirmed, claims, resources.holder)]
    if tracer is not None:
        middleware.append(CallTracing(tracer, resources.facts))
    switches, tenants = WorkerSwitches(client, deployment, keys), WorkerTenants(client, deployment, keys)
    policy = CallPolicy(parts.registry, switches, tenants, RefusalCounter(connect_once(broker), deployment).count)
    return Executor(
        parts.registry, claims, WorkerBlobs(client, deployment, parts.kind), resources, policy, middleware, parts.clock
    )
