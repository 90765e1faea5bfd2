"""Measure the memory of the process that runs a batch while 1,000 runs wait for their model at once."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from benchmarks.batch_harness import open_shell
from benchmarks.report import Report
from benchmarks.sizes import size
from tests.model_server.running import ModelServer, running_model_server
from toolcrew import ToolClient

RUNS = size(1000, 4)
THINKS_S = size(20.0, 0.5)
"""Delay of each model response, in seconds. The delay is long enough for all runs to wait at once."""
MIB = 1024 * 1024
SCRIPT: list[dict[str, Any]] = [{"kind": "rule", "reply": {"text": "answer {{item}}", "first_byte_s": THINKS_S}}]


def lines(runs: int) -> list[Mapping[str, Any]]:
    """Return the lines of a batch of chats. Chats need no sandbox, so the capacity of the hosts does not limit them."""
    return [
        {
            "custom_id": f"i{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"[item {number}] think"}]},
        }
        for number in range(runs)
    ]


def run(runs: int = RUNS) -> Report:
    with running_model_server(SCRIPT) as model:
        return asyncio.run(_run(runs, model))


async def _run(runs: int, model: ModelServer) -> Report:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        assert client.stack is not None
        shell = stack.enter_context(open_shell(client.stack.redis_url))
        few = await shell.work("few", lines(1), model, 1)
        many = await shell.work("many", lines(runs), model, runs)
    answered = sum(many.answers.get(f"i{number}") == f"answer {number}" for number in range(runs))
    report = Report(
        "batch_memory", notes=[f"{runs} chats in one batch, the model silent for {THINKS_S:g} s before each reply"]
    )
    report.add("right_number", answered, f"of {runs}: answered", at_least=runs)
    report.add("asking_number", model.stats()["most_open"], "connections to the model at once", at_least=0.95 * runs)
    report.add("peak_bytes", many.peak_bytes, "the process that works them, resident at most", at_most=300 * MIB)
    report.add("few_bytes", few.peak_bytes, "the same with one run")
    report.add("run_bytes", (many.peak_bytes - few.peak_bytes) / (runs - 1), "a run more")
    return report
