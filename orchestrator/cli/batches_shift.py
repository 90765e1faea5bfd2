"""Work on a batch in the foreground: its display, the files of its rows, signals, and the exit code."""

import asyncio
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from contract.errors import ConfigError
from orchestrator.batches.event_files import BatchEventFile
from orchestrator.batches.live_progress import open_display
from orchestrator.batches.row_files import RowFiles
from orchestrator.cli.runner import EXIT_INTERRUPTED
from orchestrator.runs.batch_runs import BatchRuns, RowPaths, Shift
from store.batches import BatchState, RowPlace

EXIT_FAILED = 1
_DRAIN, _STOP, _BREAK_OFF = 1, 2, 3


class Interrupts:
    """Signals to a command that works on a batch. The first lets running items end and starts no other; the second
    returns running items to the queue; the third ends the command at once. SIGTERM and SIGHUP begin with the second.
    `again`: the end of a sentence, how to continue the batch.
    """

    def __init__(self, again: str, say: Callable[[str], None], leave: Callable[[int], object] = os._exit) -> None:
        """`leave`: ends the process with an exit code, whatever it still does. Rows, logs and leases allow that."""
        self.exit_code = EXIT_INTERRUPTED
        self._again, self._say, self._leave = again, say, leave
        self._shift: Shift | None = None
        self._level = 0

    def listen(self) -> None:
        """Handle signals from now on, also while the command closes."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._hear, number)

    def begin(self, shift: Shift) -> None:
        """Start the work, and do what earlier signals asked for."""
        self._shift = shift
        self._act()

    def _hear(self, number: signal.Signals) -> None:
        if number is signal.SIGINT:
            self._level += 1
        else:
            self._level = max(_STOP, self._level + 1)
            self.exit_code = 128 + number
        self._tell(number)
        self._act()

    def _tell(self, number: signal.Signals) -> None:
        match self._level:
            case 1:
                running = self._shift.runner.running if self._shift is not None else 0
                items = "1 running item is" if running == 1 else f"{running} running items are"
                self._say(f"interrupted: {items} finished first; again to stop now. Either way {self._again}")
            case 2:
                why = "stopping now" if number is signal.SIGINT else "told to stop"
                self._say(f"{why}: what runs is given back, and nothing of it is lost; {self._again}")
            case _:
                self._say(f"broken off: {self._again}, 20 s from now, and rows that lack are written then")

    def _act(self) -> None:
        if self._level >= _BREAK_OFF:
            self._leave(self.exit_code)
        elif self._shift is not None and self._level == _STOP:
            self._shift.stop()
        elif self._shift is not None and self._level == _DRAIN:
            self._shift.drain()


def find_rows(batch: str, place: RowPlace | None, output: Path | None, errors: Path | None) -> RowPaths:
    """Return the files for the rows of a resumed batch: those of the command, else those that were used before. Raises
    ConfigError if there are none.
    """
    if output is not None:
        return RowPaths(output, errors)
    if errors is not None:
        raise ConfigError(
            "a file for rows of failures goes with --output: give that, too, or neither to go on in the files of before"
        )
    if place is None:
        raise ConfigError(f"it is not known where the rows of batch {batch} go: give --output OUT.jsonl")
    if place.host != platform.node():
        raise ConfigError(
            f"the rows of batch {batch} go to {place.output} on host {place.host}: go on there, or give --output "
            "OUT.jsonl"
        )
    if not Path(place.output).is_file():
        raise ConfigError(
            f"the rows of batch {batch} went to {place.output}, which is gone: give --output; then all of them are "
            "written"
        )
    return RowPaths(Path(place.output), Path(place.errors))


def place_of(paths: RowPaths) -> RowPlace:
    """Return the record of the files that is stored with the batch."""
    return RowPlace(host=platform.node(), output=str(paths.output.absolute()), errors=str(paths.failures.absolute()))


async def work_batch(
    runs: BatchRuns,
    batch: str,
    paths: RowPaths,
    rows: RowFiles,
    interrupts: Interrupts,
    console: Console,
    *,
    is_kept: bool,
    as_json: bool,
) -> int:
    """Work on a batch until it ends or is interrupted; return the exit code. `is_kept`: its Redis remains."""
    with BatchEventFile(paths.batch_events) as event_file:
        record, summary = await runs.work(
            batch,
            lambda watched: open_display(
                replace(watched, rows=(str(paths.output), str(paths.failures))), console, as_json=as_json
            ),
            rows=rows,
            event_file=event_file,
            on_shift=interrupts.begin,
            is_kept=is_kept,
        )
    if record.state not in (BatchState.COMPLETED, BatchState.CANCELLED):
        return interrupts.exit_code
    return EXIT_FAILED if summary.failed or record.succeeded < record.total else 0
