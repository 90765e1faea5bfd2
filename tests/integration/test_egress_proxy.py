"""Real clients through the egress proxy: curl, pip and git against loopback servers over HTTP and TLS, and what each is told when refused."""

import contextlib
import os
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.egress_ground import Ground, build_rules, open_front, open_ground
from tests.web_certificate import server_context, write_authority

RUN_S = 60.0


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is for its failures."""


@contextlib.contextmanager
def serving(folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """The files of a folder at a loopback port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with open_ground() as opened:
        yield opened


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a big file, a package index and a git repository."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "big").write_bytes(os.urandom(3_000_000))
    packages = folder / "simple" / "tiny"
    packages.mkdir(parents=True)
    with zipfile.ZipFile(packages / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "x = 1\n")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    work = folder / "work"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@site.example", "-c", "init.defaultBranch=main"]
    for command in (["init", "-q", str(work)], ["-C", str(work), "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True, timeout=RUN_S)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(folder / "code.git")], check=True, timeout=RUN_S)
    subprocess.run(["git", "-C", str(folder / "code.git"), "update-server-info"], check=True, timeout=RUN_S)
    return folder


@pytest.fixture(scope="module", params=["http", "https"])
def place(request: pytest.FixtureRequest, site: Path) -> Iterator[tuple[str, int]]:
    """Where the files are: the beginning of their URLs, and the port."""
    with serving(site, server_context() if request.param == "https" else None) as port:
        yield f"{request.param}://site.example:{port}", port


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_authority(tmp_path_factory.mktemp("tls") / "authority.pem"))


def run(*argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and not name.startswith("PIP_")}
    return subprocess.run(argv, env=clean | environment, capture_output=True, text=True, timeout=RUN_S, check=False)


def test_curl_downloads(ground: Ground, place: tuple[str, int], authority: str, site: Path, tmp_path: Path) -> None:
    url, port = place
    with open_front(ground, build_rules(port)) as proxy:
        ran = run("curl", "-sS", "-x", proxy, "--cacert", authority, "-o", str(tmp_path / "got"), f"{url}/big")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "got").read_bytes() == (site / "big").read_bytes()


def test_curl_uploads_and_is_answered(ground: Ground, place: tuple[str, int], authority: str) -> None:
    url, port = place
    with open_front(ground, build_rules(port)) as proxy:
        ran = run("curl", "-sS", "-x", proxy, "--cacert", authority, "--data-binary", "x" * 100_000, "-w", "%{http_code}", f"{url}/big")
    assert ran.stdout.endswith("501"), ran


def test_curl_is_told_why_it_is_refused(ground: Ground, place: tuple[str, int]) -> None:
    url, port = place
    refused = url.replace("site.example", "evil.example")
    with open_front(ground, build_rules(port)) as proxy:
        ran = run("curl", "-sS", "-i", "-x", proxy, f"{refused}/big")
    assert "403" in ran.stdout + ran.stderr
    if url.startswith("http:"):
        assert "evil.example is not on this tenant's list; allowed: site.example" in ran.stdout


def test_pip_downloads_a_package(ground: Ground, place: tuple[str, int], authority: str, tmp_path: Path) -> None:
    url, port = place
    with open_front(ground, build_rules(port)) as proxy:
        options = ["--no-deps", "--disable-pip-version-check", "--no-cache-dir", "--retries", "0", "--trusted-host", "site.example"]
        where = ["--proxy", proxy, "--cert", authority, "--index-url", f"{url}/simple/", "-d", str(tmp_path)]
        ran = run(sys.executable, "-m", "pip", "download", "-q", *options, *where, "tiny")
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-1.0-py3-none-any.whl"]


def test_git_clones_a_repository(ground: Ground, place: tuple[str, int], authority: str, tmp_path: Path) -> None:
    url, port = place
    with open_front(ground, build_rules(port)) as proxy:
        environment = {"http_proxy": proxy, "https_proxy": proxy, "GIT_SSL_CAINFO": authority, "GIT_TERMINAL_PROMPT": "0"}
        ran = run("git", "clone", "-q", f"{url}/code.git", str(tmp_path / "code"), **environment)
    assert ran.returncode == 0, ran.stderr
    assert run("git", "-C", str(tmp_path / "code"), "log", "--format=%s").stdout == "first\n"


def test_a_certificate_is_the_hosts_own_because_nobody_reads_along(ground: Ground, site: Path) -> None:
    with serving(site, server_context()) as port, open_front(ground, build_rules(port)) as proxy:
        ran = run("curl", "-sS", "-x", proxy, f"https://site.example:{port}/big")
    # The test's own authority is not the system's: were it the proxy's certificate, this client could not tell either.
    assert "self" in ran.stderr
    assert ran.returncode == 60


def test_a_client_that_fronts_another_server_is_cut_off(ground: Ground, site: Path) -> None:
    with serving(site, server_context()) as port, open_front(ground, build_rules(port)) as proxy:
        # Greets search.example in a tunnel that was asked for site.example.
        ran = run(
            *("curl", "-sS", "-k", "-x", proxy, "--connect-to", f"search.example:{port}:site.example:{port}"),
            f"https://search.example:{port}/big",
        )
    assert (ran.returncode, "unrecognized name" in ran.stderr) == (35, True), ran
