"""Processes of a session, with the asynchronous client."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.sdk.http.async_sockets import AsyncSocket, build_lost_socket, open_socket
from toolcrew.orchestrator.sdk.http.connection import Ask, parse, with_key
from toolcrew.orchestrator.sdk.http.handshakes import Attempts, SocketLost
from toolcrew.orchestrator.sdk.http.monitors import AsyncMonitor
from toolcrew.orchestrator.sdk.http.process_buffers import MAX_INPUT_BYTES, OutputPiece, ProcessBuffer, Start

if TYPE_CHECKING:
    from toolcrew.contract.process_views import ProcessEnd, ProcessView
    from toolcrew.orchestrator.sdk.http.async_client import AsyncClient

SIGKILL = 9
START_S = 600.0
"""Seconds that the start of a process may take: the sandbox may have to be started first."""


class AsyncProcesses:
    """The processes of a session that were started here, and not by tools."""

    def __init__(self, client: "AsyncClient", path: str) -> None:
        self._client = client
        self._path = f"{path}/processes"

    async def start(
        self,
        argv: Sequence[str],
        *,
        pty: tuple[int, int] | None = None,
        stdin: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        tag: str | None = None,
        timeout_s: float | None = None,
    ) -> "AsyncProcess":
        """Start a program without a shell. It goes on when this program ends.

        `pty`: run the program in a terminal with so many columns and rows. `tag`: a name of your choice. `timeout_s`:
        the process is killed after so many seconds. The process waits for the reader of its output.
        """
        from toolcrew.contract.process_views import StartedProcess

        body = {
            "argv": list(argv),
            "pty": pty and {"cols": pty[0], "rows": pty[1]},
            "stdin": stdin,
            "env": dict(env or {}),
            "cwd": cwd,
            "user": user,
            "tag": tag,
            "timeout_s": timeout_s,
            # Otherwise a program that writes much could lose output before its first reader.
            "pace": True,
        }
        ask = with_key(Ask("POST", self._path, body=body, wait_s=START_S))
        started = parse(StartedProcess, await self._client.send(ask))
        return AsyncProcess(self._client, self._path, started.process, from_=0, pace=True)

    async def list(self) -> "Sequence[ProcessView]":
        """Return the processes, and those that ended a short time ago."""
        from toolcrew.contract.access_views import Page
        from toolcrew.contract.process_views import ProcessView

        return (await self._client.get(Page[ProcessView], self._path)).data

    def attach(self, process: int, from_: Start = "start", *, pace: bool = False) -> "AsyncProcess":
        """Return a handle of a process. Nothing is sent.

        `from_`: the position where its output begins, "start" for the oldest byte that the sandbox still has, at most 1
        MiB back, or "live". `pace`: the process waits for this reader, and otherwise a slow reader loses output.
        """
        return AsyncProcess(self._client, self._path, process, from_=from_, pace=pace)


class AsyncProcess:
    """A process of a session. After a lost connection its output continues at its position, and input that the process
    has not got is sent again. The end of a `with` block detaches; the process goes on.
    """

    def __init__(self, client: "AsyncClient", path: str, process: int, *, from_: Start, pace: bool) -> None:
        self._client = client
        self._path = f"{path}/{process}"
        self._pace = pace
        self._buffer = ProcessBuffer(from_)
        self._monitor = AsyncMonitor()
        self._sending = asyncio.Lock()
        self._socket: AsyncSocket | None = None
        self.process = process
        """Its number, for `attach`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.detach()

    async def __aiter__(self) -> AsyncGenerator[OutputPiece]:
        """Yield the output in pieces, until the process ends."""
        while (piece := await self._next_piece()) is not None:
            yield piece

    async def read(self) -> bytes:
        """Return the next output, of standard output and error alike; b"" after the end of the process."""
        piece = await self._next_piece()
        return piece.data if piece is not None else b""

    async def write(self, data: bytes | str) -> None:
        """Write input. Waits while the process reads slowly. Raises ToolFailure after its end."""
        content = data.encode() if isinstance(data, str) else data
        self._monitor.start(self._run)
        for at in range(0, len(content), MAX_INPUT_BYTES):
            async with self._monitor:
                await self._monitor.wait_for(lambda: self._buffer.is_writable)
                self._buffer.write(content[at : at + MAX_INPUT_BYTES])
            await self._send_input()

    async def close_stdin(self) -> None:
        """End the input, after all that was written. Repeatable."""
        self._monitor.start(self._run)
        async with self._monitor:
            self._buffer.end_input()
        await self._send_input()

    async def resize(self, cols: int, rows: int) -> None:
        """Change the size of the terminal."""
        body = {"cols": cols, "rows": rows}
        await self._client.send(Ask("POST", f"{self._path}/resize", repeats=True, body=body))

    async def signal(self, number: int, *, tree: bool = False) -> None:
        """Send a signal to the process. `tree`: to its process group too."""
        body = {"signal": int(number), "tree": tree}
        await self._client.send(with_key(Ask("POST", f"{self._path}/signal", body=body)))

    async def kill(self) -> None:
        """Kill the process and its process group."""
        await self.signal(SIGKILL, tree=True)

    async def info(self) -> "ProcessView":
        """Return the process with its program, the position of its output, and its end."""
        from toolcrew.contract.process_views import ProcessView

        return await self._client.get(ProcessView, self._path)

    async def wait(self, timeout_s: float | None = None) -> "ProcessEnd":
        """Return the end of the process. Raises ToolFailure with the code TIMEOUT after `timeout_s`.

        The process does not wait for a reader meanwhile: output that no one reads is held up to 1 MiB, and its oldest
        bytes are lost beyond.
        """
        self._monitor.start(self._run)
        await self._set_watched(False)
        try:
            async with self._monitor:
                await self._monitor.wait_for(lambda: self._buffer.is_over, timeout_s)
        finally:
            await self._set_watched(True)
        if self._buffer.error is not None:
            raise self._buffer.error
        if self._buffer.end is None:
            raise ToolFailure(ErrorCode.TIMEOUT, f"the process still runs after {timeout_s} s: wait again")
        return self._buffer.end

    @property
    def lost_bytes(self) -> int:
        """Output that was lost so far, because this program did not read it in time."""
        return self._buffer.lost_bytes

    async def detach(self) -> None:
        """Close the connection. The process goes on. Repeatable."""
        async with self._monitor:
            socket = self._socket
            if not self._buffer.is_over:
                self._buffer.error = ToolFailure(
                    ErrorCode.INVALID_ARGUMENTS, "this program has detached from the process: attach again"
                )
        if socket is not None:
            await socket.close()
        await self._monitor.stop()

    async def _set_watched(self, is_watched: bool) -> None:
        async with self._monitor:
            self._buffer.is_unwatched = not is_watched

    async def _next_piece(self) -> OutputPiece | None:
        self._monitor.start(self._run)
        async with self._monitor:
            await self._monitor.wait_for(lambda: self._buffer.is_readable)
            return self._buffer.take()

    async def _run(self) -> None:
        attempts = Attempts()
        try:
            while not self._buffer.is_over:
                try:
                    await self._follow(attempts)
                except SocketLost as lost:
                    await asyncio.sleep(attempts.pause(lost.error or build_lost_socket(self._client)))
        except Exception as error:  # noqa: BLE001
            # It belongs to the readers and writers of the process, who wait in other tasks.
            async with self._monitor:
                self._buffer.error = error

    async def _follow(self, attempts: Attempts) -> None:
        """Attach once, and receive until the connection ends."""
        params = {"from": self._buffer.start, "writer": self._buffer.writer, "pace": str(self._pace).lower()}
        socket = await open_socket(self._client, f"{self._path}/attach", params)
        try:
            while not self._buffer.is_over:
                message = await socket.receive()
                async with self._monitor:
                    if is_open := self._buffer.receive(message):
                        self._socket = socket
                if is_open:
                    attempts.succeed()
                    await self._send_input()
                async with self._monitor:
                    await self._monitor.wait_for(lambda: self._buffer.has_room)
        finally:
            self._socket = None
            await socket.close()

    async def _send_input(self) -> None:
        """Send the input that the connection has not sent. Without one, the next connection sends it."""
        async with self._sending:
            while True:
                async with self._monitor:
                    socket = self._socket
                    message = self._buffer.next_input() if socket is not None else None
                if socket is None or message is None:
                    return
                with suppress(SocketLost):
                    await socket.send(message)
