"""The batches of one client: checks their files, executes their items until each has its row, and shows them. Other
orchestrators of the pool share the items.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolcrew.concurrency.read_memory import PARSED_LOG, READ_BYTES, read_memory
from toolcrew.concurrency.tasks import retry_until_available
from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import ConfigError, ToolFailure
from toolcrew.contract.run_events import OnEvent, RunEvent, pass_to
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.batches.displays import Display, DisplayedBatch
from toolcrew.orchestrator.batches.limit_check import check_limits, find_sessions
from toolcrew.orchestrator.batches.lines import MAX_SHOWN, BatchFile
from toolcrew.orchestrator.batches.model_check import check_models, find_models
from toolcrew.orchestrator.batches.progress import BatchProgress
from toolcrew.orchestrator.batches.row_files import RowFiles
from toolcrew.orchestrator.batches.summary import Summary
from toolcrew.orchestrator.batches.tool_check import NOT_CHECKED, check_tools
from toolcrew.orchestrator.dialects.model import Model
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.models.choice import ChosenModel
from toolcrew.orchestrator.runs.agent_builder import AgentBuilder
from toolcrew.orchestrator.runs.batches import DEFAULT_CONCURRENCY, Batches, run_id
from toolcrew.orchestrator.runs.endpoints import ModelNames, refuse_model
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.executor import RunExecutor
from toolcrew.orchestrator.runs.follower import ROWS_AT_ONCE, Follower
from toolcrew.orchestrator.runs.models import Models
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.orchestrator.runs.tenant_limits import LimitReader
from toolcrew.orchestrator.runs.webhooks import build_webhook_check
from toolcrew.orchestrator.traces.recorder import Traces
from toolcrew.store.batches import (
    BatchDefaults,
    BatchItem,
    BatchRecord,
    ItemOutcome,
    build_ended,
)
from toolcrew.store.model_endpoints import ModelEndpoints, StoredEndpoint
from toolcrew.store.run_events import MAX_PROGRESS, BatchEventReader
from toolcrew.store.run_queue import RunQueue
from toolcrew.store.run_records import RunRecord

OpenDisplay = Callable[[DisplayedBatch], Display]


@dataclass(frozen=True)
class RowPaths:
    """Files of a batch's rows. `errors` None: use `out.errors.jsonl` next to `out.jsonl`."""

    output: Path
    errors: Path | None = None

    @property
    def failures(self) -> Path:
        """Return the path of the file with the failed rows."""
        return self.errors or self._build_sibling_path("errors")

    @property
    def batch_events(self) -> Path:
        """Return the path of the file with the batch's events. A report reads this file."""
        return self._build_sibling_path("events")

    def _build_sibling_path(self, suffix: str) -> Path:
        """Return the path of a file next to the output file, with `suffix` in its name."""
        return self.output.with_name(f"{self.output.stem}.{suffix}.jsonl")

    def open(self, belongs: Callable[[str, str], bool]) -> RowFiles:
        """Open the files. Called before the batch starts. Raises ConfigError: a path cannot be written."""
        return RowFiles.open(self.output, self.failures, belongs)


class ClientBatches:
    """Runs, shows and exports the batches of one client's tenant."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: PoolConnection,
        builder: AgentBuilder,
        tenant: str,
        traces: Traces | None = None,
    ) -> None:
        """Create the batches of `tenant`. `traces` None: write no traces."""
        self._settings = settings
        self._pool = pool
        self._builder = builder
        self.tenant = tenant
        self._traces = traces
        self.queue = RunQueue(pool.redis, settings.deployment, pool.keys)
        self._publisher = RunEventPublisher(pool.redis, settings.deployment)
        self.batches = Batches(self.queue, self._publisher, tenant, build_webhook_check(pool.dispatcher))

    async def check_models(
        self, file: BatchFile, defaults: BatchDefaults, name: str, serves: Callable[[str], bool] | None = None
    ) -> None:
        """Check the models of a file. Call this method before `batches.submit`.

        `name`: name of the file in messages. `serves`: as in ModelNames. Raises ToolFailure(PERMISSION_DENIED): the
        tenant's policy does not allow a model. Raises BadBatch: lines name models that do not exist, or have a max_cost
        and a model without prices.
        """
        policy = await self._pool.tenants.policy(self.tenant)
        # In threads of the tenant, because each pass parses large items again, for seconds in a file of many values.
        models = sorted(await in_tenant_thread(self.tenant, find_models, file, defaults))
        for model in models:
            if not policy.allows_model(model):
                raise refuse_model(self.tenant, model)
        endpoints = ModelEndpoints(self._pool.redis, self._settings.deployment, self._pool.keys)
        model_names, refused = ModelNames(self._settings, endpoints, self._pool.tenants, serves), dict[str, str]()
        for model in models:
            if len(refused) >= MAX_SHOWN:
                break
            try:
                await model_names.check(self.tenant, model)
            except ToolFailure as failure:
                refused[model] = failure.message
        priced = {
            name
            for name, stored in (await endpoints.of(self.tenant)).items()
            if isinstance(stored, StoredEndpoint) and stored.endpoint.prices is not None
        }
        await in_tenant_thread(self.tenant, check_models, file, name, defaults, refused, self._settings.model, priced)

    async def check_limits(self, file: BatchFile, defaults: BatchDefaults, name: str) -> None:
        """Check the images, sizes, networks, secrets, tools and timeouts of a file against the limits of the tenant and
        of the hosts. Call this method before `batches.submit`. Raises BadBatch: the file has errors.
        """
        sessions = await in_tenant_thread(self.tenant, find_sessions, file)
        limits = await LimitReader(self._pool, self._settings.deployment).read(self.tenant, sessions)
        await in_tenant_thread(self.tenant, check_limits, file, name, limits, defaults.options)

    async def check_tools(self, file: BatchFile, name: str) -> list[str]:
        """Check the tools that a file names, and the arguments of its calls. Call this method before
        `batches.submit`.

        Returns warnings. Raises BadBatch: the file has errors.
        """
        offers = self._pool.offers
        try:
            specs = (await offers.of(self.tenant)).tools
        except ConfigError:
            return [NOT_CHECKED]
        return await in_tenant_thread(
            self.tenant,
            check_tools,
            file,
            specs,
            lambda tool: offers.explain_missing(tool) is not None,
            name,
            self.tenant,
        )

    def open_rows(self, paths: RowPaths, batch: str, file: BatchFile) -> RowFiles:
        """Open the row files of a batch that is submitted with this input file."""
        custom_ids = {item.custom_id for item in file.items}
        return paths.open(
            lambda custom_id, run: custom_id in custom_ids and run == run_id(self.tenant, batch, custom_id)
        )

    async def open_rows_again(self, paths: RowPaths, batch: str) -> RowFiles:
        """Open the row files of an existing batch."""
        custom_ids = await self.batches.custom_ids(batch)
        return paths.open(lambda custom_id, run: custom_ids.get(custom_id) == run)

    @asynccontextmanager
    async def runner(
        self,
        batch: str | None = None,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        model: Model | ChosenModel | None = None,
    ) -> AsyncIterator[Runner]:
        """Yield a runner that executes items of the batch, `concurrency` at a time. `batch` None: the runner executes
        items of every batch of every tenant.
        """
        async with Models(self._settings, self._pool, model) as models:
            work = RunExecutor(self._pool, self._builder, models, self._traces, self._publisher)
            only = (self.tenant, batch) if batch is not None else None
            yield Runner(
                self._pool.redis, self._settings.deployment, self.queue, work, self._publisher, concurrency, only
            )

    async def recall(self, batch: str, rows: RowFiles) -> int:
        """End the waiting items that already have a row in these files, with the row as their outcome. Return the
        number of these items.

        Redis may have lost the outcomes of a batch, but the row files have them. For an item after its first attempt,
        only the row of a success counts: a failed row may come from an earlier attempt.
        """
        waiting, recalled = await self.queue.batches.waiting(self.tenant, batch), 0
        outcomes = await asyncio.to_thread(
            lambda: [outcome for outcome in rows.outcomes() if outcome.run in waiting] if waiting else []
        )
        for at in range(0, len(outcomes), ROWS_AT_ONCE):
            page = outcomes[at : at + ROWS_AT_ONCE]
            records = await self.queue.records([(self.tenant, outcome.run) for outcome in page])
            first = {
                outcome.run
                for outcome, record in zip(page, records, strict=True)
                if record is not None and record.attempt == 1
            }
            fit = [outcome for outcome in page if outcome.run in first or outcome.failure is None]
            settled = await self.queue.settle(self.tenant, batch, fit)
            for outcome in fit:
                if outcome.run in settled:
                    self._publisher.add(self.tenant, batch, build_ended(outcome, time.time()))
            await self._publisher.flush()
            recalled += len(settled)
        return recalled

    async def outcomes(self, batch: str) -> AsyncGenerator[ItemOutcome]:
        """Yield the outcomes of all items that have ended, in the order of their ends."""
        async with aclosing(self.ended(batch)) as ended:
            async for _, outcome in ended:
                yield outcome

    async def ended(self, batch: str) -> AsyncGenerator[tuple[BatchItem, ItemOutcome]]:
        """Yield all items that have ended with their outcomes, in the order of their ends. The memory of a page is
        reserved until the reader has received its items; close the generator if you do not read to its end.

        Waits while Redis does not answer, so that a client with half of the outcomes need not start again.
        """
        after = 0
        while True:
            async with AsyncExitStack() as memory:
                after, records = await retry_until_available(partial(self._ended_after, batch, after, memory))
                if not after:
                    return
                for record in records:
                    if record is not None and record.outcome is not None:
                        yield record.item, record.outcome

    async def _ended_after(self, batch: str, after: int, memory: AsyncExitStack) -> tuple[int, list[RunRecord | None]]:
        """Return a page of ended runs and the number of its last run; 0 if there are no more. `memory`: receives the
        reservation of the page.
        """
        # A reservation of an earlier attempt, which Redis interrupted.
        await memory.aclose()
        ended = await self.queue.batches.ended(self.tenant, batch, after, ROWS_AT_ONCE)
        count, size = await self.queue.batches.fit_page(self.tenant, [run for _, run in ended])
        if not count:
            return 0, []
        await memory.enter_async_context(read_memory().reserve(self.tenant, min(size * PARSED_LOG, READ_BYTES // 2)))
        records = await self.queue.records([(self.tenant, run) for _, run in ended[:count]])
        return ended[count - 1][0], records

    async def write_rows(self, batch: str, rows: RowFiles) -> int:
        """Write the rows of all items that have ended. Return the number of new rows. Raises RowsNotWritten."""
        count = 0
        async for outcome in self.outcomes(batch):
            count += len(await asyncio.to_thread(rows.append, [outcome]))
        await asyncio.to_thread(rows.settle)
        return count

    async def batch_events(self, batch: str) -> list[RunEvent]:
        """Return the latest events of a batch that Redis still stores, at most MAX_PROGRESS and one page."""
        reader, events = self._reader(batch), list[RunEvent]()
        # A batch that runs may add events faster than they are read.
        while len(events) < MAX_PROGRESS and (page := await reader.read(0.0)):
            events += page
        return events

    def _reader(self, batch: str) -> BatchEventReader:
        return BatchEventReader(self._pool.redis, self._settings.deployment, self.tenant, batch)

    async def show(self, batch: str, open_display: OpenDisplay, *, follow: bool) -> None:
        """Show the latest events of a batch. `follow`: show new events too, until the batch has ended."""
        record, reader = await self.batches.status(batch), self._reader(batch)
        displayed = DisplayedBatch(batch, BatchProgress(record.total), tenant=self.tenant)
        with open_display(displayed) as display:
            follower = Follower(self.queue, reader, self.tenant, batch, rows=None, show=display.show, tick=display.tick)
            if follow:
                await follower.run()
            else:
                for event in await self.batch_events(batch):
                    display.show(event)
            await self._show_missing_ends(batch, displayed.progress, display.show)

    async def work(
        self,
        batch: str,
        open_display: OpenDisplay,
        *,
        rows: RowFiles | None = None,
        keep_event: OnEvent = lambda _: None,
        concurrency: int | None = None,
        model: Model | ChosenModel | None = None,
        on_runner: Callable[[Runner], None] = lambda _: None,
        is_kept: bool = True,
    ) -> tuple[BatchRecord, Summary]:
        """Execute and show a batch until the batch has ended, or until the runner that `on_runner` receives is drained
        or stopped. Return the record and the summary of the batch.

        The rows of all ended items are written before the return. `keep_event`: receives every event. `is_kept`: the
        pool continues to run after this process, so that the summary may suggest commands for the batch.
        """
        record = await self.batches.status(batch)
        displayed = DisplayedBatch(batch, BatchProgress(record.total), is_kept=is_kept, tenant=self.tenant)
        async with AsyncExitStack() as stack:
            runner = await stack.enter_async_context(
                self.runner(batch, concurrency=concurrency or record.concurrency, model=model)
            )
            on_runner(runner)
            with open_display(displayed) as display:
                show, reader = pass_to(keep_event, display.show), self._reader(batch)
                follower = Follower(self.queue, reader, self.tenant, batch, rows=rows, show=show, tick=display.tick)
                try:
                    await until_first(follower.run(), runner.run())
                # Ended items must have their rows even if this process is interrupted.
                finally:
                    await follower.end()
                await self._show_missing_ends(batch, displayed.progress, show)
            return await self.batches.status(batch), displayed.summary()

    async def _show_missing_ends(self, batch: str, progress: BatchProgress, show: Callable[[RunEvent], object]) -> None:
        """Show ends that have no event. These are ends of items that were cancelled before their start, and ends with
        events that are no longer stored.
        """
        record, snapshot = await self.batches.status(batch), progress.snapshot(time.time())
        if (snapshot.done, snapshot.failed) == (record.succeeded, sum(record.failed.values())):
            return
        async for outcome in self.outcomes(batch):
            if not progress.has_end(outcome.custom_id, outcome.attempt):
                show(build_ended(outcome, record.ended_at or time.time()))


async def until_first(*works: Coroutine[Any, Any, object]) -> None:
    """Wait until one coroutine ends, then cancel the others and wait for them. Raises the exception of the first one,
    if any.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
