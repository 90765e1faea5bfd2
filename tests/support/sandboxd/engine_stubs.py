"""Engines with faults, on Unix sockets: stubs that never answer correctly, and a relay to the real engine that tests
can stall and cut.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_VERSION = b'{"ApiVersion": "1.41", "Version": "20.10.0"}'


def real_engine_socket() -> str:
    """Return the socket of the local engine, or the Unix socket that DOCKER_HOST names."""
    return urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock").path


async def answers_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept and read, but never answer."""
    while await reader.read(65536):
        pass


async def stalls_in_its_header(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begin an answer and never continue."""
    await reader.read(65536)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Le")
    await answers_nothing(reader, writer)


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send one byte at a time. Each byte is in time, but the answer never ends."""
    await reader.read(65536)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.02)


async def talks_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send bytes that are not HTTP."""
    await reader.read(65536)
    writer.write(b"\x00\x15\x03\x01 SSH-2.0-OpenSSH_9.2\r\n" * 40)


async def answers_something_else(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the version request correctly, then answer as an ordinary web server: valid JSON that no engine sends."""
    while head := await reader.read(65536):
        _answer(writer, "200 OK", _VERSION if b"GET /version" in head else b"[1, 2, 3]")


def refuses(message: bytes) -> Behaviour:
    """Return an engine that reports its version and answers all other requests with a 500 with `message`."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(65536):
            if b"GET /version" in head:
                _answer(writer, "200 OK", _VERSION)
            else:
                _answer(writer, "500 Internal Server Error", b'{"message": "' + message + b'"}')

    return behave


def _answer(writer: asyncio.StreamWriter, status: str, body: bytes) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


class EngineRelay:
    """A relay between a client and the real engine. A stalled relay accepts data and forwards the data after
    `resume`, as a hung engine does.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.held = asyncio.Event()
        """Set when the relay has received data since it was stalled."""

    def stall(self) -> None:
        self.held.clear()
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Break all open connections. New connections are still accepted."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._upstream)
        self._writers |= {writer, upstream_writer}
        try:
            await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))
        finally:
            self._writers -= {writer, upstream_writer}
            upstream_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(65536):
                self.held.set()
                # The chunk is already read, so the sender sees a successful write, as with a hung engine.
                await self._flows.wait()
                writer.write(chunk)
                await writer.drain()
            writer.write_eof()


@asynccontextmanager
async def relayed_engine(path: Path) -> AsyncIterator[EngineRelay]:
    """Run a relay to the real engine at `path`."""
    relay = EngineRelay(real_engine_socket())
    async with stub_engine(path, relay.serve):
        yield relay


@asynccontextmanager
async def stub_engine(path: Path, behaviour: Behaviour) -> AsyncIterator[None]:
    """Run an engine with this behaviour at `path`."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await behaviour(reader, writer)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(serve, path=str(path))
    try:
        yield
    finally:
        server.close()
        # A stub that never answers does not end by itself, so its task is cancelled.
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
