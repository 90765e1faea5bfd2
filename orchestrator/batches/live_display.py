"""A batch on a terminal: a few lines that are drawn over and over, and a summary that stays when it ends."""

import sys
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from orchestrator.batches.displays import Display, Watched
from orchestrator.batches.json_lines import JsonLines
from orchestrator.batches.live_screen import build_screen
from orchestrator.batches.plain_lines import PlainLines
from orchestrator.batches.summary import build_summary_lines
from store.batches import BatchEvent

EVERY_S = 0.25
_FREE_CELLS = 3


class LiveDisplay:
    """Drawn at most four times a second, and only when something shown has changed. Needs a terminal that can move its
    cursor.
    """

    def __init__(self, watched: Watched, console: Console) -> None:
        self._watched = watched
        self._console = console
        self._live = self._open()
        self._drawn: list[Text] = []
        self._drawn_at = watched.ticks() - EVERY_S
        self._size = console.size

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        self.tick()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if isinstance(error, BrokenPipeError):
            return
        for line in build_summary_lines(self._watched.summary()):
            self._console.print(Text(line), soft_wrap=True)

    def show(self, batch_event: BatchEvent) -> None:
        """Count it, and draw when that is due."""
        self._watched.progress.add(batch_event)
        self.tick()

    def tick(self) -> None:
        """Draw when that is due."""
        now = self._watched.ticks()
        if now - self._drawn_at < EVERY_S:
            return
        self._drawn_at = now
        size = self._console.size
        # The last line stays free: terminals scroll when it is written to. So do the last columns: a Ctrl-C is shown
        # there, as ^C, and must not wrap.
        lines = build_screen(
            self._watched.snapshot(), self._watched.batch, max(1, size.width - _FREE_CELLS), max(1, size.height - 1)
        )
        if size != self._size:
            # Of another width the lines that stand there are not where they were drawn.
            self._live.stop()
            self._live, self._size = self._open(), size
            self._live.start()
        elif lines == self._drawn:
            return
        self._drawn = lines
        self._live.update(Group(*(Text.assemble(line, end="\n", no_wrap=True) for line in lines)), refresh=True)

    def _open(self) -> Live:
        return Live(console=self._console, auto_refresh=False, transient=True)


def open_display(watched: Watched, console: Console, *, as_json: bool = False) -> Display:
    """The one that fits: JSON on stdout when it is wanted, else on `console`, lines where it is no terminal."""
    if as_json:
        return JsonLines(watched, sys.stdout)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(watched, console)
    return PlainLines(watched, console.file)
