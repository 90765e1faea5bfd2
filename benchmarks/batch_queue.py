"""Measure the CPU time that one run costs Redis and the orchestrator while 10, 1,000 or 10,000 other runs are queued.

One case only claims and ends a run. The other case is the whole loop that runs a batch.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis.asyncio
from pydantic import SecretStr

from benchmarks.fairness import open_server, until_it_answers
from benchmarks.report import Report, median
from benchmarks.sizes import size
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.run_events import CallFinished, OnEvent, RunReady, StepFinished
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.batches.progress import BatchProgress
from toolcrew.orchestrator.batches.row_files import RowFiles
from toolcrew.orchestrator.runs.client_batches import until_first
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.follower import Follower
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.run_gate import RunGate
from toolcrew.orchestrator.runs.run_slots import RunSlots
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.store.batches import BatchDefaults, BatchItem, BatchRecord, BatchState, ItemOutcome
from toolcrew.store.connection import open_redis
from toolcrew.store.run_events import BatchEventReader
from toolcrew.store.run_queue import RunClaim, RunQueue
from toolcrew.store.usage import ReplySpending

QUEUED = size((10, 1000, 10_000), (10, 20))
ROUNDS = size(3, 1)
RUNS = size(600, 10)
"""Number of runs that are processed in a round. The other runs stay queued."""
AT_ONCE = 10
STEPS = 5
DEPLOYMENT, TENANT = "bench", "default"


def run(rounds: int = ROUNDS) -> Report:
    return asyncio.run(_run(rounds))


async def _run(rounds: int) -> Report:
    report = Report(
        "batch_queue",
        notes=[
            f"medians of {rounds} interleaved rounds of {RUNS} runs; processor time of Redis and of the orchestrator"
        ],
    )
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for queued in QUEUED:
            for name, case in (("queue", _measure_queue), ("loop", _measure_loop)):
                one = await _on_a_redis_of_its_own(case, queued)
                if number:
                    seconds.setdefault((name, queued), []).append(one)
    for name, label in (("queue", "claimed and ended"), ("loop", f"the whole loop, {STEPS} steps")):
        for queued in QUEUED:
            redis_s, own_s = (median([one[at] for one in seconds[name, queued]]) for at in (0, 1))
            report.add(f"{name}_{queued}_redis_ms", redis_s * 1000, f"{label}, {queued:,} more queued: Redis, a run")
            report.add(f"{name}_{queued}_own_ms", own_s * 1000, f"{label}, {queued:,} more queued: orchestrator, a run")
        for at, whose in ((0, "redis"), (1, "own")):
            most = median(
                [
                    after[at] / before[at]
                    for before, after in zip(seconds[name, QUEUED[0]], seconds[name, QUEUED[-1]], strict=True)
                ]
            )
            report.add(f"{name}_{whose}_ratio", most, f"{label}, {whose}: {QUEUED[-1]:,} / {QUEUED[0]}", at_most=1.5)
    return report


class _TimeMeter:
    """CPU seconds of Redis and of this process, between `begin` and `end`."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client
        self._before = (0.0, 0.0)

    async def begin(self) -> None:
        self._before = (await self._redis_s(), time.process_time())

    async def end(self) -> tuple[float, float]:
        own = time.process_time()
        return await self._redis_s() - self._before[0], own - self._before[1]

    async def _redis_s(self) -> float:
        info: Any = await self._client.info("cpu")
        return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])


KEYS = SigningKeys.of("bench", deployment=DEPLOYMENT)
Case = Callable[["redis.asyncio.Redis", RunQueue, str], Any]


async def _on_a_redis_of_its_own(case: Case, queued: int) -> tuple[float, float]:
    """Return the CPU seconds per run of Redis and of this process, on a separate Redis server.

    RUNS runs are processed; `queued` more runs stay in the queue.
    """
    with open_server() as url:
        async with _client(url) as client:
            queue = RunQueue(client, DEPLOYMENT, KEYS)
            batch = await _submit_batch(queue, RUNS + queued)
            redis_s, own_s = await case(client, queue, batch)
            return redis_s / RUNS, own_s / RUNS


@contextlib.asynccontextmanager
async def _client(url: str) -> AsyncIterator["redis.asyncio.Redis"]:
    client = open_redis(BrokerSettings(redis_url=SecretStr(url)))
    try:
        await until_it_answers(client)
        yield client
    finally:
        await client.aclose()


async def _submit_batch(queue: RunQueue, count: int) -> str:
    record = BatchRecord(
        state=BatchState.IN_PROGRESS,
        total=count,
        sha256="0" * 64,
        concurrency=16,
        defaults=BatchDefaults(),
        created_at=time.time(),
    )
    await queue.batches.create(TENANT, "b", record)
    await queue.batches.add(TENANT, "b", [(f"run-{number}", _item(number)) for number in range(1, count + 1)])
    return "b"


def _item(number: int) -> BatchItem:
    return BatchItem(
        custom_id=f"i{number}", line=number, url="/v1/agent/runs", work=RunBody(instruction=f"do {number}")
    )


def _outcome(claim: RunClaim) -> ItemOutcome:
    return ItemOutcome(custom_id=claim.record.item.custom_id, run=claim.run, status_code=200, body={"answer": "done"})


async def _measure_queue(client: "redis.asyncio.Redis", queue: RunQueue, batch: str) -> tuple[float, float]:
    meter = _TimeMeter(client)
    await meter.begin()
    for _ in range(RUNS // AT_ONCE):
        for claim in await queue.claim(AT_ONCE, (TENANT, batch)):
            if not await queue.finish(claim, _outcome(claim)):
                raise RuntimeError(f"run {claim.run} was lost while it was held")
    return await meter.end()


class _PlayedWork:
    """Test double of the work on a batch, which completes items immediately. Each item writes its steps to its log and
    publishes them. Only the first RUNS items start.
    """

    def __init__(self) -> None:
        self.gate = RunGate()
        self.slots = RunSlots()
        self.ended = 0
        self.drain: Callable[[], None] = lambda: None

    async def work(self, claim: RunClaim, journal: Journal, _: BatchDefaults, on_event: OnEvent) -> ItemOutcome:
        on_event(RunReady(run=claim.run))
        journal.begin()
        for step in range(STEPS):
            await journal.record_reply([{"choices": [{"index": 0, "delta": {"content": "a reply"}}]}], ReplySpending())
            result = ToolResult(call_id=f"{claim.run}-{step}", name="bash_tool", success=True)
            on_event(CallFinished(run=claim.run, result=result))
            on_event(StepFinished(run=claim.run, step=step, model_s=0.0, usage=TokenUsage()))
        self.ended += 1
        if self.ended >= RUNS:
            self.drain()
        return _outcome(claim)

    def forget(self, claim: RunClaim) -> None:
        """Do nothing: no spans are recorded."""


async def _measure_loop(client: "redis.asyncio.Redis", queue: RunQueue, batch: str) -> tuple[float, float]:
    work, writer, progress = _PlayedWork(), RunEventPublisher(client, DEPLOYMENT), BatchProgress(RUNS)
    played: Any = work
    runner = Runner(client, DEPLOYMENT, queue, played, writer, 16, (TENANT, batch))
    work.drain = runner.drain
    reader, meter = BatchEventReader(client, DEPLOYMENT, TENANT, batch), _TimeMeter(client)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="toolcrew-bench-")))
        rows = stack.enter_context(RowFiles.open(folder / "out.jsonl", folder / "errors.jsonl", lambda *_: True))
        follower = Follower(queue, reader, TENANT, batch, rows=rows, show=progress.add, tick=lambda: None)
        await meter.begin()
        await until_first(follower.run(), runner.run())
        await follower.end()
        seconds = await meter.end()
        if len(rows.succeeded) < RUNS:
            raise RuntimeError(f"{len(rows.succeeded)} rows were written of {RUNS} runs or more")
    return seconds
