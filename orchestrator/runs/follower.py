"""Follows one batch to its end: rows of what has ended into its files, what happens onto a display."""

import asyncio
import time
from collections.abc import Callable

from contract.errors import BrokerUnavailable
from orchestrator.batches.happenings import BatchNoted, Happening
from orchestrator.batches.items import Outcome
from orchestrator.batches.row_files import RowFiles, RowsNotWritten
from orchestrator.logs import get_logger
from orchestrator.runs.happening_stream import HappeningReader
from orchestrator.runs.records import BatchRecord, BatchState
from orchestrator.runs.run_queue import RunQueue

log = get_logger(__name__)

LOOK_S = 0.25
ROWS_AT_ONCE = 500
WRITE_AGAIN_S = 5.0
ENDED = (BatchState.COMPLETED, BatchState.CANCELLED)


class Follower:
    """`show`: gets every happening; `tick`: called a few times a second. `rows` None: outcomes stay where they are."""

    def __init__(
        self,
        queue: RunQueue,
        reader: HappeningReader,
        tenant: str,
        batch: str,
        *,
        rows: RowFiles | None,
        show: Callable[[Happening], object],
        tick: Callable[[], None],
    ) -> None:
        self._queue, self._reader, self._tenant, self._batch = queue, reader, tenant, batch
        self._rows, self._show, self._tick = rows, show, tick
        self._written = 0
        self._write_after = 0.0

    async def run(self) -> BatchRecord:
        """Until every item has ended and its row is written; gives the batch as it then is. However long Redis, or the disk, needs."""
        while True:
            try:
                record = await self._queue.batch(self._tenant, self._batch)
                is_written = await self.write()
                await self._hear()
            except BrokerUnavailable as error:
                log.warning("batch_not_followed", batch=self._batch, error=str(error))
                await asyncio.sleep(LOOK_S)
                self._tick()
                continue
            self._tick()
            if record.state in ENDED and is_written:
                await self.end()
                return record

    async def end(self) -> None:
        """Write and show what there is now. Raises BrokerUnavailable."""
        await self.write()
        await self._settle()
        await self._hear()

    async def write(self) -> bool:
        """Write the rows of what has ended; False: the disk does not take them now, and nothing of them is lost."""
        while self._rows is not None and (ended := await self._queue.ended(self._tenant, self._batch, self._written)):
            if time.monotonic() < self._write_after:
                return False
            some = ended[:ROWS_AT_ONCE]
            records = await self._queue.runs([(self._tenant, run) for _, run in some])
            outcomes = [record.outcome for record in records if record is not None and record.outcome is not None]
            if not await self._append(outcomes):
                return False
            self._written = some[-1][0]
        return True

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
        self._show(BatchNoted(at=time.time(), message=f"{error}; it is tried again every {WRITE_AGAIN_S:g} s"))

    async def _hear(self) -> None:
        for happening in await self._reader.read(LOOK_S):
            self._show(happening)
