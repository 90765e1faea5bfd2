"""Files of a session's sandbox over HTTP: content of any size, entries, folders, and changes over a WebSocket."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response, WebSocket
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import ErrorCode, OperatorError, SandboxUnavailable, ToolFailure
from toolcrew.contract.file_views import (
    MAX_DEPTH,
    FileEntry,
    FileEvent,
    FileTime,
    MadeFolder,
    NewFolder,
    NewMetadata,
    NewMove,
    SandboxPath,
)
from toolcrew.contract.process_views import Position
from toolcrew.contract.session_views import WrittenFile
from toolcrew.contract.stream_protocol import BULK_WINDOW_BYTES
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.byte_ranges import (
    ByteRange,
    RangeNotSatisfiable,
    build_etag,
    find_range,
    parse_content_range,
)
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.api.sandbox_streams import (
    SessionStreams,
    cut_at_failure,
    read_piece,
    use_streams,
    write_piece,
)
from toolcrew.orchestrator.api.sessions import CLIENT_LEFT, WORKSPACE, SessionId
from toolcrew.orchestrator.api.sockets import SocketOptions, run_until_first_ends, send_event, serve_socket
from toolcrew.orchestrator.http.authentication import CLOSE
from toolcrew.orchestrator.http.body_limits import refuse
from toolcrew.orchestrator.http.piece_responses import CONTENT, PieceResponse
from toolcrew.orchestrator.http.problems import ApiProblem, build_response, response_to
from toolcrew.orchestrator.streams import Stream
from toolcrew.orchestrator.streams.rows import parse_answer_fields, parse_row, read_row_lines

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["session files"], responses=responses(404))

FilePath = Annotated[
    SandboxPath,
    Path(
        description="A path below /workspace, or an absolute path of the sandbox with its slash: `/files//etc/hosts`."
    ),
]
QueryPath = Annotated[SandboxPath, Query(description="An absolute path of the sandbox, or a path below /workspace.")]
Depth = Annotated[int, Query(ge=1, le=MAX_DEPTH, description="1: the entries of the folder itself.")]
_BYTES = {"required": True, "content": {CONTENT: {"schema": {"type": "string", "format": "binary"}}}}


class _OpenedFile(Record):
    size: Position
    modified_at: FileTime


class _OpenedEntry(Record):
    entry: FileEntry


class _WatchOptions(SocketOptions):
    path: SandboxPath = WORKSPACE
    recursive: bool = False


@router.get(
    "/files/{path:path}",
    response_class=Response,
    responses={
        200: {"description": "The file", "content": {CONTENT: {}}},
        206: {"description": "The part of the file that the header Range asks for", "content": {CONTENT: {}}},
        **responses(404, 416),
    },
)
async def read_session_file(session_id: SessionId, path: FilePath, caller: AnyCaller, request: Request) -> Response:
    """Return the content of a file, or with the header `Range` a part of it. The file may have any size."""
    streams = await use_streams(caller, session_id)
    async with AsyncExitStack() as stack:
        try:
            stream, part = await _open_part(stack, streams, path, request)
        except RangeNotSatisfiable as error:
            return build_response(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                "the file has no byte of the requested range: read its size in the header Content-Range",
                headers={"Content-Range": f"bytes */{error}"},
            )
        opened = _parse_opened(stream)
        wanted = part or ByteRange(0, opened.size)
        headers = _build_headers(path, opened, wanted)
        if part is not None:
            headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{opened.size}"
        pieces = cut_at_failure(_read_whole(stream, wanted.end - wanted.start), session_id)
        return PieceResponse(pieces, headers, stack.pop_all(), status=206 if part is not None else 200)


async def _open_part(
    stack: AsyncExitStack, streams: SessionStreams, path: str, request: Request
) -> tuple[Stream, ByteRange | None]:
    """Return the stream of the requested part, and the part; None: the whole file. Raises RangeNotSatisfiable."""
    header, if_range = request.headers.get("range"), request.headers.get("if-range")
    part = None
    if header is not None:
        async with streams.open({"what": "read", "path": path, "bytes": 0}) as probe:
            known = _parse_opened(probe)
        part = find_range(header, if_range, known.size, _etag(known))
    fields = {"offset": part.start, "bytes": part.end - part.start} if part is not None else {}
    opening = {"what": "read", "path": path, **fields}
    stream = await stack.enter_async_context(streams.open(opening, BULK_WINDOW_BYTES))
    if part is not None and _etag(_parse_opened(stream)) != _etag(known):
        raise ToolFailure(ErrorCode.STALE_FILE, "the file was changed in this moment: send the request again")
    return stream, part


def _parse_opened(stream: Stream) -> _OpenedFile:
    return parse_answer_fields(_OpenedFile, {name: stream.opened.get(name) for name in ("size", "modified_at")})


def _etag(opened: _OpenedFile) -> str:
    return build_etag(opened.size, opened.modified_at)


def _build_headers(path: str, opened: _OpenedFile, part: ByteRange) -> dict[str, str]:
    name = quote(path.rsplit("/", 1)[-1].encode("utf-8", "replace"), safe="")
    # A browser must never display a file of a sandbox as a page of this site, because the file could contain scripts.
    return {
        "Content-Type": CONTENT,
        "Content-Length": str(part.end - part.start),
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        "Accept-Ranges": "bytes",
        "ETag": _etag(opened),
    }


async def _read_whole(stream: Stream, count: int) -> AsyncIterator[bytes]:
    """Yield exactly `count` bytes, which the head of the response has promised."""
    while count > 0 and (piece := await read_piece(stream)) is not None:
        count -= len(piece.data)
        if count < 0:
            break
        yield piece.data
    if count:
        raise SandboxUnavailable("the sandbox sent more or fewer bytes than the file has: read it again")


@router.put("/files/{path:path}", openapi_extra={"requestBody": _BYTES}, response_model=WrittenFile)
async def write_session_file(
    session_id: SessionId,
    path: FilePath,
    caller: AnyCaller,
    request: Request,
    offset: Annotated[
        Position | None, Query(description="Write into the file from this position on, to continue an upload.")
    ] = None,
) -> WrittenFile | Response:
    """Write a file of any size. Missing folders are created.

    Without `offset` and without the header `Content-Range` the body replaces the whole file atomically, once it has
    arrived completely. With one of them the body is written into the file, so that an upload can be continued.
    """
    try:
        return await _upload(await use_streams(caller, session_id), path, offset, request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_LEFT)
    except (ApiProblem, ToolFailure, OperatorError) as error:
        return _EarlyAnswer(response_to(error, request.url.path, headers=CLOSE))


async def _upload(streams: SessionStreams, path: str, offset: int | None, request: Request) -> WrittenFile:
    length = request.headers.get("content-length", "")
    if offset is None and (header := request.headers.get("content-range")) is not None:
        offset = parse_content_range(header, int(length) if length.isdigit() else None)
    async with streams.open({"what": "write", "path": path, "offset": offset}) as stream:
        count = 0
        async for chunk in request.stream():
            count += len(chunk)
            if stream.has_ended:
                break
            await write_piece(stream, chunk)
        await write_piece(stream, b"", is_last=True)
        while await read_piece(stream) is not None:
            pass
    return WrittenFile(path=path, bytes=count)


class _EarlyAnswer(Response):
    """A response that may be sent before the body of the request was read. The rest of the body is discarded."""

    def __init__(self, answer: Response) -> None:
        super().__init__(status_code=answer.status_code)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await refuse(self._answer, receive, send)


@router.delete("/files/{path:path}", status_code=204)
async def remove_session_file(session_id: SessionId, path: FilePath, caller: AnyCaller) -> None:
    """Remove a file, or a folder with everything in it. A path without a file is no error."""
    await (await use_streams(caller, session_id)).call("remove", path=path)


@router.get("/entry")
async def get_entry(session_id: SessionId, path: QueryPath, caller: AnyCaller) -> FileEntry:
    """Return the size, the owner, the permissions and the metadata of a file, a folder or a link."""
    return parse_answer_fields(
        _OpenedEntry, await (await use_streams(caller, session_id)).call("stat", path=path)
    ).entry


@router.get(
    "/entries",
    response_class=Response,
    responses={200: {"description": "One FileEntry per line", "content": {"application/x-ndjson": {}}}},
)
async def list_entries(
    session_id: SessionId, caller: AnyCaller, path: QueryPath = WORKSPACE, depth: Depth = 1
) -> Response:
    """List the entries of a folder, one line of JSON for each. A list that is cut off has no end of its last chunk."""
    streams = await use_streams(caller, session_id)
    async with AsyncExitStack() as stack:
        opening = {"what": "list", "path": path, "depth": depth}
        stream = await stack.enter_async_context(streams.open(opening, BULK_WINDOW_BYTES))
        headers = {"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"}
        return PieceResponse(cut_at_failure(_read_entries(stream), session_id), headers, stack.pop_all())


async def _read_entries(stream: Stream) -> AsyncIterator[bytes]:
    async for lines in read_row_lines(stream):
        yield b"".join(parse_row(FileEntry, line).model_dump_json().encode() + b"\n" for line in lines)


@router.post("/folders", status_code=201)
async def make_folder(session_id: SessionId, body: NewFolder, caller: AnyCaller) -> MadeFolder:
    """Create a folder and its parents. An existing folder is no error."""
    streams = await use_streams(caller, session_id)
    return parse_answer_fields(MadeFolder, await streams.call("make_folder", **body.model_dump()))


@router.post("/moves", status_code=201)
async def move_file(session_id: SessionId, body: NewMove, caller: AnyCaller) -> FileEntry:
    """Move or rename a file or a folder. A file at the target is replaced."""
    streams = await use_streams(caller, session_id)
    return parse_answer_fields(_OpenedEntry, await streams.call("move", **body.model_dump())).entry


@router.put("/metadata")
async def set_metadata(session_id: SessionId, body: NewMetadata, caller: AnyCaller) -> FileEntry:
    """Replace the metadata of a file or a folder."""
    streams = await use_streams(caller, session_id)
    return parse_answer_fields(_OpenedEntry, await streams.call("set_metadata", **body.model_dump())).entry


@router.websocket("/watch")
async def watch_folder(socket: WebSocket, session_id: str) -> None:
    """Send the changes below a folder as events."""

    async def serve(streams: SessionStreams, options: _WatchOptions) -> None:
        async with streams.open({"what": "watch", "path": options.path, "recursive": options.recursive}) as stream:
            await send_event(socket, "opened")
            await run_until_first_ends(socket, _send_changes(socket, stream), _wait_for_end(socket))

    await serve_socket(socket, session_id, _WatchOptions, serve)


async def _send_changes(socket: WebSocket, stream: Stream) -> None:
    async for lines in read_row_lines(stream):
        for line in lines:
            await socket.send_text(parse_row(FileEvent, line).model_dump_json())
    await send_event(socket, "end")


async def _wait_for_end(socket: WebSocket) -> None:
    """Read until the client leaves. Its messages mean nothing."""
    while (await socket.receive())["type"] == "websocket.receive":
        pass
