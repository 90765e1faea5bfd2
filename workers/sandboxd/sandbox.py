"""Sandbox of a session: its container, its channel, and the calls that run in it.

Invariant: every call gets exactly one answer, at a time that the guest cannot delay, and after an answer no process of
the call runs. A container whose guest broke a rule is never used again.

The guest enforces the limit of a call, but the guest is untrusted. So sandboxd has a second, later limit for every
call. The container is removed if the guest exceeds this limit, breaks the protocol, or reports processes that survived
the end of their call. The call is then answered after the removal, when none of its processes can run.
"""

import asyncio
import functools
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.guest_protocol import REQUESTS
from toolcrew.workers.sandboxd.disks.changes import RootChanges, list_changes
from toolcrew.workers.sandboxd.frames import Frame, GuestChannel
from toolcrew.workers.sandboxd.metering import SandboxMeter, UsageReader
from toolcrew.workers.sandboxd.runtime.base import AttachedContainer, SandboxRuntime
from toolcrew.workers.sandboxd.runtime.hardening import SandboxSpec

log = structlog.get_logger(__name__)

PROTOCOL_VERSION = 1
GUEST_GRACE_S = 2.0
"""Seconds after a call's limit in which the guest may still answer. Then the container is removed."""
SLOW_WORKER_GRACE_S = 15.0
"""Additional seconds for an answer that waits behind output which a worker reads slowly."""
LIFE_MARGIN_S = 60.0
"""Minimum time in seconds between the limit of a call and the end of its sandbox's maximum life. The margin covers the
difference between the two clocks, and the time to end the call.
"""
BODY_TIMEOUT_S = 60.0
"""Time limit in seconds for each next part of a request's body. The call's own limit starts when the body is
complete.
"""
HELLO_TIMEOUT_S = 20.0
_VARIABLES_S = 5.0
SLACK_BYTES = 256 * 1024
"""Number of bytes that a guest may send beyond the request before sandboxd treats the guest as hostile."""

STREAM_FRAMES = 262_144
"""Maximum number of frames of a streamed output of any size. A program may write one byte at a time."""
FRAME_COST_BYTES = 64
"""Cost of a data frame in addition to its body, in bytes. Without a cost, empty frames would be unlimited."""
_STREAM_STDERR_BYTES = 65_536
SANDBOXD_FIELDS = frozenset(
    {
        *("ok", "code", "message", "is_ending", "sandbox", "sandbox_s", "sandbox_lost", "removal_failed"),
        *("workspace_kept", "usage", "session_usage"),
    }
)
"""Fields of a call's answer that only sandboxd may set."""
_KILL_FIELDS = ("signalled", "survivors", "method", "ms")
_KILL_METHODS = ("tree", "all")
_QUOTE_CHARS = 200

Sink = Callable[[Frame], None]


class Connections(Protocol):
    """The network connections of a sandbox with a proxy (egress/tunnels.py)."""

    def take(self, frame: Frame) -> None: ...

    def cut(self) -> None: ...

    def close(self) -> None: ...


class StreamChannel(Protocol):
    """The channel to the stream server of a sandbox (streams.py)."""

    @property
    def is_active(self) -> bool: ...

    @property
    def is_open(self) -> bool: ...

    async def wait_quiet(self) -> None: ...

    def close(self) -> None: ...


class SandboxCounter(Protocol):
    """Counters of all sandboxes (factory.py)."""

    oom: int
    kills: Counter[str]
    lost: Counter[str]


@dataclass(eq=False)
class RunningCall:
    """A request that runs in the guest. `sink` is called with its data frames, and the future `done` gets its last
    header.
    """

    guest_id: str
    call_id: str
    op: str
    timeout_s: float
    budget: int
    sink: Sink
    done: asyncio.Future[dict[str, Any]]
    timer: asyncio.TimerHandle | None = field(init=False, default=None)
    ends_by: float = field(init=False, default=0.0)
    is_cancelled: bool = field(init=False, default=False)


@dataclass(eq=False)
class Sandbox:
    """A started container with its channel. A lost sandbox is never used again: its calls are answered with an error,
    and its container is removed at once.

    The next `remove` repeats a failed removal. `is_removed`: the engine no longer has the container. `tenant`: "" until
    a session gets the sandbox. `streams`: None until a stream gateway has asked for its channel.
    """

    runtime: SandboxRuntime
    spec: SandboxSpec
    generation: int
    container: str
    name: str = ""
    tenant: str = field(init=False, default="")
    lost: str | None = field(init=False, default=None)
    is_loss_reported: bool = field(init=False, default=False)
    is_removed: bool = field(init=False, default=False)
    tunnels: Connections | None = field(init=False, default=None)
    streams: StreamChannel | None = field(init=False, default=None)
    on_removed: Callable[[], None] | None = None
    counts: "SandboxCounter | None" = None
    calls: dict[str, RunningCall] = field(init=False, default_factory=dict)
    started_at: float = field(init=False, default_factory=time.monotonic)
    meter: SandboxMeter = field(init=False, default_factory=lambda: SandboxMeter(None))
    _channel: GuestChannel | None = field(init=False, default=None)
    _hello: asyncio.Future[None] = field(init=False, default_factory=lambda: asyncio.get_running_loop().create_future())
    _removal: "asyncio.Task[SandboxUnavailable | None] | None" = field(init=False, default=None)
    _removal_failed: bool = field(init=False, default=False)
    _holders: set[object] = field(init=False, default_factory=set)
    _released_at: float = field(init=False, default=float("-inf"))

    async def attach(self, attached: AttachedContainer) -> None:
        """Take over the streams of the container and wait for the guest's hello.

        Raises SandboxUnavailable when no hello arrives. The caller then removes the sandbox.
        """
        self._channel = await GuestChannel.open(
            attached.sock, self._on_frame, self._lose, attached.stderr, lambda: self.tenant
        )
        self.meter = SandboxMeter(_open_reader(attached))
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self._hello
        except TimeoutError:
            self._lose("the guest did not answer in time; check that its image was built with scripts/build-image")
        if self.lost:
            debug = self._channel.read_debug_text().decode("utf-8", "replace").strip()[-500:]
            raise SandboxUnavailable(
                f"the sandbox did not start ({self.lost}{': ' + debug if debug else ''}): "
                f"run `toolcrew doctor` on this host"
            )

    def remaining_s(self) -> float:
        """Return the longest time limit in seconds with which a call ends before the sandbox reaches its maximum
        life.
        """
        return self.started_at + self.spec.life_s - LIFE_MARGIN_S - time.monotonic()

    def begin(self, call_id: str, request: Mapping[str, Any], budget: int, sink: Sink) -> RunningCall:
        """Register a call. The caller then sends the request and its body with `feed`, and calls `start_clock`."""
        # Give the call a random id towards the guest: workers choose `call_id`, and two workers could choose the same
        # one.
        call = RunningCall(
            guest_id=secrets.token_hex(16),
            call_id=call_id,
            op=str(request["op"]),
            timeout_s=float(request.get("timeout_s", 30.0)),
            budget=budget + SLACK_BYTES,
            sink=sink,
            done=asyncio.get_running_loop().create_future(),
        )
        if self.lost is not None:
            self._answer(call, self._loss())
            return call
        self.calls[call.guest_id] = call
        # Set a limit now: a worker that stops in the middle of its body must not occupy the sandbox forever.
        self._arm(call, BODY_TIMEOUT_S, self.cancel)
        return call

    def forget(self, call: RunningCall) -> None:
        """Remove a call from the list. Call this only if nothing was sent to the guest."""
        self._disarm(call)
        self.calls.pop(call.guest_id, None)

    def feed(self, call: RunningCall, header: Mapping[str, Any], body: bytes) -> None:
        """Send one frame of a call to the guest. Raises FrameError when the frame is too large."""
        if self._channel is not None:
            self._channel.send({**header, "id": call.guest_id}, body)

    def start_clock(self, call: RunningCall) -> None:
        """Start the call's time limit, because the request is complete. The guest gets some more seconds to report the
        end.
        """
        if self._runs(call) and not call.is_cancelled:
            self._limit(call, call.timeout_s)

    async def ask(
        self,
        request: Mapping[str, Any],
        *,
        sink: Sink | None = None,
        body: AsyncIterator[bytes] | None = None,
        body_bytes: int = 0,
    ) -> dict[str, Any]:
        """Send a request that no worker asked for, with a body of exactly `body_bytes`. Return the guest's last header,
        after the checks that also apply to a worker's call.

        Raises SandboxUnavailable when the sandbox is lost before the answer.
        """
        call = self.begin("", request, count_budget(request), sink or _drop)
        try:
            self.feed(call, {**request, "body_bytes": body_bytes}, b"")
            if body is not None:
                await self._feed_all(call, body)
            self.start_clock(call)
            done = await call.done
        finally:
            # After an error or a cancellation the guest may still run the request: cancel it. If it has ended, the
            # guest ignores the cancel.
            self.cancel(call)
        if "sandbox_lost" in done:
            raise SandboxUnavailable(
                f"the sandbox is lost: {done['error']['message'] if 'error' in done else done['sandbox_lost']}"
            )
        return done

    async def set_variables(self, variables: Mapping[str, str]) -> None:
        """Add environment variables to all programs that start from now on. Raises SandboxUnavailable."""
        done = await self.ask({"op": "set_variables", "timeout_s": _VARIABLES_S, "variables": variables})
        if "error" in done:
            raise SandboxUnavailable(
                f"the guest did not accept variables: {quote_text(done['error'])}; open a new session"
            )

    async def _feed_all(self, call: RunningCall, body: AsyncIterator[bytes]) -> None:
        async for piece in body:
            # One piece at a time: a guest that does not read must not fill the memory of sandboxd.
            await self.drain()
            self.feed(call, {"op": "data"}, piece)
            if self._runs(call) and not call.is_cancelled:
                self._arm(call, BODY_TIMEOUT_S, self.cancel)

    def cancel(self, call: RunningCall) -> None:
        """Kill the processes of a call. The guest then ends the call. If it does not, the container is removed 2 s
        later, which also ends the call.
        """
        if not self._runs(call) or call.is_cancelled:
            return
        # Start the time limit even if the guest never reads the cancel. The flag prevents a second cancel from starting
        # it again, which would give the guest more time.
        call.is_cancelled = True
        self.feed(call, {"op": "cancel"}, b"")
        self._limit(call, 0.0)

    def end_calls(self, code: str, message: str) -> None:
        """Answer all running calls with this error. The caller then removes the sandbox, which ends their programs."""
        for call in list(self.calls.values()):
            self._answer(call, {"ev": "done", "error": {"code": code, "message": message}})

    async def drain(self) -> None:
        """Wait until the guest has read all data that was sent."""
        if self._channel is not None:
            await self._channel.drain()

    def send(self, header: Mapping[str, Any], body: bytes) -> None:
        """Send a frame of a tunnel, which belongs to no call."""
        self.meter.network_bytes += len(body)
        if self._channel is not None:
            self._channel.send(header, body)

    def hold(self, holder: object) -> None:
        """Stop reading from the guest until every caller of `hold` has called `release`."""
        # A slow worker stops the whole sandbox, also for calls of other workers. Otherwise the output would fill the
        # memory of sandboxd, because a guest can print faster than a worker reads.
        if self._channel is not None and not self._holders:
            self._channel.pause()
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        if holder not in self._holders:
            return
        self._holders.discard(holder)
        if self._channel is not None and not self._holders:
            self._released_at = time.monotonic()
            self._channel.resume()

    async def pause(self) -> None:
        """Freeze all processes. Raises SandboxUnavailable."""
        await self.runtime.pause(self.container)

    async def unpause(self) -> None:
        """Thaw all processes. Raises SandboxUnavailable."""
        await self.runtime.unpause(self.container)

    @asynccontextmanager
    async def list_changes(self, folder: Path, tenant: str) -> AsyncIterator[RootChanges | None]:
        """Yield the changes of the root file system, or None when it is read-only. `folder`: a folder on a disk, for
        the list. `tenant`: the owner of the sandbox. Raises ToolFailure (FILE_TOO_LARGE) and SandboxUnavailable.
        """
        layers = self.runtime.open_changes(self.container, self.spec)
        if layers is None:
            yield None
            return
        try:
            async with list_changes(self.spec.image_facts.id, layers, folder, tenant) as changes:
                yield changes
        finally:
            for layer in layers:
                os.close(layer)

    def end(self, reason: str) -> None:
        """Remove the container in the background. Its calls are answered with `reason`."""
        self._lose(reason)

    def end_hostile(self, violation: str) -> None:
        """End a sandbox whose guest broke the protocol."""
        self._violate(violation)

    async def remove(self) -> None:
        """Remove the container and return after the engine no longer has it. Pending calls are answered.

        Raises SandboxUnavailable when the engine refuses. The next `remove` tries again.
        """
        self._mark_lost("removed by sandboxd")
        # All callers share one removal. It is shielded, so that a cancelled caller does not stop it.
        error = await asyncio.shield(self._begin_removal())
        if error is not None:
            raise SandboxUnavailable(str(error)) from error

    def _begin_removal(self) -> "asyncio.Task[SandboxUnavailable | None]":
        # Run one removal at a time. Repeat a failed removal only when a caller asks again, so that the engine is not
        # flooded.
        if self._removal is None or (self._removal.done() and not self.is_removed):
            self._removal = asyncio.get_running_loop().create_task(self._remove())
        return self._removal

    async def _remove(self) -> SandboxUnavailable | None:
        """Remove the container. Return a failure and do not raise it, because possibly no task awaits this one."""
        # Read the counters first, because they end with the control group of the sandbox.
        self.meter.close()
        if self._channel is not None:
            self._channel.close()
        try:
            await self.runtime.remove(self.container)
        except SandboxUnavailable as error:
            if not self._removal_failed:
                log.error("sandbox_not_removed", container=self.container[:12], error=str(error))
            self._removal_failed = True
            return error
        self.is_removed = True
        if self.on_removed is not None:
            self.on_removed()
        return None

    def _on_frame(self, frame: Frame) -> None:
        if self.lost is not None:
            # After the loss, drop frames that were already buffered: all calls have been answered with the loss.
            return
        # A correct guest sends only these frames. Any other one ends the sandbox: a guest that another program controls
        # could otherwise test how sandboxd handles invalid frames.
        kind = frame.header.get("ev")
        call = self.calls.get(str(frame.header.get("id")))
        if kind == "hello" and not self._hello.done():
            self._check_hello(frame.header)
        elif self.tunnels is not None and isinstance(kind, str) and kind.startswith("net_"):
            self.meter.network_bytes += len(frame.body)
            self.tunnels.take(frame)
        elif kind == "fatal":
            self._lose(
                f"the guest gave up with the message: {quote_text(frame.header.get('message'))}", "guest_gave_up"
            )
        elif call is not None and kind == "data":
            self._take_data(call, frame)
        elif call is not None and kind == ("pong" if call.op == "ping" else "done"):
            self._finish(call, frame.header)
        else:
            self._violate(f"unexpected frame '{quote_text(kind)[:40]}'")

    def _check_hello(self, header: Mapping[str, Any]) -> None:
        if header.get("v") == PROTOCOL_VERSION:
            self._hello.set_result(None)
        else:
            self._lose(
                f"the guest speaks version '{quote_text(header.get('v'))[:40]}' and not {PROTOCOL_VERSION}: build the "
                "image anew"
            )

    def _take_data(self, call: RunningCall, frame: Frame) -> None:
        # Reduce the call's budget before the check of the stream, so that every data frame costs something.
        call.budget -= len(frame.body) + FRAME_COST_BYTES
        if not has_stream(call.op, frame.header.get("stream")):
            self._violate("data of a stream that the request does not have")
        elif call.budget < 0:
            self._violate("more output than was asked for")
        else:
            call.sink(frame)

    def _finish(self, call: RunningCall, header: Mapping[str, Any]) -> None:
        done = build_done(header)
        if count_survivors(header):
            # The guest could not end all processes of the call. Only the removal of the container ends them.
            self._end_by_removal(call, done, "processes outlived a call's kill")
        else:
            self._answer(call, done)

    def _on_overdue(self, call: RunningCall) -> None:
        if not self._runs(call):
            return
        now = time.monotonic()
        unread = self._holders or now - self._released_at < GUEST_GRACE_S
        if unread and now < call.ends_by + SLOW_WORKER_GRACE_S:
            # The answer may be in data that sandboxd has not read, because a worker reads slowly. Give the guest more
            # time.
            self._arm(call, GUEST_GRACE_S, self._on_overdue)
            return
        code = "CANCELLED" if call.is_cancelled else "TIMEOUT"
        limit = "its cancel" if call.is_cancelled else f"the limit of {call.timeout_s:g} s"
        error = {"code": code, "message": f"no answer {GUEST_GRACE_S:g} s after {limit}"}
        self._end_by_removal(call, {"ev": "done", "error": error}, "the guest did not end a call at its limit")

    def _end_by_removal(self, call: RunningCall, done: dict[str, Any], reason: str) -> None:
        """Remove the container and answer the call afterwards, when none of its processes can run."""
        # Remove the call from the list first: `_lose` answers every call in the list at once, and this call must wait
        # for the removal of the container.
        self.forget(call)
        started = time.monotonic()
        self._lose(reason)
        self._begin_removal().add_done_callback(functools.partial(self._answer_removed, call, done, started))

    def _answer_removed(
        self,
        call: RunningCall,
        done: dict[str, Any],
        started: float,
        removal: "asyncio.Task[SandboxUnavailable | None]",
    ) -> None:
        error = None if removal.cancelled() else removal.exception() or removal.result()
        if self.is_removed:
            killed = {"signalled": 0, "survivors": 0, **(done.get("kill") or {}), "method": "container"}
            done["kill"] = {**killed, "ms": (time.monotonic() - started) * 1000}
        else:
            done["removal_failed"] = str(error or "sandboxd is ending")
        done["sandbox_lost"] = self.lost
        self._answer(call, done)

    def _answer(self, call: RunningCall, done: dict[str, Any]) -> None:
        self.forget(call)
        if self.counts is not None:
            self.counts.oom += done.get("oom") is True
            if done.get("kill"):
                self.counts.kills[str(done["kill"]["method"])] += 1
        # The task that waits for the answer may have been cancelled.
        if not call.done.done():
            call.done.set_result(done)

    def _runs(self, call: RunningCall) -> bool:
        return call.guest_id in self.calls

    def _limit(self, call: RunningCall, timeout_s: float) -> None:
        call.ends_by = time.monotonic() + timeout_s + GUEST_GRACE_S
        self._arm(call, timeout_s + GUEST_GRACE_S, self._on_overdue)

    def _arm(self, call: RunningCall, after_s: float, then: Callable[[RunningCall], None]) -> None:
        self._disarm(call)
        call.timer = asyncio.get_running_loop().call_later(after_s, then, call)

    def _disarm(self, call: RunningCall) -> None:
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None

    def _violate(self, violation: str) -> None:
        self._lose(f"the guest broke the protocol: {violation}", "guest_broke_protocol")

    def _lose(self, reason: str, cause: str = "ended") -> None:
        """Mark the sandbox as lost, log it once, and remove its container."""
        if self.lost is not None:
            return
        log.warning("sandbox_lost", container=self.container[:12], cause=cause, reason=reason)
        if self.counts is not None:
            self.counts.lost[cause] += 1
        self._mark_lost(reason)
        self._begin_removal()

    def _mark_lost(self, reason: str) -> None:
        if self.lost is not None:
            return
        # Set `lost` first: the answers below run callbacks, which must see the loss.
        self.lost = reason
        # End the connections too: the sandbox's programs cannot read the answers any more.
        if self.tunnels is not None:
            self.tunnels.close()
        if self.streams is not None:
            self.streams.close()
        if not self._hello.done():
            self._hello.set_result(None)
        for call in list(self.calls.values()):
            self._answer(call, self._loss())

    def _loss(self) -> dict[str, Any]:
        error = {"code": "SANDBOX_UNAVAILABLE", "message": f"the sandbox died during the call: {self.lost}"}
        return {"ev": "done", "error": error, "sandbox_lost": self.lost}


def _drop(_: Frame) -> None:
    """Discard a frame that no caller needs."""


def _open_reader(attached: AttachedContainer) -> UsageReader | None:
    """Return the reader of a sandbox; None, with a log entry, when its control group cannot be read."""
    try:
        return UsageReader(attached.id, attached.process)
    except (OSError, LookupError) as error:
        log.warning("usage_not_measured", container=attached.id[:12], error=str(error))
        return None


# --- Limits of what a guest may send ----------------------------------------------------------------------------------


def count_budget(request: Mapping[str, Any]) -> int:
    """Return how many bytes of data frames the guest may send in answer to a (checked) request."""
    total = int(request.get("max_bytes", 0)) + int(request.get("live_bytes", 0))
    capture = request.get("capture")
    if isinstance(capture, dict):
        total += sum(max(value, 0) for value in capture.values() if isinstance(value, int))
        if "stream" in capture:
            total += _STREAM_STDERR_BYTES + FRAME_COST_BYTES * min(max(total, 0), STREAM_FRAMES)
    return total


def has_stream(op: str, stream: object) -> bool:
    """Return whether a request with this op may be answered with data of this stream."""
    return op in REQUESTS and isinstance(stream, str) and stream in REQUESTS[op].STREAMS


def build_done(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the guest's answer without the fields that only sandboxd may set. Only the kill report is checked here,
    because sandboxd counts kills.

    The worker that sent the call checks every other field (contract/guest_protocol.py).
    """
    done = {name: value for name, value in header.items() if name not in SANDBOXD_FIELDS and name != "id"}
    if "kill" in done:
        done["kill"] = _build_kill(done["kill"])
    return {**done, "ev": "done"}


def count_survivors(header: Mapping[str, Any]) -> int:
    """Return the number of processes that the guest could not kill at the end of the call. A malformed report counts as
    one.
    """
    kill = header.get("kill")
    if kill is None:
        return 0
    # In doubt, count a survivor: this only removes the container. A wrong zero would leave a process alive.
    count = kill.get("survivors", 0) if isinstance(kill, dict) else 1
    return count if isinstance(count, int) else 1


def quote_text(text: object) -> str:
    """Return a guest's text for a log or an error message: shortened, in printable ASCII."""
    return str(text)[:_QUOTE_CHARS].encode("unicode_escape").decode("ascii")[:_QUOTE_CHARS]


def _build_kill(kill: object) -> dict[str, Any] | None:
    if not isinstance(kill, dict) or kill.get("method") not in _KILL_METHODS:
        return None
    return {name: kill[name] for name in _KILL_FIELDS if name in kill}
