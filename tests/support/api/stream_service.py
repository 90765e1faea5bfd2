"""A service with one process, over the routes of the HTTP API, and a network that breaks connections at any byte."""

import asyncio
import json
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

WINDOW_BYTES = 65_536
STARTED = {"process": 7, "pid": 70}


@dataclass
class FakeProcess:
    """A process that writes `pieces` (stream, bytes), echoes its input if `echoes`, and ends after `reads` bytes of
    input, or at the end of its input if it `reads_to_end`. It keeps all its output. `typed`: the input that it got.
    `requests`: the bodies of the other requests. `commands`: the text messages, each with the bytes typed before it.
    """

    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    reads: int = 0
    echoes: bool = False
    ring_start: int = 0
    end: dict[str, Any] = field(default_factory=lambda: {"exit_code": 3, "signal": None, "lost_bytes": 0})
    typed: bytearray = field(default_factory=bytearray)
    accepted: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    attached: list[dict[str, str]] = field(default_factory=list)
    gaps: int = 0
    reads_to_end: bool = False
    pty: dict[str, int] | None = None
    commands: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def output(self, start: int) -> Iterator[tuple[int, int, bytes]]:
        position = 0
        for stream, data in self.pieces:
            skipped = max(start - position, 0)
            if skipped < len(data):
                yield stream, position + skipped, data[skipped:]
            position += len(data)

    def type(self, writer: str, offset: int, data: bytes) -> int:
        accepted = self.accepted.get(writer, 0)
        if offset > accepted:
            self.gaps += 1
            raise WebSocketDisconnect(1008)
        fresh = data[accepted - offset :]
        self.typed += fresh
        self.accepted[writer] = accepted + len(fresh)
        if self.echoes and fresh:
            self.pieces.append((1, fresh))
        self.changed.set()
        return self.accepted[writer]

    def view(self) -> dict[str, Any]:
        return {
            **STARTED,
            "argv": ["sh", "-c", "a b"],
            "cwd": "/workspace",
            "tag": None,
            "pty": self.pty,
            "user": None,
            "started_at": "2026-11-29T12:00:00Z",
            "output_bytes": sum(len(data) for _, data in self.pieces),
            "end": None,
        }

    def command(self, fields: dict[str, Any]) -> None:
        self.commands.append((fields, len(self.typed)))
        self.changed.set()

    def is_over(self) -> bool:
        has_ended = not self.reads_to_end or any("close_stdin" in fields for fields, _ in self.commands)
        return has_ended and len(self.typed) >= self.reads


class StreamService:
    """Serves `process` at every session. `refusals`: problems of the next attachments, before one succeeds."""

    def __init__(self, process: FakeProcess) -> None:
        self.process = process
        self.refusals: list[dict[str, Any]] = []
        path = "/v1/sessions/{session}/processes"
        self.app = Starlette(
            routes=[
                Route(path, self._start, methods=["POST"]),
                Route(path, self._list),
                Route(path + "/{process}", self._show),
                Route(path + "/{process}/{action}", self._act, methods=["POST"]),
                WebSocketRoute(path + "/{process}/attach", self._attach),
            ]
        )

    async def _start(self, request: Request) -> Response:
        self.process.requests.append(("start", await request.json()))
        return JSONResponse(STARTED, 201)

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"data": [self.process.view()], "next_cursor": None})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self.process.view())

    async def _act(self, request: Request) -> Response:
        body = await request.body()
        self.process.requests.append((request.path_params["action"], json.loads(body) if body else None))
        return Response(status_code=204)

    async def _attach(self, socket: WebSocket) -> None:
        await socket.accept()
        if self.refusals:
            problem = self.refusals.pop(0)
            await socket.send_json({"event": "error", **problem})
            await socket.close(4000 + problem["status"])
            return
        self.process.attached.append(dict(socket.query_params))
        try:
            reading = asyncio.ensure_future(self._read_input(socket))
            try:
                await self._write_output(socket)
            finally:
                reading.cancel()
                await asyncio.wait([reading])
        except WebSocketDisconnect:
            return
        await socket.close()

    async def _read_input(self, socket: WebSocket) -> None:
        writer = socket.query_params["writer"]
        try:
            while True:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                if (text := message.get("text")) is not None:
                    self.process.command(json.loads(text))
                    continue
                (offset,) = struct.unpack_from(">Q", message["bytes"])
                accepted = self.process.type(writer, offset, message["bytes"][8:])
                # As the API does: the last window may still be on its way.
                if accepted > WINDOW_BYTES:
                    await socket.send_json({"event": "input", "position": accepted - WINDOW_BYTES})
        finally:
            self.process.changed.set()

    async def _write_output(self, socket: WebSocket) -> None:
        process, query = self.process, socket.query_params
        asked = process.ring_start if query["from"] in ("start", "live") else int(query["from"])
        position = max(asked, process.ring_start)
        opened = {"process": 7, "pid": 70, "pty": None, "from": position, "lost_bytes": position - asked}
        accepted = process.accepted.get(query["writer"], 0)
        await socket.send_json({"event": "opened", **opened, "input_offset": accepted})
        while True:
            process.changed.clear()
            for stream, at, data in list(process.output(position)):
                await socket.send_bytes(struct.pack(">BQ", stream, at) + data)
                position = at + len(data)
            if process.is_over() and not list(process.output(position)):
                await socket.send_json({"event": "end", **process.end})
                return
            await process.changed.wait()


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serve an application in a thread. Yields its address."""
    config = uvicorn.Config(app, port=0, log_config=None, ws="websockets-sansio", lifespan="off")
    server, started = uvicorn.Server(config), threading.Event()

    class Started(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    server = Started(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(30)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


class BreakingNetwork:
    """Forwards connections to a service, and breaks them. `down` and `up`: numbers of bytes, from the service and to it,
    counted from the last break on: the connection that carries the last of them is broken there.
    """

    def __init__(self, url: str, down: Sequence[int] = (), up: Sequence[int] = ()) -> None:
        self._port = int(url.rpartition(":")[2])
        self.down, self.up = list(down), list(up)
        self.broken = 0
        self.on_break: Callable[[], object] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self.break_all()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def break_all(self) -> None:
        """Break the open connections."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.ensure_future(self._forward(reader, writer)))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        tasks = [
            asyncio.create_task(self._pump(reader, inner_writer, self.up)),
            asyncio.create_task(self._pump(inner_reader, writer, self.down)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            # Reset, so that nothing that was written is delivered later.
            writer.transport.abort()
            inner_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, breaks: list[int]) -> None:
        try:
            while data := await reader.read(65536):
                if is_broken := bool(breaks) and breaks[0] <= len(data):
                    data = data[: breaks.pop(0)]
                    self.broken += 1
                    self.on_break()
                elif breaks:
                    breaks[0] -= len(data)
                writer.write(data)
                await writer.drain()
                if is_broken:
                    break
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            return
