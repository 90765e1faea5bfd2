"""The guest's proxy port: programs' data becomes frames, the host's data reaches the programs, and both respect the
window.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.guest.guest_harness import DEADLINE_S, Guest, needs_namespace, running_guest
from toolcrew.workers.sandboxd.frames import Frame

pytestmark = needs_namespace

PORT = 3128
WINDOW, PIECE, GRANT = 65_536, 32_768, 32_768
MAX_TUNNELS = 64
_OWN_NETWORK = 'exec unshare --net /bin/bash --norc -c \'ip link set lo up; exec "$@"\' bash "$@";'
_CONNECT_CODE = f"import socket, sys; s = socket.create_connection(('127.0.0.1', {PORT}));"


class Host:
    """sandboxd's side of a guest's connections, driven by hand, and the programs' sockets in the guest's network."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.last_conn = 0
        self._frames = guest.events

    def connect(self) -> tuple[socket.socket, int]:
        """Return a program's connection and its number."""
        program = self.connect_without_event()
        assert self.await_event("net_open", self.last_conn + 1)
        self.last_conn += 1
        return program, self.last_conn

    def connect_without_event(self) -> socket.socket:
        """Connect a program. Raises OSError when the guest resets the connection at once."""
        return self.guest.connect(PORT)

    def send(self, op: str, conn: int, body: bytes = b"", **fields: Any) -> None:
        self.guest.send({"op": op, "conn": conn, **fields}, body)

    def await_event(self, event: str, conn: int) -> Frame:
        """Return the next frame of this connection, which must be this event. Frames of other connections are stored."""
        for frame in self._frames:
            if frame.header.get("conn") == conn:
                self._frames.remove(frame)
                break
        else:
            while (frame := self.guest.next_frame()).header.get("conn") != conn:
                self._frames.append(frame)
        assert frame.header["ev"] == event, frame.header
        return frame

    def store(self, frame: Frame) -> None:
        """Store a frame for `await_event`."""
        self._frames.append(frame)

    def read_data(self, conn: int, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.await_event("net_data", conn).body
        return data

    def is_fatal(self) -> bool:
        return bool(self.guest.next_frame().header["ev"] == "fatal")

    def is_quiet(self) -> bool:
        """Return whether the guest sends nothing before its reply to a ping."""
        time.sleep(0.05)
        self.settle()
        return not self._frames

    def settle(self) -> None:
        """Wait until the guest has processed all input. The guest's output until then is recorded."""
        self.guest.send({"id": "0" * 32, "op": "ping"})
        while (frame := self.guest.next_frame()).header["ev"] != "pong":
            self._frames.append(frame)


@pytest.fixture
def host() -> Iterator[Host]:
    with running_guest(_OWN_NETWORK, options=["--proxy", str(PORT)]) as guest:
        yield Host(guest)


def read_to_the_end(program: socket.socket) -> None:
    while program.recv(65_536):
        pass


def test_connection_numbers_are_unique_and_not_reused(host: Host) -> None:
    first, first_conn = host.connect()
    second, second_conn = host.connect()
    first.sendall(b"a")
    second.sendall(b"b")
    assert (host.await_event("net_data", second_conn).body, host.await_event("net_data", first_conn).body) == (
        b"b",
        b"a",
    )
    for program, conn in ((first, first_conn), (second, second_conn)):
        host.send("net_close", conn)
        host.await_event("net_close", conn)
        program.close()
    assert host.connect()[1] == 3


def test_a_late_close_does_not_affect_a_reused_descriptor(host: Host) -> None:
    first, first_conn = host.connect()
    host.send("net_end", first_conn)
    first.close()
    host.await_event("net_end", first_conn)
    host.await_event("net_close", first_conn)
    second, second_conn = host.connect()
    host.send("net_close", first_conn)
    host.settle()
    second.sendall(b"question")
    assert host.await_event("net_data", second_conn).body == b"question"


def test_a_half_closed_program_still_receives_data(host: Host) -> None:
    program, conn = host.connect()
    program.sendall(b"all")
    program.shutdown(socket.SHUT_WR)
    assert host.await_event("net_data", conn).body == b"all"
    host.await_event("net_end", conn)
    host.send("net_data", conn, b"answer")
    host.send("net_end", conn)
    host.await_event("net_close", conn)
    assert program.recv(100) + program.recv(100) == b"answer"
    host.send("net_close", conn)
    assert host.is_quiet()


def test_the_end_of_the_host_stream_keeps_the_other_direction_open(host: Host) -> None:
    program, conn = host.connect()
    host.send("net_data", conn, b"done")
    host.send("net_end", conn)
    assert program.recv(100) + program.recv(100) == b"done"
    program.sendall(b"thanks")
    assert host.await_event("net_data", conn).body == b"thanks"


def test_a_slow_program_reads_all_data_after_end_and_close(host: Host) -> None:
    program, conn = host.connect()
    host.send("net_data", conn, bytes(PIECE))
    host.send("net_data", conn, bytes(PIECE))
    host.send("net_end", conn)
    host.send("net_close", conn)
    received = 0
    while data := program.recv(8192):
        received += len(data)
    assert received == 2 * PIECE


def test_a_close_without_an_end_resets_the_program_connection(host: Host) -> None:
    program, conn = host.connect()
    host.send("net_data", conn, b"half of a file")
    host.send("net_close", conn)
    host.await_event("net_close", conn)
    with pytest.raises(ConnectionResetError):
        read_to_the_end(program)


@pytest.mark.parametrize("sent", [0, WINDOW], ids=["open window", "full window"])
def test_a_program_reset_closes_the_connection_even_with_a_full_window(host: Host, sent: int) -> None:
    program, conn = host.connect()
    program.sendall(bytes(sent))
    assert len(host.read_data(conn, sent)) == sent
    if sent:
        program.sendall(b"waits for room")
    program.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    program.close()
    host.await_event("net_close", conn)


def test_programs_get_the_proxy_variables(host: Host) -> None:
    text = f"http://127.0.0.1:{PORT} http://127.0.0.1:{PORT} localhost,127.0.0.1,::1\n".encode()
    script = 'echo "$http_proxy $HTTPS_PROXY $no_proxy"'
    for state in ({}, {"cwd": None, "state": "keep"}, {"cwd": None, "state": "use"}):
        assert host.guest.run(script, **state).bytes_of("stdout") == text


def test_killing_a_call_closes_its_open_connections(host: Host) -> None:
    call = host.guest.start_script(f"exec python3 -c \"{_CONNECT_CODE} s.sendall(b'x'); s.recv(1)\"", timeout_s=60)
    assert host.await_event("net_open", 1)
    assert host.await_event("net_data", 1).body == b"x"
    host.guest.send({"id": call, "op": "cancel"})
    host.await_event("net_end", 1)
    host.await_event("net_close", 1)


def test_a_half_closed_connection_of_a_live_program_stays_open(host: Host) -> None:
    program, conn = host.connect()
    program.shutdown(socket.SHUT_WR)
    host.await_event("net_end", conn)
    # IPv4 by an IPv6 socket, as some languages' own libraries do: the kernel lists it elsewhere.
    connect_code = f"import socket, sys; s = socket.socket(socket.AF_INET6); s.connect(('::ffff:127.0.0.1', {PORT}));"
    program_code = connect_code + " s.shutdown(socket.SHUT_WR); sys.stdout.buffer.write(s.recv(100))"
    call = host.guest.start_script(f'python3 -c "{program_code}"', timeout_s=30)
    assert host.await_event("net_open", 2)
    host.await_event("net_end", 2)
    time.sleep(1.2)  # longer than between two looks at who has left
    for number in (conn, 2):
        host.send("net_data", number, b"at last")
        host.send("net_end", number)
        host.await_event("net_close", number)
    assert program.recv(100) == b"at last"
    assert host.guest.finish(call).bytes_of("stdout") == b"at last"


def test_programs_are_read_only_up_to_the_flow_control_window(host: Host) -> None:
    programs = [host.connect() for _ in range(16)]
    before = host.guest.resident_bytes()
    for program, _ in programs:
        program.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(10_000):
                program.send(bytes(PIECE))
    call, data_frames = host.guest.start_script("echo here"), 0
    while (frame := host.guest.next_frame()).header.get("id") != call:
        host.store(frame)
        data_frames += frame.header["ev"] == "net_data"
    assert frame.body == b"here\n", "a call is served meanwhile"
    assert host.guest.finish(call)["exit_code"] == 0
    assert data_frames <= 2 * 16, "no connection may say more than its window"
    for _, conn in programs:
        assert len(host.read_data(conn, WINDOW)) == WINDOW
    assert host.guest.resident_bytes() - before < 2 * 1024 * 1024
    assert host.is_quiet()
    host.send("net_room", programs[0][1], bytes=GRANT)
    assert len(host.read_data(programs[0][1], GRANT)) == GRANT


def test_connections_without_a_reader_use_bounded_memory(host: Host) -> None:
    programs = [host.connect() for _ in range(32)]
    before = host.guest.resident_bytes()
    for _, conn in programs:
        host.send("net_data", conn, bytes(PIECE))
        host.send("net_data", conn, bytes(PIECE))
    host.settle()
    assert host.guest.resident_bytes() - before < 32 * WINDOW + 4 * 1024 * 1024


def test_a_megabyte_in_each_direction_arrives_complete(host: Host) -> None:
    program, conn = host.connect()
    data, returned = os.urandom(1024 * 1024), bytearray()

    def exchange() -> None:
        program.sendall(data)
        program.shutdown(socket.SHUT_WR)
        while piece := program.recv(PIECE):
            returned.extend(piece)

    exchange_thread = threading.Thread(target=exchange)
    exchange_thread.start()
    received = b""
    while len(received) < len(data):
        piece = host.await_event("net_data", conn).body
        received += piece
        if len(received) % GRANT == 0:
            host.send("net_room", conn, bytes=GRANT)
    host.await_event("net_end", conn)
    for at in range(0, len(data), GRANT):
        if at >= WINDOW:
            credit = 0
            while credit < GRANT:
                credit += host.await_event("net_room", conn).header["bytes"]
        host.send("net_data", conn, data[at : at + GRANT])
    host.send("net_end", conn)
    exchange_thread.join(DEADLINE_S)
    assert received == data
    assert bytes(returned) == data


def test_a_sandbox_without_network_has_no_proxy_port() -> None:
    with running_guest(_OWN_NETWORK) as guest:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {PORT}))"
        assert b"ConnectionRefusedError" in guest.run(f'python3 -c "{connect}"').bytes_of("stderr")


@pytest.mark.parametrize("options", [[], ["--proxy", str(PORT)]], ids=["no network", "network"])
def test_a_frame_for_an_unknown_connection_ends_the_guest(options: list[str]) -> None:
    with running_guest(_OWN_NETWORK, options=options) as guest:
        guest.send({"op": "net_data", "conn": 1}, b"x")
        assert guest.next_frame().header["ev"] == "fatal"
        assert guest.wait_exit() == 1


@pytest.mark.parametrize(
    ("op", "body", "fields"),
    [
        ("net_data", bytes(WINDOW + 1), {}),
        ("net_room", b"", {}),
        ("net_room", b"", {"bytes": 0}),
        ("net_room", b"", {"bytes": True}),
        ("net_room", b"", {"bytes": 1}),
    ],
)
def test_an_invalid_connection_frame_ends_the_guest(
    host: Host, op: str, body: bytes, fields: dict[str, object]
) -> None:
    _, conn = host.connect()
    host.send(op, conn, body, **fields)
    assert host.is_fatal()
    assert host.guest.wait_exit() == 1


def test_a_connection_above_the_limit_is_refused_without_affecting_others(host: Host) -> None:
    programs = [host.connect() for _ in range(MAX_TUNNELS)]
    with pytest.raises(ConnectionResetError):
        read_to_the_end(host.connect_without_event())
    programs[-1][0].sendall(b"x")
    assert host.await_event("net_data", MAX_TUNNELS).body == b"x"
    host.send("net_close", 1)
    host.await_event("net_close", 1)
    host.connect()


def test_the_rate_of_new_connections_is_limited(host: Host) -> None:
    connects = f"import socket\nfor _ in range(1000): socket.create_connection(('127.0.0.1', {PORT})).close()"
    call = host.guest.start_script(f'timeout 0.5 python3 -c "{connects}"')
    opened, began_at = 0, time.monotonic()
    while (frame := host.guest.next_frame()).header.get("id") != call:
        if frame.header["ev"] == "net_open":
            opened += 1
            host.send("net_end", frame.header["conn"])
            host.send("net_close", frame.header["conn"])
    assert opened <= 100 + 100 * (time.monotonic() - began_at) + 1


def test_the_rate_of_data_frames_is_limited(host: Host) -> None:
    sends = f"{_CONNECT_CODE} s.setsockopt(6, 1, 1)\nwhile 1: s.sendall(b'x')"
    call = host.guest.start_script(f'timeout 0.5 python3 -c "{sends}"; true')
    frames, began_at = 0, time.monotonic()
    while (frame := host.guest.next_frame()).header.get("id") != call:
        if frame.header["ev"] == "net_data":
            frames += 1
            host.send("net_room", 1, bytes=len(frame.body))
    assert frames <= 2000 + 2000 * (time.monotonic() - began_at) + 1
