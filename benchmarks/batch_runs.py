"""Measure a batch of 1,000 runs of five calls each on a whole pool, with all runs claimed at once.

The figures are the number of correct results, the memory, and the cost of a step compared with the same loop without
a pool.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.batch_harness import BatchMeasurement, open_shell
from benchmarks.raw_celery import RawCelery, open_raw
from benchmarks.report import Report, median
from benchmarks.sizes import size
from benchmarks.whole_path import per_second
from tests.model_server.running import ModelServer, running_model_server
from toolcrew import ToolClient
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.loop.limits import ReActOptions
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.sdk.local_tools import LocalTools
from toolcrew.store.connection import open_redis

RUNS = size(1000, 4)
CALLS = 5
SHORT, LONG = 5, size(45, 7)
"""Number of calls in a short and in a long run. The difference of their durations is the cost of the additional
steps.
"""
PAIRS = size(32, 2)
AT_A_TIME = size(16, 2)
MIB = 1024 * 1024
_COMMAND = "echo {step} >> acts; wc -l < acts"
_SPEC = "A line more in a file, and how many it has."


def script(calls: int) -> list[dict[str, Any]]:
    """Return the model's script for runs of this many calls.

    Each call adds a line to a file of the workspace and counts the lines. The answer therefore shows a call that ran
    twice or not at all.
    """
    rules: list[dict[str, Any]] = [
        {
            "kind": "rule",
            "when": {"step": step},
            "reply": {"calls": [{"name": "bash_tool", "arguments": {"command": _COMMAND.format(step=step)}}]},
        }
        for step in range(calls)
    ]
    return [
        *rules,
        {
            "kind": "rule",
            "when": {"observation": "(?P<lines>\\d+)"},
            "reply": {"text": "{{item}} acted {{match.lines}} times"},
        },
    ]


def lines(runs: int) -> list[Mapping[str, Any]]:
    return [
        {"id": f"i{number}", "instruction": f"[item {number}] act", "limits": {"max_iterations": LONG + 1}}
        for number in range(runs)
    ]


def count_correct(answers: Mapping[str, str], runs: int, calls: int) -> int:
    """Return the number of runs with the only correct answer."""
    return sum(answers.get(f"i{number}") == f"{number} acted {calls} times" for number in range(runs))


def run(runs: int = RUNS) -> Report:
    with running_model_server(script(CALLS)) as model, running_model_server(script(LONG)) as talkative:
        return asyncio.run(_run(runs, model, talkative))


async def _run(runs: int, model: ModelServer, talkative: ModelServer) -> Report:
    report = Report("batch_runs")
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        assert client.stack is not None
        connection = open_redis(load_settings().broker(client.stack.redis_url))
        stack.push_async_callback(connection.aclose)
        raw = await open_raw(client.stack.redis_url, connection, stack)
        shell = stack.enter_context(open_shell(client.stack.redis_url))
        floors = [await _floors(raw, talkative)]
        short = await shell.work("short", lines(PAIRS), model, AT_A_TIME)
        long = await shell.work("long", lines(PAIRS), talkative, AT_A_TIME)
        _check(long, PAIRS, LONG)
        floors.append(await _floors(raw, talkative))
        whole = await shell.work("whole", lines(runs), model, runs)
    step_s = (long.seconds - short.seconds) / (PAIRS * (LONG - SHORT))
    _add_whole(report, whole, runs, step_s)
    _add_step(report, step_s, (long.cpu_s - short.cpu_s) / (PAIRS * (LONG - SHORT)), floors)
    report.notes.append(
        f"a step: a reply of the model and its one call; from {PAIRS} runs of {LONG} and of {SHORT} calls, {AT_A_TIME} "
        "at a time"
    )
    return report


async def _floors(raw: RawCelery, server: ModelServer) -> tuple[float, float]:
    """Return two baselines in seconds: one step of the same runs in this process, and one no-op through Celery."""
    local_s = await _local(server, PAIRS)
    rate = await per_second(lambda _: raw.by_hub(), PAIRS * LONG)
    return local_s / (PAIRS * LONG), 1 / rate


async def _local(server: ModelServer, runs: int) -> float:
    """Return the seconds of this many runs in this process, with the same model, the same concurrency and an
    equivalent local tool.
    """
    model = OpenAIModel("played", server.url, "no-key-needed")
    numbers, answers = iter(range(runs)), dict[str, str]()

    async def worker() -> None:
        for number in numbers:
            with tempfile.TemporaryDirectory(prefix="toolcrew-bench-") as folder:
                answers[f"i{number}"] = await _one_local(model, folder, f"[item {number}] act")

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(AT_A_TIME)))
    seconds = time.perf_counter() - began
    await model.aclose()
    if count_correct(answers, runs, LONG) != runs:
        raise RuntimeError(f"the runs without a pool went wrong: {list(answers.values())[:3]}")
    return seconds


async def _one_local(model: OpenAIModel, folder: str, instruction: str) -> str:
    async def bash_tool(command: str) -> str:
        shell = await asyncio.create_subprocess_exec("bash", "-c", command, cwd=folder, stdout=asyncio.subprocess.PIPE)
        output, _ = await shell.communicate()
        return output.decode()

    bash_tool.__doc__ = _SPEC
    result = await LocalTools([bash_tool]).run(
        instruction, model=model, dialect="native", options=ReActOptions(max_iterations=LONG + 1)
    )
    return result.answer or ""


def _check(worked: BatchMeasurement, runs: int, calls: int) -> None:
    """Raise RuntimeError if a run failed: the figures of a wrong batch have no meaning."""
    correct = count_correct(worked.answers, runs, calls)
    if correct != runs:
        raise RuntimeError(f"{runs - correct} of {runs} runs went wrong: {list(worked.failures)[:3]}")


def _add_whole(report: Report, whole: BatchMeasurement, runs: int, step_s: float) -> None:
    report.add(
        "right_number",
        count_correct(whole.answers, runs, CALLS),
        f"of {runs} runs of {CALLS} calls: right results",
        at_least=runs,
    )
    report.add("retried_number", whole.retried, "begun anew after a failure", at_most=0)
    report.add("in_flight_number", whole.most_in_flight, "in flight at once", at_least=0.95 * runs)
    report.add("peak_bytes", whole.peak_bytes, "the process that works them, resident at most", at_most=300 * MIB)
    report.add("whole_ms", whole.seconds * 1000, "from the first beginning to the last end")
    report.add("runs_per_s", runs / whole.seconds, "runs")
    report.add("run_ms", whole.seconds * 1000 / runs, "a run, of the whole time")
    report.add(
        "session_ms",
        (whole.seconds / runs - CALLS * step_s) * 1000,
        f"of that its session, opened and closed: all but {CALLS} steps",
    )
    report.add("cpu_run_ms", whole.cpu_s * 1000 / runs, "a run, processor time of the process that works them")


def _add_step(report: Report, step_s: float, cpu_s: float, floors: Sequence[tuple[float, float]]) -> None:
    local_s, raw_s = (median([floor[at] for floor in floors]) for at in (0, 1))
    report.add("step_ms", step_s * 1000, "ours: a step in a batch")
    report.add("cpu_step_ms", cpu_s * 1000, "of that processor time of the process that works it")
    report.add("local_ms", local_s * 1000, "floor: a step of the same loop in one process, no Celery, no sandbox")
    report.add("raw_ms", raw_s * 1000, "floor: a raw Celery no-op, 50 in flight")
    report.add("local_ratio", step_s / local_s, "step / the same loop in one process")
    report.add("raw_ratio", step_s / raw_s, "step / raw Celery no-op")
    report.add("both_ratio", step_s / (local_s + raw_s), "step / (the loop + a no-op)")
