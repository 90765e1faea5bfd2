"""Ports of a session's sandbox: the bytes of a TCP connection over a WebSocket."""

from fastapi import APIRouter, WebSocket

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.stream_protocol import BULK_WINDOW_BYTES
from toolcrew.orchestrator.api.sandbox_streams import SessionStreams
from toolcrew.orchestrator.api.sockets import (
    SocketOptions,
    parse_options,
    run_until_first_ends,
    send_event,
    serve_socket,
)
from toolcrew.orchestrator.streams import Stream

router = APIRouter(prefix="/v1/sessions/{session_id}/ports")


class _PortPath(Record):
    port: int


class _Command(Record):
    """A text message of the client. `close_input`: no bytes follow."""

    close_input: bool = False


@router.websocket("/{port}")
async def connect_port(socket: WebSocket, session_id: str, port: str) -> None:
    """Serve a client that talks to a program that listens in the sandbox."""

    async def serve(streams: SessionStreams, _: SocketOptions) -> None:
        number = parse_options(_PortPath, {"port": port}).port
        async with streams.open({"what": "port", "port": number}, BULK_WINDOW_BYTES) as stream:
            await send_event(socket, "opened")
            await run_until_first_ends(socket, _send_bytes(socket, stream), _take_messages(socket, stream))

    await serve_socket(socket, session_id, SocketOptions, serve)


async def _send_bytes(socket: WebSocket, stream: Stream) -> None:
    while (piece := await stream.read()) is not None:
        if piece.data:
            await socket.send_bytes(piece.data)
        if piece.is_last:
            await send_event(socket, "output_closed")
    await send_event(socket, "end")


async def _take_messages(socket: WebSocket, stream: Stream) -> None:
    has_closed_input = False
    while (message := await socket.receive())["type"] == "websocket.receive":
        data, text = message.get("bytes"), message.get("text")
        if has_closed_input:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "this connection has closed its input: connect again")
        if data is not None:
            await stream.write(data)
        elif parse_options(_Command, text).close_input:
            has_closed_input = True
            await stream.write(b"", is_last=True)
