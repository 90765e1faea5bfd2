"""A folder that serves as a package index and a code host, over HTTP or TLS at a loopback port."""

import contextlib
import os
import ssl
import subprocess
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from tests.http_sites import serve_http

_RUN_S = 60.0
_WHEEL = {
    "tiny.py": "x = 1\n",
    "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny-1.0.dist-info/RECORD": "",
}


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
