"""`python -m tests.pool_worker`: the shipped worker without sandboxes, with tools that tests observe and end."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from contract.errors import ToolcrewError
from contract.registry import Tool
from tests.builders import build_spec
from workers.logs import log_not_started
from workers.settings import load_worker_settings
from workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from workers.web_worker import run_web_worker

TEXT = {"type": "string"}


def _where(_: dict[str, Any], bench: ToolEnvironment) -> Outcome:
    context = bench.context
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


def _ask_sandbox(_: dict[str, Any], bench: ToolEnvironment) -> Outcome:
    return Outcome(str(bench.run({"op": "exec"})))


def build_tools() -> list[WorkerTool]:
    path = {"properties": {"path": TEXT}, "required": ["path"]}
    return [
        Tool(build_spec("where_tool", pool="web"), _where),
        Tool(build_spec("wait_tool", pool="web", **path), _wait),
        Tool(build_spec("stubborn_tool", pool="web", **path), _stubborn),
        Tool(build_spec("grasping_tool", pool="web"), _ask_sandbox),
        Tool(build_spec("operators_tool", pool="tools"), _where),
    ]


def main() -> int:
    try:
        run_web_worker(load_worker_settings(), build_tools())
    except ToolcrewError as error:
        log_not_started("worker", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
