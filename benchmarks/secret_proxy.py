"""Measure what a secret adds to the time of a request through the egress proxy. With a secret the proxy decrypts TLS,
inserts the secret and searches the answer; without one it only forwards bytes. Both use persistent connections.
"""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.processes import child_process, wait_for
from benchmarks.report import Case, Report, interleave, median, percentile, timed
from benchmarks.sizes import size
from toolcrew.contract.secrets import build_placeholder
from toolcrew.workers.egress.authority import Authority

HOST = "localhost"
VALUE = "a-secret-of-the-benchmark"
ROUNDS = size(600, 20)
WARM_UP = size(50, 2)
ANSWER_BYTES = 4096
LARGE_BYTES = 1024 * 1024


def _build_answer(size: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size


_ANSWER, _LARGE_ANSWER = _build_answer(ANSWER_BYTES), _build_answer(LARGE_BYTES)


@contextlib.contextmanager
def _tls_server(context: ssl.SSLContext) -> Iterator[int]:
    """Serve the same answer to every request on persistent connections; yield the port."""

    def serve(raw: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(raw, server_side=True) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = b""
            while piece := connection.recv(65536):
                data += piece
                if data.endswith(b"\r\n\r\n"):
                    connection.sendall(_LARGE_ANSWER if data.startswith(b"GET /large ") else _ANSWER)
                    data = b""

    def accept(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


class _Connection(http.client.HTTPSConnection):
    """A connection of a session, through the proxy, with or without its secret."""

    def __init__(self, proxy: Path, port: int, trust: ssl.SSLContext, *, has_secret: bool) -> None:
        super().__init__(HOST, port, context=trust)
        self._proxy = proxy
        self._trust = trust
        rules = {"hosts": [HOST], "private_hosts": [HOST], "ports": [port], "max_bytes": 2**50}
        secret = {"name": "TOKEN", "value": VALUE, "hosts": [f"{HOST}:{port}"], "place": "header:Authorization"}
        opening = {"v": 1, "tenant": "bench", "session": "bench", "rules": {**rules, "bytes_per_second": 2**40}}
        self._opening = opening | {"secrets": [secret] if has_secret else []}

    def connect(self) -> None:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.connect(str(self._proxy))
        raw.sendall(f"{json.dumps(self._opening)}\nCONNECT {HOST}:{self.port} HTTP/1.1\r\n\r\n".encode())
        if b" 200 " not in (answer := raw.recv(1000)):
            raise RuntimeError(f"no tunnel: {answer!r}")
        self.sock = self._trust.wrap_socket(raw, server_hostname=HOST)

    def ask(self, path: str = "/", size: int = ANSWER_BYTES) -> None:
        placeholder = build_placeholder("bench", "bench", "TOKEN")
        self.request("GET", path, headers={"Authorization": f"Bearer {placeholder}"})
        answer = self.getresponse()
        if answer.status != 200 or len(answer.read()) != size:
            raise RuntimeError(f"not the whole answer: {answer.status}")


def _ask_authority(proxy: Path) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(proxy))
        client.sendall(b'{"v": 1, "ask": "authority"}\n')
        return b"".join(iter(lambda: client.recv(65536), b"")).decode()


def run(rounds: int = ROUNDS) -> Report:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrew-bench-")))
        authority, proxy, bundle = Authority(), folder / "egress.sock", folder / "authorities.pem"
        bundle.write_bytes(authority.build_bundle())
        port = stack.enter_context(_tls_server(authority.find_context(HOST)))
        environment = {"TOOLCREW_EGRESS_SOCKET": str(proxy), "SSL_CERT_FILE": str(bundle)}
        stack.enter_context(
            child_process([sys.executable, "-m", "toolcrew.workers.egress"], environment, folder / "egress.log")
        )
        wait_for(proxy)
        trust = ssl.create_default_context(cadata=bundle.read_text() + _ask_authority(proxy))
        tunnel = _Connection(proxy, port, trust, has_secret=False)
        secret = _Connection(proxy, port, trust, has_secret=True)
        for connection in (tunnel, secret):
            stack.callback(connection.close)
        cases: dict[str, Case] = {
            "tunnel": timed(tunnel.ask),
            "secret": timed(secret.ask),
            "tunnel_large": timed(lambda: tunnel.ask("/large", LARGE_BYTES)),
            "secret_large": timed(lambda: secret.ask("/large", LARGE_BYTES)),
            "tunnel_open": timed(lambda: _ask_once(proxy, port, trust, has_secret=False)),
            "secret_open": timed(lambda: _ask_once(proxy, port, trust, has_secret=True)),
        }
        seconds = asyncio.run(interleave(cases, rounds, WARM_UP))
    return _report(seconds, rounds)


def _ask_once(proxy: Path, port: int, trust: ssl.SSLContext, *, has_secret: bool) -> None:
    connection = _Connection(proxy, port, trust, has_secret=has_secret)
    connection.ask()
    connection.close()


def _report(seconds: dict[str, list[float]], rounds: int) -> Report:
    notes = [f"{rounds} interleaved requests on kept connections, answers of {ANSWER_BYTES} bytes, TLS on both sides"]
    report = Report("secret_proxy", notes=notes)
    for case, label in (("tunnel", "the plain tunnel"), ("secret", "TLS ends in the proxy, a secret is put in")):
        report.add(f"{case}_ms", median(seconds[case]) * 1000, f"{label}, p50")
        report.add(f"{case}_p95_ms", percentile(seconds[case], 0.95) * 1000, f"{label}, p95")
        report.add(f"{case}_open_ms", median(seconds[f"{case}_open"]) * 1000, f"{label}, with a new connection, p50")
        report.add(f"{case}_large_ms", median(seconds[f"{case}_large"]) * 1000, f"{label}, answers of 1 MiB, p50")
    more = (median(seconds["secret"]) - median(seconds["tunnel"])) * 1000
    report.add("more_ms", more, "what a secret costs a request, p50", at_most=3.0)
    return report
