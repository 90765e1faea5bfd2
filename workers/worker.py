"""One Celery worker, of either kind: it serves calls beside a host's duties and its control list."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import structlog

from contract.specs import Catalog
from store.blobs import WorkerBlobs
from store.calls import WorkerCallStore
from store.catalog import WorkerCatalogStore
from store.connection import SharedClock, connect, connect_once
from store.hosts import WorkerControlStore
from store.metrics import RefusalCounter
from store.switches import WorkerSwitches
from store.tenants import WorkerTenants
from telemetry.spans import Tracer
from workers.celery_edge.app import POOL_OF_KIND, build_app, claim_node, run_celery_worker
from workers.celery_edge.tasks import register_tasks
from workers.control import ControlListener, OrderHandler
from workers.duties import Duty
from workers.executor import CallMiddleware, CallPolicy, ClaimConfirmation, Executor, HeldCalls
from workers.host import Host
from workers.mcp.server_registry import ServerRegistry
from workers.settings import WorkerSettings
from workers.tools.base import WorkerRegistry, WorkerResources
from workers.tracing import CallTracing, open_process_tracer

log = structlog.get_logger(__name__)

PUBLISH_EVERY_S = 4.0
"""The catalogs in Redis expire with the last worker that publishes them."""


@dataclass(frozen=True)
class WorkerParts:
    """What differs between a worker beside sandboxes and one without.

    `servers` None: it has no MCP servers. `build_catalogs`: pool -> what it serves here. `open_resources`,
    `open_guards` are called in the process or thread that runs calls; guards are middleware inside of all other.
    """

    kind: Literal["sandbox", "web"]
    host: Host
    clock: SharedClock
    registry: WorkerRegistry
    servers: ServerRegistry | None
    build_catalogs: Callable[[], dict[str, Catalog]]
    build_order_handler: Callable[[WorkerControlStore, WorkerCallStore], OrderHandler]
    open_resources: Callable[[], WorkerResources]
    open_guards: Callable[[], Sequence[CallMiddleware]] = tuple


def run_worker(settings: WorkerSettings, parts: WorkerParts) -> None:
    """Serve calls until the process is told to stop."""
    broker, deployment, keys, host = (
        settings.broker(),
        settings.deployment,
        settings.broker().signing_keys(),
        parts.host,
    )
    pool = POOL_OF_KIND[parts.kind]
    node = claim_node(settings.host if parts.kind == "sandbox" else f"web-{settings.host}", broker)
    tracer = open_process_tracer(parts.kind)
    refusals = RefusalCounter(connect_once(broker), deployment)
    app = build_app(broker, refusals.count)
    build_executor = partial(_build_executor, settings, parts, node, HeldCalls(), tracer)
    look = parts.servers.look if parts.servers is not None else None
    register_tasks(app, parts.registry, keys, build_executor, refusals.count, deployment, look)
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
    settings: WorkerSettings, parts: WorkerParts, node: str, held: HeldCalls, tracer: Tracer | None
) -> Executor:
    """Called in the process, and the thread, that runs the calls."""
    broker, deployment = settings.broker(), settings.deployment
    client, keys = connect(broker), broker.signing_keys()
    resources = parts.open_resources()
    claims = WorkerCallStore(client, deployment, parts.clock, node)
    middleware = [*parts.open_guards(), ClaimConfirmation(held, claims, resources.holder)]
    if tracer is not None:
        middleware.append(CallTracing(tracer, resources.facts))
    switches, tenants = WorkerSwitches(client, deployment, keys), WorkerTenants(client, deployment, keys)
    policy = CallPolicy(parts.registry, switches, tenants, RefusalCounter(connect_once(broker), deployment).count)
    return Executor(
        parts.registry, claims, WorkerBlobs(client, deployment, parts.kind), resources, policy, middleware, parts.clock
    )
