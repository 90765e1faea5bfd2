"""The worker of a sandbox host: serves the queue of its incarnation, beside the host's sandboxd."""

from functools import partial

import structlog

from contract.clock import SharedClock
from contract.hosts import holder_name
from contract.specs import Catalog
from store.blobs import WorkerBlobs
from store.calls import RefusalCounter, WorkerCallStore
from store.connection import connect, connect_once
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
from workers.control import ControlListener
from workers.executor import CallMiddleware, Executor
from workers.held_calls import ClaimConfirmation, HeldCalls
from workers.host_life import HostLife
from workers.mcp.sandbox_tools import AT_ONCE, await_sandboxd, build_sandbox_sources
from workers.mcp.settings import StdioEntry, load_servers
from workers.mcp.shelf import ServerShelf
from workers.sandbox_client import SandboxClient
from workers.settings import WorkerSettings
from workers.skills.examiner import SkillExaminer
from workers.skills.installed import InstalledSkillCache
from workers.skills.loader import load_skills
from workers.skills.of_session import SessionSkills
from workers.tools.base import WorkerRegistry, WorkerResources
from workers.tools.builtin import build_registry
from workers.tools.skill import build_skill_tool
from workers.tools.skill_tools import register_skill_tools
from workers.tracing import CallTracing, open_process_tracer

log = structlog.get_logger(__name__)


def run_sandbox_worker(settings: WorkerSettings) -> None:
    """Serves until it is told to stop. Raises OperatorError when it cannot start."""
    key = settings.broker().signing_keys()
    registry, skills = build_registry(), load_skills(settings.skill_roots())
    if settings.skill_roots():
        registry.register(
            build_skill_tool(
                skills, InstalledSkillCache(connect(settings.broker()), settings.deployment, key), SessionSkills(SkillExaminer())
            )
        )
        register_skill_tools(registry, skills)
    sources = build_sandbox_sources(load_servers(settings.mcp_servers, StdioEntry), settings.sandboxd_socket)
    shelf = ServerShelf(registry, sources, settings.mcp_refresh_s, AT_ONCE)
    if sources:
        await_sandboxd(settings.sandboxd_socket)
    shelf.ask_due()
    clock = SharedClock()
    tracer = open_process_tracer("sandbox")
    life = HostLife(settings, clock)
    node = claim_node(settings.host, settings.broker())
    refusals = RefusalCounter(connect_once(settings.broker()), settings.deployment)
    app = build_app(settings.broker(), refusals.count)
    register_tasks(
        app,
        registry,
        key,
        partial(_build_executor, settings, registry, life, clock, HeldCalls(), tracer, node),
        refusals.count,
        settings.deployment,
        shelf.look if sources else None,
    )

    def build_catalogs() -> dict[str, Catalog]:
        return {"sandbox": Catalog(tools=tuple(registry.specs()), skills=tuple(skill.summary for skill in skills))}

    publisher = CatalogPublisher(connect(settings.broker()), settings.deployment, key, build_catalogs())
    shelf.on_change = lambda: publisher.replace(build_catalogs())
    ledger = WorkerCallStore(connect(settings.broker()), settings.deployment, clock)
    open_sandboxd = partial(SandboxClient, settings.sandboxd_socket)
    control = ControlListener(WorkerControlStore(connect(settings.broker())), open_sandboxd, ledger, life.queue, key, clock, refusals.count)
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

    log.info("worker_starting", queue=life.queue, worker=life.worker, concurrency=settings.concurrency)
    run_worker(
        app,
        node,
        (life.queue,),
        settings.concurrency,
        settings.log_level,
        pool=choose_pool("sandbox", settings.worker_pool),
        on_ready=start_threads,
        on_stop=stop_threads,
        on_process_stop=end_spans,
    )


def _build_executor(
    settings: WorkerSettings,
    registry: WorkerRegistry,
    life: HostLife,
    clock: SharedClock,
    held: HeldCalls,
    tracer: Tracer | None,
    node: str,
) -> Executor:
    broker, deployment = settings.broker(), settings.deployment
    client, once, keys = connect(broker), connect_once(broker), broker.signing_keys()
    resources = WorkerResources(
        {"host": settings.host, "queue": life.queue},
        holder_name(life.queue, life.worker),
        life.open_call_client(),
        StateStore.of(broker),
        partial(open_call_events, once, deployment),
    )
    claims = WorkerCallStore(client, deployment, clock, node)
    middleware: list[CallMiddleware] = [ClaimConfirmation(held, claims, resources.holder)]
    if tracer is not None:
        middleware.append(CallTracing(tracer, resources.facts))
    count_refusal = RefusalCounter(once, deployment).count
    policy = CallPolicy(registry, WorkerSwitches(client, deployment, keys), WorkerTenants(client, deployment, keys), count_refusal)
    return Executor(registry, claims, WorkerBlobs(client, deployment, "sandbox"), resources, policy, middleware, clock)
