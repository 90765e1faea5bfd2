"""Follows one batch to its end: rows of what has ended into its files, what happens onto a display."""

import asyncio
import time
from collections.abc import Callable, Sequence

from contract.errors import BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from contract.run_events import BatchNotice, RunEvent
from orchestrator.batches.row_files import RowFiles, RowsNotWritten
from orchestrator.terminal.commands import build_resubmission
from store.batches import BatchEventReader, BatchRecord, BatchState, Outcome
from store.runs import RunQueue
from store.tasks import check_cancelled
from telemetry.logs import get_logger

log = get_logger(__name__)

LOOK_S = 0.25
ROWS_AT_ONCE = 100
"""They wait for the disk together, and lie in memory together, with all that their items left: a transcript may have
megabytes.
"""
WRITE_AGAIN_S = 5.0
ENDED = (BatchState.COMPLETED, BatchState.CANCELLED)


class BatchForgotten(OperatorError):
    """Redis knows nothing any more of a batch that it knew."""

    code = ErrorCode.BROKER_UNAVAILABLE


class Follower:
    """`show`: gets every event; `tick`: called a few times a second. `rows` None: outcomes stay where they
    are.
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
        self._queue, self._reader, self._tenant, self._batch = queue, reader, tenant, batch
        self._rows, self._show, self._tick = rows, show, tick
        self._written = 0
        self._numbers: dict[str, int] = {}
        self._gone: set[str] = set()
        self._write_after = 0.0

    async def run(self) -> BatchRecord:
        """Until every item has ended and its row is written; gives the batch as it then is. However long Redis, or the
        disk, needs.

        Raises BatchForgotten.
        """
        while True:
            check_cancelled()
            try:
                record = await self._looked()
                if record.state is BatchState.CANCELLING:
                    # What nobody works any more by now is nobody else's to end.
                    await self._queue.cancel(self._tenant, self._batch)
                is_written = await self.write()
                await self._hear()
                if record.state in ENDED and is_written and await self._write_missed():
                    self._tick()
                    await self._settle()
                    await self._hear()
                    return record
            except BrokerUnavailable as error:
                log.warning("batch_not_followed", batch=self._batch, error=str(error))
                await asyncio.sleep(LOOK_S)
                self._tick()
                continue
            self._tick()

    async def _looked(self) -> BatchRecord:
        try:
            return await self._queue.batch(self._tenant, self._batch)
        except ToolFailure as error:
            raise BatchForgotten(
                f"Redis has forgotten batch {self._batch} while it was worked: its data was flushed or lost. The rows "
                "that were written stay: see that Redis keeps its data, then submit the same file again with `--id "
                f"{self._batch}` and the same --output, which works the lines without one"
            ) from error

    async def _write_missed(self) -> bool:
        """Write what got a number that had been read by: a Redis that forgot its last second counts on from before
        it.
        """
        self._written = 0
        return await self.write()

    async def end(self) -> None:
        """Write and show what there is now. Raises RowsNotWritten when the disk does not take all of it,
        BrokerUnavailable.
        """
        try:
            await self._write_now()
        finally:
            await self._hear()

    async def _write_now(self) -> None:
        while self._rows is not None and (some := await self._next()) is not None:
            await asyncio.to_thread(self._rows.append, some[1])
            self._note_written(some[0])
        if self._rows is not None:
            await asyncio.to_thread(self._rows.settle)

    async def write(self) -> bool:
        """Write the rows of what has ended; False: the disk does not take them now, and nothing of them is lost."""
        while self._rows is not None and (some := await self._next()) is not None:
            if time.monotonic() < self._write_after or not await self._append(some[1]):
                return False
            self._note_written(some[0])
        return True

    def _note_written(self, ended: Sequence[tuple[int, str]]) -> None:
        for number, run in ended:
            self._numbers[run] = number
        self._written = ended[-1][0]

    async def _next(self) -> tuple[Sequence[tuple[int, str]], list[Outcome]] | None:
        """Some of what has ended and is not written: numbers and runs, and their outcomes; None: that is all."""
        while told := await self._queue.ended(self._tenant, self._batch, self._written, ROWS_AT_ONCE):
            if ended := [one for one in told if self._numbers.get(one[1]) != one[0]]:
                records = await self._queue.runs([(self._tenant, run) for _, run in ended])
                self._tell_gone({run for (_, run), record in zip(ended, records, strict=True) if record is None})
                return ended, [
                    record.outcome for record in records if record is not None and record.outcome is not None
                ]
            self._written = told[-1][0]
        return None

    def _tell_gone(self, gone: set[str]) -> None:
        """Of runs whose records Redis has lost: even their items' ids are not known any more."""
        if gone <= self._gone:
            return
        self._gone |= gone
        told = (
            f"{len(self._gone)} items are gone from Redis and have no row: see that it evicts nothing, then submit the "
            "same file again"
        )
        self._show(
            BatchNotice(
                message=f"{told} with `{build_resubmission(self._batch, self._tenant)}` and the same --output",
            )
        )

    async def _append(self, outcomes: list[Outcome]) -> bool:
        assert self._rows is not None
        try:
            await asyncio.to_thread(self._rows.append, outcomes)
        except RowsNotWritten as error:
            self._cannot_write(error)
            return False
        return True

    async def _settle(self) -> None:
        """One row an item over both files."""
        is_settled = self._rows is None
        while self._rows is not None and not is_settled:
            try:
                await asyncio.to_thread(self._rows.settle)
                is_settled = True
            except RowsNotWritten as error:
                self._cannot_write(error)
                await asyncio.sleep(WRITE_AGAIN_S)

    def _cannot_write(self, error: RowsNotWritten) -> None:
        self._write_after = time.monotonic() + WRITE_AGAIN_S
        self._show(BatchNotice(message=f"{error}; it is tried again every {WRITE_AGAIN_S:g} s"))

    async def _hear(self) -> None:
        for event in await self._reader.read(LOOK_S):
            self._show(event)
