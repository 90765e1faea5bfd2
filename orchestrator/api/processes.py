"""Processes of a session over HTTP, and their input and output over a WebSocket."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Path, Query, Request, Response, WebSocket
from pydantic import Field
from starlette.requests import ClientDisconnect

from toolcrew.contract.access_views import Page
from toolcrew.contract.calls import Record
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.process_views import (
    InputState,
    Name,
    NewInput,
    NewProcess,
    NewSignal,
    Position,
    ProcessEnd,
    ProcessState,
    ProcessView,
    StartedProcess,
    TerminalSize,
)
from toolcrew.contract.stream_protocol import WINDOW_BYTES
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.idempotency import IdempotencyKey, find_call_id
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.api.sandbox_streams import (
    SessionStreams,
    cut_at_failure,
    read_piece,
    use_streams,
)
from toolcrew.orchestrator.api.sessions import CLIENT_LEFT, SessionId
from toolcrew.orchestrator.api.sockets import (
    SocketOptions,
    parse_options,
    run_until_first_ends,
    send_event,
    serve_socket,
)
from toolcrew.orchestrator.http.piece_responses import CONTENT, PieceResponse, while_connected
from toolcrew.orchestrator.streams import Stream
from toolcrew.orchestrator.streams.rows import parse_answer_fields

router = APIRouter(prefix="/v1/sessions/{session_id}/processes", tags=["processes"], responses=responses(404))

ProcessNumber = Annotated[int, Path(ge=1, le=2**53)]
WaitS = Annotated[float, Query(ge=0, le=3600, description="Seconds to wait for the end of the process.")]
HOLD_S: Final = 10.0
"""Seconds for which a process with `pace` waits for its first reader."""
OUTPUT: Final = struct.Struct(">BQ")
"""Begins a binary message to the client: 1 for output or 2 for standard error, and the position of its first byte."""
INPUT: Final = struct.Struct(">Q")
"""Begins a binary message of the client: the position of its first byte in the writer's input."""


class _AttachOptions(SocketOptions):
    position: Position | Literal["start", "live"] = Field(default="start", alias="from")
    writer: Name | None = None
    pace: bool = False


class _Command(Record):
    """A text message of the client. Each has one field."""

    resize: TerminalSize | None = None
    signal: Annotated[int, Field(ge=1, le=64)] | None = None
    close_stdin: bool = False
    ping: int | None = None


@router.post("", status_code=201)
async def start_process(
    session_id: SessionId,
    body: NewProcess,
    caller: AnyCaller,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> StartedProcess:
    """Start a process, which goes on until it ends by itself, by a signal, at its `timeout_s` or with the session. Its
    last 1 MiB of output are kept.
    """
    streams = await use_streams(caller, session_id)
    key = find_call_id(f"process {session_id}", caller.identity.key_id, idempotency_key)
    async with AsyncExitStack() as stack:
        opening = {"what": "process", **body.model_dump(mode="json"), "key": key}
        stream = await stack.enter_async_context(streams.open(opening))
        started = parse_answer_fields(StartedProcess, {name: stream.opened.get(name) for name in ("process", "pid")})
        if body.pace:
            caller.app_state.background.begin(_hold(stack.pop_all()))
    response.headers["Location"] = f"/v1/sessions/{session_id}/processes/{started.process}"
    return started


async def _hold(stack: AsyncExitStack) -> None:
    """Keep the stream that has started a process. It reads nothing, so the process waits for another reader."""
    async with stack:
        await asyncio.sleep(HOLD_S)


@router.get("")
async def list_processes(session_id: SessionId, caller: AnyCaller) -> Page[ProcessView]:
    """List the processes that run, and those that ended in the last 300 seconds."""
    return Page(data=await _list(await use_streams(caller, session_id)))


@router.get("/{process}")
async def get_process(session_id: SessionId, process: ProcessNumber, caller: AnyCaller) -> ProcessView:
    """Return a process."""
    return await _find(await use_streams(caller, session_id), process)


async def _list(streams: SessionStreams) -> list[ProcessView]:
    found = (await streams.call("processes")).get("processes")
    return [parse_answer_fields(ProcessView, one) for one in (found if isinstance(found, list) else [])]


async def _find(streams: SessionStreams, process: int) -> ProcessView:
    for one in await _list(streams):
        if one.process == process:
            return one
    raise ToolFailure(ErrorCode.FILE_NOT_FOUND, f"the session has no process {process}: list its processes")


@router.post("/{process}/signal", status_code=204)
async def signal_process(session_id: SessionId, process: ProcessNumber, body: NewSignal, caller: AnyCaller) -> None:
    """Send a signal. With SIGKILL (9) the response follows the end of the process."""
    await (await use_streams(caller, session_id)).call("signal", process=process, **body.model_dump())


@router.post("/{process}/resize", status_code=204)
async def resize_process(session_id: SessionId, process: ProcessNumber, body: TerminalSize, caller: AnyCaller) -> None:
    """Change the size of a process's terminal."""
    await (await use_streams(caller, session_id)).call("resize", process=process, **body.model_dump())


@router.post("/{process}/input")
async def write_input(session_id: SessionId, process: ProcessNumber, body: NewInput, caller: AnyCaller) -> InputState:
    """Write to the input of a process. A request that is sent again writes nothing twice, because of its offset."""
    streams = await use_streams(caller, session_id)
    fields = body.model_dump(mode="json")
    return parse_answer_fields(InputState, await streams.call("input", process=process, **fields))


@router.post("/{process}/close_stdin", status_code=204)
async def close_input(session_id: SessionId, process: ProcessNumber, caller: AnyCaller) -> None:
    """Close the input of a process."""
    await (await use_streams(caller, session_id)).call("close_stdin", process=process)


@router.get("/{process}/wait")
async def wait_for_process(
    session_id: SessionId, process: ProcessNumber, caller: AnyCaller, request: Request, timeout_s: WaitS = 30.0
) -> ProcessState:
    """Wait until a process ends, for at most `timeout_s` seconds."""
    streams = await use_streams(caller, session_id)
    waiting = streams.call("wait", process=process, timeout_s=timeout_s)
    try:
        fields = await while_connected(request.receive, waiting)
    except ClientDisconnect:
        return Response(status_code=CLIENT_LEFT)  # type: ignore[return-value]
    if fields.get("running"):
        return ProcessState(running=True)
    return ProcessState(running=False, end=parse_answer_fields(ProcessEnd, fields))


@router.get(
    "/{process}/output",
    response_class=Response,
    responses={200: {"description": "The output", "content": {CONTENT: {}}}},
)
async def read_output(
    session_id: SessionId,
    process: ProcessNumber,
    caller: AnyCaller,
    position: Annotated[Position, Query(alias="from", description="The position of the first byte to return.")] = 0,
) -> Response:
    """Return the kept output of a process up to now, from a position on: standard output and standard error in the
    order in which they were written. The header `Output-From` is the position of the first byte, which is higher than
    `from` if older output is not kept any more.
    """
    streams = await use_streams(caller, session_id)
    until = (await _find(streams, process)).output_bytes
    async with AsyncExitStack() as stack:
        stream = await stack.enter_async_context(streams.open({"what": "attach", "process": process, "from": position}))
        start = _find_position(stream)
        headers = {"Content-Type": CONTENT, "Cache-Control": "no-store", "Output-From": str(start)}
        pieces = cut_at_failure(_read_until(stream, until - start), session_id)
        return PieceResponse(pieces, headers, stack.pop_all())


async def _read_until(stream: Stream, count: int) -> AsyncIterator[bytes]:
    """Yield `count` bytes, or fewer if the stream ends before."""
    while count > 0 and (piece := await read_piece(stream)) is not None:
        yield piece.data[:count]
        count -= len(piece.data)


def _find_position(stream: Stream) -> int:
    """Return the position of a stream's first byte in the output of its process."""
    return parse_answer_fields(_AttachedAt, {"from": stream.opened.get("from")}).position


class _AttachedAt(Record):
    position: Position = Field(alias="from")


class _Attached(_AttachedAt):
    process: Position
    pid: Position
    pty: bool
    lost_bytes: Position
    input_offset: Position


_ATTACHED: Final = ("process", "pid", "pty", "from", "lost_bytes", "input_offset")


@router.websocket("/{process}/attach")
async def attach_process(socket: WebSocket, session_id: str, process: str) -> None:
    """Serve a client that reads the output of a process and writes to its input."""

    async def serve(streams: SessionStreams, options: _AttachOptions) -> None:
        number = parse_options(_ProcessPath, {"process": process}).process
        attach = {"what": "attach", "process": number, "from": options.position}
        async with streams.open({**attach, "writer": options.writer, "pace": options.pace}) as stream:
            await _ProcessSocket(socket, streams, stream, number).serve()

    await serve_socket(socket, session_id, _AttachOptions, serve)


class _ProcessPath(Record):
    process: Annotated[int, Field(ge=1, le=2**53)]


class _ProcessSocket:
    """One client of a process."""

    def __init__(self, socket: WebSocket, streams: SessionStreams, stream: Stream, process: int) -> None:
        self._socket = socket
        self._streams = streams
        self._stream = stream
        self._process = process
        # The fields come from the sandbox, which may send others.
        self._attached = parse_answer_fields(_Attached, {name: stream.opened.get(name) for name in _ATTACHED})
        self._start, self._input_start = self._attached.position, self._attached.input_offset
        self._input_position = self._acknowledged = self._input_start
        self._has_closed_input = False

    async def serve(self) -> None:
        """Relay until the process ends or the client leaves."""
        await send_event(self._socket, "opened", **self._attached.model_dump(by_alias=True))
        await run_until_first_ends(self._socket, self._send_output(), self._take_messages())

    async def _send_output(self) -> None:
        while (piece := await self._stream.read()) is not None:
            head = OUTPUT.pack(2 if piece.is_stderr else 1, self._start + piece.offset)
            await self._socket.send_bytes(head + piece.data)
        await send_event(self._socket, "end", **parse_answer_fields(ProcessEnd, self._stream.end).model_dump())

    async def _take_messages(self) -> None:
        while (message := await self._socket.receive())["type"] == "websocket.receive":
            data, text = message.get("bytes"), message.get("text")
            if data is not None:
                await self._write(data)
            else:
                await self._execute(parse_options(_Command, text))

    async def _write(self, message: bytes) -> None:
        if self._has_closed_input:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, "this connection has closed the input: attach again to write"
            )
        if len(message) < INPUT.size:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "a binary message begins with a position of 8 bytes")
        at = INPUT.unpack_from(message)[0]
        if at > self._input_position:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"input before the position {at} is missing: continue at {self._input_position}",
            )
        # A client that attaches again repeats input of which it does not know whether it arrived.
        data = message[INPUT.size + self._input_position - at :]
        await self._stream.write(data)
        self._input_position += len(data)
        await self._acknowledge()

    async def _acknowledge(self) -> None:
        """Say which input the sandbox has. It has everything but the last window."""
        arrived = max(self._input_start, self._input_position - WINDOW_BYTES)
        if arrived - self._acknowledged >= WINDOW_BYTES // 2:
            self._acknowledged = arrived
            await send_event(self._socket, "input", position=arrived)

    async def _execute(self, command: _Command) -> None:
        if command.resize is not None:
            await self._streams.call("resize", process=self._process, **command.resize.model_dump())
        if command.signal is not None:
            await self._streams.call("signal", process=self._process, signal=command.signal)
        if command.close_stdin and not self._has_closed_input:
            # In the stream, because a request could overtake the input before it.
            self._has_closed_input = True
            await self._stream.write(b"", is_last=True)
        if command.ping is not None:
            await send_event(self._socket, "pong", ping=command.ping)
