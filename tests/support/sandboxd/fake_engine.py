"""A container engine without containers: socket pairs, and guests that follow a test's script."""

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import IO, Any

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.frames import MAX_DOWN, MAX_UP, Frame, FrameDecoder, encode_frame
from toolcrew.workers.sandboxd.runtime.base import LABEL_DEPLOYMENT, AttachedContainer, ListedContainer
from toolcrew.workers.sandboxd.runtime.hardening import ImageFacts

_MUX = struct.Struct(">BxxxI")


CLEAN: Mapping[str, Any] = {
    "processes": 0,
    "zombies": 0,
    "jobs": 0,
    "entries": {"workspace": 0, "tmp": 0, "output": 0, "shm": 0},
    "workspace": {"bytes": 1 << 28, "inodes": 65_536, "type": "tmpfs"},
}
"""The state that a guest reports for an unused sandbox."""


def pack_output(data: bytes, stream: int = 1) -> bytes:
    """Return output as the engine sends it."""
    return _MUX.pack(stream, len(data)) + data


class FakeGuest:
    """The other end of an attached container: frames in and out, multiplexed as the engine does. The test's script
    controls the guest.
    """

    def __init__(self, sock: socket.socket, config: Mapping[str, Any]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = FrameDecoder(MAX_DOWN)
        self._frames: list[Frame] = []
        self.config = config
        self.attests: dict[str, Any] = {}
        self.variables: dict[str, str] = {}
        self.gone = asyncio.Event()

    async def next(self) -> Frame:
        """Return the next frame from the host. Raises EOFError when the host has closed the stream."""
        loop = asyncio.get_running_loop()
        while not self._frames:
            data = await loop.sock_recv(self._sock, 65536)
            if not data:
                raise EOFError
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    async def request(self) -> tuple[dict[str, Any], bytes]:
        """Return the header and the body of the next complete request."""
        first = await self.next()
        body = first.body
        while len(body) < first.header.get("body_bytes", 0):
            body += (await self.next()).body
        return first.header, body

    async def send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        await self.send_raw(encode_frame(header, body, max_total=MAX_UP))

    async def send_raw(self, data: bytes, stream: int = 1) -> None:
        """Send bytes of PID 1's stdout (1) or stderr (2) in one engine message."""
        await asyncio.get_running_loop().sock_sendall(self._sock, pack_output(data, stream))

    async def hello(self) -> None:
        await self.send({"ev": "hello", "v": 1})

    async def done(self, request: Mapping[str, Any], **fields: Any) -> None:
        await self.send({"id": request["id"], "ev": "done", **fields})

    def die(self) -> None:
        """End PID 1: the attached stream ends on both sides. The script that plays the guest closes the descriptor,
        because the script may still be reading.
        """
        self.gone.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.gone.set()
        self._sock.close()


Behaviour = Callable[[FakeGuest], Awaitable[None]]


async def echoing(guest: FakeGuest) -> None:
    """Send a greeting, then answer every request with its body as stdout."""
    await guest.hello()
    while True:
        request, body = await guest.request()
        if request["op"] == "cancel":
            continue
        if request["op"] == "attest":
            await guest.done(request, **{**CLEAN, **guest.attests})
            continue
        if request["op"] == "set_variables":
            guest.variables |= request["variables"]
        if request["op"] == "ping":
            await guest.send({"id": request["id"], "ev": "pong"})
            continue
        if body:
            await guest.send({"id": request["id"], "ev": "data", "stream": "stdout"}, body[:262144])
        await guest.done(request, run_s=0.01, kill=None)


async def silent(guest: FakeGuest) -> None:
    """Send a greeting, and never answer a request, not even a cancel."""
    await guest.hello()
    while True:
        await guest.next()


class FakeEngine:
    """Containers that are socket pairs. Each start uses the next behaviour; the last behaviour is repeated."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self._behaviours = list(behaviours) or [echoing]
        self.guests: list[FakeGuest] = []
        self.alive: dict[str, FakeGuest] = {}
        self.removed: list[str] = []
        self.starting = asyncio.Event()
        self.start_gate = asyncio.Event()
        self.start_gate.set()
        self.removing = asyncio.Event()
        self.remove_gate = asyncio.Event()
        self.remove_gate.set()
        self.emptied = asyncio.Event()
        self.refuse_removals = 0
        self.refuse_starts = 0
        self.paused: set[str] = set()
        self.thawed: list[str] = []
        self.pausing = asyncio.Event()
        self.pause_gate = asyncio.Event()
        self.pause_gate.set()
        self.image = "sha256:1"
        self.stream_servers: dict[str, socket.socket] = {}
        """Container -> the end of its last stream server. A test plays the server."""
        self.skills: dict[str, bytes] = {}
        self.listed: list[ListedContainer] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, config: Mapping[str, Any], name: str) -> AttachedContainer:
        self.starting.set()
        await self.start_gate.wait()
        if self.refuse_starts:
            self.refuse_starts -= 1
            raise SandboxUnavailable("the Docker engine refused: no such luck")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        guest = FakeGuest(theirs, config)
        behaviour = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
        self._tasks.append(asyncio.create_task(self._play(behaviour, guest)))
        container = secrets.token_hex(32)
        self.guests.append(guest)
        self.alive[container] = guest
        self.emptied.clear()
        return AttachedContainer(container, ours, os.getpid())

    async def open_program(self, container: str, command: Sequence[str]) -> socket.socket:
        ours, theirs = socket.socketpair()
        if (before := self.stream_servers.pop(container, None)) is not None:
            before.close()
        self.stream_servers[container] = theirs
        for sock in (ours, theirs):
            sock.setblocking(False)
        return ours

    async def remove(self, container: str) -> None:
        self.removing.set()
        await self.remove_gate.wait()
        if self.refuse_removals:
            self.refuse_removals -= 1
            raise SandboxUnavailable("the Docker engine refused: device busy")
        self.listed = [one for one in self.listed if one.id != container]
        self.paused.discard(container)
        guest = self.alive.pop(container, None)
        if guest is not None:
            guest.die()
            self.removed.append(container)
        if not self.alive:
            self.emptied.set()

    async def pause(self, container: str) -> None:
        self.pausing.set()
        await self.pause_gate.wait()
        self.paused.add(container)

    async def unpause(self, container: str) -> None:
        self.paused.discard(container)
        self.thawed.append(container)

    async def image_id(self, image: str) -> str | None:
        return f"{self.image}-{image}"

    async def find_image(self, image: str) -> ImageFacts:
        """Accept every image. None has an environment."""
        return ImageFacts(id=f"{self.image}-{image}")

    async def ensure_guest_volume(self, image: str) -> str:
        return f"guest-of-{image}"

    async def fill_skill_volume(self, name: str, image: str, archive: IO[bytes]) -> None:
        with tarfile.open(fileobj=archive) as unpacked:
            self.skills |= {member.name: unpacked.extractfile(member).read() for member in unpacked if member.isfile()}  # type: ignore[union-attr]

    async def list_containers(self, deployment: str, product: str = "sandbox") -> list[ListedContainer]:
        return [one for one in self.listed if one.labels.get(LABEL_DEPLOYMENT) == deployment]

    def describe(self) -> dict[str, Any]:
        return {}

    async def end(self) -> None:
        self.start_gate.set()
        self.remove_gate.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for guest in self.guests:
            guest.close()
        for server in self.stream_servers.values():
            server.close()

    @staticmethod
    async def _play(behaviour: Behaviour, guest: FakeGuest) -> None:
        with contextlib.suppress(EOFError, OSError):
            await behaviour(guest)
        guest.close()
