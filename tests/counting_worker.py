"""`python -m tests.counting_worker`: the shipped worker without sandboxes, with a tool that records each execution."""

import sys
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


def _append(arguments: dict[str, Any], bench: ToolEnvironment) -> Outcome:
    """Write one line for each call, so that a test can count the calls. `gate`: a named pipe. The call ends when a
    writer opens and closes the pipe.
    """
    with Path(arguments["path"]).open("a", encoding="utf-8") as marks:
        marks.write(f"{bench.call.id}\n")
    if "gate" in arguments:
        Path(arguments["gate"]).read_bytes()
    return Outcome(arguments.get("text", "done"))


def build_tools() -> list[WorkerTool]:
    return [
        Tool(
            build_spec(
                "append_tool", pool="web", properties={"path": TEXT, "text": TEXT, "gate": TEXT}, required=["path"]
            ),
            _append,
        )
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
