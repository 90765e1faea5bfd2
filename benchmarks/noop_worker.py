"""`python -m benchmarks.noop_worker QUEUE`: a worker exactly like ours, with one task that does nothing."""

import sys

from workers.app import build_app, run_worker
from workers.logs import configure_logging
from workers.settings import load_worker_settings

TASK = "bench.noop"


def noop(envelope: str = "") -> None:
    """The floor of every call through Celery; our transport sends an envelope, here an empty one."""


def main(queue: str) -> None:
    settings = load_worker_settings()
    configure_logging(settings.log_level)
    app = build_app(settings.broker())
    app.task(name=TASK)(noop)
    run_worker(app, settings.host, (queue,), settings.concurrency, settings.log_level, on_ready=lambda: None, on_stop=lambda: None)


if __name__ == "__main__":
    main(sys.argv[1])
