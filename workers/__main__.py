"""`python -m workers`: one Celery worker of a sandbox host."""

import sys
import time
from functools import partial

import redis
import structlog
from celery.signals import worker_ready, worker_shutdown

from contract.errors import BrokerUnavailable, SandboxUnavailable, ToolcrewError
from contract.names import POOL_SANDBOX, host_queue
from contract.specs import Catalog
from workers.app import build_app
from workers.blobs import Blobs
from workers.catalog import CatalogPublisher
from workers.executor import Executor
from workers.ledger import Ledger
from workers.logs import configure_logging
from workers.redis_connection import connect
from workers.sandbox_client import SandboxClient
from workers.settings import WorkerSettings, load_worker_settings
from workers.tasks import register_tasks
from workers.tools.base import WorkerRegistry
from workers.tools.builtin import build_registry

log = structlog.get_logger(__name__)

SANDBOXD_WAIT_S = 60.0


def main() -> int:
    try:
        settings = load_worker_settings()
        configure_logging(settings.log_level)
        return _run(settings)
    except ToolcrewError as error:
        sys.stderr.write(f"worker: {error}\n")
        return 1


def _run(settings: WorkerSettings) -> int:
    _check_redis(settings)
    key = settings.broker().signing_key()
    boot = _await_sandboxd(settings)
    queue = host_queue(settings.host, boot)
    registry = build_registry()
    app = build_app(settings.broker())
    facts = {"host": settings.host, "queue": queue}
    register_tasks(app, registry, key, partial(_build_executor, settings, registry, facts))
    publisher = CatalogPublisher(connect(settings.broker()), settings.deployment, Catalog(tools=tuple(registry.specs())))
    worker_ready.connect(lambda **_: publisher.start(), weak=False)
    worker_shutdown.connect(lambda **_: publisher.stop(), weak=False)
    log.info("worker_starting", queue=queue, concurrency=settings.concurrency)
    app.worker_main(
        [
            "worker",
            f"--queues={queue},{POOL_SANDBOX}",
            f"--hostname={settings.host}@%h",
            "--pool=prefork",
            f"--concurrency={settings.concurrency}",
            "-O",
            "fair",
            "--without-gossip",
            "--without-mingle",
            "--events",
            f"--loglevel={settings.log_level}",
        ]
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


def _check_redis(settings: WorkerSettings) -> None:
    try:
        connect(settings.broker()).ping()
    except redis.RedisError as error:
        raise BrokerUnavailable(
            f"Redis at {settings.broker().redis_address()} does not answer ({error}): check TOOLCREW_REDIS_URL and its password"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
