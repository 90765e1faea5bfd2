"""Run a worker for benchmarks: `python -m benchmarks.noop_worker QUEUE POOL`.

The worker is configured like a toolcrew worker and has one task that does nothing. Without arguments, the program
runs a toolcrew worker with a tool that does nothing and a tool that takes ten milliseconds.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Literal, cast

from toolcrew.contract.registry import Tool
from toolcrew.contract.settings import WorkerSettings, read_environment
from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.celery_edge.app import build_app, run_celery_worker
from toolcrew.workers.logs import configure_logging
from toolcrew.workers.tools.base import Outcome, ToolEnvironment
from toolcrew.workers.web_worker import run_web_worker

TASK = "tool.noop"
TOOL = "noop_tool"
NAP_TOOL = "nap_tool"
NAP_S = 0.01


def noop(envelope: str = "") -> None:
    """Do nothing: the baseline of every call through Celery. The transport sends an envelope, which is empty here."""


def _noop_tool(_: dict[str, Any], _bench: ToolEnvironment) -> Outcome:
    return Outcome("")


def _nap_tool(_: dict[str, Any], _bench: ToolEnvironment) -> Outcome:
    time.sleep(NAP_S)
    return Outcome("")


def main(queue: str, pool: str) -> None:
    settings = read_environment(WorkerSettings)
    configure_logging("worker", settings)
    app = build_app(settings.broker())
    app.task(name=TASK)(noop)
    kind = cast(Literal["threads", "prefork"], pool)
    run_celery_worker(
        app,
        settings.host,
        (queue,),
        settings.concurrency,
        settings.log_level,
        pool=kind,
        on_ready=lambda: None,
        on_stop=lambda: None,
    )


def serve_tool() -> None:
    """Serve the pool of operators' tools, as it is shipped."""
    settings = read_environment(WorkerSettings)
    configure_logging("worker", settings)
    run_web_worker(
        settings, [_tool(TOOL, "Does nothing.", _noop_tool), _tool(NAP_TOOL, "Takes ten milliseconds.", _nap_tool)]
    )


def _tool(name: str, description: str, handler: Callable[[dict[str, Any], ToolEnvironment], Outcome]) -> Tool[Any]:
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    return Tool(ToolSpec(name=name, description=description, parameters=parameters, pool="tools"), handler)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        serve_tool()
