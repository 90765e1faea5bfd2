"""Both ends of sandboxd's tunnels for tests: a proxy that the test controls, and a guest that is a list of frames."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.stack.waiting import SOON_S
from toolcrew.workers.sandboxd.egress.relay import GRANT, ProxyStreams, open_proxy
from toolcrew.workers.sandboxd.egress.tunnels import Tunnels
from toolcrew.workers.sandboxd.frames import Frame

PREAMBLE = {"v": 1, "tenant": "acme", "session": "s1", "rules": {"hosts": ["example.org"]}}


@dataclass
class ProxyEnd:
    """A connection as the proxy sees the connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    preamble: dict[str, Any]

    async def read(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), SOON_S)

    async def read_all(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), SOON_S)

    def stop_reading(self) -> None:
        """Stop reading: further data stays in the socket."""
        assert isinstance(self.writer.transport, asyncio.Transport)
        self.writer.transport.pause_reading()

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await asyncio.wait_for(self.writer.drain(), SOON_S)


@dataclass
class FakeGuestEnd:
    """The guest's side: functions that send a frame to sandboxd and that return the next frame of a connection."""

    tunnels: Tunnels = field(init=False)
    violations: list[str] = field(default_factory=list)
    proxied: "asyncio.Queue[ProxyEnd]" = field(default_factory=asyncio.Queue)
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    unread_bytes: int = 0
    _received: dict[int, "asyncio.Queue[tuple[str, dict[str, Any], bytes]]"] = field(default_factory=dict)

    def send_frame(self, event: str, conn: object, body: bytes = b"", **fields: object) -> None:
        self.tunnels.take(Frame({"ev": event, "conn": conn, **fields}, body))

    def open(self, conn: int) -> None:
        self.send_frame("net_open", conn)

    async def open_through(self, conn: int) -> ProxyEnd:
        self.open(conn)
        return await asyncio.wait_for(self.proxied.get(), SOON_S)

    def take(self, header: dict[str, Any], body: bytes) -> None:
        self.unread_bytes += len(body)
        self._queue(header["conn"]).put_nowait((header["op"], header, body))

    async def receive(self, conn: int) -> tuple[str, dict[str, Any], bytes]:
        """Return op, header and body of the next frame of that connection."""
        frame = await asyncio.wait_for(self._queue(conn).get(), SOON_S)
        self.unread_bytes -= len(frame[2])
        return frame

    async def receive_ops(self, conn: int, *, until: str = "net_close") -> list[str]:
        ops: list[str] = []
        while until not in ops:
            ops.append((await self.receive(conn))[0])
        return ops

    async def receive_data(self, conn: int, count: int) -> bytes:
        """Return `count` bytes and return the window as a guest does."""
        data, unacknowledged = b"", 0
        while len(data) < count:
            op, _, body = await self.receive(conn)
            assert op == "net_data", op
            data, unacknowledged = data + body, unacknowledged + len(body)
            if unacknowledged >= GRANT:
                self.send_frame("net_room", conn, bytes=unacknowledged)
                unacknowledged = 0
        return data

    def _queue(self, conn: int) -> "asyncio.Queue[tuple[str, dict[str, Any], bytes]]":
        return self._received.setdefault(conn, asyncio.Queue())


@asynccontextmanager
async def running_tunnels(
    folder: Path, connect: Callable[[], Awaitable[ProxyStreams]] | None = None
) -> AsyncIterator[FakeGuestEnd]:
    """Run tunnels to a proxy that passes each connection to the test, or to the connection that `connect` opens."""
    guest = FakeGuestEnd()
    guest.drained.set()
    path = folder / "proxy.sock"

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest.proxied.put_nowait(ProxyEnd(reader, writer, json.loads(await reader.readline())))

    async def drain() -> None:
        await guest.drained.wait()

    server = await asyncio.start_unix_server(accept, str(path))
    guest.tunnels = Tunnels(
        guest.take,
        drain,
        connect or partial(open_proxy, path, PREAMBLE, frozenset({os.geteuid()})),
        guest.violations.append,
    )
    try:
        yield guest
    finally:
        guest.tunnels.close()
        server.close()


async def wait_closed(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has closed, and drop the remaining data."""
    try:
        while await asyncio.wait_for(reader.read(65_536), SOON_S):
            pass
    except ConnectionError:
        return


async def refuse_connection() -> Any:
    """Fail as a connection to a missing proxy does."""
    raise ConnectionRefusedError("no server listens")
