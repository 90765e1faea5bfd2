"""A batch in a log: a line when something worth telling has happened, every few seconds at most, and one for each
failure.
"""

from types import TracebackType
from typing import IO

from orchestrator.batches.displays import Watched
from orchestrator.batches.figures import MAX_NOTE_CHARS, format_cost, format_count, format_eta, format_rate, one_line
from orchestrator.batches.snapshot import Snapshot
from orchestrator.batches.summary import build_summary_lines
from store.batches import BatchEvent, BatchNotice, ItemDone, ItemRetried

EVERY_S = 5.0
MAX_TOLD = 5
"""Failures and notes between two moments EVERY_S apart; how many more there were is said after."""


class PlainLines:
    """Lines on `out`; harmless for a terminal that shows the log."""

    def __init__(self, watched: Watched, out: IO[str]) -> None:
        self._watched = watched
        self._out = out
        self._stood = ""
        self._stood_at = self._told_at = watched.ticks() - EVERY_S
        self._told = self._untold_failures = self._untold_notes = 0

    def __enter__(self) -> "PlainLines":
        self._write(f"batch {one_line(self._watched.batch)}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BrokenPipeError):
            return
        self._tell_untold()
        for line in build_summary_lines(self._watched.summary()):
            self._write(line)

    def show(self, batch_event: BatchEvent) -> None:
        """Tell a failure or a note; then how all stands, when that is due."""
        is_new = self._watched.progress.add(batch_event)
        match batch_event:
            case ItemDone() if is_new and batch_event.failure is not None:
                self._tell(
                    f"failed {_what(batch_event)}: {one_line(batch_event.message) or 'no message'}", is_failure=True
                )
            case ItemRetried() if is_new:
                self._tell(f"tried again {_what(batch_event)}", is_failure=True)
            case BatchNotice() if is_new and batch_event.message:
                self._tell(one_line(batch_event.message, MAX_NOTE_CHARS), is_failure=False)
        self.tick()

    def tick(self) -> None:
        """How all stands, when EVERY_S have passed and it has changed."""
        now = self._watched.ticks()
        if now - self._told_at >= EVERY_S:
            self._tell_untold()
        if now - self._stood_at < EVERY_S:
            return
        self._stood_at = now
        snapshot = self._watched.snapshot()
        counts = str(
            (
                snapshot.total,
                snapshot.done,
                snapshot.failed,
                snapshot.running,
                snapshot.queued,
                snapshot.steps,
                snapshot.calls,
            )
        )
        if counts != self._stood:
            self._stood = counts
            self._write(build_standing(snapshot))

    def _tell(self, line: str, *, is_failure: bool) -> None:
        now = self._watched.ticks()
        if now - self._told_at >= EVERY_S:
            self._tell_untold()
        if self._told == 0:
            self._told_at = now
        self._told += 1
        if self._told <= MAX_TOLD:
            self._write(line)
        elif is_failure:
            self._untold_failures += 1
        else:
            self._untold_notes += 1

    def _tell_untold(self) -> None:
        untold = (self._untold_failures, "failures"), (self._untold_notes, "notes")
        self._told = self._untold_failures = self._untold_notes = 0
        if parts := [f"{count:,} more {word}" for count, word in untold if count]:
            self._write(f"and {' and '.join(parts)} in the meantime that are not shown here")

    def _write(self, line: str) -> None:
        self._out.write(f"{line}\n")
        self._out.flush()


def build_standing(snapshot: Snapshot) -> str:
    """How all stands, in one line."""
    s = snapshot
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in s.failures.items())
    failed = f"{s.failed:,} failed" + (f" ({kinds})" if kinds else "")
    return (
        f"{s.done:,} of {s.total:,} done, {failed}, {s.running:,} running, {s.queued:,} queued; "
        f"{format_rate(s.calls_per_s)} calls/s; tokens {format_count(s.prompt_tokens)} in, "
        f"{format_count(s.completion_tokens)} out; cost {format_cost(s.cost, s.cost_unknown)}; ETA "
        f"{format_eta(s.eta_s)}"
    )


def _what(batch_event: ItemDone | ItemRetried) -> str:
    kind = batch_event.failure or "unknown"
    return f"{one_line(batch_event.item, 80)} ({kind} {one_line(batch_event.code, 64)})"
