"""The text of a run's replies while they come: the loop hears a reply when it is whole and remembered, whoever watches
need not wait so long.
"""

from collections.abc import Callable

from contract.run_events import OnEvent, RunEvent, TextArrived, TextWithdrawn
from orchestrator.dialects.base import ReplyReader, Text
from orchestrator.dialects.model import Chunk


class LiveText:
    """One run's. It reads each reply beside the loop, in the loop's dialect, and acts on nothing; what the loop then
    tells of text that has been shown is left out."""

    def __init__(self, run: str, tell: OnEvent) -> None:
        self._run = run
        self._tell = tell
        self._open_reader: Callable[[], ReplyReader] | None = None
        self._reader: ReplyReader | None = None
        self._shown = 0

    def use(self, open_reader: Callable[[], ReplyReader]) -> None:
        """How the run's replies are read."""
        self._open_reader = open_reader

    def begin(self) -> None:
        """A reply is asked for."""
        self._reader = self._open_reader() if self._open_reader is not None else None
        self._shown = 0

    def feed(self, chunk: Chunk) -> None:
        """A piece of it has come."""
        for event in self._reader.feed(chunk) if self._reader is not None else ():
            if isinstance(event, Text) and event.text:
                self._shown += len(event.text)
                self._tell(TextArrived(run=self._run, text=event.text))

    def withdraw(self) -> None:
        """It broke off, and nobody else has heard of it."""
        if self._shown:
            self._tell(TextWithdrawn(run=self._run, characters=self._shown))
        self._shown = 0

    def on_event(self, event: RunEvent) -> None:
        """What the loop tells."""
        if isinstance(event, TextArrived) and self._shown:
            text, known = event.text[self._shown :], min(self._shown, len(event.text))
            self._shown -= known
            if not text:
                return
            event = TextArrived(run=event.run, at=event.at, text=text)
        self._tell(event)
