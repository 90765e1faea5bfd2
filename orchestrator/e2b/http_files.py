"""The address `/files` of E2B's sandboxes: whole files over plain HTTP, of any size, in constant memory."""

import posixpath
import re
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final
from urllib.parse import quote

from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.orchestrator.e2b.connect_rpc import ConnectError
from toolcrew.orchestrator.e2b.filesystem import METADATA_PREFIX
from toolcrew.orchestrator.e2b.sandbox import EnvdSandbox
from toolcrew.orchestrator.http.piece_responses import PieceResponse
from toolcrew.orchestrator.streams.stream import Stream

MAX_HEADER_BYTES: Final = 16_384
"""Limit of the headers of one part of a form, in bytes."""
MAX_FILES: Final = 10_000
_INFLATED_BYTES: Final = 262_144
_METADATA_HEADER: Final = "x-metadata-"
_RANGE: Final = re.compile(r"bytes=(\d{1,18})?-(\d{1,18})?")
_STATUS: Final = {
    ErrorCode.FILE_NOT_FOUND: 404,
    ErrorCode.IS_DIRECTORY: 400,
    ErrorCode.INVALID_ARGUMENTS: 400,
    ErrorCode.PATH_NOT_ALLOWED: 400,
    ErrorCode.NOT_A_DIRECTORY: 400,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.NO_SPACE: 507,
    ErrorCode.SESSION_NOT_FOUND: 502,
}
_CONNECT_STATUS: Final = {"unauthenticated": 401, "invalid_argument": 400}


class FileError(Exception):
    """Error of a request, with the status of its answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def respond(self) -> Response:
        return JSONResponse({"code": self.status, "message": str(self)}, self.status)


def build_file_error(error: ToolFailure | OperatorError | ConnectError) -> FileError:
    """Return the error of a request for an error of the sandbox."""
    if isinstance(error, ConnectError):
        return FileError(_CONNECT_STATUS.get(error.code, 500), error.message)
    return FileError(_STATUS.get(error.code, 503 if isinstance(error, OperatorError) else 500), str(error))


class FileTransfers:
    """Downloads and uploads of one sandbox."""

    def __init__(self, sandbox: EnvdSandbox) -> None:
        self._sandbox = sandbox

    async def download(self, request: Request) -> Response:
        """Send a file, or a range of it. Raises FileError, ToolFailure, OperatorError, ConnectError."""
        user = await self._sandbox.find_user(request.query_params.get("username", ""))
        path = await self._sandbox.resolve(request.query_params.get("path", ""), user)
        entry = (await self._sandbox.call("stat", path=path, user=user))["entry"]
        if entry["type"] == "directory":
            raise FileError(400, f"{path} is a directory")
        wanted = request.headers.get("range")
        async with AsyncExitStack() as stack:
            stream = await self._sandbox.open("read", path=path, user=user)
            size = int(stream.opened["size"])
            start, end = _parse_range(wanted, size)
            if wanted is not None:
                stream.close()
                stream = await self._sandbox.open("read", path=path, user=user, offset=start, bytes=end - start)
            await stack.enter_async_context(stream)
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Disposition": f"inline; filename*=UTF-8''{quote(posixpath.basename(path))}",
                "X-Content-Type-Options": "nosniff",
                "Accept-Ranges": "bytes",
                "Vary": "Accept-Encoding",
            }
            if wanted is not None:
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            if _is_gzip(request, wanted):
                headers["Content-Encoding"] = "gzip"
                pieces = _compress(_read(stream))
            else:
                headers["Content-Length"] = str(end - start)
                pieces = _read(stream)
            response = PieceResponse(pieces, headers, stack.pop_all())
        response.status_code = 206 if wanted is not None else 200
        return response

    async def upload(self, request: Request) -> Response:
        """Write one file from the body, or each part `file` of a form."""
        user = await self._sandbox.find_user(request.query_params.get("username", ""))
        path = request.query_params.get("path")
        metadata = _read_metadata(request)
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        body = _inflate(request) if request.headers.get("content-encoding") == "gzip" else request.stream()
        if kind == b"multipart/form-data":
            written = await self._upload_form(body, options.get(b"boundary", b""), path, user, metadata)
        elif not path:
            raise FileError(400, "the query needs 'path'")
        else:
            written = [await self._write(path, body, user, metadata)]
        return JSONResponse(written)

    async def compose(self, request: Request, message: Mapping[str, Any]) -> Response:
        """Join files into one, and remove them."""
        user = await self._sandbox.find_user(str(message.get("username") or ""))
        sources, destination = message.get("source_paths"), message.get("destination")
        if not isinstance(sources, list) or not all(isinstance(path, str) for path in sources):
            raise FileError(400, "'source_paths' must be a list of paths")
        if not isinstance(destination, str) or not destination:
            raise FileError(400, "'destination' is missing")
        paths = [await self._sandbox.resolve(path, user) for path in sources]

        async def content() -> AsyncIterator[bytes]:
            for path in paths:
                async with await self._sandbox.open("read", path=path, user=user) as stream:
                    async for piece in _read(stream):
                        yield piece

        written = await self._write(destination, content(), user, _read_metadata(request))
        for path in paths:
            if path != written["path"]:
                await self._sandbox.call("remove", path=path, user=user)
        return JSONResponse(written)

    async def _upload_form(
        self,
        body: AsyncIterator[bytes],
        boundary: bytes,
        path: str | None,
        user: str | None,
        metadata: dict[str, str],
    ) -> list[dict[str, Any]]:
        written: list[dict[str, Any]] = []
        form = _Form(boundary)
        async with AsyncExitStack() as stack:
            stream: Stream | None = None
            place = ""
            async for event, data in form.read(body):
                if event == "begin":
                    place = await self._sandbox.resolve(path or data.decode(errors="replace"), user)
                    stream = await self._open(place, user, metadata)
                    await stack.enter_async_context(stream)
                elif stream is not None and event == "data":
                    await stream.write(data)
                elif stream is not None:
                    await _finish(stream)
                    written.append(_describe(place, metadata))
                    await stack.aclose()
                    stream = None
                    if len(written) > MAX_FILES:
                        raise FileError(400, f"the form has more than {MAX_FILES} files")
        if not written:
            raise FileError(400, "the form has no part 'file'")
        return written

    async def _write(
        self, path: str, body: AsyncIterator[bytes], user: str | None, metadata: dict[str, str]
    ) -> dict[str, Any]:
        place = await self._sandbox.resolve(path, user)
        async with await self._open(place, user, metadata) as stream:
            async for piece in body:
                await stream.write(piece)
            await _finish(stream)
        return _describe(place, metadata)

    async def _open(self, path: str, user: str | None, metadata: dict[str, str]) -> Stream:
        return await self._sandbox.open("write", path=path, user=user, metadata=metadata)


class _Form:
    """Parses the parts named `file` of a form, one piece of the body after the other."""

    def __init__(self, boundary: bytes) -> None:
        self._events: list[tuple[str, bytes]] = []
        self._header = bytearray()
        self._value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._is_file = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._collect(self._header, data[start:end]),
                    "on_header_value": lambda data, start, end: self._collect(self._value, data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": lambda data, start, end: self._take(data[start:end]),
                    "on_part_end": self._end_part,
                },
            )
        except ValueError as error:
            raise FileError(400, f"the form is invalid: {error}") from None

    async def read(self, body: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, bytes]]:
        """Yield `begin` with the name of a file, `data` with its bytes, and `end`. Raises FileError."""
        try:
            async for piece in body:
                self._parser.write(piece)
                events, self._events = self._events, []
                for event in events:
                    yield event
            self._parser.finalize()
        except ValueError as error:
            raise FileError(400, f"the form is invalid: {error}") from None

    def _begin_part(self) -> None:
        self._headers.clear()

    def _collect(self, place: bytearray, data: bytes) -> None:
        place += data
        if len(self._header) + len(self._value) > MAX_HEADER_BYTES or len(self._headers) > 16:
            raise FileError(400, "a part of the form has headers that are too long")

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._is_file = options.get(b"name") == b"file"
        if self._is_file:
            self._events.append(("begin", options.get(b"filename", b"")))

    def _take(self, data: bytes) -> None:
        if self._is_file:
            self._events.append(("data", data))

    def _end_part(self) -> None:
        if self._is_file:
            self._events.append(("end", b""))


async def _finish(stream: Stream) -> None:
    """End an upload, and wait until the file is in its place."""
    await stream.write(b"", is_last=True)
    while await stream.read() is not None:
        pass


async def _read(stream: Stream) -> AsyncIterator[bytes]:
    while (piece := await stream.read()) is not None:
        if piece.data:
            yield piece.data


async def _compress(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    compressor = zlib.compressobj(1, wbits=31)
    async for piece in pieces:
        if data := compressor.compress(piece):
            yield data
    yield compressor.flush()


async def _inflate(request: Request) -> AsyncIterator[bytes]:
    """Yield the content of a compressed body, in pieces of limited size. Raises FileError."""
    inflater = zlib.decompressobj(wbits=31)
    try:
        async for piece in request.stream():
            while piece:
                if data := inflater.decompress(piece, _INFLATED_BYTES):
                    yield data
                piece = inflater.unconsumed_tail
    except zlib.error as error:
        raise FileError(400, f"the body is not gzip: {error}") from None
    if not inflater.eof:
        raise FileError(400, "the compressed body is not complete")


def _is_gzip(request: Request, wanted: str | None) -> bool:
    accepted = {part.partition(";")[0].strip() for part in request.headers.get("accept-encoding", "").split(",")}
    return wanted is None and "gzip" in accepted


def _parse_range(wanted: str | None, size: int) -> tuple[int, int]:
    """Return the first position and the one after the last. Raises FileError(416)."""
    if wanted is None:
        return 0, size
    found = _RANGE.fullmatch(wanted.strip())
    if found is None or found[1] is found[2] is None:
        raise FileError(416, "the range is invalid: use one range of bytes")
    if found[1] is None:
        return max(0, size - int(found[2])), size
    start, end = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
    if not start < end:
        raise FileError(416, f"the file has {size} bytes: the range is outside")
    return start, end


def _read_metadata(request: Request) -> dict[str, str]:
    """Return the metadata that the headers set. It replaces what a file had."""
    metadata = {
        METADATA_PREFIX + name.removeprefix(_METADATA_HEADER): value
        for name, value in request.headers.items()
        if name.startswith(_METADATA_HEADER)
    }
    if not all(value.isascii() and value.isprintable() for value in metadata.values()):
        raise FileError(400, "metadata must be printable ASCII")
    return metadata


def _describe(path: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    described = {"path": path, "name": posixpath.basename(path), "type": "file"}
    shown = {name.removeprefix(METADATA_PREFIX): value for name, value in metadata.items()}
    return {**described, **({"metadata": shown} if shown else {})}
