"""Follows one batch to its end: writes the rows of ended items to the row files and shows the events of the batch.

Invariant: every ended item has its row in the files before `run` returns, even if Redis lost recent writes.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from toolcrew.concurrency.tasks import check_cancelled
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import BatchNotice, RunEvent
from toolcrew.orchestrator.batches.row_files import RowFiles, RowsNotWritten
from toolcrew.orchestrator.terminal.commands import build_resubmission
from toolcrew.store.batches import BatchRecord, BatchState, ItemOutcome
from toolcrew.store.run_events import BatchEventReader
from toolcrew.store.run_queue import RunQueue
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

CHECK_INTERVAL_S = 0.25
ROWS_AT_ONCE = 100
"""Number of rows that are written together. These rows are in memory together, and a transcript may have megabytes."""
WRITE_RETRY_S = 5.0
ENDED = (BatchState.COMPLETED, BatchState.CANCELLED)


class BatchLost(OperatorError):
    """Raised when Redis no longer has the record of a batch."""

    code = ErrorCode.BROKER_UNAVAILABLE


class Follower:
    """Follower of one batch. `show`: receives every event. `tick`: called several times per second. `rows` None:
    write no rows.
    """

    def __init__(
        self,
        queue: RunQueue,
        reader: BatchEventReader,
        tenant: str,
        batch: str,
        *,
        rows: RowFiles | None,
        show: Callable[[RunEvent], object],
        tick: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._reader = reader
        self._tenant = tenant
        self._batch = batch
        self._rows = rows
        self._show = show
        self._tick = tick
        self._written = 0
        self._numbers: dict[str, int] = {}
        self._lost: set[str] = set()
        self._write_after = 0.0

    async def run(self) -> BatchRecord:
        """Return the batch when every item has ended and has its row. Waits for Redis and for the disk without a
        limit. Raises BatchLost.
        """
        while True:
            check_cancelled()
            try:
                record = await self._read_record()
                if record.state is BatchState.CANCELLING:
                    # End items that no process owns any more.
                    await self._queue.batches.cancel(self._tenant, self._batch)
                is_written = await self.write()
                await self._show_events()
                if record.state in ENDED and is_written and await self._write_missed():
                    self._tick()
                    await self._settle()
                    await self._show_events()
                    return record
            except BrokerUnavailable as error:
                log.warning("batch_not_followed", batch=self._batch, error=str(error))
                await asyncio.sleep(CHECK_INTERVAL_S)
                self._tick()
                continue
            self._tick()

    async def _read_record(self) -> BatchRecord:
        """Return the record of the batch. Raises BatchLost."""
        try:
            return await self._queue.batches.get(self._tenant, self._batch)
        except ToolFailure as error:
            raise BatchLost(
                f"Redis has lost batch {self._batch} while it ran. The written rows are not lost: check that Redis "
                f"keeps its data, then submit the same file again with `--id "
                f"{self._batch}` and the same --output, which runs the lines without a row"
            ) from error

    async def _write_missed(self) -> bool:
        """Write rows that were missed because of repeated numbers.

        After a failure, Redis may have lost its last second of data and may use the same numbers for other items.
        """
        self._written = 0
        return await self.write()

    async def end(self) -> None:
        """Write all rows and show all events that exist now. Raises RowsNotWritten if the disk does not accept the
        rows. Raises BrokerUnavailable.
        """
        try:
            await self._write_rows()
            if self._rows is not None:
                await asyncio.to_thread(self._rows.settle)
        finally:
            await self._show_events()

    async def write(self) -> bool:
        """Write the rows of ended items. Return False if the disk does not accept the rows now; no row is lost."""
        if time.monotonic() < self._write_after:
            return False
        try:
            await self._write_rows()
        except RowsNotWritten as error:
            self._cannot_write(error)
            return False
        return True

    async def _write_rows(self) -> None:
        """Write the rows of ended items. Raises RowsNotWritten."""
        while self._rows is not None and (page := await self._next()) is not None:
            await asyncio.to_thread(self._rows.append, page[1])
            self._numbers |= {run: number for number, run in page[0]}
            self._written = page[0][-1][0]

    async def _next(self) -> tuple[Sequence[tuple[int, str]], list[ItemOutcome]] | None:
        """Return a page of ends without rows, as (number, run), and their outcomes; None if there are no more."""
        while page := await self._queue.batches.ended(self._tenant, self._batch, self._written, ROWS_AT_ONCE):
            if ended := [(number, run) for number, run in page if self._numbers.get(run) != number]:
                records = await self._queue.records([(self._tenant, run) for _, run in ended])
                self._report_lost({run for (_, run), record in zip(ended, records, strict=True) if record is None})
                return ended, [
                    record.outcome for record in records if record is not None and record.outcome is not None
                ]
            self._written = page[-1][0]
        return None

    def _report_lost(self, lost: set[str]) -> None:
        """Show a notice about runs without a record in Redis. The ids of their items are lost too."""
        if lost <= self._lost:
            return
        self._lost |= lost
        items = count(len(self._lost), "item, which has", "items, which have")
        message = (
            f"Redis has lost {items} no row: see that it evicts nothing, then submit the same file again with "
            f"`{build_resubmission(self._batch, self._tenant)}` and the same --output"
        )
        self._show(BatchNotice(message=message))

    async def _settle(self) -> None:
        """Remove duplicate rows: each item keeps one row in both files together. Waits until the disk accepts the
        change.
        """
        is_settled = self._rows is None
        while self._rows is not None and not is_settled:
            try:
                await asyncio.to_thread(self._rows.settle)
                is_settled = True
            except RowsNotWritten as error:
                self._cannot_write(error)
                await asyncio.sleep(WRITE_RETRY_S)

    def _cannot_write(self, error: RowsNotWritten) -> None:
        """Show the error, and pause the writing of rows for WRITE_RETRY_S."""
        self._write_after = time.monotonic() + WRITE_RETRY_S
        self._show(BatchNotice(message=f"{error}; it is tried again every {WRITE_RETRY_S:g} s"))

    async def _show_events(self) -> None:
        """Show the next events of the batch."""
        for event in await self._reader.read(CHECK_INTERVAL_S):
            self._show(event)
