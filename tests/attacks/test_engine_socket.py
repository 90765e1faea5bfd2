"""Attacks on the engine's socket. Access to the socket is root access on the host. So the socket is not in a sandbox,
and the host follows no path of a sandbox to it.
"""

from pathlib import Path

import pytest

from tests.support.sandboxd.attack_sandboxd import OwnSandboxd
from tests.support.sandboxd.containers import Box, python

pytestmark = pytest.mark.stack

ENGINE_SOCKETS = ("run/docker.sock", "run/containerd/containerd.sock", "run/podman/podman.sock")
ENGINE_PORTS = (2375, 2376, 2377, 4243)


def test_a_sandbox_contains_no_engine_socket(shared_box: Box) -> None:
    """Aim: find a socket of the engine, or any socket, in the sandbox's files."""
    answer = shared_box.run("find / -xdev -type s 2>/dev/null; find /dev /tmp /workspace /run -type s 2>/dev/null")

    assert answer.output.strip() == ""
    assert (shared_box.root / "run").is_dir()
    assert not (shared_box.root / "run").is_symlink()
    assert not [place for place in ENGINE_SOCKETS if (shared_box.root / place).exists()]
    assert "docker.sock" not in shared_box.mounts()


def test_a_sandbox_cannot_connect_to_any_listener_of_the_host(shared_box: Box) -> None:
    """Aim: connect to the addresses on which the host's programs, including the engine, listen. The attacker knows
    the names.
    """
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = sorted({row[7] for row in rows if len(row) > 7 and row[3] == "00010000"})
    answer = shared_box.run(
        python(f"""
import socket
reached = []
for name in {names!r}:
    try: socket.socket(socket.AF_UNIX).connect(name.replace('@', chr(0), 1) if name[0] == '@' else name); reached.append(name)
    except OSError: pass
for port in {ENGINE_PORTS!r}:
    for host in ('127.0.0.1', '172.17.0.1', '::1'):
        try: socket.create_connection((host, port), 1); reached.append(port)
        except OSError: pass
print(reached)
""")
    )

    assert names
    assert answer.output.strip() == "[]"


def test_sandboxd_never_connects_to_a_socket_of_the_sandbox(sandboxd: OwnSandboxd) -> None:
    """Aim: replace the socket of a channel, so that sandboxd connects to an attacker's socket."""
    listen = """
import os, socket
os.makedirs('/output/.state', exist_ok=True)
servers = []
for place in ('/workspace/sandboxd.sock', '/tmp/sandboxd.sock', '/output/sandboxd.sock', '/output/.state/guest.sock', '\\0toolcrew', '\\0guest'):
    servers.append(socket.socket(socket.AF_UNIX)); servers[-1].bind(place); servers[-1].listen()
os.symlink('/run/docker.sock', '/workspace/docker.sock')
print('listening', flush=True)
import select
print('reached', select.select(servers, [], [], 100)[0])
"""
    with sandboxd.session(session="deputy") as session:
        session.start_job(python(listen))
        session.wait_for("python3 -")
        session.bash("until [ -S /output/.state/guest.sock ]; do sleep 0.01; done")
        session.ask(
            {"op": "read_text", "path": "sandboxd.sock", "offset": 1, "limit": 9, "max_bytes": 8192, "timeout_s": 5}
        )
        session.ask({"op": "write_file", "path": "docker.sock", "mode": "append", "timeout_s": 5}, b"x")
        session.ask(
            {"op": "glob", "pattern": "**", "path": ".", "kind": "any", "limit": 9, "max_bytes": 8192, "timeout_s": 5}
        )

        assert any("python3 -" in line for line in session.programs().values())
        assert "reached" not in session.bash("cat /output/jobs/*.log").streams["merged"].decode()
        assert session.is_usable()
