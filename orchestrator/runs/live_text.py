"""Shows the text of a reply while the reply arrives. The loop of a durable run receives a reply only after the
complete reply is logged.
"""

from collections.abc import Callable

from toolcrew.contract.run_events import OnEvent, RunEvent, TextArrived, TextWithdrawn
from toolcrew.orchestrator.dialects.base import ReplyReader, Text
from toolcrew.orchestrator.dialects.model import Chunk


class LiveText:
    """Publishes the text of one run's replies while they arrive.

    This class reads each reply in the dialect of the loop and publishes only text. The loop repeats the text in its
    own events, so text that was already shown is removed from those events.
    """

    def __init__(self, run: str, on_event: OnEvent) -> None:
        self._run = run
        self._publish = on_event
        self._open_reader: Callable[[], ReplyReader] | None = None
        self._reader: ReplyReader | None = None
        self._shown = 0

    def use(self, open_reader: Callable[[], ReplyReader]) -> None:
        """Set the function that opens a reader for each reply."""
        self._open_reader = open_reader

    def begin(self) -> None:
        """Begin to read a new reply of the model."""
        self._reader = self._open_reader() if self._open_reader is not None else None
        self._shown = 0

    def feed(self, chunk: Chunk) -> None:
        """Publish the text of a chunk."""
        for event in self._reader.feed(chunk) if self._reader is not None else ():
            if isinstance(event, Text) and event.text:
                self._shown += len(event.text)
                self._publish(TextArrived(run=self._run, text=event.text))

    def withdraw(self) -> None:
        """Withdraw the shown text of a reply that was interrupted."""
        if self._shown:
            self._publish(TextWithdrawn(run=self._run, characters=self._shown))
        self._shown = 0

    def pass_on(self, event: RunEvent) -> None:
        """Pass an event of the loop to the listener, without the text that was already published."""
        if isinstance(event, TextArrived) and self._shown:
            text = event.text[self._shown :]
            self._shown -= min(self._shown, len(event.text))
            if not text:
                return
            event = TextArrived(run=event.run, at=event.at, text=text)
        self._publish(event)
