"""A real sandboxd whose sandboxes reach the network through an egress proxy, and requests to its sandboxes."""

import contextlib
import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.stack.service_process import run_program
from tests.support.stack.stack import UP_S, Footprint
from tests.support.stack.waiting import wait_until
from toolcrew.workers.sandbox_client import GuestResponse, SandboxClient


@contextlib.contextmanager
def running_sandboxd(footprint: Footprint, environment: dict[str, str]) -> Iterator[Path]:
    """Run a sandboxd with this environment, and yield its socket."""
    with run_program(footprint, "sandboxd", [sys.executable, "-m", "toolcrew.workers.sandboxd"], environment):
        socket = Path(environment["TOOLCREW_SANDBOXD_SOCKET"])
        wait_until(socket.exists, UP_S, lambda: (footprint.folder / "sandboxd.log").read_text())
        yield socket


def sandboxd_environment(folder: Path, ports: list[int]) -> dict[str, str]:
    egress = {"ports": ports, "hosts": ["site.example", "localhost"], "private_hosts": ["site.example", "localhost"]}
    elsewhere = {"ports": ports, "hosts": ["else.example"], "private_hosts": []}
    classes = {
        "fetching": {"network": "egress", "egress": egress},
        "elsewhere": {"network": "egress", "egress": elsewhere},
    }
    return {
        "TOOLCREW_SANDBOXD_SOCKET": str(folder / "sandboxd.sock"),
        "TOOLCREW_SANDBOXD_NAME": f"egress-{secrets.token_hex(4)}",
        "TOOLCREW_SANDBOXD_STATE": str(folder / "state"),
        "TOOLCREW_SANDBOXD_LEASES": str(folder / "leases"),
        "TOOLCREW_EGRESS_SOCKET": str(folder / "egress.sock"),
        "TOOLCREW_TENANT_CLASSES": json.dumps(classes),
    }


def text_of(response: GuestResponse) -> str:
    return b"".join(response.streams.values()).decode(errors="replace")


def run_script(socket: Path, sandbox: str, script: str, timeout_s: float = 30.0, **options: Any) -> GuestResponse:
    """Run a shell script in a sandbox and return its response. `options`: of SandboxClient.call."""
    body = script.encode()
    request = {
        "op": "exec",
        "argv": None,
        "script_bytes": len(body),
        "cwd": "/workspace",
        "env": {},
        "timeout_s": timeout_s,
        "capture": {"stdout": 1 << 20, "stderr": 1 << 16},
    }
    with SandboxClient(socket) as client:
        return client.call(sandbox, request, body, **options)


def write_file(socket: Path, sandbox: str, name: str, data: bytes) -> None:
    """Write a file of the workspace."""
    request = {"op": "write_file", "path": f"/workspace/{name}", "mode": "overwrite", "timeout_s": 60}
    with SandboxClient(socket) as client:
        assert "error" not in client.call(sandbox, request, data).done
