"""`python -m workers`: one Celery worker of a sandbox host."""

import sys
import time
from functools import partial

import structlog

from contract.errors import SandboxUnavailable, ToolcrewError
from contract.names import POOL_SANDBOX, host_queue
from contract.specs import Catalog
from workers.app import build_app, run_worker
from workers.blobs import Blobs
from workers.catalog import CatalogPublisher
from workers.control import ControlListener
from workers.executor import Executor
from workers.ledger import Ledger
from workers.lifeline import hold_lifeline
from workers.logs import configure_logging
from workers.redis_connection import check_redis, connect
from workers.sandbox_client import SandboxClient
from workers.settings import WorkerSettings, load_worker_settings
from workers.tasks import register_tasks
from workers.tools.base import WorkerRegistry
from workers.tools.builtin import build_registry

log = structlog.get_logger(__name__)

SANDBOXD_WAIT_S = 60.0
ORPHAN_GRACE_S = 5.0
"""How long the worker of an embedded stack outlives its keeper: its sandboxd is gone as well, so calls only have to leave their results."""


def main() -> int:
    hold_lifeline(ORPHAN_GRACE_S)
    try:
        settings = load_worker_settings()
        configure_logging(settings.log_level)
        return _run(settings)
    except ToolcrewError as error:
        sys.stderr.write(f"worker: {error}\n")
        return 1


def _run(settings: WorkerSettings) -> int:
    check_redis(settings.broker())
    key = settings.broker().signing_key()
    boot = _await_sandboxd(settings)
    queue = host_queue(settings.host, boot)
    registry = build_registry()
    app = build_app(settings.broker())
    facts = {"host": settings.host, "queue": queue}
    register_tasks(app, registry, key, partial(_build_executor, settings, registry, facts))
    publisher = CatalogPublisher(connect(settings.broker()), settings.deployment, Catalog(tools=tuple(registry.specs())))
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
    return 0


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
    )


if __name__ == "__main__":
    sys.exit(main())
