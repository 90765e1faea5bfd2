"""`python -m toolcrew.workers`: run one Celery worker of the kind in TOOLCREW_WORKER_KIND."""

import sys

from toolcrew.contract.errors import ToolcrewError
from toolcrew.contract.extras import explain_missing
from toolcrew.contract.settings import WorkerSettings, read_environment
from toolcrew.contract.startup import importing_program
from toolcrew.store.connection import check_connection
from toolcrew.workers.lifeline import hold_lifeline
from toolcrew.workers.logs import configure_logging, log_not_started

ORPHAN_GRACE_S = 5.0
"""Seconds that the worker of an embedded stack runs after its parent has died.

The stack's sandboxd has ended too, so running calls only need time to store their results.
"""


def main() -> int:
    hold_lifeline(ORPHAN_GRACE_S)
    try:
        settings = read_environment(WorkerSettings)
        configure_logging("web-worker" if settings.worker_kind == "web" else "worker", settings)
        check_connection(settings.broker())
        _run(settings)
    except ToolcrewError as error:
        log_not_started("worker", error)
        return 1
    return 0


def _run(settings: WorkerSettings) -> None:
    # Import only the chosen kind: a host of one kind need not have the packages of the other kind.
    if settings.worker_kind == "web":
        try:
            with importing_program():
                from toolcrew.workers.web_tools import load_web_worker_servers, load_web_worker_tools
                from toolcrew.workers.web_worker import run_web_worker
        except ModuleNotFoundError as error:
            raise explain_missing(error) from error

        run_web_worker(settings, load_web_worker_tools(settings), load_web_worker_servers(settings))
    else:
        with importing_program():
            from toolcrew.workers.sandbox_worker import run_sandbox_worker

        run_sandbox_worker(settings)


if __name__ == "__main__":
    sys.exit(main())
