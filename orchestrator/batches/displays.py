"""Displays of a batch: the common base, log lines for people, and JSON lines for programs."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from toolcrew.contract.clock import with_instants
from toolcrew.contract.plurals import plural
from toolcrew.contract.run_events import BatchNotice, RunEnded, RunEvent, RunRetried
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.batches.progress import BatchProgress, ProgressSnapshot
from toolcrew.orchestrator.batches.summary import Summary, build_summary, build_summary_lines
from toolcrew.orchestrator.terminal.figures import (
    MAX_NOTE_CHARS,
    format_cost,
    format_count,
    format_rate,
    format_seconds,
    format_time,
    one_line,
)

STATUS_EVERY_S = 5.0


@dataclass(frozen=True)
class DisplayedBatch:
    """A batch that a display shows.

    `wall`: function that returns Unix seconds. `ticks`: function that returns seconds of a monotonic clock. `is_kept`:
    the batch is still stored after this command, so that the summary may suggest commands for it. `rows`: the files for
    successes and for failures, if this process writes them. `printed_warnings`: warnings that the command has printed
    before.
    """

    batch: str
    progress: BatchProgress
    wall: Callable[[], float] = time.time
    ticks: Callable[[], float] = time.monotonic
    is_kept: bool = True
    rows: tuple[str, ...] = ()
    tenant: str = DEFAULT_TENANT
    printed_warnings: tuple[str, ...] = ()

    def summary(self) -> Summary:
        """Return the summary of the batch."""
        snapshot = self.progress.snapshot(self.wall())
        return build_summary(
            snapshot,
            batch=self.batch,
            tenant=self.tenant,
            is_kept=self.is_kept,
            rows=self.rows,
            grades=self.progress.summarize_grades(),
        )


class Display:
    """Counts the events of a batch and shows the status. A context manager. Not safe for several threads.

    Leaving the context ends the display with a summary, even after an exception.
    """

    def __init__(self, displayed: DisplayedBatch, every_s: float) -> None:
        """Create the display. `every_s`: minimum time between two statuses, in seconds."""
        self._displayed = displayed
        self._every_s = every_s
        self._opened_at = displayed.wall()
        self._next_at = displayed.ticks() + every_s
        self._ended_earlier = 0
        self._printed_warnings = set(displayed.printed_warnings)

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the summary, unless the reader of the output has closed the pipe."""
        if not isinstance(error, BrokenPipeError):
            self._show_summary(self._displayed.summary())

    def show(self, event: RunEvent) -> None:
        """Count an event of the batch, and show it."""
        is_new = self._displayed.progress.add(event)
        if event.at < self._opened_at:
            # A resumed batch may have been paused for days. Ends before the pause say nothing about the current rate.
            self._ended_earlier = self._displayed.progress.ended
        self._show_event(event, is_new)
        self.tick()

    def tick(self) -> None:
        """Show the status if enough time has passed since the last one. Called several times per second, even without
        events.
        """
        now = self._displayed.ticks()
        if now >= self._next_at:
            self._next_at = now + self._every_s
            self._show_status(self._displayed.progress.snapshot(self._displayed.wall()))

    def _show_event(self, event: RunEvent, is_new: bool) -> None: ...

    def _show_status(self, s: ProgressSnapshot) -> None: ...

    def _show_summary(self, summary: Summary) -> None: ...

    def _summary_lines(self, summary: Summary) -> list[str]:
        """Return the summary for people, without warnings that were printed before."""
        warnings = tuple(warning for warning in summary.warnings if warning not in self._printed_warnings)
        return build_summary_lines(summary.model_copy(update={"warnings": warnings}))

    def _counts(self, s: ProgressSnapshot) -> str:
        """Return the numbers of items by state."""
        failures = ", ".join(f"{count:,} {failure_kind}" for failure_kind, count in s.failures.items())
        failed = f"{s.failed:,} failed" + (f" ({failures})" if failures else "")
        return f"{s.done:,} of {s.total:,} done, {failed}, {s.running:,} running, {s.queued:,} queued"

    def _figures(self, s: ProgressSnapshot) -> str:
        """Return the rate since the display was opened, the estimated remaining time at that rate, and the cost."""
        seconds = self._displayed.wall() - self._opened_at
        rate = max(0, s.ended - self._ended_earlier) / seconds if seconds > 0 else 0.0
        eta = format_seconds((s.total - s.ended) / rate) if rate else "unknown"
        tokens = f"{format_count(s.prompt_tokens)} in, {format_count(s.completion_tokens)} out"
        return (
            f"{format_rate(rate)} items/s; ETA {eta}; {s.calls:,} {plural(s.calls, 'call')}; tokens {tokens}; cost "
            f"{format_cost(s.cost, s.cost_unknown)}"
        )


class JsonLines(Display):
    """Writes every event as one line of JSON, including repeated events, and then the summary."""

    def __init__(self, displayed: DisplayedBatch, out: IO[str]) -> None:
        super().__init__(displayed, STATUS_EVERY_S)
        self._out = out

    def _show_event(self, event: RunEvent, is_new: bool) -> None:
        self._write(with_instants(event.to_json()))

    def _show_summary(self, summary: Summary) -> None:
        self._write(summary.model_dump(mode="json"))

    def _write(self, data: dict[str, Any]) -> None:
        # ASCII works in every encoding of stdout, and escaped characters cannot control a terminal.
        self._out.write(json.dumps(data, separators=(",", ":")) + "\n")
        self._out.flush()


class LogDisplay(Display):
    """Writes failures, retries and notices when they arrive. Writes the status every few seconds if the status has
    changed.

    `has_past`: also write events that occurred before the display was opened. For a resumed batch it is False, because
    these events were already shown.
    """

    def __init__(self, displayed: DisplayedBatch, out: IO[str], *, has_past: bool = False) -> None:
        super().__init__(displayed, STATUS_EVERY_S)
        self._out = out
        self._has_past = has_past
        self._last_counts = ""

    def _show_event(self, event: RunEvent, is_new: bool) -> None:
        is_shown = is_new and (self._has_past or event.at >= self._opened_at)
        warning = event.message if isinstance(event, BatchNotice) and event.is_warning else None
        if is_shown and warning not in self._printed_warnings and (line := _describe(event)):
            self._write(event.at, line)
            if warning is not None:
                self._printed_warnings.add(warning)

    def _show_status(self, s: ProgressSnapshot) -> None:
        counts = f"{self._counts(s)}; {s.steps:,} {plural(s.steps, 'step')}"
        if counts != self._last_counts:
            self._last_counts = counts
            self._write(self._displayed.wall(), f"{counts}; {self._figures(s)}")

    def _show_summary(self, summary: Summary) -> None:
        self._out.write("".join(f"{line}\n" for line in self._summary_lines(summary)))
        self._out.flush()

    def _write(self, at: float, line: str) -> None:
        self._out.write(f"{format_time(at)}  {line}\n")
        self._out.flush()


def _describe(event: RunEvent) -> str:
    """Return the line for a failure, retry or notice; "" for any other event."""
    if isinstance(event, BatchNotice):
        return one_line(event.message, MAX_NOTE_CHARS)
    if not isinstance(event, RunEnded | RunRetried) or event.failure is None:
        return ""
    failure = event.failure
    cause = f"{one_line(event.item, 80)} failed ({failure.kind} {one_line(failure.code, 64)})"
    if isinstance(event, RunRetried):
        return f"{cause} and is queued again"
    return f"{cause}: {one_line(failure.message) or 'no message'}"
