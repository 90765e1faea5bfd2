"""Programs of a sandbox reach the network through the tunnel of the real sandboxd and the real proxy, and in no other
way.
"""

import contextlib
import ensurepip
import hashlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.records.builders import build_reply
from tests.support.sandboxd.egress_harness import Harness, open_harness
from tests.support.sandboxd.egress_sandboxd import (
    run_script,
    running_sandboxd,
    sandboxd_environment,
    text_of,
    write_file,
)
from tests.support.stack.service_process import run_program
from tests.support.stack.stack import Footprint, open_footprint, require_engine
from tests.support.stack.waiting import SOON_S, wait_until
from tests.support.web.package_site import build_site, open_site
from tests.support.web.web_certificate import server_context, write_authority
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import A, GuestReply, GuestRequest
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.mcp.sandbox_server import SandboxServer
from toolcrew.workers.mcp.settings import StdioEntry
from toolcrew.workers.sandbox_client import GuestResponse, SandboxClient

_FETCH = "import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1], timeout=20).read())"
_DIGEST = (
    "import hashlib, sys, urllib.request as u; print(hashlib.sha256(u.urlopen(sys.argv[1], "
    "timeout=20).read()).hexdigest())"
)
_READ_ERROR = """
import urllib.error, urllib.request
try:
    urllib.request.urlopen('http://site.example/')
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
_FETCHER = """
import hashlib, json, sys, urllib.request
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    try:
        with urllib.request.urlopen(message["params"]["arguments"]["url"], timeout=10) as answer:
            text = hashlib.sha256(answer.read()).hexdigest()
    except OSError as error:
        text = f"{type(error).__name__}: {error}"
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {"content": [{"type": "text", "text": text}]}}), flush=True)
"""
"""An MCP server whose only tool returns the content at an address."""
TERMS = {"acme": SandboxPolicy(tenant_class="fetching"), "rival": SandboxPolicy(tenant_class="elsewhere")}


@dataclass
class EgressSandboxd:
    """A sandboxd whose sandboxes reach `site.example`, and localhost by name, through the proxy that listens at
    `socket`.
    """

    client_socket: Path
    socket: Path
    harness: Harness
    http: int
    https: int
    stall: "Stall"
    footprint: Footprint
    site: Path
    _names: dict[str, str] = field(default_factory=dict)

    def run(
        self, script: str, tenant: str = "acme", session: str = "s1", call_id: str = "", timeout_s: float = 30.0
    ) -> GuestResponse:
        if tenant not in self._names:
            with SandboxClient(self.client_socket) as client:
                self._names[tenant] = client.open(tenant, session, policy=TERMS.get(tenant))
        return run_script(self.client_socket, self._names[tenant], script, timeout_s, call_id=call_id)

    def write(self, name: str, data: bytes) -> None:
        write_file(self.client_socket, self.name(), name, data)

    def name(self, tenant: str = "acme") -> str:
        return self._names[tenant]

    def set_proxy(self, proxy: Path) -> None:
        """Let sandboxd use another proxy from now on."""
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        self.socket.symlink_to(proxy)


class Stall:
    """A server that sends the start of a large answer and then nothing. `asked`: set by each request."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._open.append(connection)
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(1000))
                self.asked.set()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for opened in (self._listening, *self._open):
            opened.close()


@pytest.fixture(scope="module")
def sandboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EgressSandboxd]:
    api = require_engine()
    site = build_site(tmp_path_factory.mktemp("site"))
    stall = Stall()
    with contextlib.ExitStack() as stack:
        footprint = stack.enter_context(open_footprint(api))
        stack.callback(stall.close)
        http, https = stack.enter_context(open_site(site)), stack.enter_context(open_site(site, server_context()))
        harness = stack.enter_context(open_harness())
        environment = sandboxd_environment(footprint.folder, [http, https, stall.port])
        at = stack.enter_context(running_sandboxd(footprint, environment))
        made = EgressSandboxd(at, footprint.folder / "egress.sock", harness, http, https, stall, footprint, site)
        made.set_proxy(harness.path)
        made.run("true")
        made.write("authority.pem", write_authority(tmp_path_factory.mktemp("tls") / "authority.pem").read_bytes())
        yield made


@pytest.fixture(params=["http", "https"])
def url(sandboxes: EgressSandboxd, request: pytest.FixtureRequest) -> str:
    return f"{request.param}://site.example:{sandboxes.http if request.param == 'http' else sandboxes.https}"


# Common clients


def test_a_python_program_downloads(sandboxes: EgressSandboxd, url: str) -> None:
    response = sandboxes.run(f"export SSL_CERT_FILE=authority.pem; python3 -c '{_DIGEST}' {url}/big")
    assert text_of(response).strip() == hashlib.sha256((sandboxes.site / "big").read_bytes()).hexdigest()


def test_git_clones(sandboxes: EgressSandboxd, url: str) -> None:
    script = (
        f"rm -rf code; GIT_SSL_CAINFO=$PWD/authority.pem git clone -q {url}/code.git code && git -C code log "
        "--format=%s"
    )
    response = sandboxes.run(script, timeout_s=90.0)
    assert text_of(response) == "first\n", response.done


def test_pip_downloads_a_package(sandboxes: EgressSandboxd) -> None:
    wheel = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
    sandboxes.write("pip.whl", wheel.read_bytes())
    url = f"https://site.example:{sandboxes.https}/simple/"
    options = "-q --no-deps --disable-pip-version-check --no-cache-dir --retries 0 --cert authority.pem"
    response = sandboxes.run(
        f"python3 pip.whl/pip download {options} --index-url {url} -d packages tiny && ls packages", timeout_s=90
    )
    assert text_of(response) == "tiny-1.0-py3-none-any.whl\n"


def test_a_refusal_reaches_the_program_as_403(sandboxes: EgressSandboxd) -> None:
    response = sandboxes.run(f"python3 -c '{_FETCH}' http://evil.example/ 2>&1; true")
    assert "403" in text_of(response)


# MCP servers of the session


def _call_fetcher(sandboxes: EgressSandboxd, network: str, tenant: str) -> str:
    """Return the data that a kept MCP server gets from the site. The server is called twice."""
    entry = StdioEntry.model_validate({"command": "python3", "args": ("-c", _FETCHER), "network": network})
    sandboxes.run("true", tenant)

    def run(request: GuestRequest[A], body: bytes) -> GuestReply[A]:
        with SandboxClient(sandboxes.client_socket) as client:
            return build_reply(request, client.call(sandboxes.name(tenant), request.as_header(), body))

    server = SandboxServer("fetcher", entry, is_sessionless=True)
    outputs = [
        server.call_tool(run, "fetch", {"url": f"http://site.example:{sandboxes.http}/big"}, "/workspace", 30)
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]
    return str(outputs[0]["content"][0]["text"])


def test_an_mcp_server_has_the_network_of_its_session(sandboxes: EgressSandboxd) -> None:
    assert (
        _call_fetcher(sandboxes, "session", "acme") == hashlib.sha256((sandboxes.site / "big").read_bytes()).hexdigest()
    )
    assert _call_fetcher(sandboxes, "session", "unknown").startswith("URLError")


def test_an_mcp_server_without_network_runs_only_in_sessions_without_network(sandboxes: EgressSandboxd) -> None:
    with pytest.raises(ToolFailure) as caught:
        _call_fetcher(sandboxes, "none", "acme")
    assert caught.value.code is ErrorCode.SECURITY_REFUSED
    assert _call_fetcher(sandboxes, "none", "unknown").startswith("URLError")


def test_unset_proxy_variables_do_not_make_a_session_one_without_network(sandboxes: EgressSandboxd) -> None:
    request = {
        "op": "exec",
        "argv": None,
        "script_bytes": 0,
        "cwd": None,
        "env": {},
        "timeout_s": 30,
        "state": "keep",
        "capture": {"stdout": 99},
    }
    script = b"unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY"
    sandboxes.run("true")
    with SandboxClient(sandboxes.client_socket) as client:
        assert client.call(sandboxes.name(), {**request, "script_bytes": len(script)}, script).done["exit_code"] == 0
    with pytest.raises(ToolFailure) as caught:
        _call_fetcher(sandboxes, "none", "acme")
    assert caught.value.code is ErrorCode.SECURITY_REFUSED


# No other route


@pytest.mark.parametrize("tenant", ["acme", "unknown"])
def test_only_the_port_of_the_proxy_is_reachable(sandboxes: EgressSandboxd, tenant: str) -> None:
    tries = "\n".join(
        [
            "import socket",
            (
                f"for where in (('127.0.0.1', {sandboxes.http}), ('172.17.0.1', 22), ('192.0.2.1', 80), ('::1', "
                f"{sandboxes.http}), ('2001:db8::1', 80)):"
            ),
            "    try: socket.create_connection(where, timeout=5); print('reached', where)",
            "    except OSError as error: pass",
            "try: socket.getaddrinfo('site.example', 80); print('resolved')",
            "except OSError: pass",
            "print('tried')",
        ]
    )
    assert text_of(sandboxes.run(f"cat > tries.py <<'END'\n{tries}\nEND\npython3 tries.py 2>&1", tenant)) == "tried\n"


def test_a_sandbox_without_network_has_no_proxy(sandboxes: EgressSandboxd) -> None:
    response = sandboxes.run(
        "env | grep -ci proxy; python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 3128))' 2>&1 | tail "
        "-1",
        "unknown",
    )
    assert "ConnectionRefusedError" in text_of(response)
    assert text_of(response).startswith("0\n")


def test_each_session_is_checked_against_the_rules_of_its_own_tenant(sandboxes: EgressSandboxd) -> None:
    response = sandboxes.run(
        f"python3 -c '{_FETCH}' http://site.example:{sandboxes.http}/big 2>&1; true", "rival", "theirs"
    )
    assert "403" in text_of(response)
    # The proxy writes the line of a connection after its answer.
    sandboxes.harness.wait_for_line(tenant="rival", session="theirs")


def test_a_withdrawn_network_ends_open_connections_and_refuses_new_ones(sandboxes: EgressSandboxd) -> None:
    sandboxes.stall.asked.clear()
    got: list[GuestResponse] = []
    stalling = f"python3 -c '{_FETCH}' http://site.example:{sandboxes.stall.port}/ 2>&1 | tail -1 | tail -c 300"
    fetch = f"python3 -c '{_FETCH}' http://site.example:{sandboxes.http}/big 2>&1 | tail -c 300"
    with SandboxClient(sandboxes.client_socket) as client:
        try:
            with in_thread(lambda: got.append(sandboxes.run(stalling))):
                assert sandboxes.stall.asked.wait(SOON_S)
                assert client.send_policy("acme", TERMS["acme"].model_copy(update={"network": "none"})) == 1
            refused = sandboxes.run(fetch)
        finally:
            client.send_policy("acme", TERMS["acme"])
    assert any(
        error_name in text_of(got[0]) for error_name in ("IncompleteRead", "RemoteDisconnected", "ConnectionResetError")
    )
    assert "403" in text_of(refused)
    assert "HTTPError" not in text_of(sandboxes.run(fetch))


# Ends of connections


def test_a_cancelled_call_ends_its_connections_at_the_proxy(sandboxes: EgressSandboxd) -> None:
    sandboxes.stall.asked.clear()
    before = sandboxes.harness.served
    fetch = f"python3 -c '{_FETCH}' http://site.example:{sandboxes.stall.port}/"
    with in_thread(lambda: sandboxes.run(fetch, call_id="fetch", timeout_s=60)):
        assert sandboxes.stall.asked.wait(SOON_S)
        with SandboxClient(sandboxes.client_socket) as client:
            assert client.cancel(sandboxes.name(), "fetch")
    sandboxes.harness.wait_for_line(before + 1)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_a_client_gets_an_error_when_the_proxy_ends_during_a_response(
    sandboxes: EgressSandboxd, stop: signal.Signals
) -> None:
    own = sandboxes.footprint.folder / f"egress-{stop.name}.sock"
    sandboxes.stall.asked.clear()
    got: list[GuestResponse] = []
    with run_program(
        sandboxes.footprint,
        "egress",
        [sys.executable, "-m", "toolcrew.workers.egress"],
        {"TOOLCREW_EGRESS_SOCKET": str(own)},
    ) as proxy:
        wait_until(own.exists, SOON_S, "the proxy listens")
        sandboxes.set_proxy(own)
        fetch = (
            f"no_proxy= NO_PROXY= python3 -c '{_FETCH}' http://localhost:{sandboxes.stall.port}/ 2>&1 | tail -1 | tail -c "
            "300"
        )
        with in_thread(lambda: got.append(sandboxes.run(fetch))):
            assert sandboxes.stall.asked.wait(SOON_S)
            os.kill(proxy.pid, stop)
    # The failure may come before or after the head of the answer. The client gets an error in both cases.
    assert "IncompleteRead" in text_of(got[0]) or "RemoteDisconnected" in text_of(got[0])
    sandboxes.set_proxy(sandboxes.harness.path)


def test_a_program_gets_502_when_the_proxy_is_unavailable(sandboxes: EgressSandboxd) -> None:
    sandboxes.set_proxy(sandboxes.footprint.folder / "nothing.sock")
    try:
        response = sandboxes.run(f"python3 - <<'END'\n{_READ_ERROR}\nEND")
    finally:
        sandboxes.set_proxy(sandboxes.harness.path)
    assert text_of(response).startswith("502 The egress proxy of this host does not answer")


@contextlib.contextmanager
def in_thread(work: Any) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
        assert not thread.is_alive()
