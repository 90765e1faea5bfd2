"""Display of a batch on a terminal: a progress bar with the counts below the bar."""

import sys
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.text import Text

from toolcrew.orchestrator.batches.displays import Display, DisplayedBatch, JsonLines, LogDisplay
from toolcrew.orchestrator.batches.progress import ProgressSnapshot
from toolcrew.orchestrator.batches.summary import Summary
from toolcrew.orchestrator.terminal.figures import MAX_NOTE_CHARS, format_seconds, one_line

REFRESH_S = 0.25


class LiveProgress(Display):
    """Progress bar. Needs a terminal that can move its cursor. At the end the bar is removed, and only the summary
    stays on the terminal.
    """

    def __init__(self, displayed: DisplayedBatch, console: Console) -> None:
        super().__init__(displayed, REFRESH_S)
        self._console = console
        self._bar = Progress(
            BarColumn(None, complete_style="green", finished_style="green"),
            MofNCompleteColumn(),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("")
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "LiveProgress":
        self._live.start()
        self._show_status(self._displayed.progress.snapshot(self._displayed.wall()))
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        super().__exit__(error_type, error, trace)

    def _show_status(self, s: ProgressSnapshot) -> None:
        self._bar.update(self._task, total=s.total, completed=s.ended)
        title = Text(f"batch {one_line(self._displayed.batch)}  {format_seconds(s.wall_s)}", style="bold")
        notes = [Text(one_line(note.message, MAX_NOTE_CHARS), style="magenta") for note in s.notes[-1:]]
        figures = Text(f"{self._counts(s)}\n{self._figures(s)}")
        self._live.update(Group(title, self._bar, figures, *notes), refresh=True)

    def _show_summary(self, summary: Summary) -> None:
        for line in self._summary_lines(summary):
            self._console.print(Text(line), soft_wrap=True)


def open_display(displayed: DisplayedBatch, console: Console, *, as_json: bool = False) -> Display:
    """Return a suitable display: JSON on stdout on request, else a progress bar on a terminal, else log lines."""
    if as_json:
        return JsonLines(displayed, sys.stdout)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(displayed, console)
    return LogDisplay(displayed, console.file)
