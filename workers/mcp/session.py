"""The SDK's session with an MCP server, whichever way its messages go: results are given as they came."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import mcp_types as types
from mcp.client.session import ClientSession
from mcp.shared.dispatcher import Dispatcher
from mcp.shared.exceptions import MCPError
from mcp.shared.transport_context import TransportContext
from mcp_types.version import LATEST_MODERN_VERSION
from pydantic import TypeAdapter, ValidationError

from contract.errors import ErrorCode, ToolFailure
from workers.mcp.messages import broken
from workers.mcp.pages import ToolPages

CLIENT = types.Implementation(name="toolcrew", version="1")
STANDS_ALONE = types.DiscoverResult(supported_versions=[LATEST_MODERN_VERSION], capabilities=types.ServerCapabilities())
"""To adopt where it is known that a server speaks a revision in which every request stands alone."""
REFUSED = (MCPError, ValidationError, RuntimeError)
"""What the SDK raises for an answer that is an error, or none."""
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


class RecordingDispatcher(Dispatcher[TransportContext], Protocol):
    """`method`, `result`: of the last request."""

    method: str
    result: dict[str, Any]


class RawSession(ClientSession):
    """Not by the SDK's own methods: those refuse a whole list for one tool that breaks the schema."""

    def __init__(self, server: str, dispatcher: RecordingDispatcher) -> None:
        super().__init__(dispatcher=dispatcher, client_info=CLIENT)
        self._server = server
        self._recording = dispatcher

    async def adopt_alone(self) -> bool:
        """Ask whether the server speaks a revision in which every request stands alone, and speak it then."""
        try:
            answer = await self.send_discover(LATEST_MODERN_VERSION)
        except MCPError:
            return False
        versions = answer.get("supportedVersions")
        # No more of the answer is needed, so no more of it has to be right.
        alone = isinstance(versions, list) and LATEST_MODERN_VERSION in versions
        if alone:
            self.adopt(STANDS_ALONE)
        return alone

    async def gather_tools(self) -> list[Any]:
        """What the server lists, unchecked. Raises ToolFailure, MCPError."""
        pages = ToolPages(self._server)
        while pages.cursor is not None:
            params = types.PaginatedRequestParams(cursor=pages.cursor or None)
            pages.add(await self._ask(types.ListToolsRequest(params=params)))
        return pages.listed

    async def use_tool(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result, unchecked but for being an object. Raises MCPError."""
        # Half of a surrogate pair, which JSON can write, cannot be encoded.
        given = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
        params = types.CallToolRequestParams(name=tool, arguments=given)
        return await self._ask(types.CallToolRequest(params=params))

    async def _ask(self, request: types.Request[Any, Any]) -> dict[str, Any]:
        with suppress(ValidationError):
            await self.send_request(request, _ANY)
        return self._recording.result

    def explain(self, error: Exception) -> ToolFailure:
        """The failure for what the SDK raised."""
        if not isinstance(error, MCPError):
            return broken(self._server, "it speaks no revision that is known here")
        words = f"the MCP server {self._server} refused {self._recording.method}: {error.message}"
        return ToolFailure(ErrorCode.HTTP_ERROR, words, mcp_code=error.code)
