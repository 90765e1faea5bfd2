"""The egress proxy in a thread, over names that resolve to loopback, and clients that connect as the clients of
sandboxd do.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from tests.support.stack.waiting import SOON_S, until
from tests.support.web.web_certificate import trusting_context
from tests.support.web.web_servers import StubResolver, WebServer
from toolcrew.contract.settings import EgressSettings
from toolcrew.workers.egress.allowances import ConnectionQuotas
from toolcrew.workers.egress.authority import Authority
from toolcrew.workers.egress.daemon import MAX_CONNECTIONS, serve
from toolcrew.workers.egress.destinations import Destinations, ResolverPool
from toolcrew.workers.egress.interception import SecretProxy
from toolcrew.workers.egress.limits import ProxyLimits
from toolcrew.workers.egress.secrets import SecretUses
from toolcrew.workers.egress.serving import Proxy
from toolcrew.workers.web.addresses import AddressRules


def build_rules(*servers: WebServer | int, **rules: Any) -> dict[str, Any]:
    """Return rules that allow site.example on loopback at the servers' ports. `rules` override the defaults."""
    ports = [server if isinstance(server, int) else server.port for server in servers]
    return {"hosts": ["site.example"], "private_hosts": ["site.example"], "ports": ports or [80, 443], **rules}


def build_opening(rules: Mapping[str, Any] | None, **fields: Any) -> bytes:
    """Return the opening line that sandboxd sends; without rules if `rules` is None."""
    opening = {"v": 1, "tenant": "acme", "session": "s1", **({} if rules is None else {"rules": rules}), **fields}
    return json.dumps(opening).encode() + b"\n"


@dataclass
class Harness:
    """A running proxy. `logs`: the log lines so far."""

    path: Path
    resolver: StubResolver
    logs: list[Any] = field(default_factory=list)

    def connect(self, rules: Mapping[str, Any] | None, **session_fields: Any) -> socket.socket:
        """Return a connection whose opening line has been sent."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(SOON_S)
        client.connect(str(self.path))
        client.sendall(build_opening(rules, **session_fields))
        return client

    def ask(self, rules: Mapping[str, Any] | None, data: bytes, **session_fields: Any) -> bytes:
        """Send `data` and return everything that comes back."""
        with self.connect(rules, **session_fields) as client:
            with contextlib.suppress(BrokenPipeError):
                client.sendall(data)
            return read_all(client)

    def tunnel(self, rules: Mapping[str, Any], place: str, **session_fields: Any) -> socket.socket:
        """Return a tunnel that the proxy has granted."""
        client = self.connect(rules, **session_fields)
        client.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
        assert read_some(client, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        return client

    @property
    def served(self) -> int:
        """Return how many connections the log reports."""
        return sum(line["event"] == "egress" for line in self.logs)

    def wait_for_line(self, count: int = 1, **fields: object) -> dict[str, Any]:
        """Return the newest log line of a connection with these fields, after `count` such lines exist. An earlier
        test may still write a line.
        """
        deadline = threading.Event()
        for _ in range(int(SOON_S * 100)):
            lines = [line for line in self.logs if line["event"] == "egress" and fields.items() <= line.items()]
            if len(lines) >= count:
                return dict(lines[-1])
            deadline.wait(0.01)
        raise AssertionError(f"not {count} lines: {self.logs}")


def status_of(data: bytes) -> int:
    return int(data.split(b" ", 2)[1])


def body_of(data: bytes) -> str:
    return data.partition(b"\r\n\r\n")[2].decode()


def build_hello(name: str | None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """Return the first bytes that a real TLS client sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = version
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
    return sent.read()


def read_all(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            data += piece
    return data


def read_some(client: socket.socket, until: bytes) -> bytes:
    data = b""
    while not data.endswith(until):
        piece = client.recv(1)
        assert piece, data
        data += piece
    return data


def get(place: str, *headers: str, method: str = "GET", body: bytes = b"", host: str | None = None) -> bytes:
    """Return a request for http://`place`. `host`: a Host header that differs from `place`."""
    lines = [f"{method} http://{place} HTTP/1.1", f"Host: {host or place.partition('/')[0]}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@contextmanager
def open_harness(
    resolver_pool: dict[str, list[list[str]]] | None = None,
    limits: ProxyLimits | None = None,
    addresses: AddressRules | None = None,
    max_connections: int = MAX_CONNECTIONS,
    **settings: Any,
) -> Iterator[Harness]:
    """Run a proxy that knows site.example and `resolver_pool`. `settings`: fields of EgressSettings."""
    resolver = StubResolver({"site.example": [["127.0.0.1"]]} | (resolver_pool or {}))
    chosen = limits or ProxyLimits(watch_s=0.05, linger_s=0.5)

    def build() -> Proxy:
        # Locks and semaphores belong to the event loop that uses them.
        rules = addresses or AddressRules()
        quotas = ConnectionQuotas(max_tenant_connections=max_connections)
        secrets = SecretProxy(Authority(), SecretUses(), trusting_context())
        return Proxy(Destinations(ResolverPool(lambda: resolver), rules, chosen), quotas, chosen, secrets)

    with tempfile.TemporaryDirectory() as folder, capture_logs() as logs:
        harness = Harness(Path(folder) / "egress.sock", resolver, logs)
        with _running(EgressSettings(egress_socket=harness.path, **settings), build, max_connections):
            yield harness


@contextmanager
def _running(settings: EgressSettings, build: Callable[[], Proxy], max_connections: int) -> Iterator[None]:
    loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def run() -> None:
        serving = asyncio.ensure_future(serve(settings, build(), stop, max_connections))
        await until(lambda: settings.egress_socket.exists() or serving.done())
        ready.set()
        await serving

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(SOON_S)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(SOON_S)
        loop.close()


@contextmanager
def open_tcp_port(harness: Harness, rules: Mapping[str, Any]) -> Iterator[str]:
    """Open a TCP port that replaces a sandbox's loopback and the tunnels of sandboxd. Yields the proxy URL as a
    sandbox sees the URL.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_accept, args=(listening, harness, rules), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, harness: Harness, rules: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        while True:
            client_side, _ = listening.accept()
            proxy_side = harness.connect(rules)
            proxy_side.settimeout(None)
            for source, sink in ((client_side, proxy_side), (proxy_side, client_side)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
