"""Working a batch from this process: its items are run here, and on whatever other orchestrators there are, until every
one has its row.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from contract.run_events import RunEvent
from orchestrator.batches.displays import Display, Watched
from orchestrator.batches.event_files import BatchEventFile
from orchestrator.batches.lines import BatchFile
from orchestrator.batches.progress import Progress
from orchestrator.batches.row_files import RowFiles
from orchestrator.batches.summary import Summary
from orchestrator.batches.tool_check import NOT_CHECKED, check_tools
from orchestrator.dialects.model import Model
from orchestrator.dispatch.pool_connection import PoolConnection
from orchestrator.models.choice import ChosenModel
from orchestrator.runs.batches import DEFAULT_CONCURRENCY, Batches, run_id
from orchestrator.runs.follower import ROWS_AT_ONCE, Follower
from orchestrator.runs.item_work import ItemWork
from orchestrator.runs.models import Models
from orchestrator.runs.run_parts import RunParts
from orchestrator.runs.runner import Runner
from orchestrator.settings import OrchestratorSettings
from orchestrator.traces.opening import Traces
from store.batches import BatchEventReader, BatchEventWriter, BatchRecord, Outcome, build_recalled_end
from store.runs import RunQueue
from store.tasks import retry_until_available

OpenDisplay = Callable[[Watched], Display]


@dataclass(frozen=True)
class RowPaths:
    """Where the rows go. `errors` None: beside `out.jsonl`, as `out.errors.jsonl`."""

    output: Path
    errors: Path | None = None

    @property
    def failures(self) -> Path:
        """Where rows of failures go."""
        return self.errors or self._beside("errors")

    @property
    def batch_events(self) -> Path:
        """Where it is kept what happened, for a report."""
        return self._beside("events")

    def _beside(self, what: str) -> Path:
        return self.output.with_name(f"{self.output.stem}.{what}.jsonl")

    def open(self, belongs: Callable[[str, str], bool]) -> RowFiles:
        """Raises ConfigError for paths that cannot be written, before anything of the batch has begun."""
        return RowFiles.open(self.output, self.failures, lambda custom_id, run, /: belongs(custom_id, run))


@dataclass
class Shift:
    """This process's work on a batch while it lasts. `drain`: begin nothing any more; what runs is ended. `stop`: give
    back what runs, now.
    """

    runner: Runner
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    is_drained: bool = False

    def drain(self) -> None:
        self.is_drained = True
        self.runner.drain()

    def stop(self) -> None:
        self.is_drained = True
        self._stopped.set()

    async def until_stopped(self) -> None:
        await self._stopped.wait()


class BatchRuns:
    """Batches of one client's tenant, and the work on them."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: PoolConnection,
        parts: RunParts,
        tenant: str,
        traces: Traces | None = None,
    ) -> None:
        """`traces` None: none are written."""
        self._settings, self._pool, self._parts, self.tenant, self._traces = settings, pool, parts, tenant, traces
        self.queue = RunQueue(pool.redis, settings.deployment, pool.keys)
        self._writer = BatchEventWriter(pool.redis, settings.deployment)
        self.batches = Batches(self.queue, self._writer, tenant)

    async def check_tools(self, file: BatchFile, name: str) -> list[str]:
        """Check the tools that a file names, and the arguments of its calls; call it before `batches.submit`. Returns
        warnings. Raises BadBatch.
        """
        offers = self._pool.offers
        try:
            specs = (await offers.of(self.tenant)).tools
        except ConfigError:
            return [NOT_CHECKED]
        return await asyncio.to_thread(
            check_tools, file, specs, lambda tool: offers.explain_missing(tool) is not None, name, self.tenant
        )

    def open_rows(self, paths: RowPaths, batch: str, file: BatchFile) -> RowFiles:
        """The files of a batch that is submitted with that file."""
        known = {item.custom_id for item in file.items}
        return paths.open(lambda custom_id, run: custom_id in known and run == run_id(self.tenant, batch, custom_id))

    async def open_rows_again(self, paths: RowPaths, batch: str) -> RowFiles:
        """The files of a batch that is there already."""
        known = await self.batches.custom_ids(batch)
        return paths.open(lambda custom_id, run: known.get(custom_id) == run)

    @asynccontextmanager
    async def runner(
        self,
        batch: str | None = None,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        model: Model | ChosenModel | None = None,
    ) -> AsyncIterator[Runner]:
        """What works items of that batch, so many at a time; None: of every batch of every tenant. It has to be run."""
        async with Models(self._settings, model) as models:
            work = ItemWork(self._pool, self._parts, models, self._traces)
            only = (self.tenant, batch) if batch is not None else None
            yield Runner(self._pool.redis, self._settings.deployment, self.queue, work, self._writer, concurrency, only)

    async def recall(self, batch: str, rows: RowFiles) -> int:
        """End items that wait and have a row in these files already, as that says: of a batch that Redis knows no more,
        or not all of. Those whose attempt would be begun anew are left out. How many items."""
        waiting, recalled = await self.queue.waiting(self.tenant, batch), 0
        known = await asyncio.to_thread(
            lambda: [outcome for outcome in rows.outcomes() if outcome.run in waiting] if waiting else []
        )
        for at in range(0, len(known), ROWS_AT_ONCE):
            some = known[at : at + ROWS_AT_ONCE]
            records = await self.queue.runs([(self.tenant, outcome.run) for outcome in some])
            first = {
                outcome.run
                for outcome, record in zip(some, records, strict=True)
                if record is not None and record.attempt == 1
            }
            fit = [outcome for outcome in some if outcome.run in first or outcome.failure is None]
            settled = await self.queue.settle(self.tenant, batch, fit)
            for outcome in fit:
                if outcome.run in settled:
                    self._writer.add(self.tenant, batch, build_recalled_end(outcome, time.time()))
            await self._writer.flush()
            recalled += len(settled)
        return recalled

    async def outcomes(self, batch: str) -> AsyncIterator[Outcome]:
        """Of all items that have ended so far, in the order in which they did; over an outage of Redis, so that nobody
        who has half of them has to begin anew."""
        after = 0
        while True:
            after, outcomes = await retry_until_available(partial(self._outcomes_after, batch, after))
            if not after:
                return
            for outcome in outcomes:
                yield outcome

    async def _outcomes_after(self, batch: str, after: int) -> tuple[int, list[Outcome]]:
        """Some of them, and the number of the last one; 0: there are no more."""
        ended = await self.queue.ended(self.tenant, batch, after, ROWS_AT_ONCE)
        records = await self.queue.runs([(self.tenant, run) for _, run in ended])
        outcomes = [record.outcome for record in records if record is not None and record.outcome is not None]
        return ended[-1][0] if ended else 0, outcomes

    async def write_rows(self, batch: str, rows: RowFiles) -> int:
        """Write the rows of all that has ended so far; how many were new. Raises RowsNotWritten."""
        count = 0
        async for outcome in self.outcomes(batch):
            count += len(await asyncio.to_thread(rows.append, [outcome]))
        await asyncio.to_thread(rows.settle)
        return count

    async def batch_events(self, batch: str) -> list[RunEvent]:
        """What has happened of late, as far as Redis keeps it."""
        reader = BatchEventReader(self._pool.redis, self._settings.deployment, self.tenant, batch)
        told: list[RunEvent] = []
        while some := await reader.read(0.0):
            told += some
        return told

    async def tell(self, batch: str, open_display: OpenDisplay, *, follow: bool) -> None:
        """Show what has happened of late; and, if it is followed, what happens until the batch has ended."""
        record = await self.batches.status(batch)
        reader = BatchEventReader(self._pool.redis, self._settings.deployment, self.tenant, batch)
        watched = Watched(batch, Progress(record.total), tenant=self.tenant)
        with open_display(watched) as display:
            if follow:
                await Follower(
                    self.queue, reader, self.tenant, batch, rows=None, show=display.show, tick=display.tick
                ).run()
                await self._show_untold(batch, watched.progress, display.show)
                return
            for event in await self.batch_events(batch):
                display.show(event)
            await self._show_untold(batch, watched.progress, display.show)

    async def work(
        self,
        batch: str,
        open_display: OpenDisplay,
        *,
        rows: RowFiles | None = None,
        kept: BatchEventFile | None = None,
        concurrency: int | None = None,
        model: Model | ChosenModel | None = None,
        on_shift: Callable[[Shift], None] = lambda _: None,
        is_kept: bool = True,
    ) -> tuple[BatchRecord, Summary]:
        """Work and watch a batch until it has ended, or until the shift that `on_shift` gets is drained or stopped; how
        it then stands.

        Rows of all that has ended by then are written. `kept`: where it is kept what happens. `is_kept`: the pool
        outlives this process, so that what is said at the end can name the batch by its id.
        """
        record = await self.batches.status(batch)
        watched = Watched(batch, Progress(record.total), is_kept=is_kept, tenant=self.tenant)
        async with AsyncExitStack() as stack:
            runner = await stack.enter_async_context(
                self.runner(batch, concurrency=concurrency or record.concurrency, model=model)
            )
            shift = Shift(runner)
            on_shift(shift)
            with open_display(watched) as display:

                def show(event: RunEvent) -> None:
                    if kept is not None:
                        kept.add(event)
                    display.show(event)

                reader = BatchEventReader(self._pool.redis, self._settings.deployment, self.tenant, batch)
                follower = Follower(self.queue, reader, self.tenant, batch, rows=rows, show=show, tick=display.tick)
                try:
                    await until_first(follower.run(), runner.run(), shift.until_stopped())
                finally:
                    await follower.end()
                await self._show_untold(batch, watched.progress, show)
            return await self.batches.status(batch), watched.summary()

    async def _show_untold(self, batch: str, progress: Progress, show: Callable[[RunEvent], object]) -> None:
        """Show the ends that nobody told, so that what is shown is what there is: of items that were cancelled before
        they had begun, and of those whose events are no longer kept."""
        record, stands = await self.batches.status(batch), progress.snapshot(time.time())
        if (stands.done, stands.failed) == (record.succeeded, sum(record.failed.values())):
            return
        async for outcome in self.outcomes(batch):
            if not progress.has_end(outcome.custom_id, outcome.attempt):
                show(build_recalled_end(outcome, record.ended_at or time.time()))


async def until_first(*works: Coroutine[Any, Any, object]) -> None:
    """Until one of these ends; the others are cancelled, and waited for. Raises what that one raises."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
