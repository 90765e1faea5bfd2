"""`python -m tests.edge_worker POOL QUEUE SLOTS`: the Celery edge, executor and ledger of a shipped worker, on either
pool. Two tools record their actions in files.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args

from contract.errors import ErrorCode, ToolFailure
from contract.hosts import holder_name
from contract.registry import ToolRegistry
from contract.settings import BrokerSettings
from store.blobs import WorkerBlobs
from store.calls import WorkerCallStore
from store.connection import SharedClock, connect, connect_once
from store.metrics import RefusalCounter
from tests.builders import build_spec
from tests.fakes import build_executor
from workers.celery_edge.app import Pool, build_app, run_celery_worker
from workers.celery_edge.tasks import register_tasks
from workers.executor import Executor
from workers.logs import configure_logging
from workers.settings import load_worker_settings
from workers.tools.base import Outcome, ToolEnvironment, WorkerRegistry, WorkerTool

TEXT = {"type": "string"}


def _note(arguments: dict[str, Any], bench: ToolEnvironment) -> Outcome:
    """Append the call id to a file and use the requested time."""
    with open(arguments["path"], "a") as file:
        file.write(f"{bench.call.id}\n")
    time.sleep(arguments["seconds"])
    return Outcome(bench.call.id)


def _meet(arguments: dict[str, Any], bench: ToolEnvironment) -> Outcome:
    """Succeed only if enough calls of this tool run at the same time."""
    folder = Path(arguments["path"])
    (folder / bench.call.id).touch()
    until = time.monotonic() + 20
    while len(list(folder.iterdir())) < arguments["count"]:
        if time.monotonic() > until:
            raise ToolFailure(ErrorCode.TIMEOUT, "no other call came")
        time.sleep(0.02)
    return Outcome("met")


def build_tools() -> WorkerRegistry:
    path = {"path": TEXT}
    return ToolRegistry(
        [
            WorkerTool(
                build_spec(
                    "note_tool", properties={**path, "seconds": {"type": "number"}}, required=["path", "seconds"]
                ),
                _note,
            ),
            WorkerTool(
                build_spec("meet_tool", properties={**path, "count": {"type": "integer"}}, required=["path", "count"]),
                _meet,
            ),
        ]
    )


def _build_executor(broker: BrokerSettings, registry: WorkerRegistry, queue: str, clock: SharedClock) -> Executor:
    client = connect(broker)
    blobs = WorkerBlobs(client, broker.deployment, "sandbox")
    return build_executor(
        registry,
        None,
        WorkerCallStore(client, broker.deployment, clock),
        blobs,
        {},
        holder_name(queue, str(os.getpid())),
        clock,
    )


def main(pool: str, queue: str, slots: str) -> None:
    settings = load_worker_settings()
    broker, registry = settings.broker(), build_tools()
    configure_logging("worker", settings)
    [chosen] = [name for name in get_args(Pool) if name == pool]
    refusals = RefusalCounter(connect_once(broker), broker.deployment)
    app = build_app(broker, refusals.count)
    executor = partial(_build_executor, broker, registry, queue, SharedClock())
    register_tasks(app, registry, broker.signing_keys(), executor, refusals.count, broker.deployment)
    nothing = lambda: None  # noqa: E731
    run_celery_worker(app, queue, (queue,), int(slots), "INFO", pool=chosen, on_ready=nothing, on_stop=nothing)


if __name__ == "__main__":
    main(*sys.argv[1:])
