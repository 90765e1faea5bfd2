"""Runs a batch in the foreground: shows its display, writes its row files, handles signals and returns the exit
code.
"""

import asyncio
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.batches.event_files import write_batch_events
from toolcrew.orchestrator.batches.live_progress import open_display
from toolcrew.orchestrator.batches.row_files import RowFiles
from toolcrew.orchestrator.cli.runner import EXIT_INTERRUPTED
from toolcrew.orchestrator.runs.client_batches import ClientBatches, RowPaths
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.store.batches import BatchState, RowLocation

EXIT_FAILED = 1
_DRAIN, _STOP, _BREAK_OFF = 1, 2, 3


class BatchInterrupts:
    """Handles signals to a command that runs a batch. The first signal lets running items end and starts no others. The
    second returns running items to the queue. The third ends the command at once. SIGTERM and SIGHUP start with the
    second.
    `advice`: how to continue the batch, as the end of a sentence.
    """

    def __init__(self, advice: str, say: Callable[[str], None], leave: Callable[[int], object] = os._exit) -> None:
        """Set the functions that the handler calls. `say`: prints a message. `leave`: ends the process at once with an
        exit code; rows, logs and leases of runs are not lost.
        """
        self.exit_code = EXIT_INTERRUPTED
        self._advice = advice
        self._say = say
        self._leave = leave
        self._runner: Runner | None = None
        self._level = 0

    def listen(self) -> None:
        """Handle signals from now on until the end of the command."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)

    def begin(self, runner: Runner) -> None:
        """Start the runner. Then apply the signals that arrived before the start."""
        self._runner = runner
        self._act()

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGINT:
            self._level += 1
        else:
            self._level = max(_STOP, self._level + 1)
            self.exit_code = 128 + number
        self._print_notice(number)
        self._act()

    def _print_notice(self, number: signal.Signals) -> None:
        match self._level:
            case 1:
                running = self._runner.running if self._runner is not None else 0
                items = "1 running item is" if running == 1 else f"{running} running items are"
                self._say(f"interrupted: {items} finished first; interrupt again to stop now; {self._advice}")
            case 2:
                cause = "stopping now" if number is signal.SIGINT else "stopped by a signal"
                self._say(f"{cause}: running items return to the queue, and nothing is lost; {self._advice}")
            case _:
                self._say(f"aborted: {self._advice}, after at least 20 s; missing rows are written then")

    def _act(self) -> None:
        if self._level >= _BREAK_OFF:
            self._leave(self.exit_code)
        elif self._runner is not None and self._level == _STOP:
            self._runner.stop()
        elif self._runner is not None and self._level == _DRAIN:
            self._runner.drain()


def find_rows(batch: str, location: RowLocation | None, output: Path | None, errors: Path | None) -> RowPaths:
    """Return the files for the rows of a resumed batch: the files in the options of the command, otherwise the files
    that the batch used before. Raises ConfigError if there are none.
    """
    if output is not None:
        return RowPaths(output, errors)
    if errors is not None:
        raise ConfigError("--errors needs --output: give both, or neither to use the files that were used before")
    if location is None:
        raise ConfigError(f"the output file of batch {batch} is unknown: give --output OUT.jsonl")
    if location.host != platform.node():
        raise ConfigError(
            f"the rows of batch {batch} go to {location.output} on host {location.host}: resume it there, or give "
            "--output OUT.jsonl"
        )
    if not Path(location.output).is_file():
        raise ConfigError(
            f"the rows of batch {batch} went to {location.output}, which does not exist any more: give --output "
            "OUT.jsonl to write all rows again"
        )
    return RowPaths(Path(location.output), Path(location.errors))


def build_row_location(paths: RowPaths) -> RowLocation:
    """Return the record of the files that is stored with the batch."""
    return RowLocation(host=platform.node(), output=str(paths.output.absolute()), errors=str(paths.failures.absolute()))


async def run_batch(
    runs: ClientBatches,
    batch: str,
    paths: RowPaths,
    rows: RowFiles,
    interrupts: BatchInterrupts,
    console: Console,
    *,
    is_kept: bool,
    as_json: bool,
    printed_warnings: tuple[str, ...] = (),
) -> int:
    """Run a batch until it ends or is interrupted, and return the exit code. `is_kept`: Redis continues to run after
    the command, so the batch is still stored. `printed_warnings`: warnings that the display does not print again.
    """
    with write_batch_events(paths.batch_events) as keep_event:
        record, summary = await runs.work(
            batch,
            lambda displayed: open_display(
                replace(displayed, rows=(str(paths.output), str(paths.failures)), printed_warnings=printed_warnings),
                console,
                as_json=as_json,
            ),
            rows=rows,
            keep_event=keep_event,
            on_runner=interrupts.begin,
            is_kept=is_kept,
        )
    if record.state not in (BatchState.COMPLETED, BatchState.CANCELLED):
        return interrupts.exit_code
    return EXIT_FAILED if summary.failed or record.succeeded < record.total else 0
