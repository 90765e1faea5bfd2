"""Session of the SDK with an MCP server over any dispatcher. Results are returned unchecked."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import mcp_types as types
from mcp.client.session import ClientSession
from mcp.shared.dispatcher import Dispatcher
from mcp.shared.exceptions import MCPError
from mcp.shared.transport_context import TransportContext
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_MODERN_VERSION
from pydantic import TypeAdapter, ValidationError

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.mcp.messages import build_protocol_error
from toolcrew.workers.mcp.pages import ToolPages

CLIENT = types.Implementation(name="toolcrew", version="1")
SESSIONLESS = types.DiscoverResult(supported_versions=[LATEST_MODERN_VERSION], capabilities=types.ServerCapabilities())
"""State of a session with a server that speaks a revision without sessions, in which every request stands alone."""
REFUSED = (MCPError, ValidationError, RuntimeError)
"""Exceptions of the SDK for an error response or an invalid response."""
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


class RecordingDispatcher(Dispatcher[TransportContext], Protocol):
    """Dispatcher that stores the `method` and the `result` of the last request."""

    method: str
    result: dict[str, Any]


class RawSession(ClientSession):
    """Session that returns unchecked results. The SDK's own methods would reject a whole list because of one tool with
    an invalid schema.
    """

    def __init__(self, server: str, dispatcher: RecordingDispatcher) -> None:
        super().__init__(dispatcher=dispatcher, client_info=CLIENT)
        self._server = server
        self._recording = dispatcher

    async def try_adopt_sessionless(self) -> bool:
        """Ask the server whether it speaks the revision without sessions, and use this revision if so. Return whether
        it is used.
        """
        try:
            answer = await self.send_discover(LATEST_MODERN_VERSION)
        except MCPError:
            return False
        versions = answer.get("supportedVersions")
        # Only this field of the answer is needed, so the other fields are not checked.
        is_sessionless = isinstance(versions, list) and LATEST_MODERN_VERSION in versions
        if is_sessionless:
            self.adopt(SESSIONLESS)
        return is_sessionless

    def resume(self, revision: str) -> None:
        """Continue a session that an earlier conversation has opened. Raises RuntimeError for an unknown revision."""
        if revision not in HANDSHAKE_PROTOCOL_VERSIONS:
            raise RuntimeError(f"Unsupported protocol version: {revision}")
        self.adopt(
            types.InitializeResult(
                protocol_version=revision, capabilities=types.ServerCapabilities(), server_info=CLIENT
            )
        )

    async def gather_tools(self) -> list[Any]:
        """Return the unchecked list of the server's tools. Raises ToolFailure, MCPError."""
        pages = ToolPages(self._server)
        while pages.cursor is not None:
            params = types.PaginatedRequestParams(cursor=pages.cursor or None)
            pages.add(await self._send(types.ListToolsRequest(params=params)))
        return pages.listed

    async def use_tool(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of the call. Only its type is checked (an object). Raises MCPError."""
        # JSON can contain a lone surrogate, which UTF-8 cannot encode.
        json_arguments = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
        params = types.CallToolRequestParams(name=tool, arguments=json_arguments)
        return await self._send(types.CallToolRequest(params=params))

    async def _send(self, request: types.Request[Any, Any]) -> dict[str, Any]:
        with suppress(ValidationError):
            await self.send_request(request, _ANY)
        return self._recording.result

    def explain(self, error: Exception) -> ToolFailure:
        """Convert an exception of the SDK to a ToolFailure."""
        if not isinstance(error, MCPError):
            return build_protocol_error(self._server, "its protocol revision is unknown")
        message = f"the MCP server {self._server} refused {self._recording.method}: {error.message}"
        return ToolFailure(ErrorCode.HTTP_ERROR, message, mcp_code=error.code)
