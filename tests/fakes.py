"""Fakes that stand where a process of ours would: catalog, transport, ledger, blobs, sandbox client, engine and guest."""

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.envelope import decode_call, encode_result
from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from contract.specs import ToolSpec
from orchestrator.models.base import Chunk, ModelRequest
from orchestrator.results import ResultHub
from orchestrator.transport import Delivery
from tests.builders import KEY
from workers.sandbox_client import GuestResponse, SandboxClient
from workers.sandboxd.engine import AttachedContainer
from workers.sandboxd.frames import MAX_DOWN, MAX_UP, Frame, FrameDecoder, encode_frame
from workers.sandboxd.server import Server
from workers.sandboxd.sessions import Sessions

# Orchestrator


class StaticCatalog:
    """A catalog that never changes."""

    def __init__(self, *specs: ToolSpec) -> None:
        self._specs = specs

    async def specs(self) -> tuple[ToolSpec, ...]:
        return self._specs

    def explain_missing(self, name: str) -> str | None:
        return None


class AnsweringTransport:
    """A transport whose worker is a function: (call, context) -> result. What it raises is raised by `deliver`."""

    def __init__(self, answer: Callable[[ToolCall, ToolContext], ToolResult | Awaitable[ToolResult]]) -> None:
        self._answer = answer
        self.deliveries: list[Delivery] = []
        self.calls: list[ToolCall] = []
        self.contexts: list[ToolContext] = []
        self.commands: list[tuple[str, ToolCall]] = []

    async def deliver(self, delivery: Delivery) -> Any:
        call, context = decode_call(delivery.envelope, KEY)
        self.deliveries.append(delivery)
        self.calls.append(call)
        self.contexts.append(context)
        result = self._answer(call, context)
        return encode_result(result if isinstance(result, ToolResult) else await result)

    async def command(self, queue: str, envelope: str) -> None:
        call, context = decode_call(envelope, KEY)
        self.commands.append((queue, call))
        self.calls.append(call)
        self.contexts.append(context)

    async def aclose(self) -> None:
        """Nothing to close."""


class MemoryAsyncBlobs:
    """Blobs in a dict, for the orchestrator."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    async def leave(self, tenant: str, data: bytes) -> str:
        key = f"{tenant}:{len(self.kept)}"
        self.kept[key] = data
        return key

    async def take(self, tenant: str, key: str) -> bytes:
        return self.kept.pop(key)


class StreamModel:
    """A model whose stream is a function of the request; for streams that stall, die or are watched."""

    name = "stream"

    def __init__(self, stream: Callable[[ModelRequest], AsyncIterator[Chunk]]) -> None:
        self._stream = stream

    def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        return self._stream(request)

    async def aclose(self) -> None:
        """Nothing to close."""


async def close_hub(hub: ResultHub) -> None:
    """Close, and cancel the closing when it hangs: see the known bug about a swallowed cancellation."""
    closing = asyncio.create_task(hub.close())
    finished, _ = await asyncio.wait({closing}, timeout=1)
    if not finished:
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)


# Worker


class MemoryLedger:
    """Claims in a set."""

    def __init__(self) -> None:
        self.claimed: set[tuple[str, str]] = set()

    def claim(self, tenant: str, call_id: str, host: str) -> bool:
        key = (tenant, call_id)
        if key in self.claimed:
            return False
        self.claimed.add(key)
        return True


class MemoryBlobs:
    """Blobs in a dict, for a worker."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def take(self, tenant: str, key: str) -> bytes:
        if key not in self.kept:
            raise ToolFailure(ErrorCode.OUTCOME_UNKNOWN, "gone")
        return self.kept.pop(key)

    def leave(self, tenant: str, data: bytes) -> str:
        key = f"{tenant}:{len(self.kept)}"
        self.kept[key] = data
        return key


class FakeSandboxClient(SandboxClient):
    """Answers requests from a script: a GuestResponse, an exception, or a function of (request, body)."""

    def __init__(self, *answers: Any) -> None:
        super().__init__("/nonexistent")
        self._answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.names: list[str] = []
        self.closed: list[str] = []
        self.cancelled: list[tuple[str, str]] = []

    def call(self, name: str, request: Mapping[str, Any], body: bytes = b"", **_: Any) -> GuestResponse:
        self.names.append(name)
        self.requests.append(dict(request))
        self.bodies.append(body)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(request, body)
        assert isinstance(answer, GuestResponse)
        return answer

    def describe_open(self, name: str, image: str | None, ttl_s: float) -> dict[str, Any]:
        self.names.append(name)
        self.requests.append({"image": image, "ttl_s": ttl_s})
        return {"ok": True, "sandbox": {"id": "c0ffee", "generation": 1, "rebuilt": False}, "image": image or "default", "start_s": 0.25}

    def close(self, name: str) -> bool:
        self.closed.append(name)
        return True

    def cancel(self, name: str, call_id: str) -> bool:
        self.cancelled.append((name, call_id))
        return True


# sandboxd

_MUX = struct.Struct(">BxxxI")


class FakeGuest:
    """The other end of an attached container: frames in and out, multiplexed as the engine does it. What it does is the test's script."""

    def __init__(self, sock: socket.socket, config: Mapping[str, Any]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = FrameDecoder(MAX_DOWN)
        self._frames: list[Frame] = []
        self.config = config
        self.gone = asyncio.Event()

    async def next(self) -> Frame:
        """The next frame from the host. Raises EOFError when the host has closed."""
        loop = asyncio.get_running_loop()
        while not self._frames:
            data = await loop.sock_recv(self._sock, 65536)
            if not data:
                raise EOFError
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    async def request(self) -> tuple[dict[str, Any], bytes]:
        """The next whole request: its header and body."""
        first = await self.next()
        body = first.body
        while len(body) < first.header.get("body_bytes", 0):
            body += (await self.next()).body
        return first.header, body

    async def send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        await self.send_raw(encode_frame(header, body, max_total=MAX_UP))

    async def send_raw(self, data: bytes, stream: int = 1) -> None:
        """Bytes of PID 1's stdout (1) or stderr (2), in one engine message."""
        await asyncio.get_running_loop().sock_sendall(self._sock, _MUX.pack(stream, len(data)) + data)

    async def hello(self) -> None:
        await self.send({"ev": "hello", "v": 1})

    async def done(self, request: Mapping[str, Any], **fields: Any) -> None:
        await self.send({"id": request["id"], "ev": "done", **fields})

    def die(self) -> None:
        """PID 1 ends: the attached stream ends on both sides. Its descriptor is closed by who plays it, who may be reading."""
        self.gone.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.gone.set()
        self._sock.close()


Behaviour = Callable[[FakeGuest], Awaitable[None]]


async def echoing(guest: FakeGuest) -> None:
    """Greets, then answers every request: its body comes back as stdout."""
    await guest.hello()
    while True:
        request, body = await guest.request()
        if request["op"] == "cancel":
            continue
        if request["op"] == "ping":
            await guest.send({"id": request["id"], "ev": "pong"})
            continue
        if body:
            await guest.send({"id": request["id"], "ev": "data", "stream": "stdout"}, body[:262144])
        await guest.done(request, run_s=0.01, kill=None)


async def silent(guest: FakeGuest) -> None:
    """Greets, and never answers a request, not even a cancel."""
    await guest.hello()
    while True:
        await guest.next()


class FakeEngine:
    """Containers that are socket pairs; each start takes the next behaviour, the last one for ever."""

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
        self.never_started: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, config: Mapping[str, Any], name: str) -> AttachedContainer:
        self.starting.set()
        await self.start_gate.wait()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        guest = FakeGuest(theirs, config)
        behaviour = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
        self._tasks.append(asyncio.create_task(self._play(behaviour, guest)))
        container = secrets.token_hex(32)
        self.guests.append(guest)
        self.alive[container] = guest
        self.emptied.clear()
        return AttachedContainer(container, ours)

    async def remove(self, container: str) -> None:
        self.removing.set()
        await self.remove_gate.wait()
        if self.refuse_removals:
            self.refuse_removals -= 1
            raise SandboxUnavailable("the Docker engine refused: device busy")
        guest = self.alive.pop(container, None)
        if guest is not None:
            guest.die()
            self.removed.append(container)
        if not self.alive:
            self.emptied.set()

    async def list_ours(self, _: str) -> list[str]:
        return [container for container in self.alive if container not in self.never_started]

    async def list_never_started(self, _: float) -> list[str]:
        return self.never_started

    async def end(self) -> None:
        self.start_gate.set()
        self.remove_gate.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for guest in self.guests:
            guest.close()

    @staticmethod
    async def _play(behaviour: Behaviour, guest: FakeGuest) -> None:
        with contextlib.suppress(EOFError, OSError):
            await behaviour(guest)
        guest.close()


@dataclass
class Sandboxd:
    """A daemon in this process on a real socket, over a fake engine."""

    path: Path
    engine: FakeEngine
    sessions: Sessions
    server: Server
    clients: list[SandboxClient] = field(default_factory=list)

    def client(self) -> SandboxClient:
        client = SandboxClient(self.path)
        self.clients.append(client)
        return client

    async def open(self, session: str = "s1", **fields: Any) -> tuple[SandboxClient, str]:
        client = self.client()
        return client, await asyncio.to_thread(client.open, "acme", session, **fields)


@asynccontextmanager
async def running_sandboxd(
    path: Path, *behaviours: Behaviour, limit: int = 10, uids: frozenset[int] | None = None
) -> AsyncIterator[Sandboxd]:
    """sandboxd without a container engine. `behaviours`: of the guests, in the order in which they are started."""
    engine = FakeEngine(*behaviours)
    sessions = Sessions(engine, "test", lambda image, labels: {"Image": image, "Labels": dict(labels)}, limit)  # type: ignore[arg-type]
    allowed = frozenset({os.geteuid()}) if uids is None else uids
    server = Server(sessions, images=frozenset({"default", "python"}), default_image="default", uids=allowed, facts={"boot": "b00t"})
    listening = await server.listen(path / "sandboxd.sock", 0o600)
    daemon = Sandboxd(path / "sandboxd.sock", engine, sessions, server)
    try:
        yield daemon
    finally:
        engine.start_gate.set()
        engine.remove_gate.set()
        engine.refuse_removals = 0
        listening.close()
        for client in daemon.clients:
            client.disconnect()
        await sessions.close_all()
        await server.close_connections()
        await engine.end()
