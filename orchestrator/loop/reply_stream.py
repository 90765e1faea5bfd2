"""Two steps between the model's stream and the agent loop: reading the stream in the background, and removing repeated
text after an interrupted reply.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from toolcrew.contract.errors import ModelInterrupted
from toolcrew.orchestrator.dialects.model import Chunk

MAX_CHUNKS = 64 * 1024
"""Number of chunks of a reply that may wait in memory until the agent loop takes them. At the limit, reading from the
server pauses. No normal reply has that many tokens, so only a broken server reaches the limit.
"""


class ReplyChanged(Exception):
    """Raised at the end of a reply that was logged in another form. The run must read this form, because a process that
    resumes the run reads it.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__("the reply was logged in another form")
        self.chunks = chunks


class ReadAhead:
    """Reads the model's stream in the background, so that a tool that runs for 30 s does not stall the connection.

    The object can be iterated once. Raises the errors of the stream; a stream that cancelled itself raises
    ModelInterrupted.
    """

    def __init__(self, stream: AsyncIterator[Chunk]) -> None:
        self._stream = stream
        self._queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(MAX_CHUNKS)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ReadAhead":
        self._task = asyncio.create_task(self._pump(), name="model-stream")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def __aiter__(self) -> "ReadAhead":
        return self

    async def __anext__(self) -> Chunk:
        item = await self._queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    async def _pump(self) -> None:
        await self._queue.put(await self._read())

    async def _read(self) -> Exception | None:
        """Read to the end. Return an exception of the stream, which `__anext__` raises."""
        try:
            async for chunk in self._stream:
                await self._queue.put(chunk)
        except asyncio.CancelledError:
            assert self._task is not None
            if not self._task.cancelling():
                return ModelInterrupted("the model's stream cancelled itself")
            # If the task was cancelled while it waited for the full queue, the stream itself was not cancelled, so
            # close it.
            close = getattr(self._stream, "aclose", None)
            if close is not None:
                await close()
            raise
        except Exception as error:  # noqa: BLE001  # the reader raises it
            return error
        return None


class DisplayedText:
    """The text of one step as it was shown. If the reply is requested again, equal text is not shown again."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._earlier_text = ""
        self._matched = 0

    def restart(self) -> None:
        """Record that the reply starts again from its beginning."""
        self._earlier_text, self._pieces, self._matched = self._displayed_text(), [], 0

    def withdraw(self) -> int:
        """Forget the text. Return how many characters to withdraw."""
        withdrawn = len(self._displayed_text())
        self._earlier_text, self._pieces, self._matched = "", [], 0
        return withdrawn

    def show(self, text: str) -> tuple[int, str]:
        """Return (number of earlier characters to withdraw, text to show now)."""
        self._pieces.append(text)
        if not self._earlier_text:
            return 0, text
        # Compared in place: a copy of the rest for each chunk would take quadratic time.
        if self._earlier_text.startswith(text, self._matched):
            self._matched += len(text)
            return 0, ""
        remaining = self._earlier_text[self._matched :]
        common_length = _common_prefix(remaining, text)
        self._earlier_text = ""
        return len(remaining) - common_length, text[common_length:]

    def end(self) -> int:
        """Return how many earlier characters to withdraw at the end of the reply."""
        withdrawn = len(self._earlier_text) - self._matched if self._earlier_text else 0
        self._earlier_text = ""
        return withdrawn

    def _displayed_text(self) -> str:
        # The displayed text: the new reply so far, then the remaining text of the earlier reply.
        return "".join(self._pieces) + (self._earlier_text[self._matched :] if self._earlier_text else "")


def _common_prefix(first: str, right: str) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(first, right, strict=False)) if a != b),
        min(len(first), len(right)),
    )
