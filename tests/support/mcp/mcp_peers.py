"""External MCP servers for tests: the server of the SDK over HTTP, and a server over raw sockets that answers as a
test specifies.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from socket import socket
from typing import Any

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent, ToolAnnotations

from tests.support.web.web_servers import SYSTEM_TLS, StubResolver, WebServer, answer, open_web_server
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.workers.mcp.http_server import HttpServer
from toolcrew.workers.mcp.settings import HttpEntry

TOOL = {
    "name": "echo",
    "description": "Says it again.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}},
}
RequestHandler = Callable[[dict[str, Any]], Any]
"""Maps a request to the response message, to raw bytes, or to a status."""


def build_peer() -> MCPServer:
    """Return an ordinary server, built with the SDK."""
    server = MCPServer("peer")

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @server.tool()
    def refuse() -> str:
        """Fails."""
        raise ToolError("no such thing: \x1b[31mred")

    @server.tool()
    def show() -> list[TextContent | ImageContent]:
        """A picture."""
        return [TextContent(type="text", text="look"), ImageContent(type="image", data="AAAA", mime_type="image/png")]

    return server


@contextmanager
def open_sdk_peer(*, json_response: bool = False) -> Iterator[str]:
    """Run the server in a thread and yield its address."""
    port = reserve_port()
    config = uvicorn.Config(
        build_peer().streamable_http_app(json_response=json_response), port=port, log_level="error", lifespan="on"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server of the test did not start")
            thread.join(0.01)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.should_exit = True
        thread.join(20)


def reply_to(request: Mapping[str, Any], result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request["id"], "result": result}


def modern(request: dict[str, Any], call: Callable[[dict[str, Any]], Any] | None = None, tools: Any = (TOOL,)) -> Any:
    """Return the answers of a correct server of 2026-07-28. `call` answers tool calls instead."""
    if request["method"] == "server/discover":
        return reply_to(request, {"supportedVersions": ["2026-07-28"], "capabilities": {}})
    if request["method"] == "tools/list":
        return reply_to(request, {"tools": list(tools)})
    if call is not None:
        return call(request)
    return reply_to(request, {"content": [{"type": "text", "text": request["params"]["arguments"].get("text", "")}]})


def legacy(request: dict[str, Any]) -> Any:
    """Return the answers of a server that knows only the handshake."""
    if request["method"] == "initialize":
        return reply_to(
            request,
            {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "old", "version": "1"},
            },
        )
    if request["method"] == "notifications/initialized":
        return 202
    if request["method"] in ("tools/list", "tools/call"):
        return modern(request)
    return {"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "Method not found"}}


@contextmanager
def open_raw_peer(handler: RequestHandler, *, as_stream: bool = False, session: str = "") -> Iterator[WebServer]:
    """Run a server that answers each request with the result of `handler`."""
    with open_web_server() as server:

        def send(connection: socket) -> None:
            if not server.bodies[-1]:
                connection.sendall(answer(b"", 200))
                return
            reply = handler(json.loads(server.bodies[-1]))
            if isinstance(reply, bytes):
                connection.sendall(reply)
                return
            if isinstance(reply, int):
                connection.sendall(answer(b"", reply))
                return
            text = json.dumps(reply)
            body, kind = (
                (f"event: message\ndata: {text}\n\n", "text/event-stream") if as_stream else (text, "application/json")
            )
            connection.sendall(answer(body, 200, kind, **({"mcp_session_id": session} if session else {})))

        server.replies["*"] = send
        yield server


NOT_FOUND: dict[str, Any] = {
    "404": lambda: answer("", 404),
    "404 with an error of the protocol": lambda: answer(
        '{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Session not found"}}', 404, "application/json"
    ),
}


class StatefulServer:
    """A server of the revision 2025-06-18 that adds each text to the texts of the session, and returns them all."""

    def __init__(self, refusal: Callable[[], bytes] = NOT_FOUND["404"]) -> None:
        self.texts: dict[str, list[str]] = {}
        self.opened = 0
        self.refusal = refusal
        self.lock = threading.Lock()
        self.at_opening: Callable[[], None] = lambda: None
        self.web: WebServer | None = None

    def __call__(self, request: dict[str, Any]) -> Any:
        assert self.web is not None
        if request["method"] == "initialize":
            self.at_opening()
            with self.lock:
                self.opened += 1
                session = f"s-{self.opened}"
                self.texts[session] = []
            return answer(json.dumps(legacy(request)), 200, "application/json", mcp_session_id=session)
        if request["method"] == "server/discover":
            return legacy(request)
        session = self.web.header("mcp-session-id") or ""
        if session not in self.texts:
            return self.refusal()
        if request["method"] == "tools/call":
            assert self.web.header("mcp-protocol-version") == "2025-06-18"
            self.texts[session].append(request["params"]["arguments"]["text"])
            return reply_to(request, {"content": [{"type": "text", "text": " ".join(self.texts[session])}]})
        return 202 if "id" not in request else reply_to(request, {"tools": [TOOL]})


def build_client(url: str, names: Mapping[str, list[list[str]]] | None = None, **fields: Any) -> HttpServer:
    """Return a client of the server at `url`. `names`: the resolver's results for hosts."""
    entry = HttpEntry(url=url, **{"private": True, **fields})
    return HttpServer("peer", entry, resolver=StubResolver(dict(names or {})), tls=SYSTEM_TLS)
