"""Output of a running call on a terminal: escaped, dimmed, a few lines at a time; the result that follows has the whole
of it.
"""

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from orchestrator.terminal.text import escape_controls

MAX_LINE_CHARS = 200
TAIL_LINES = 8
REFRESH_PER_S = 8


class LiveLines:
    """Pieces of output as whole lines for people; one that has not ended waits for its rest, so far as it is shown at
    all.
    """

    def __init__(self) -> None:
        self._open: dict[str, str] = {}

    def feed(self, stream: str, text: str) -> list[str]:
        """The lines that are complete by this piece."""
        *lines, rest = (self._open.get(stream, "") + text).split("\n")
        # More than is shown is not kept: a line may never end.
        self._open[stream] = _last_turn(rest)[: MAX_LINE_CHARS + 1] + ("\r" if rest.endswith("\r") else "")
        return [_fit(line) for line in lines]

    def rest(self) -> list[str]:
        """Lines that have not ended, so far."""
        return [_fit(line) for line in self._open.values() if line]


class LiveOutput:
    """Shows the output of one call while it runs. On a terminal its last lines, which vanish when it ends; elsewhere
    every line, as it comes.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines = LiveLines()
        self._tail: list[str] = []
        self._live = (
            Live(console=console, transient=True, refresh_per_second=REFRESH_PER_S) if console.is_terminal else None
        )

    def __enter__(self) -> "LiveOutput":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(Text(""))
            self._live.stop()
        else:
            self._print(self._lines.rest())

    def show(self, stream: str, text: str) -> None:
        """One more piece."""
        lines = self._lines.feed(stream, text)
        if self._live is None:
            self._print(lines)
            return
        self._tail = [*self._tail, *lines][-TAIL_LINES:]
        shown = [*self._tail, *self._lines.rest()][-TAIL_LINES:]
        self._live.update(Text("\n".join(shown), style="dim", no_wrap=True, overflow="ellipsis"))

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            self._console.print(Text(line, style="dim"), soft_wrap=True)


def _last_turn(line: str) -> str:
    """What stands there of a line that was written over again and again, as progress is told."""
    return line.rstrip("\r").rpartition("\r")[2]


def _fit(line: str) -> str:
    """A line as it can be shown: without what would drive a terminal, and told when it is cut."""
    line = _last_turn(line)
    cut = line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}..."
    return escape_controls(cut).replace("\t", "    ")
