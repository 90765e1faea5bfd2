"""Start separate hosts for the benchmark of images. Each host has its own Docker engine, sandboxd and worker on this
machine.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import secrets
import select
import signal
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests.exceptions
from docker import APIClient

from benchmarks.engine_peer import open_api
from benchmarks.processes import START_LIMIT_S, STOP_LIMIT_S, child_process, running_sandboxd
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.settings import SandboxdSettings

ENGINE_TIMEOUT_S = 120
_TYPE = "application/vnd.docker"


@dataclass(frozen=True)
class ImageHost:
    """A running host. `api`: a client of its engine."""

    name: str
    api: APIClient


@contextlib.contextmanager
def running_host(name: str, folder: Path, shared: Mapping[str, str], own: Mapping[str, str]) -> Iterator[ImageHost]:
    """Start a host whose engine has only the sandbox image. `shared`: environment of sandboxd and the worker. `own`:
    additional environment of sandboxd alone. Raises SandboxUnavailable when a part does not start.
    """
    folder.mkdir()
    with running_engine(folder) as api:
        _copy_image(SandboxdSettings().sandbox_image, api)
        engine = {"DOCKER_HOST": f"unix://{folder / 'engine.sock'}"}
        with running_sandboxd({**shared, **own, **engine}) as sandboxd:
            worker = {
                **shared,
                "TOOLCREW_HOST": name,
                "TOOLCREW_SANDBOXD_SOCKET": str(sandboxd.socket),
                "TOOLCREW_WORKER_KIND": "sandbox",
                "TOOLCREW_LOG_LEVEL": "WARNING",
            }
            with child_process([sys.executable, "-m", "toolcrew.workers"], worker, folder / "worker.log"):
                yield ImageHost(name, api)


@contextlib.contextmanager
def running_engine(folder: Path) -> Iterator[APIClient]:
    """Start a Docker engine without networks, and yield a client of it. The engine mounts its data folder on itself, so
    `folder` must be in a `temporary_folder`. Raises SandboxUnavailable with its output.
    """
    socket, log = folder / "engine.sock", folder / "engine.log"
    # This engine must not read the configuration of the machine's own engine.
    (folder / "engine.json").write_text("{}")
    argv = [
        *("dockerd", "--config-file", str(folder / "engine.json"), "--host", f"unix://{socket}", "--bridge", "none"),
        *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")),
        *("--iptables=false", "--ip-forward=false", "--ip-masq=false", "--log-level", "warn"),
    ]
    with contextlib.ExitStack() as stack:
        after_engine = stack.enter_context(contextlib.ExitStack())
        child = stack.enter_context(child_process(argv, {}, log))
        until = time.monotonic() + START_LIMIT_S
        while True:
            try:
                api = APIClient(f"unix://{socket}", version="auto", timeout=ENGINE_TIMEOUT_S)
                break
            except (docker.errors.DockerException, requests.exceptions.RequestException):
                if child.poll() is not None or time.monotonic() > until:
                    raise SandboxUnavailable(log.read_text(errors="replace") or "dockerd did not start") from None
                time.sleep(0.1)
        stack.callback(api.close)
        # The containerd of an engine that was killed still writes into the folder.
        containerd = int((folder / "exec" / "containerd" / "containerd.pid").read_text())
        after_engine.callback(_end, os.pidfd_open(containerd))
        yield api


def _end(program: int) -> None:
    """Kill a program, by its pidfd, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(program, signal.SIGKILL)
    select.select([program], [], [], STOP_LIMIT_S)
    os.close(program)


def _copy_image(image: str, into: APIClient) -> None:
    api = open_api()
    try:
        into.load_image(api.get_image(image))  # type: ignore[no-untyped-call]
    finally:
        api.close()


def push_image(registry: str, repository: str, files: Mapping[str, bytes]) -> str:
    """Push an image of these files with the tag v1, without an engine, and return its name. `registry`: host and
    port.
    """
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    layer = gzip.compress(tree.getvalue(), 1)
    history = {"rootfs": {"type": "layers", "diff_ids": [_digest(tree.getvalue())]}}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, **history}).encode()
    root = f"http://{registry}/v2/{repository}"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_TYPE}.distribution.manifest.v2+json",
        "config": _push_blob(root, config, f"{_TYPE}.container.image.v1+json"),
        "layers": [_push_blob(root, layer, f"{_TYPE}.image.rootfs.diff.tar.gzip")],
    }
    _send("PUT", f"{root}/manifests/v1", json.dumps(manifest).encode(), str(manifest["mediaType"]))
    return f"{registry}/{repository}:v1"


def _push_blob(root: str, content: bytes, media_type: str) -> dict[str, Any]:
    location, digest = _send("POST", f"{root}/blobs/uploads/"), _digest(content)
    _send("PUT", f"{location}&digest={digest}", content, "application/octet-stream")
    return {"mediaType": media_type, "size": len(content), "digest": digest}


def _send(method: str, url: str, body: bytes = b"", media_type: str = "application/octet-stream") -> str:
    request = urllib.request.Request(url, data=body, method=method, headers={"Content-Type": media_type})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.headers.get("Location"))


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def new_deployment() -> str:
    return f"bench-{secrets.token_hex(4)}"
