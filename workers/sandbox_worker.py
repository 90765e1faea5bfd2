"""The worker of a sandbox host: serves its own queue and the opening of sessions, beside the host's sandboxd."""

import time
from functools import partial

import structlog

from contract.errors import SandboxUnavailable
from contract.names import POOL_SANDBOX, host_queue
from contract.specs import Catalog
from workers.app import build_app, run_worker
from workers.blobs import Blobs
from workers.call_events import open_events
from workers.catalog import CatalogPublisher
from workers.control import ControlListener
from workers.executor import Executor
from workers.ledger import Ledger
from workers.redis_connection import connect, connect_once
from workers.sandbox_client import SandboxClient
from workers.settings import WorkerSettings
from workers.switches import Switches
from workers.tasks import register_tasks
from workers.tools.base import WorkerRegistry
from workers.tools.builtin import build_registry

log = structlog.get_logger(__name__)

SANDBOXD_WAIT_S = 60.0


def run_sandbox_worker(settings: WorkerSettings) -> None:
    """Serves until it is told to stop. Raises OperatorError when it cannot start."""
    key = settings.broker().signing_key()
    boot = _await_sandboxd(settings)
    queue = host_queue(settings.host, boot)
    registry = build_registry()
    app = build_app(settings.broker())
    facts = {"host": settings.host, "queue": queue}
    register_tasks(app, registry, key, partial(_build_executor, settings, registry, facts))
    catalogs = {"sandbox": Catalog(tools=tuple(registry.specs()))}
    publisher = CatalogPublisher(connect(settings.broker()), settings.deployment, catalogs)
    ledger = Ledger(connect(settings.broker()), settings.deployment)
    control = ControlListener(connect(settings.broker()), partial(SandboxClient, settings.sandboxd_socket), ledger, queue, key)

    def start_threads() -> None:
        publisher.start()
        control.start()

    def stop_threads() -> None:
        control.stop()
        publisher.stop()

    log.info("worker_starting", queue=queue, concurrency=settings.concurrency)
    run_worker(
        app,
        settings.host,
        (queue, POOL_SANDBOX),
        settings.concurrency,
        settings.log_level,
        on_ready=start_threads,
        on_stop=stop_threads,
    )


def _await_sandboxd(settings: WorkerSettings) -> str:
    """The boot id of this host's sandboxd, which may still be starting. Raises SandboxUnavailable when it stays silent."""
    until = time.monotonic() + SANDBOXD_WAIT_S
    while True:
        try:
            with SandboxClient(settings.sandboxd_socket) as client:
                return str(client.status()["boot"])
        except SandboxUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _build_executor(settings: WorkerSettings, registry: WorkerRegistry, facts: dict[str, str]) -> Executor:
    client = connect(settings.broker())
    return Executor(
        registry,
        SandboxClient(settings.sandboxd_socket),
        Ledger(client, settings.deployment),
        Blobs(client, settings.deployment),
        facts,
        switches=Switches(client, settings.deployment),
        open_events=partial(open_events, connect_once(settings.broker()), settings.deployment),
    )
