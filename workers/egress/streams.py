"""Relay of bytes between a client and a host. Each side is a stream that charges the session's quota. Both directions
are relayed at the same time. `watch` ends idle and old connections.
"""

import asyncio
import contextlib
import select
import socket
import time
from collections.abc import Coroutine
from typing import Any

from toolcrew.workers.egress.allowances import ConnectionQuota
from toolcrew.workers.egress.hellos import HelloGate
from toolcrew.workers.egress.limits import CHUNK_BYTES, ProxyLimits
from toolcrew.workers.egress.outcomes import EgressOutcome, refuse_bad_gateway
from toolcrew.workers.egress.processor_share import start_task


class Stream:
    """A socket with its quota. Nothing is read ahead: bytes that are not requested stay in the kernel. One reader and
    one writer at a time.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self.received = 0
        """Bytes that were charged to a quota."""
        self.is_ended = False
        """True after the end of the other side's data was read."""

    async def receive(self, quota: ConnectionQuota, max_bytes: int = CHUNK_BYTES) -> bytes:
        """Return the next bytes; empty at the end. Raises OSError, and Refusal when the session's quota is used up and
        more bytes wait.
        """
        while True:
            # Reading the end of the data uses no quota, so a session without quota still learns that the answer is
            # complete.
            data = self._peek(quota) if quota.is_used_up else self._receive(quota, await quota.take(max_bytes))
            if data is not None:
                self.received += len(data)
                self.is_ended = not data
                return data
            await self._wait_readable()

    def _receive(self, quota: ConnectionQuota, allowed_bytes: int) -> bytes | None:
        """Return at most `allowed_bytes` bytes, or None when none are there yet."""
        data: bytes | None = None
        try:
            data = self._try_receive(allowed_bytes) if allowed_bytes else None
        finally:
            quota.give_back(allowed_bytes - len(data or b""))
        return data

    def _peek(self, quota: ConnectionQuota) -> bytes | None:
        if data := self._try_receive(1, socket.MSG_PEEK):
            raise quota.build_spent_refusal()
        return data

    async def receive_line(self, max_bytes: int) -> bytes:
        """Return the bytes up to the end of the line and none after it. The result is shorter when `max_bytes` bytes
        contain no line end, or the stream ends. Not charged to a quota.
        """
        line = b""
        while len(line) < max_bytes and not line.endswith(b"\n"):
            await self._wait_readable()
            peeked = self._socket.recv(min(CHUNK_BYTES, max_bytes - len(line)), socket.MSG_PEEK)
            if not peeked:
                break
            line += self._socket.recv(peeked.find(b"\n") + 1 or len(peeked))
        return line

    async def send(self, data: bytes) -> None:
        """Send all of the data. Raises OSError."""
        if data:
            await self._loop.sock_sendall(self._socket, data)

    def end_sending(self) -> None:
        """End the sending direction. The other side can still send."""
        with contextlib.suppress(OSError):  # the other side has already closed
            self._socket.shutdown(socket.SHUT_WR)

    async def drain(self) -> None:
        """Read and drop until the other side ends, because closing with unread data would reset the connection and lose
        the answer.
        """
        while await self._loop.sock_recv(self._socket, CHUNK_BYTES):
            pass

    def has_left(self) -> bool:
        """Return whether the other side has closed both directions or reset the connection. A side that only stopped
        sending has not left.
        """
        poll = select.poll()
        poll.register(self._socket, 0)
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _try_receive(self, max_bytes: int, flags: int = 0) -> bytes | None:
        try:
            return self._socket.recv(max_bytes, flags)
        except (BlockingIOError, InterruptedError):
            return None

    async def _wait_readable(self) -> None:
        readable = self._loop.create_future()
        number = self._socket.fileno()
        self._loop.add_reader(number, _resolve, readable)
        try:
            await readable
        finally:
            self._loop.remove_reader(number)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


Work = Coroutine[Any, Any, None]


class ActivityClock:
    """The times of a connection's start and of its last activity."""

    def __init__(self) -> None:
        self._began_at = self._active_at = time.monotonic()

    def record_activity(self) -> None:
        self._active_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._active_at

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began_at


async def watch(client: Stream, activity: ActivityClock, limits: ProxyLimits) -> None:
    """Watch a connection until the task is cancelled. Raises Refusal when it is idle, too old, or left by its
    client.
    """
    while True:
        await asyncio.sleep(min(limits.watch_s, limits.idle_s / 4, limits.total_s / 4))
        if client.is_ended and client.has_left():
            raise refuse_bad_gateway(EgressOutcome.INTERRUPTED, "the client left")
        if activity.idle_s >= limits.idle_s:
            raise refuse_bad_gateway(
                EgressOutcome.IDLE, f"no data was sent or received for {limits.idle_s:g} s: try again"
            )
        if activity.age_s >= limits.total_s:
            raise refuse_bad_gateway(
                EgressOutcome.TOO_LONG, f"a connection lasts {limits.total_s:g} s at most: open another connection"
            )


async def run_all(*works: Work, background: tuple[Work, ...] = ()) -> None:
    """Run all tasks. When all `works` have ended, cancel the `background` tasks and return. Raises the first failure
    after it has cancelled the rest.
    """
    needed = {start_task(work) for work in works}
    every = needed | {start_task(work) for work in background}
    try:
        running = set(every)
        while needed & running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)


async def tunnel(
    client: Stream, host: Stream, gate: HelloGate, first: bytes, quota: ConnectionQuota, activity: ActivityClock
) -> None:
    """Relay until both sides have ended. The end of one side is passed to the other. `first`: bytes that the client has
    already sent. Raises Refusal and OSError.
    """
    await run_all(_send_up(client, host, gate, first, quota, activity), _send_down(client, host, quota, activity))


async def _send_up(
    client: Stream, host: Stream, gate: HelloGate, first: bytes, quota: ConnectionQuota, activity: ActivityClock
) -> None:
    while data := first or await client.receive(quota):
        first = b""
        activity.record_activity()
        passed = gate.pass_on(data)
        try:
            await host.send(passed)
        except OSError:
            return  # the host reads no more, but the client must still get its answer
        activity.record_activity()
    gate.finish()
    host.end_sending()


async def _send_down(client: Stream, host: Stream, quota: ConnectionQuota, activity: ActivityClock) -> None:
    while data := await host.receive(quota):
        activity.record_activity()
        await client.send(data)
        activity.record_activity()
    client.end_sending()
