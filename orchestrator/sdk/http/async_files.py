"""Files of a session, with the asynchronous client."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from toolcrew.contract.errors import ApiUnavailable, ConfigError, ErrorCode, ToolcrewError, ToolFailure
from toolcrew.orchestrator.sdk.http.async_sockets import AsyncSocket, open_stream
from toolcrew.orchestrator.sdk.http.connection import MAX_LINE_BYTES, Ask, file_path, parse, segment, with_key
from toolcrew.orchestrator.sdk.http.handshakes import Attempts, SocketLost, read_event
from toolcrew.orchestrator.sdk.http.local_files import begin_again, open_whole

if TYPE_CHECKING:
    from toolcrew.contract.file_views import FileEntry, FileEvent
    from toolcrew.orchestrator.sdk.http.async_client import AsyncClient

WAIT_S: Final = 600.0
"""Seconds that a request may take beyond the usual: the sandbox may have to be started first."""
WHOLE_BYTES: Final = 8 * 1024 * 1024
"""A smaller file is uploaded in one request, which has no parts to continue."""
PIECE_BYTES: Final = 256 * 1024


class AsyncSessionFiles:
    """The files of a session. Paths are absolute, or below /workspace."""

    def __init__(self, client: "AsyncClient", session: str) -> None:
        self._client = client
        self._session = session
        self._path = f"/v1/sessions/{segment(session)}"

    async def read(self, path: str) -> bytes:
        """Return the content of a file of at most 128 MiB."""
        return await self._client.send(Ask("GET", file_path(self._session, path), repeats=True, wait_s=WAIT_S))

    async def write(self, path: str, data: bytes | str) -> None:
        """Write a whole file atomically, and create missing folders. A text is written in UTF-8."""
        content = data.encode() if isinstance(data, str) else data
        await self._client.send(
            Ask("PUT", file_path(self._session, path), repeats=True, content=content, wait_s=WAIT_S)
        )

    async def download(self, path: str, local: Path | str) -> None:
        """Copy a file of any size to a local path. It replaces a local file when it is complete. After a lost
        connection the copy continues, or begins again if the file was changed.
        """
        with open_whole(Path(local)) as out:
            await self._download(path, out)

    async def upload(self, local: Path | str, path: str) -> None:
        """Copy a local file of any size into the session. It replaces a file there when it is complete. After a lost
        connection the copy continues.
        """
        source = Path(local)
        size = (await asyncio.to_thread(source.stat)).st_size
        if size <= WHOLE_BYTES:
            await self.write(path, await asyncio.to_thread(source.read_bytes))
            return
        part = f"{path}.{secrets.token_hex(4)}.part"
        try:
            await self._upload(source, size, part)
            await self.move(part, path)
        except BaseException:
            with suppress(ToolcrewError):
                await self.remove(part)
            raise

    async def list(self, path: str = "/workspace", depth: int = 1) -> "AsyncGenerator[FileEntry]":
        """Yield the entries of a folder. `depth`: 1 for the folder itself, at most 100."""
        from toolcrew.contract.file_views import FileEntry

        ask = Ask("GET", f"{self._path}/entries", repeats=True, params={"path": path, "depth": depth}, wait_s=WAIT_S)
        rest = b""
        async with self._client.stream(ask) as response:
            async for piece in response.aiter_bytes():
                # Not `aiter_lines`: the names of files may contain other ends of lines.
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield parse(FileEntry, line)
                if len(rest) > MAX_LINE_BYTES:
                    raise ApiUnavailable(
                        f"the API sent an entry of more than {MAX_LINE_BYTES} bytes: check TOOLCREW_URL"
                    )

    async def stat(self, path: str) -> "FileEntry":
        """Return the size, the owner, the permissions and the metadata of a file, a folder or a link."""
        from toolcrew.contract.file_views import FileEntry

        return await self._client.get(FileEntry, f"{self._path}/entry", {"path": path})

    async def make_folder(self, path: str, mode: int | None = None) -> "FileEntry":
        """Create a folder and its parents. An existing folder is no error."""
        from toolcrew.contract.file_views import MadeFolder

        ask = Ask("POST", f"{self._path}/folders", repeats=True, body={"path": path, "mode": mode}, wait_s=WAIT_S)
        return parse(MadeFolder, await self._client.send(ask)).entry

    async def move(self, source: str, target: str) -> "FileEntry":
        """Move or rename a file or a folder. A file at the target is replaced."""
        from toolcrew.contract.file_views import FileEntry

        ask = Ask("POST", f"{self._path}/moves", body={"source": source, "target": target}, wait_s=WAIT_S)
        return parse(FileEntry, await self._client.send(with_key(ask)))

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with everything in it. A path without a file is no error."""
        await self._client.send(Ask("DELETE", file_path(self._session, path), repeats=True, wait_s=WAIT_S))

    @asynccontextmanager
    async def watch(
        self, path: str = "/workspace", *, recursive: bool = False
    ) -> "AsyncIterator[AsyncGenerator[FileEvent]]":
        """Yield the changes of a folder that happen during the block, as they happen.

            async with session.files.watch("src") as events:
                async for event in events:
                    print(event.event, event.name)

        The event "overflow" says that events were lost: list the folder again. It also follows a lost connection.
        """
        params = {"path": path, "recursive": str(recursive).lower()}
        socket = await open_stream(self._client, f"{self._path}/watch", params)
        async with aclosing(self._follow(socket, params)) as events:
            yield events

    async def _follow(self, socket: AsyncSocket, params: dict[str, str]) -> "AsyncGenerator[FileEvent]":
        from toolcrew.contract.file_views import FileEvent

        try:
            while True:
                try:
                    message = await socket.receive()
                except SocketLost:
                    await socket.close()
                    socket = await open_stream(self._client, f"{self._path}/watch", params)
                    yield FileEvent(event="overflow")
                    continue
                if read_event(message).get("event") == "end":
                    return
                yield parse(FileEvent, message.encode() if isinstance(message, str) else message)
        finally:
            await socket.close()

    async def _download(self, path: str, out: IO[bytes]) -> None:
        attempts, position, version, size = Attempts(), 0, "", None
        while position != size:
            headers = {"Accept-Encoding": "identity"}
            if position:
                headers |= {"Range": f"bytes={position}-", "If-Range": version}
            ask = Ask("GET", file_path(self._session, path), repeats=True, headers=headers, wait_s=WAIT_S)
            try:
                async with self._client.stream(ask) as response:
                    if position and response.status_code != 206:
                        # The file was changed.
                        await asyncio.to_thread(begin_again, out)
                        position = 0
                    version = response.headers.get("etag", "")
                    size = position + int(response.headers["content-length"])
                    async for piece in response.aiter_bytes():
                        await asyncio.to_thread(out.write, piece)
                        position += len(piece)
                        attempts.succeed()
            except ApiUnavailable as error:
                if not version:
                    raise
                await asyncio.sleep(attempts.pause(error))

    async def _upload(self, source: Path, size: int, path: str) -> None:
        attempts, position = Attempts(), 0
        while position < size:
            part = AsyncFilePart(source, position, size)
            headers = {"Content-Length": str(size - position)}
            params = {"offset": position}
            try:
                await self._client.send(
                    Ask(
                        "PUT",
                        file_path(self._session, path),
                        params=params,
                        content=part,
                        headers=headers,
                        wait_s=WAIT_S,
                    )
                )
                return
            except ApiUnavailable as error:
                await asyncio.sleep(attempts.pause(error))
            arrived = await self._find_size(path)
            if arrived > position:
                attempts.succeed()
            position = min(arrived, size)

    async def _find_size(self, path: str) -> int:
        try:
            return (await self.stat(path)).size
        except ToolFailure as failure:
            if failure.code is not ErrorCode.FILE_NOT_FOUND:
                raise
            return 0


class AsyncFilePart:
    """The bytes of a local file from a position on, read while they are sent. Raises ConfigError if they are fewer."""

    def __init__(self, path: Path, start: int, end: int) -> None:
        self._path = path
        self._start = start
        self._end = end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        position = self._start
        with await asyncio.to_thread(self._path.open, "rb") as source:
            source.seek(position)
            while position < self._end:
                data = await asyncio.to_thread(source.read, min(PIECE_BYTES, self._end - position))
                if not data:
                    raise ConfigError(f"{self._path} became shorter while it was uploaded: upload it again")
                position += len(data)
                yield data
