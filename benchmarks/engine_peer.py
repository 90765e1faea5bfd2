"""Baselines that use the Docker engine through its SDK alone, with the same container configuration that sandboxd
requests.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import docker.errors

from toolcrew.contract.settings import SandboxdSettings
from toolcrew.workers.sandboxd.daemon import SANDBOX_MAX_LIFE_S
from toolcrew.workers.sandboxd.disks.base import WorkspaceMount
from toolcrew.workers.sandboxd.frames import MAX_DOWN, MAX_UP, Frame, FrameDecoder, encode_frame
from toolcrew.workers.sandboxd.plans import Plans, Profile
from toolcrew.workers.sandboxd.runtime.engine import Engine
from toolcrew.workers.sandboxd.runtime.hardening import build_container_config
from toolcrew.workers.sandboxd.runtime.seccomp import load_seccomp_profile

LABELS = {"toolcrew.bench": "1"}
ENGINE_TIMEOUT_S = 60
"""Timeout of one response of the engine, in seconds."""
_MUX = struct.Struct(">BxxxI")


def open_api() -> docker.APIClient:
    return docker.from_env(timeout=ENGINE_TIMEOUT_S).api


def sandbox_config() -> Mapping[str, Any]:
    """Return the body that sandboxd would send to `POST /containers/create` on this host, with the labels of the
    benchmark.
    """

    async def ask() -> int:
        engine = Engine()
        try:
            return (await engine.facts()).cgroup_version
        finally:
            engine.close()

    settings = SandboxdSettings()
    profile = Profile(seccomp=load_seccomp_profile(), cgroup_version=asyncio.run(ask()), life_s=SANDBOX_MAX_LIFE_S)
    return build_container_config(profile.build_spec(Plans(settings).standard(), WorkspaceMount(), LABELS))


@contextlib.contextmanager
def raw_container(api: docker.APIClient, config: Mapping[str, Any]) -> Iterator[tuple[str, socket.socket]]:
    """Create a container, attach to it and start it. Yield its id and the attached socket after the first byte has
    arrived.

    The container is removed at the end, even after an error.
    """
    container = str(api.create_container_from_config(dict(config))["Id"])  # type: ignore[no-untyped-call]
    try:
        attached = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        with socket.socket(fileno=os.dup(attached.fileno())) as sock:
            attached.close()
            api.start(container)
            sock.settimeout(ENGINE_TIMEOUT_S)
            if not sock.recv(1, socket.MSG_PEEK):
                raise ConnectionError("the container ended before its first byte")
            yield container, sock
    finally:
        with contextlib.suppress(docker.errors.NotFound):
            api.remove_container(container, force=True, v=True)


def exec_peer(api: docker.APIClient, container: str) -> Callable[[], None]:
    """Return a function that does what `docker exec` does for `bash -c true`: create, run to the end with output,
    read the exit code.
    """

    def run() -> None:
        created = api.exec_create(
            container, ["/bin/bash", "--noprofile", "--norc", "-c", "true"], stdout=True, stderr=True
        )
        api.exec_start(created["Id"], demux=True)
        if api.exec_inspect(created["Id"])["ExitCode"] != 0:
            raise RuntimeError("docker exec did not succeed")

    return run


class DirectGuest:
    """Client that exchanges frames directly with a guest, over pipes or over the attached socket of an engine
    (`multiplexed`).
    """

    def __init__(self, receive: Callable[[int], bytes], send: Callable[[bytes], object], *, multiplexed: bool) -> None:
        self._receive = receive
        self._send = send
        self._multiplexed = multiplexed
        self._mux = bytearray()
        self._decoder = FrameDecoder(MAX_UP)
        self._waiting: list[Frame] = []
        if self._next().header.get("ev") != "hello":
            raise RuntimeError("the guest did not say hello")

    def call(self, request: Mapping[str, object], body: bytes = b"") -> dict[str, Any]:
        """Send one request; return the header that ends it."""
        header = {**request, "id": os.urandom(16).hex(), "body_bytes": len(body)}
        self._send(encode_frame(header, body, max_total=MAX_DOWN))
        while (frame := self._next()).header.get("ev") == "data":
            pass
        return frame.header

    def _next(self) -> Frame:
        while not self._waiting:
            data = self._receive(65536)
            if not data:
                raise ConnectionError("the guest is gone")
            self._waiting.extend(self._decoder.feed(self._demultiplexed(data) if self._multiplexed else data))
        return self._waiting.pop(0)

    def _demultiplexed(self, data: bytes) -> bytes:
        self._mux += data
        payload = b""
        while len(self._mux) >= _MUX.size and len(self._mux) >= _MUX.size + (size := _MUX.unpack_from(self._mux)[1]):
            payload += bytes(self._mux[_MUX.size : _MUX.size + size])
            del self._mux[: _MUX.size + size]
        return payload


def memory_of(pid: int) -> dict[str, int]:
    """Return `usage` and `inactive_file` of the memory cgroup of a process, in bytes. Supports cgroup versions 1 and
    2.
    """
    places = dict(
        (line.split(":", 2)[1], line.split(":", 2)[2]) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    )
    v1 = next((path for names, path in places.items() if "memory" in names.split(",")), None)
    folder = Path("/sys/fs/cgroup/memory" if v1 is not None else "/sys/fs/cgroup") / (v1 or places[""]).lstrip("/")
    usage = folder / ("memory.usage_in_bytes" if v1 is not None else "memory.current")
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    inactive = fields["total_inactive_file" if v1 is not None else "inactive_file"]
    return {"usage": int(usage.read_text()), "inactive_file": int(inactive)}
