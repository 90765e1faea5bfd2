"""The guest's tunnels joined to sandboxd's tunnels, as in a sandbox. Whatever both ends do, bytes arrive in order and
nothing remains open.
"""

import asyncio
import contextlib
import os
import select
import socket
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT, Guest, needs_namespace, running_guest
from tests.support.sandboxd.tunnel_ends import PREAMBLE
from tests.support.stack.waiting import SOON_S, until
from toolcrew.workers.sandboxd.egress import relay as relay_module
from toolcrew.workers.sandboxd.egress.relay import open_proxy
from toolcrew.workers.sandboxd.egress.tunnels import Tunnels
from toolcrew.workers.sandboxd.frames import MAX_DOWN, MAX_UP, FrameDecoder, encode_frame

assert GUEST_PARENT
from guest.frames import Outbox  # noqa: E402
from guest.tunnels.tunnels import Tunnels as GuestTunnels  # noqa: E402

pytestmark = needs_namespace

PORT = 3128
_OWN_NETWORK = 'exec unshare --net /bin/bash --norc -c \'ip link set lo up; exec "$@"\' bash "$@";'
_RESET = struct.pack("ii", 1, 0)


class _Pace(asyncio.BaseProtocol):
    """Controls whether the guest reads the data that it is sent."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.takes.set()

    def pause_writing(self) -> None:
        self.takes.clear()

    def resume_writing(self) -> None:
        self.takes.set()


@dataclass
class Pair:
    """A guest, sandboxd's end of the guest, and the socket at which the proxy's connections arrive."""

    guest: Guest
    loop: asyncio.AbstractEventLoop
    listening: socket.socket
    tunnels: Tunnels = field(init=False)
    faults: list[str] = field(default_factory=list)

    async def join(self) -> None:
        stdin, stdout = self.guest.pipes
        os.set_blocking(stdout.fileno(), False)
        transport, pace = await self.loop.connect_write_pipe(_Pace, stdin)
        decoder = FrameDecoder(MAX_UP)

        def send(header: dict[str, Any], body: bytes) -> None:
            transport.write(encode_frame(header, body, max_total=MAX_DOWN))

        async def drain() -> None:
            await pace.takes.wait()

        def take() -> None:
            data = os.read(stdout.fileno(), 1 << 18)
            if not data:
                self.faults.append("the guest has gone")
                self.loop.remove_reader(stdout.fileno())
            for frame in decoder.feed(data):
                if str(frame.header["ev"]).startswith("net_"):
                    self.tunnels.take(frame)
                else:
                    self.faults.append(str(frame.header))

        connect = partial(open_proxy, Path(self.listening.getsockname()), PREAMBLE, frozenset({os.geteuid()}))
        self.tunnels = Tunnels(send, drain, connect, self.faults.append)
        self.loop.add_reader(stdout.fileno(), take)

    async def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return the two ends of a connection: the program's end, and the proxy's end after the opening."""
        program = await asyncio.to_thread(self.guest.connect, PORT)
        program.setblocking(False)
        proxy, _ = await asyncio.wait_for(self.loop.sock_accept(self.listening), SOON_S)
        while await asyncio.wait_for(self.loop.sock_recv(proxy, 1), SOON_S) != b"\n":
            pass
        return program, proxy

    async def until_over(self) -> None:
        """Wait until neither side has a connection."""
        await until(lambda: not self.tunnels._relays, SOON_S)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.guest.pid}/fd"))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    loop = asyncio.new_event_loop()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_guest(_OWN_NETWORK, options=["--proxy", str(PORT)]) as guest,
        socket.socket(socket.AF_UNIX) as listening,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(relay_module, "LINGER_S", 0.02)
        listening.bind(f"{folder}/proxy.sock")
        listening.listen(100)
        listening.setblocking(False)
        pair = Pair(guest, loop, listening)
        loop.run_until_complete(pair.join())
        yield pair
        pair.tunnels.close()
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()


@dataclass(frozen=True)
class EndScript:
    """The script of one end: pieces to send, then the end; pieces to read, up to the end or to a stop, in order or by
    a reset.
    """

    sends: list[int]
    reads: int
    leaves_after: int | None
    resets: bool


@dataclass
class End:
    """One running end. `received`: the data that it read. `is_cut`: the data did not end cleanly."""

    sock: socket.socket
    script: EndScript
    sent: bytes = b""
    received: bytearray = field(default_factory=bytearray)
    is_cut: bool = False

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        sending = loop.create_task(self._send(loop))
        try:
            await self._read(loop)
            if self.script.leaves_after is None:
                await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if self.script.resets and self.script.leaves_after is not None and self.sock.family == socket.AF_INET:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.sock.close()

    async def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):
            for size in self.script.sends:
                data = os.urandom(size)
                self.sent += data
                await loop.sock_sendall(self.sock, data)
            self.sock.shutdown(socket.SHUT_WR)

    async def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while self.script.leaves_after is None or len(self.received) < self.script.leaves_after:
                data = await loop.sock_recv(self.sock, self.script.reads)
                if not data:
                    return
                self.received += data
        except OSError:
            self.is_cut = True


_SIZES = st.integers(1, 40) | st.sampled_from([4096, 32_767, 32_768, 32_769, 65_535, 65_536, 65_537, 200_000])
_END_SCRIPTS = st.builds(
    EndScript,
    sends=st.lists(_SIZES, max_size=5),
    reads=st.sampled_from([1000, 32_768, 300_000]),
    leaves_after=st.none() | st.none() | st.none() | st.sampled_from([0, 1, 5000, 65_536, 100_000]),
    resets=st.booleans(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(_END_SCRIPTS, _END_SCRIPTS), min_size=1, max_size=4))
def test_every_byte_arrives_in_order_and_no_connection_remains(
    pair: Pair, scripts: list[tuple[EndScript, EndScript]]
) -> None:
    async def play() -> None:
        ends = []
        for program, proxy in scripts:
            sockets = await pair.connect()
            ends.append((End(sockets[0], program), End(sockets[1], proxy)))
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(end.work() for both in ends for end in both))
        for client, other in ends:
            assert other.sent.startswith(bytes(client.received))
            assert client.sent.startswith(bytes(other.received))
            if client.script.leaves_after is None and other.script.leaves_after is None:
                assert client.is_cut is False
                assert other.is_cut is False
                assert len(client.received) == len(other.sent)
                assert len(other.received) == len(client.sent)
        await pair.until_over()

    pair.loop.run_until_complete(play())
    assert pair.faults == []


def test_closed_connections_leave_no_descriptor(pair: Pair) -> None:
    async def play() -> None:
        before = pair.descriptors()
        for number in range(60):
            program, proxy = await pair.connect()
            first, second = (program, proxy) if number % 2 else (proxy, program)
            first.close()
            second.close()
        await pair.until_over()
        assert pair.descriptors() == before

    pair.loop.run_until_complete(play())
    assert pair.faults == []


def test_reused_descriptor_is_not_mistaken_for_its_old_connection() -> None:
    """Existing connections are served before new ones are accepted. Otherwise a notice about a lost connection would
    reach its successor.
    """
    with open(os.devnull, "wb") as nowhere:
        tunnels = GuestTunnels(Outbox(nowhere.fileno()), 0)
        place = tunnels._listener.getsockname()

        def serve_one_turn() -> list[int]:
            poller = select.poll()
            tunnels.register(poller)
            events = poller.poll(SOON_S * 1000)
            for fd, ready_events in events:
                tunnels.serve(fd, ready_events)
            return [fd for fd, _ in events]

        with socket.create_connection(place) as first:
            (listener,) = serve_one_turn()
            first.sendall(b"x")
            with socket.create_connection(place):
                assert serve_one_turn()[1:] == [listener]
