"""A TLS server whose requests are recorded, behind the egress proxy, and connections of sessions with secrets."""

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.sandboxd.egress_harness import Harness, build_rules, open_harness, read_all
from tests.support.stack.waiting import SOON_S
from tests.support.web.web_certificate import server_context
from toolcrew.contract.secrets import build_placeholder
from toolcrew.workers.egress.limits import ProxyLimits

VALUE = "ghp-canary-0123456789abcdefXYZ"
"""The value of every secret here."""
PLACEHOLDER = build_placeholder("acme", "s1", "TOKEN").encode()
Answer = Callable[[bytes], bytes | Sequence[bytes | threading.Event]]


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def echo(request: bytes) -> bytes:
    """Answer with the request itself."""
    return answer(request)


@dataclass
class Site:
    """A server that keeps connections. `requests`: heads and bodies as they arrived. `answer`: the next answers, or
    their pieces, each sent on its own. An event among the pieces: the server waits for it.
    """

    port: int
    answer: Answer = echo
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0

    @property
    def received(self) -> bytes:
        return b"".join(self.requests)


def _serve(site: Site, raw: socket.socket, context: ssl.SSLContext) -> None:
    with contextlib.suppress(OSError):
        connection = context.wrap_socket(raw, server_side=True)
        site.connections += 1
        while request := _read_request(connection):
            site.requests.append(request)
            answered = site.answer(request)
            pieces = [answered] if isinstance(answered, bytes) else answered
            for piece in pieces:
                if isinstance(piece, threading.Event):
                    piece.wait(SOON_S)
                else:
                    connection.sendall(piece)
            sent = b"".join(piece for piece in pieces if isinstance(piece, bytes))
            if b"\r\nconnection: close" in sent.lower():
                break
        connection.close()
    raw.close()


def _read_request(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        if not (piece := connection.recv(1)):
            return b""
        data += piece
    lower = data.lower()
    if b"transfer-encoding: chunked" in lower:
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += connection.recv(1)
    elif b"content-length: " in lower:
        length = int(lower.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        for _ in range(length):
            data += connection.recv(1)
    return data


@contextlib.contextmanager
def open_secret_site(context: ssl.SSLContext | None = None) -> Iterator[Site]:
    """Serve TLS with the certificate of site.example, or with another context."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        site, tls = Site(listening.getsockname()[1]), context or server_context()

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    raw, _ = listening.accept()
                    threading.Thread(target=_serve, args=(site, raw, tls), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield site
        listening.shutdown(socket.SHUT_RDWR)


@dataclass
class SecretHarness:
    """A proxy that knows site.example and search.example, and a site. `trust`: a context with the proxy's authority."""

    proxy: Harness
    site: Site
    trust: ssl.SSLContext

    @property
    def host(self) -> str:
        return f"site.example:{self.site.port}"

    def reset(self) -> "SecretHarness":
        """Return the harness, with the usual answer of the site and without its earlier requests."""
        self.site.answer = echo
        self.site.requests.clear()
        return self

    def secret(self, **fields: Any) -> dict[str, Any]:
        """Return a secret bound to the site, with its value."""
        usual = {"name": "TOKEN", "value": VALUE, "hosts": [self.host], "place": "header:Authorization"}
        return {**usual, **fields}

    def open_tunnel(
        self, *secrets: Mapping[str, Any], session: str = "s1", place: str | None = None, **rules: Any
    ) -> socket.socket:
        """Return a tunnel of a session with these secrets, before TLS."""
        names = ["site.example", "search.example"]
        allowed = build_rules(self.site.port, hosts=names, private_hosts=names, **rules)
        return self.proxy.tunnel(allowed, place or self.host, session=session, run="r1", secrets=secrets)

    def connect(self, *secrets: Mapping[str, Any], name: str = "site.example", **options: Any) -> ssl.SSLSocket:
        """Return a TLS connection through the proxy to the site. `name`: SNI."""
        return self.trust.wrap_socket(self.open_tunnel(*secrets, **options), server_hostname=name)

    def ask(self, raw: bytes, *secrets: Mapping[str, Any], **options: Any) -> bytes:
        """Send bytes, end the sending, and return everything that comes back."""
        with self.connect(*(secrets or [self.secret()]), **options) as client:
            client.sendall(raw)
            return read_answer(client)

    def get(self, path: str = "/", *headers: str, method: str = "GET", body: bytes = b"", host: str = "") -> bytes:
        """Return a request."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host or self.host}", *headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def read_uses(self) -> list[dict[str, Any]]:
        """Return the uses that the proxy reports to sandboxd."""
        return list(json.loads(self.proxy_question("uses")))

    def proxy_question(self, ask: str) -> bytes:
        return ask_proxy(self.proxy, ask)


def ask_proxy(harness: Harness, ask: str) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(harness.path))
        client.sendall(json.dumps({"v": 1, "ask": ask}).encode() + b"\n")
        return read_all(client)


def read_answer(client: socket.socket) -> bytes:
    """Return one answer with its framing: to the end of its body, or of the connection."""
    data = b""
    with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
        while not _is_complete(data):
            if not (piece := client.recv(65536)):
                break
            data += piece
    return data


def _is_complete(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    lower = head.lower()
    if not end:
        return False
    if b"transfer-encoding: chunked" in lower:
        return body.endswith(b"0\r\n\r\n")
    if b"content-length: " in lower:
        return len(body) >= int(lower.partition(b"content-length: ")[2].split(b"\r\n")[0])
    return False


@contextlib.contextmanager
def open_secret_harness(limits: ProxyLimits | None = None) -> Iterator[SecretHarness]:
    names = {"search.example": [["127.0.0.1"]], "elsewhere.example": [["127.0.0.1"]]}
    with open_secret_site() as site, open_harness(names, limits) as proxy:
        trust = ssl.create_default_context(cadata=ask_proxy(proxy, "authority").decode())
        yield SecretHarness(proxy, site, trust)
