"""Streams to ports of this machine, in place of ports of a sandbox."""

import asyncio

from toolcrew.orchestrator.streams import StreamPiece, StreamTarget


class PortStream:
    """A stream to a port of this machine, with the methods of Stream that previews use."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._position = 0
        self._both_ended = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._both_ended.is_set()

    async def read(self) -> StreamPiece | None:
        if self._reader.at_eof():
            await self._both_ended.wait()
            return None
        data = await self._reader.read(32 * 1024)
        self._position += len(data)
        return StreamPiece(data, self._position - len(data), False, is_last=not data)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        self._writer.write(data)
        await self._writer.drain()
        if is_last:
            self._writer.write_eof()
            self._both_ended.set()

    def close(self) -> None:
        self._writer.close()


class LocalPorts:
    """Opens such streams. `opened`: all of them. `targets`: the session and the author of each."""

    def __init__(self) -> None:
        self.opened: list[PortStream] = []
        self.targets: list[StreamTarget] = []

    async def open(self, target: StreamTarget, port: int) -> PortStream:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=32 * 1024)
        self.targets.append(target)
        self.opened.append(PortStream(reader, writer))
        return self.opened[-1]
