"""A batch looked back on: a line for each begin and end of an item and each note, with its time."""

from types import TracebackType
from typing import IO

from orchestrator.batches.displays import Watched
from orchestrator.batches.figures import MAX_NOTE_CHARS, format_seconds, format_time, one_line
from orchestrator.batches.summary import build_summary_lines
from store.batches import BatchEvent, BatchNotice, ItemDone, ItemRetried, ItemStarted


class LogLines:
    """Lines on `out`; harmless for a terminal that shows them. What comes twice is told once."""

    def __init__(self, watched: Watched, out: IO[str]) -> None:
        self._watched = watched
        self._out = out

    def __enter__(self) -> "LogLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BrokenPipeError):
            return
        for line in build_summary_lines(self._watched.summary()):
            self._out.write(f"{line}\n")
        self._out.flush()

    def show(self, batch_event: BatchEvent) -> None:
        """Tell it, if it is worth a line."""
        line = _line(batch_event) if self._watched.progress.add(batch_event) else ""
        if line:
            self._out.write(f"{format_time(batch_event.at)}  {line}\n")

    def tick(self) -> None:
        """Nothing is shown for time alone."""


def _line(batch_event: BatchEvent) -> str:
    name = one_line(batch_event.item, 80)
    match batch_event:
        case ItemStarted():
            again = (
                "gone on with"
                if batch_event.is_resumed
                else "begun"
                if batch_event.attempt == 1
                else f"begun, attempt {batch_event.attempt}"
            )
            return f"{name} {again}"
        case ItemDone(failure=None, seconds=0.0):
            # Nobody told of its end when it came; its row did.
            return f"{name} done"
        case ItemDone(failure=None):
            return (
                f"{name} done in {format_seconds(batch_event.seconds)}; steps {batch_event.steps:,}, calls "
                f"{batch_event.calls:,}"
            )
        case ItemDone():
            return (
                f"{name} failed ({batch_event.failure} {one_line(batch_event.code, 64)}): "
                f"{one_line(batch_event.message) or 'no message'}"
            )
        case ItemRetried():
            return f"{name} queued again after a failure ({batch_event.failure} {one_line(batch_event.code, 64)})"
        case BatchNotice():
            return one_line(batch_event.message, MAX_NOTE_CHARS)
    return ""
