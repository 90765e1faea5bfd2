"""A folder that serves as a package index and a code host, over HTTP or TLS at a loopback port. With a token also a
private npm registry, git server and model API.
"""

import base64
import contextlib
import hashlib
import json
import os
import ssl
import subprocess
import zipfile
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.sandboxd.archives import build_tar
from tests.support.web.http_sites import serve_http
from tests.support.web.web_certificate import server_context

_RUN_S = 60.0
_WHEEL = {
    "tiny.py": "x = 1\n",
    "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny-1.0.dist-info/RECORD": "",
}

_NPM_PACKAGE = (
    ("package/package.json", b'{"name": "tiny", "version": "1.0.0", "main": "index.js"}'),
    ("package/index.js", b"module.exports = 'tiny';"),
)


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the output of a test is for its failures."""


def build_site(folder: Path) -> Path:
    """Create `big` (3 MB), an index with the package `tiny` below `simple/`, and the repository `code.git`. Returns
    the folder.
    """
    (folder / "big").write_bytes(os.urandom(3_000_000))
    packages = folder / "simple" / "tiny"
    packages.mkdir(parents=True)
    with zipfile.ZipFile(packages / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in _WHEEL.items():
            wheel.writestr(name, text)
    work, bare = str(folder / "work"), str(folder / "code.git")
    _git("init", "-q", work)
    _git("-C", work, "commit", "-q", "--allow-empty", "-m", "first")
    _git("clone", "-q", "--bare", work, bare)
    _git("-C", bare, "update-server-info")
    return folder


def open_site(folder: Path, tls: ssl.SSLContext | None = None) -> "contextlib.AbstractContextManager[int]":
    """Serve the files of a folder. Yields the port."""
    return serve_http(partial(_Files, directory=str(folder)), tls)


def _git(*arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@site.example", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *arguments], check=True, timeout=_RUN_S)


class _PrivateHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, token: str, package: bytes, *arguments: object) -> None:
        self._folder = folder
        self._token = token
        self._package = package
        super().__init__(*arguments)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the output of a test is for its failures."""

    def do_GET(self) -> None:  # the names that http.server calls
        self._serve(b"")

    def do_POST(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._serve(body)

    def _serve(self, body: bytes) -> None:
        if not self._is_allowed():
            self._reply(401, b"who are you?", "text/plain", {"WWW-Authenticate": 'Basic realm="private"'})
            return
        path = urlsplit(self.path).path
        if path.startswith("/git/"):
            self._run_git(path.removeprefix("/git"), body)
        elif path == "/v1/chat/completions":
            self._chat(json.loads(body))
        elif path == "/npm/tiny":
            self._describe_package()
        elif path.startswith("/npm/"):
            self._reply(200, self._package, "application/octet-stream")
        elif path == "/echo":
            self._reply(200, json.dumps(dict(self.headers)).encode(), "application/json")
        else:
            self._send_file(path)

    def _is_allowed(self) -> bool:
        scheme, _, credentials = self.headers.get("Authorization", "").partition(" ")
        if scheme == "Basic":
            return base64.b64decode(credentials).decode().partition(":")[2] == self._token
        return (scheme, credentials) == ("Bearer", self._token)

    def _reply(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, path: str) -> None:
        found = self._folder / path.strip("/")
        if found.is_dir():
            links = "".join(
                f'<a href="{one.name}{"/" if one.is_dir() else ""}">{one.name}</a>' for one in found.iterdir()
            )
            self._reply(200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
        elif found.is_file():
            self._reply(200, found.read_bytes(), "application/octet-stream")
        else:
            self._reply(404, b"", "text/plain")

    def _describe_package(self) -> None:
        digest = base64.b64encode(hashlib.sha512(self._package).digest()).decode()
        tarball = f"https://{self.headers['Host']}/npm/tiny/-/tiny-1.0.0.tgz"
        version = {"name": "tiny", "version": "1.0.0", "dist": {"tarball": tarball, "integrity": f"sha512-{digest}"}}
        about = {"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        self._reply(200, json.dumps(about).encode(), "application/json")

    def _chat(self, request: dict[str, object]) -> None:
        if request.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for text in ("hel", "lo"):
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
                line = f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            end = b"data: [DONE]\n\n"
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))
            return
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self._reply(200, json.dumps(reply).encode(), "application/json")

    def _run_git(self, path: str, body: bytes) -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self._folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": urlsplit(self.path).query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        ran = subprocess.run(
            ["git", "http-backend"], input=body, env=environment, capture_output=True, timeout=_RUN_S, check=True
        )
        head, _, content = ran.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        status = int(headers.pop("Status", "200").split()[0])
        self._reply(status, content, headers.pop("Content-Type", "text/plain"), headers)


def open_private_site(folder: Path, token: str) -> "contextlib.AbstractContextManager[int]":
    """Serve the files of `build_site` to holders of the token. Yields the port."""
    return serve_http(partial(_PrivateHandler, folder, token, build_tar(*_NPM_PACKAGE, mode="w:gz")), server_context())
