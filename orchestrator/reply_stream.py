"""The model's stream on its way to the loop: read ahead, and without what a broken reply has said already."""

import asyncio
from collections.abc import AsyncIterator

from orchestrator.models.base import Chunk


class ReadAhead:
    """Reads the model's stream in the background, so that a tool that runs for 30 s does not stall the connection."""

    def __init__(self, stream: AsyncIterator[Chunk]) -> None:
        self._stream = stream
        self._queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ReadAhead":
        self._task = asyncio.create_task(self._pump(), name="model-stream")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    async def _pump(self) -> None:
        try:
            async for chunk in self._stream:
                self._queue.put_nowait(chunk)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # handed to the reader, which raises it
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(None)


class ShownText:
    """The text of one step as it was shown. When the reply breaks off and comes again, what is the same is not shown again."""

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
        rest = self._before[self._matched :]
        if rest.startswith(text):
            self._matched += len(text)
            return 0, ""
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
