"""The shipped worker with tools that tests observe, block and count.

`python -m tests.support.stack.tool_worker`: the worker without sandboxes. `python -m tests.support.stack.tool_worker POOL QUEUE SLOTS`: the Celery
edge, executor and ledger of a worker with sandboxes, on either pool.
"""

import contextlib
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args

from tests.support.records.builders import build_spec
from tests.support.records.fakes import build_executor
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import ErrorCode, ToolcrewError, ToolFailure
from toolcrew.contract.guest_protocol import ExecRequest
from toolcrew.contract.hosts import holder_name
from toolcrew.contract.registry import Tool, ToolRegistry
from toolcrew.contract.settings import WorkerSettings, read_environment
from toolcrew.store.blobs import WorkerBlobs
from toolcrew.store.calls import WorkerCallStore
from toolcrew.store.clock import SharedClock
from toolcrew.store.connection import connect, connect_once
from toolcrew.store.metrics import RefusalCounter
from toolcrew.workers.celery_edge.app import Pool, build_app, run_celery_worker
from toolcrew.workers.celery_edge.tasks import register_tasks
from toolcrew.workers.executor import Executor
from toolcrew.workers.logs import configure_logging, log_not_started
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerRegistry, WorkerTool
from toolcrew.workers.web_worker import run_web_worker

TEXT, NUMBER = {"type": "string"}, {"type": "number"}


def _append(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    """Append the call's id to a file. `seconds`: the duration of the call. `gate`: a named pipe; the call ends when a
    writer opens and closes the pipe.
    """
    with Path(arguments["path"]).open("a", encoding="utf-8") as file:
        file.write(f"{environment.call.id}\n")
    if "gate" in arguments:
        Path(arguments["gate"]).read_bytes()
    time.sleep(arguments.get("seconds", 0))
    return Outcome(arguments.get("text", environment.call.id))


def _meet(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    """Succeed only if enough calls of this tool run at the same time."""
    folder = Path(arguments["path"])
    (folder / environment.call.id).touch()
    until = time.monotonic() + 20
    while len(list(folder.iterdir())) < arguments["count"]:
        if time.monotonic() > until:
            raise ToolFailure(ErrorCode.TIMEOUT, "no other call came")
        time.sleep(0.02)
    return Outcome("met")


def _where(_: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    context = environment.context
    return Outcome(
        f"{os.getpid()}",
        {"pid": os.getpid(), "tenant": context.tenant, "session": context.session, "limit_s": context.timeout_s},
    )


def _wait(arguments: dict[str, Any], _: ToolEnvironment) -> Outcome:
    """Record in a file the start of the call and its orderly end."""
    path = Path(arguments["path"])
    path.with_suffix(".began").write_text(str(os.getpid()))
    try:
        time.sleep(60)
    finally:
        path.with_suffix(".cleaned").touch()
    return Outcome("waited")


def _stubborn(arguments: dict[str, Any], _: ToolEnvironment) -> Outcome:
    """Ignore everything except a kill."""
    Path(arguments["path"]).with_suffix(".began").write_text(str(os.getpid()))
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def _ask_sandbox(_: dict[str, Any], environment: ToolEnvironment) -> Outcome:
    return Outcome(str(environment.run(ExecRequest(argv=["true"], cwd=None, timeout_s=1))))


def build_tools(pool: str) -> list[WorkerTool]:
    path: dict[str, Any] = {
        "properties": {"path": TEXT, "text": TEXT, "gate": TEXT, "seconds": NUMBER, "count": NUMBER},
        "required": ["path"],
    }
    return [
        Tool(build_spec("append_tool", pool=pool, **path), _append),
        Tool(build_spec("meet_tool", pool=pool, **path), _meet),
        Tool(build_spec("where_tool", pool=pool), _where),
        Tool(build_spec("wait_tool", pool=pool, **path), _wait),
        Tool(build_spec("stubborn_tool", pool=pool, **path), _stubborn),
        Tool(build_spec("grasping_tool", pool=pool), _ask_sandbox),
        Tool(build_spec("operators_tool", pool="tools"), _where),
    ]


def _build_executor(broker: BrokerSettings, registry: WorkerRegistry, queue: str, clock: SharedClock) -> Executor:
    client = connect(broker)
    ledger, blobs = WorkerCallStore(client, broker.deployment, clock), WorkerBlobs(client, broker.deployment, "sandbox")
    return build_executor(registry, None, ledger, blobs, {}, holder_name(queue, str(os.getpid())), clock)


def run_edge(pool: str, queue: str, slots: str) -> None:
    settings = read_environment(WorkerSettings)
    broker, registry = settings.broker(), ToolRegistry(build_tools("sandbox"))
    configure_logging("worker", settings)
    [chosen] = [name for name in get_args(Pool) if name == pool]
    refusals = RefusalCounter(connect_once(broker), broker.deployment)
    app = build_app(broker, refusals.count)
    executor = partial(_build_executor, broker, registry, queue, SharedClock())
    register_tasks(app, registry, broker.signing_keys(), executor, refusals.count, broker.deployment)
    nothing = lambda: None  # noqa: E731
    run_celery_worker(app, queue, (queue,), int(slots), "INFO", pool=chosen, on_ready=nothing, on_stop=nothing)


def main(*arguments: str) -> int:
    try:
        run_edge(*arguments) if arguments else run_web_worker(read_environment(WorkerSettings), build_tools("web"))
    except ToolcrewError as error:
        log_not_started("worker", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
