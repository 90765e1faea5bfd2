"""Measure read_tool: a page of 2,000 lines, and a page from the middle of a 10 MB file.

The baselines are reading the same lines on the host, and an empty round trip.
"""

import asyncio
import contextlib
import itertools
import tempfile
import time
from pathlib import Path

from benchmarks.processes import running_sandboxd
from benchmarks.report import Case, Report, median, timed
from benchmarks.report import interleave as run_interleaved
from benchmarks.sizes import size
from toolcrew.contract.calls import ToolCall, ToolContext
from toolcrew.workers.sandbox_client import SandboxClient, sandbox_id
from toolcrew.workers.tools.base import ToolEnvironment, WorkerResources
from toolcrew.workers.tools.read import FOOTER_BYTES, READ_TOOL
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES

ROUNDS = size(200, 2)
WARM_UP = size(20, 1)
PAGE_LINES = 2000
LARGE_LINES = 200_000
MIDDLE = LARGE_LINES // 2
_PAGE = "".join(f"line {number}\n" for number in range(1, PAGE_LINES + 1)).encode()
_LARGE = "".join(f"{number:08d} " + "x" * 42 + "\n" for number in range(1, LARGE_LINES + 1)).encode()
_FILES = {"page.txt": _PAGE, "large.txt": _LARGE}


PAGE_REQUEST = {
    "op": "read_text",
    "path": "page.txt",
    "offset": 1,
    "limit": PAGE_LINES,
    "column": 1,
    "encoding": "auto",
    "max_bytes": MAX_OUTPUT_BYTES - FOOTER_BYTES,
    "timeout_s": 30.0,
}
"""Request that workers/tools/read.py sends for the page."""


def host_read(path: Path, offset: int, limit: int) -> None:
    """Read a range of lines as a plain Python program does."""
    with path.open(encoding="utf-8") as file:
        lines = list(itertools.islice(file, offset - 1, offset - 1 + limit))
    if len(lines) != limit:
        raise RuntimeError(f"{path} has too few lines")


class ToolRun:
    """Handler of read_tool over one sandbox."""

    def __init__(self, client: SandboxClient) -> None:
        now = time.time()
        self._context = ToolContext(tenant="bench", session="read", sent_at=now, deadline_at=now + 3600)
        self._client = client

    def read(self, name: str, offset: int, limit: int) -> None:
        arguments = {"file_path": name, "offset": offset, "limit": limit, "column": 1, "encoding": "auto"}
        call = ToolCall(id="bench", name="read_tool", arguments=arguments)
        outcome = READ_TOOL.handler(
            arguments, ToolEnvironment(call, self._context, WorkerResources({}, client=self._client))
        )
        if outcome.output is None or f"\n{offset + limit - 1}\t" not in outcome.output:
            raise RuntimeError(f"the page is not whole: {outcome.error or outcome.output}")


def run(rounds: int = ROUNDS) -> Report:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sandboxd = stack.enter_context(running_sandboxd())
        client = stack.enter_context(SandboxClient(sandboxd.socket))
        name = client.open("bench", "read")
        assert name == sandbox_id("bench", "read")
        for file, content in _FILES.items():
            (folder / file).write_bytes(content)
            client.call(
                name,
                {"op": "write_file", "path": file, "mode": "overwrite", "timeout_s": 30.0},
                content,
                call_id="bench",
            )
        tool = ToolRun(client)
        page: dict[str, Case] = {
            "host_page": timed(lambda: host_read(folder / "page.txt", 1, PAGE_LINES)),
            "ping": timed(lambda: client.call(name, {"op": "ping"})),
            "request": timed(lambda: client.call(name, PAGE_REQUEST, call_id="bench")),
            "page": timed(lambda: tool.read("page.txt", 1, PAGE_LINES)),
        }
        # Measure this case separately: 10 MB evict the data of the other cases from the CPU caches.
        middle: dict[str, Case] = {
            "host_middle": timed(lambda: host_read(folder / "large.txt", MIDDLE, 100)),
            "middle": timed(lambda: tool.read("large.txt", MIDDLE, 100)),
        }
        seconds = asyncio.run(run_interleaved(page, rounds, WARM_UP)) | asyncio.run(
            run_interleaved(middle, rounds, WARM_UP)
        )
    return _report(seconds, rounds)


def _report(seconds: dict[str, list[float]], rounds: int) -> Report:
    report = Report("read_tool", notes=[f"medians of {rounds} interleaved rounds after {WARM_UP} to warm up"])
    report.add_ms("floor_page", seconds["host_page"], "floor: host Python, open and 2,000 lines")
    report.add_ms("ping", seconds["ping"], "floor: empty round trip through sandboxd")
    report.add_ms("request", seconds["request"], "ours: the request through sandboxd, 2,000 lines")
    report.add_ms("page", seconds["page"], "ours: all of read_tool, the numbering in the worker included")
    report.add_ms("floor_middle", seconds["host_middle"], "floor: host Python, 100 lines in the middle of 10 MB")
    report.add_ms("middle", seconds["middle"], "ours: read_tool over sandboxd, the same, all lines counted")
    middle = {name: median(values) for name, values in seconds.items()}
    report.add("page_median_ms", middle["request"] * 1000, "a page of 2,000 lines through sandboxd", at_most=3.0)
    report.add("middle_ratio", middle["middle"] / middle["host_middle"], "middle of 10 MB, ours / host", at_most=3.0)
    return report
