"""The model's stream on its way to the loop: read ahead, and without what a broken reply has said already."""

import asyncio
from collections.abc import AsyncIterator

from contract.errors import ModelInterrupted
from orchestrator.dialects.model import Chunk

MAX_CHUNKS = 64 * 1024
"""Read ahead of the loop. More than a reply has tokens, so only a server that does not end waits, for as long as a tool
or a person takes.
"""


class ReadAhead:
    """Reads the model's stream in the background, so that a tool that runs for 30 s does not stall the connection.

    Iterated once. Raises what the stream raises; a stream that was cancelled from within is ModelInterrupted.
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
        """Read to the end; gives what the stream raised, for the reader to raise."""
        try:
            async for chunk in self._stream:
                await self._queue.put(chunk)
        except asyncio.CancelledError:
            assert self._task is not None
            if not self._task.cancelling():
                return ModelInterrupted("the model's stream was cancelled from within")
            # Cancelled while the queue was full, the stream does not know of it yet.
            close = getattr(self._stream, "aclose", None)
            if close is not None:
                await close()
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the reader raises it
            return error
        return None


class ShownText:
    """The text of one step as it was shown. When the reply breaks off and comes again, what is the same is not shown
    again.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._before = ""
        self._matched = 0

    def begin_again(self) -> None:
        """The reply comes again, from its start."""
        self._before, self._pieces, self._matched = self._text(), [], 0

    def show(self, text: str) -> tuple[int, str]:
        """(characters shown earlier that are void, text to show now)."""
        self._pieces.append(text)
        if not self._before:
            return 0, text
        # In place: a copy of the rest for each chunk would cost the reply's square.
        if self._before.startswith(text, self._matched):
            self._matched += len(text)
            return 0, ""
        rest = self._before[self._matched :]
        same = _common_prefix(rest, text)
        self._before = ""
        return len(rest) - same, text[same:]

    def end(self) -> int:
        """The reply has ended: how many characters shown earlier are void."""
        void = len(self._before) - self._matched if self._before else 0
        self._before = ""
        return void

    def _text(self) -> str:
        # What is on display: the new reply so far, and behind it what the old one had more.
        return "".join(self._pieces) + (self._before[self._matched :] if self._before else "")


def _common_prefix(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
