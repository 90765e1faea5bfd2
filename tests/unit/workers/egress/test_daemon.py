"""The proxy as a process: allowed clients, listening address, shutdown, and blocking lookups."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.sandboxd.egress_harness import build_opening, get, open_harness, read_all
from tests.support.stack.waiting import SOON_S
from tests.support.web.web_servers import StubResolver
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import EgressSettings, OrchestratorSettings, load_settings, read_environment
from toolcrew.workers.egress.destinations import LOOKUPS_PER_TENANT, ResolverPool
from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.urls import Address


@contextmanager
def running_process(path: Path, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start `python -m toolcrew.workers.egress`, and wait until the process is ready."""
    variables = {**os.environ, "TOOLCREW_EGRESS_SOCKET": str(path), **environment}
    process = subprocess.Popen([sys.executable, "-m", "toolcrew.workers.egress"], env=variables, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        assert b"egress_ready" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.wait(SOON_S)
        process.stderr.close()


def exchange(path: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(SOON_S)
        client.connect(str(path))
        try:
            client.sendall(data)
        except BrokenPipeError:
            return b""
        return read_all(client)


def test_the_process_refuses_a_second_proxy_and_removes_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "own" / "egress.sock"
    with running_process(path) as process:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert b"is not on this tenant's list" in exchange(
            path, build_opening({"hosts": ["a.example"]}) + get("b.example/")
        )
        second = subprocess.run(
            [sys.executable, "-m", "toolcrew.workers.egress"],
            env={**os.environ, "TOOLCREW_EGRESS_SOCKET": str(path)},
            capture_output=True,
            timeout=SOON_S,
        )
        assert (second.returncode, b"another egress proxy already listens" in second.stderr) == (1, True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lookups:
            lookups.connect(str(path))
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON_S) == 0
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_user_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    # The proxy closes the connection of a refused client, perhaps before the client has sent everything.
    program = (
        "import contextlib, os, socket, sys; os.setuid(int(sys.argv[2])); s = socket.socket(socket.AF_UNIX); "
        "s.connect(sys.argv[1])\n"
        "with contextlib.suppress(OSError): s.sendall(sys.stdin.buffer.read())\n"
        "with contextlib.suppress(OSError): print(s.recv(12))"
    )
    data = build_opening({"hosts": ["a.example"]}) + get("b.example/")
    with open_harness(egress_allow_uids=[4321]) as harness:
        harness.path.parent.chmod(0o755)

        def connect_as(uid: int) -> bytes:
            argv = [sys.executable, "-c", program, str(harness.path), str(uid)]
            return subprocess.run(argv, input=data, stdout=subprocess.PIPE, timeout=SOON_S, check=True).stdout

        assert b"HTTP" not in connect_as(4322)
        assert b"HTTP/1.1 403" in connect_as(4321)
        assert {"event": "peer_refused", "log_level": "warning", "uid": 4322} in harness.logs


def test_a_connection_without_data_is_not_logged() -> None:
    with open_harness() as harness:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(harness.path))
            client.shutdown(socket.SHUT_WR)
            assert read_all(client) == b""
        harness.ask({}, get("site.example/"))
        assert harness.wait_for_line()["destination"] == "site.example"
        assert harness.served == 1


class _SlowResolver(StubResolver):
    """A resolver that answers when the test says so. Counts concurrent lookups."""

    def __init__(self) -> None:
        super().__init__({"a.example": [["93.184.216.34"]]})
        self.may_answer = threading.Event()
        self.started_lookups = threading.Semaphore(0)

    def resolve(self, host: str, deadline: Deadline, limit_s: float) -> tuple[Address, ...]:
        self.started_lookups.release()
        assert self.may_answer.wait(SOON_S)
        return super().resolve(host, deadline, limit_s)


async def test_slow_lookups_of_one_tenant_delay_no_other_tenant() -> None:
    slow, quick = _SlowResolver(), StubResolver({"a.example": [["93.184.216.34"]]})
    resolvers = iter([slow, quick])
    resolver_pool = ResolverPool(lambda: next(resolvers))
    lookups = [asyncio.ensure_future(resolver_pool.resolve("slow", "a.example", 5)) for _ in range(50)]
    for _ in range(LOOKUPS_PER_TENANT):
        assert await asyncio.to_thread(slow.started_lookups.acquire, timeout=SOON_S)
    assert len(await asyncio.wait_for(resolver_pool.resolve("quick", "a.example", SOON_S), SOON_S)) == 1
    assert not slow.started_lookups.acquire(blocking=False)
    slow.may_answer.set()
    assert len(await asyncio.gather(*lookups)) == 50
    resolver_pool.close()


@pytest.mark.parametrize(
    ("classes", "running", "needs"),
    [
        ("", "", False),
        ('{"builders": {"pids": 64}}', "", False),
        ('{"builders": {"network": "none"}}', "", False),
        ('{"a": {}, "builders": {"network": "egress", "egress": {"hosts": ["pypi.org"]}}}', "", True),
        ('{"default": {"network": "egress"}}', "", True),
        ('{"default": {"network": "egress"}}', "/run/egress.sock", False),
    ],
)
def test_a_local_stack_starts_a_proxy_only_if_a_class_needs_one(
    classes: str, running: str, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_TENANT_CLASSES", classes)
    monkeypatch.setenv("TOOLCREW_EGRESS_SOCKET", running)
    assert load_settings().needs_egress() is needs


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        (EgressSettings, "EGRESS_ALLOW_UIDS", "x"),
        (EgressSettings, "NAT64_PREFIX", "64:ff9b::/64"),
        (OrchestratorSettings, "TENANT_CLASSES", "{"),
        (OrchestratorSettings, "TENANT_CLASSES", "[]"),
        (OrchestratorSettings, "TENANT_CLASSES", '{"a": 1}'),
    ],
)
def test_an_invalid_setting_is_named_in_the_error(
    settings: type[EgressSettings | OrchestratorSettings], name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TOOLCREW_{name}", value)
    with pytest.raises(ConfigError, match=r"TOOLCREW_|tenant_classes"):
        read_environment(settings)
