"""The server inside E2B's sandboxes (`envd`), as its clients reach it: processes, files and `/files`."""

import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from toolcrew.contract.errors import OperatorError, ToolFailure
from toolcrew.orchestrator.e2b.connect_rpc import ConnectError, build_stream_answer, parse_message, read_body
from toolcrew.orchestrator.e2b.filesystem import FilesystemService
from toolcrew.orchestrator.e2b.http_files import FileError, FileTransfers, build_file_error
from toolcrew.orchestrator.e2b.processes import ProcessService
from toolcrew.orchestrator.e2b.sandbox import EnvdSandbox

VERSION = "0.6.13"
"""The version of envd whose behaviour is served. Clients decide by it what they may use."""
_FILES = "/files"


class Envd:
    """Serves one sandbox. Requests are already authenticated."""

    def __init__(self, sandbox: EnvdSandbox) -> None:
        self._sandbox = sandbox
        self._processes = processes = ProcessService(sandbox)
        self._filesystem = files = FilesystemService(sandbox)
        self._transfers = FileTransfers(sandbox)
        self._unary: dict[str, Callable[[dict[str, Any], str | None], Awaitable[dict[str, Any]]]] = {
            "/process.Process/List": lambda message, _: processes.list_running(message),
            "/process.Process/SendInput": lambda message, _: processes.send_input(message),
            "/process.Process/SendSignal": lambda message, _: processes.send_signal(message),
            "/process.Process/CloseStdin": lambda message, _: processes.close_stdin(message),
            "/process.Process/Update": lambda message, _: processes.update(message),
            "/filesystem.Filesystem/Stat": files.stat,
            "/filesystem.Filesystem/MakeDir": files.make_dir,
            "/filesystem.Filesystem/Move": files.move,
            "/filesystem.Filesystem/Remove": files.remove,
            "/filesystem.Filesystem/ListDir": files.list_dir,
            "/filesystem.Filesystem/CreateWatcher": files.create_watcher,
            "/filesystem.Filesystem/GetWatcherEvents": files.get_watcher_events,
            "/filesystem.Filesystem/RemoveWatcher": files.remove_watcher,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        response = await self._answer(request)
        await response(scope, receive, send)

    def close(self) -> None:
        """End the watches that clients have not ended."""
        self._filesystem.close()

    async def _answer(self, request: Request) -> Response:
        path, method = request.url.path, request.method
        if path == "/health":
            return Response(status_code=204)
        if path == _FILES or path == f"{_FILES}/compose":
            return await self._answer_files(request)
        if method != "POST":
            return JSONResponse({"code": "unimplemented", "message": f"{path} is not served"}, 404)
        try:
            return await self._answer_rpc(request, path)
        except ConnectError as error:
            return error.respond()
        except (ToolFailure, OperatorError) as error:
            return ConnectError.of(error).respond()

    async def _answer_rpc(self, request: Request, path: str) -> Response:
        if path == "/process.Process/Start":
            return await self._processes.start(request, await self._find_user(request))
        if path == "/process.Process/Connect":
            return await self._processes.connect(request)
        if path == "/filesystem.Filesystem/WatchDir":
            return await self._filesystem.watch_dir(request, await self._find_user(request))
        if path == "/process.Process/StreamInput":
            return build_stream_answer(await self._processes.stream_input(request))
        serve = self._unary.get(path)
        if serve is None:
            return JSONResponse({"code": "unimplemented", "message": f"{path} is not served"}, 404)
        user = await self._find_user(request)
        return JSONResponse(await serve(parse_message(await read_body(request)), user))

    async def _answer_files(self, request: Request) -> Response:
        try:
            if request.url.path != _FILES:
                return await self._transfers.compose(request, parse_message(await read_body(request)))
            if request.method == "GET":
                return await self._transfers.download(request)
            if request.method == "POST":
                return await self._transfers.upload(request)
            return FileError(405, "use GET or POST").respond()
        except FileError as error:
            return error.respond()
        except (ToolFailure, OperatorError, ConnectError) as error:
            return build_file_error(error).respond()

    async def _find_user(self, request: Request) -> str | None:
        """Return the Linux user of a request: the name in its Authorization header, which has no password."""
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return await self._sandbox.find_user("")
        try:
            name = base64.b64decode(text, validate=True).decode().partition(":")[0]
        except (binascii.Error, ValueError):
            raise ConnectError("unauthenticated", "the Authorization header is invalid") from None
        return await self._sandbox.find_user(name)
