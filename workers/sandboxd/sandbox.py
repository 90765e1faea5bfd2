"""One sandbox: its container, its channel, and the calls that run in it, each with sandboxd's own limit behind the guest's."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from contract.errors import SandboxUnavailable
from workers.sandboxd.channel import GuestChannel
from workers.sandboxd.engine import AttachedContainer, Engine
from workers.sandboxd.frames import Frame

log = structlog.get_logger(__name__)

GUEST_GRACE_S = 2.0
"""How long after a call's limit the guest may still answer before the container is removed."""
HELLO_TIMEOUT_S = 20.0
SLACK_BYTES = 256 * 1024
"""What a guest may send beyond what was asked for before it counts as hostile: frame headers are not counted."""

Sink = Callable[[Frame], None]


@dataclass
class RunningCall:
    """One request inside the guest. `sink` gets its data frames; `done` its last header."""

    guest_id: str
    call_id: str
    timeout_s: float
    budget: int
    sink: Sink
    done: asyncio.Future[dict[str, Any]]
    timer: asyncio.TimerHandle | None = None


@dataclass
class Sandbox:
    """A started container with its channel. Made by `start_sandbox`; when it is lost it stays lost."""

    engine: Engine
    generation: int
    container: str = ""
    lost: str | None = None
    calls: dict[str, RunningCall] = field(default_factory=dict)
    _channel: GuestChannel | None = None
    _hello: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _removal: asyncio.Task[None] | None = None

    async def attach(self, attached: AttachedContainer) -> None:
        """Take over a started container and wait for the guest's first word."""
        self.container = attached.id
        self._channel = await GuestChannel.open(attached.sock, self._on_frame, self._on_lost)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self._hello
        except TimeoutError:
            self._lose("the guest did not answer in time; is the image a toolcrew sandbox image?")
        if self.lost:
            debug = self._channel.debug_text.decode("utf-8", "replace").strip()[-500:]
            await self.remove()
            raise SandboxUnavailable(f"the sandbox did not start: {self.lost}{': ' + debug if debug else ''}")

    def begin(self, call_id: str, request: Mapping[str, Any], budget: int, sink: Sink) -> RunningCall:
        """Announce a request to the guest; the body follows by `feed`, `body_complete` starts the clock."""
        call = RunningCall(
            guest_id=secrets.token_hex(16),
            call_id=call_id,
            timeout_s=float(request.get("timeout_s", 30.0)),
            budget=budget + SLACK_BYTES,
            sink=sink,
            done=asyncio.get_running_loop().create_future(),
        )
        self.calls[call.guest_id] = call
        return call

    def feed(self, call: RunningCall, header: Mapping[str, Any], body: bytes) -> None:
        """Send one frame of a call to the guest."""
        if self._channel is not None:
            self._channel.send({**header, "id": call.guest_id}, body)

    def start_clock(self, call: RunningCall) -> None:
        """The request is whole: from here on the guest has the call's limit, and a little more to say so."""
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(call.timeout_s + GUEST_GRACE_S, self._on_overdue, call)

    def cancel(self, call: RunningCall) -> None:
        """Kill what a call runs; its `done` follows, by the guest or, 2 s later, by the container's removal."""
        if call.done.done():
            return
        self.feed(call, {"op": "cancel"}, b"")
        if call.timer is not None:
            call.timer.cancel()
        call.timer = asyncio.get_running_loop().call_later(GUEST_GRACE_S, self._on_overdue, call)

    async def drain(self) -> None:
        """Wait until the guest has taken what was sent."""
        if self._channel is not None:
            await self._channel.drain()

    def pause(self) -> None:
        if self._channel is not None:
            self._channel.pause()

    def resume(self) -> None:
        if self._channel is not None:
            self._channel.resume()

    async def remove(self) -> None:
        """Remove the container; returns when the engine no longer has it. Pending calls are told."""
        self._lose("removed by sandboxd")
        if self._removal is None:
            self._removal = asyncio.ensure_future(self._remove())
        await asyncio.shield(self._removal)

    async def _remove(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self.container:
            await self.engine.remove(self.container)

    def _on_frame(self, frame: Frame) -> None:
        header = frame.header
        kind = header.get("ev")
        if kind == "hello":
            if not self._hello.done():
                self._hello.set_result(None)
            return
        call = self.calls.get(str(header.get("id")))
        if call is None or kind not in ("data", "done", "pong"):
            self._violated(f"unexpected frame {str(kind)[:40]!r}")
        elif kind == "data":
            call.budget -= len(frame.body)
            if call.budget < 0:
                self._violated("more output than was asked for")
            else:
                call.sink(frame)
        else:
            self._finish(call, dict(header))

    def _finish(self, call: RunningCall, done: dict[str, Any]) -> None:
        survivors = _survivors(done)
        if survivors:
            # The guest could not end everything that the call had started: only the container's end does.
            self._lose(f"{survivors} processes outlived the call's kill")
            self._remove_then_answer(call, done)
        else:
            self._answer(call, done)

    def _on_overdue(self, call: RunningCall) -> None:
        if call.done.done():
            return
        self._lose("the guest did not end a call at its limit")
        message = f"no answer {GUEST_GRACE_S:g} s after the limit of {call.timeout_s:g} s"
        self._remove_then_answer(call, {"ev": "done", "error": {"code": "TIMEOUT", "message": message}})

    def _remove_then_answer(self, call: RunningCall, done: dict[str, Any]) -> None:
        async def work() -> None:
            started = time.monotonic()
            try:
                await self.remove()
            except SandboxUnavailable as error:
                log.error("sandbox_not_removed", container=self.container[:12], error=str(error))
                done["removal_failed"] = str(error)
            kill = done.get("kill") if isinstance(done.get("kill"), dict) else {}
            killed = {"signalled": 0, "survivors": 0, **(kill or {}), "method": "container"}
            done["kill"] = {**killed, "ms": (time.monotonic() - started) * 1000}
            done["sandbox_lost"] = self.lost
            self._answer(call, done)

        self.calls.pop(call.guest_id, None)
        self._background = asyncio.ensure_future(work())

    def _answer(self, call: RunningCall, done: dict[str, Any]) -> None:
        self.calls.pop(call.guest_id, None)
        if call.timer is not None:
            call.timer.cancel()
        if not call.done.done():
            call.done.set_result(done)

    def _violated(self, what: str) -> None:
        log.warning("guest_broke_protocol", container=self.container[:12], what=what)
        self._lose(f"the guest broke the protocol: {what}")
        self._background = asyncio.ensure_future(self.remove())

    def _on_lost(self, reason: str) -> None:
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
        if not self._hello.done():
            self._hello.set_result(None)
        for call in list(self.calls.values()):
            error = {"code": "SANDBOX_UNAVAILABLE", "message": f"the sandbox died during the call: {self.lost}"}
            self._answer(call, {"ev": "done", "error": error, "sandbox_lost": self.lost})


def _survivors(done: Mapping[str, Any]) -> int:
    kill = done.get("kill")
    count = kill.get("survivors", 0) if isinstance(kill, dict) else 0
    return count if isinstance(count, int) else 1


async def start_sandbox(engine: Engine, config: Mapping[str, Any], name: str, generation: int) -> Sandbox:
    """Create, start and greet a sandbox. Raises SandboxUnavailable; then nothing is left behind."""
    attached = await engine.start(config, name)
    sandbox = Sandbox(engine, generation)
    try:
        await sandbox.attach(attached)
    except BaseException:
        await asyncio.shield(engine.remove(attached.id))
        raise
    return sandbox
