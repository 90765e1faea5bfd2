"""Loopback web servers that answer byte by byte as a test specifies, and a resolver of invented names."""

import ipaddress
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from socket import create_server, socket
from typing import Any

from tests.support.records.builders import build_call, build_context
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.store.web_pages import WebPage
from toolcrew.workers.tools.base import WorkerRegistry, WorkerTool
from toolcrew.workers.web.access_rules import WebAccessRules
from toolcrew.workers.web.addresses import AddressRules
from toolcrew.workers.web.connections import build_tls
from toolcrew.workers.web.fetcher import Fetcher
from toolcrew.workers.web.limits import Deadline, FetchLimits
from toolcrew.workers.web.urls import Address

Reply = bytes | Sequence[bytes] | Callable[[socket], None]
"""The data that a server sends before it closes: at once, in pieces, or through a function of the connection."""

QUICK = FetchLimits(connect_s=2)
SHORT_LIMITS = FetchLimits(tls_s=0.3, first_byte_s=0.3, rate_window_s=0.3)
"""Limits for tests of servers that are too slow. On a busy machine a correct server may exceed these limits too."""


SYSTEM_TLS = build_tls()
"""Loaded once, because the system has many authorities."""


def answer(
    body: bytes | str = b"", status: int = 200, content_type: str = "text/html; charset=utf-8", **headers: str
) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    head = {"content-type": content_type, "content-length": str(len(data))}
    head |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items() if value)
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + data


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} X\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


@dataclass
class WebServer:
    """A server with one answer per path; `*` stands for all other paths. Keeps the head of every request."""

    port: int = 0
    replies: dict[str, Reply] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str = "/", host: str = "site.example", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    @property
    def paths(self) -> list[str]:
        return [request.split(" ")[1] for request in self.requests]

    def header(self, name: str, at: int = -1) -> str | None:
        lines = self.requests[at].split("\r\n")[1:]
        return next((line.partition(": ")[2] for line in lines if line.lower().startswith(f"{name.lower()}: ")), None)

    def serve(self, connection: socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            data = connection.recv(65536)
            if not data:
                return
            head += data
        text, _, body = head.partition(b"\r\n\r\n")
        self.requests.append(text.decode("latin-1"))
        length = int(self.header("content-length") or 0)
        while len(body) < length:
            body += connection.recv(65536)
        self.bodies.append(body)
        path = self.paths[-1].partition("?")[0]
        self._send(connection, self.replies.get(path, self.replies.get("*", answer("nothing here", 404))))

    def _send(self, connection: socket, reply: Reply) -> None:
        if callable(reply):
            reply(connection)
            return
        for piece in [reply] if isinstance(reply, bytes) else reply:
            connection.sendall(piece)


@contextmanager
def open_web_server(
    replies: Mapping[str, Reply] | None = None, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> Iterator[WebServer]:
    """Run a server in a thread, with one thread for each connection."""
    with create_server((host, 0)) as listening:
        server = WebServer(listening.getsockname()[1], dict(replies or {}))
        thread = threading.Thread(target=_accept, args=(server, listening, tls))
        thread.start()
        try:
            yield server
        finally:
            server.ending.set()
            # A new connection wakes `accept`. Closing the socket from this thread would not.
            with socket() as waker:
                waker.connect((host, server.port))
            thread.join(5)


def _accept(server: WebServer, listening: socket, tls: ssl.SSLContext | None) -> None:
    while True:
        connection, _ = listening.accept()
        if server.ending.is_set():
            connection.close()
            return
        threading.Thread(target=_serve, args=(server, connection, tls), daemon=True).start()


def _serve(server: WebServer, connection: socket, tls: ssl.SSLContext | None) -> None:
    with connection:
        try:
            if tls is None:
                server.serve(connection)
            else:
                with tls.wrap_socket(connection, server_side=True) as wrapped:
                    server.serve(wrapped)
        except OSError:
            return  # the client has disconnected, as many tests intend


@dataclass
class StubResolver:
    """A resolver of given names. A list of lists gives one answer per lookup; the last answer is repeated."""

    names: dict[str, list[list[str]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def resolve(self, host: str, deadline: Deadline, limit_s: float) -> tuple[Address, ...]:
        self.asked.append(host)
        if host not in self.names:
            raise ToolFailure(ErrorCode.NETWORK_ERROR, f"DNS: {host} has no address", cause="dns")
        answers = self.names[host]
        return tuple(ipaddress.ip_address(text) for text in (answers.pop(0) if len(answers) > 1 else answers[0]))


class MemoryStore:
    """A PageStore in a dictionary."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, str], WebPage] = {}
        self.fetches: Counter[str] = Counter()

    def take(self, tenant: str, url: str) -> WebPage | None:
        return self.pages.get((tenant, url))

    def keep(self, tenant: str, page: WebPage) -> bool:
        self.pages[tenant, page.url] = page
        return True

    def count(self, tenant: str) -> int:
        self.fetches[tenant] += 1
        return self.fetches[tenant]


@dataclass
class Web:
    """A fetcher for loopback servers. The names of `resolver` resolve to 127.0.0.1, and the fetcher may connect there
    unless a test changes this.
    """

    resolver: StubResolver
    fetcher: Fetcher
    store: MemoryStore


def build_web(
    *servers: WebServer,
    hosts: Sequence[str] = ("site.example", "other.example"),
    names: dict[str, list[list[str]]] | None = None,
    limits: FetchLimits | None = None,
    tls: ssl.SSLContext | None = None,
    clock: Callable[[], float] | None = None,
    per_minute: int | None = None,
    **rules: Any,
) -> Web:
    ports = frozenset(server.port for server in servers)
    rules.setdefault("allowed_hosts", frozenset(f"{host}:{port}" for host in hosts for port in ports))
    rules.setdefault("addresses", AddressRules())
    resolver = StubResolver({host: [["127.0.0.1"]] for host in hosts} | (names or {}))
    store = MemoryStore()
    chosen = {"clock": clock} if clock is not None else {}
    return Web(
        resolver,
        Fetcher(
            resolver,
            WebAccessRules(**rules),
            store,
            per_minute=per_minute,
            limits=limits,
            tls=tls or SYSTEM_TLS,
            **chosen,
        ),
        store,
    )


def run_tool(tool: WorkerTool, *, tenant: str = "acme", timeout_s: float = 30.0, **arguments: Any) -> ToolResult:
    """Call one tool as a worker does: the arguments are checked, and every outcome becomes a result."""
    executor = build_executor(
        WorkerRegistry([tool]), FakeSandboxClient(), MemoryLedger(), MemoryBlobs(), {"host": "h1", "queue": "q"}
    )
    return executor.execute(build_call(tool.name, **arguments), build_context(tenant=tenant, timeout_s=timeout_s))
