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

from tests.guest_harness import DEADLINE_S, Guest, needs_namespace, running_guest
from workers.sandboxd.frames import Frame

pytestmark = needs_namespace

PORT = 3128
WINDOW, PIECE, GRANT = 65_536, 32_768, 32_768
MAX_TUNNELS = 64
_OWN_NETWORK = 'exec unshare --net /bin/bash --norc -c \'ip link set lo up; exec "$@"\' bash "$@";'
_ASKS = f"import socket, sys; s = socket.create_connection(('127.0.0.1', {PORT}));"


class Host:
    """sandboxd's side of a guest's connections, driven by hand, and the programs' sockets in the guest's network."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.last = 0
        self._kept: list[Frame] = []

    def connect(self) -> tuple[socket.socket, int]:
        """Return a program's connection and its number."""
        program = self.connect_unseen()
        assert self.hear("net_open", self.last + 1)
        self.last += 1
        return program, self.last

    def connect_unseen(self) -> socket.socket:
        """Connect a program. Raises OSError when the guest resets the connection at once."""
        return self.guest.connect(PORT)

    def tell(self, op: str, conn: int, body: bytes = b"", **fields: Any) -> None:
        self.guest.send({"op": op, "conn": conn, **fields}, body)

    def hear(self, event: str, conn: int) -> Frame:
        """Return the next frame of this connection, which must be this event. Frames of other connections are stored."""
        for frame in self._kept:
            if frame.header.get("conn") == conn:
                self._kept.remove(frame)
                break
        else:
            while (frame := self.guest.next_frame()).header.get("conn") != conn:
                self._kept.append(frame)
        assert frame.header["ev"] == event, frame.header
        return frame

    def keep(self, frame: Frame) -> None:
        """Store a frame for `hear`."""
        self._kept.append(frame)

    def hear_data(self, conn: int, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.hear("net_data", conn).body
        return data

    def hear_fatal(self) -> bool:
        return bool(self.guest.next_frame().header["ev"] == "fatal")

    def is_quiet(self) -> bool:
        """Return whether the guest sends nothing before its reply to a ping."""
        time.sleep(0.05)
        self.settle()
        return not self._kept

    def settle(self) -> None:
        """Wait until the guest has processed all input. The guest's output until then is recorded."""
        self.guest.send({"id": "0" * 32, "op": "ping"})
        while (frame := self.guest.next_frame()).header["ev"] != "pong":
            self._kept.append(frame)


@pytest.fixture
def host() -> Iterator[Host]:
    with running_guest(_OWN_NETWORK, options=["--proxy", str(PORT)]) as guest:
        yield Host(guest)


def read_to_the_end(program: socket.socket) -> None:
    while program.recv(65_536):
        pass


# Relaying


def test_connections_have_numbers_of_their_own_that_never_come_again(host: Host) -> None:
    first, one = host.connect()
    second, two = host.connect()
    first.sendall(b"a")
    second.sendall(b"b")
    assert (host.hear("net_data", two).body, host.hear("net_data", one).body) == (b"b", b"a")
    for program, conn in ((first, one), (second, two)):
        host.tell("net_close", conn)
        host.hear("net_close", conn)
        program.close()
    assert host.connect()[1] == 3


def test_a_close_that_the_host_says_late_leaves_the_connection_that_has_its_descriptor_now(host: Host) -> None:
    first, one = host.connect()
    host.tell("net_end", one)
    first.close()
    host.hear("net_end", one)
    host.hear("net_close", one)
    second, two = host.connect()
    host.tell("net_close", one)
    host.settle()
    second.sendall(b"question")
    assert host.hear("net_data", two).body == b"question"


def test_a_program_that_ends_its_question_still_gets_its_answer(host: Host) -> None:
    program, conn = host.connect()
    program.sendall(b"all")
    program.shutdown(socket.SHUT_WR)
    assert host.hear("net_data", conn).body == b"all"
    host.hear("net_end", conn)
    host.tell("net_data", conn, b"answer")
    host.tell("net_end", conn)
    host.hear("net_close", conn)
    assert program.recv(100) + program.recv(100) == b"answer"
    host.tell("net_close", conn)
    assert host.is_quiet()


def test_the_hosts_end_is_the_programs_end_of_file_and_no_more(host: Host) -> None:
    program, conn = host.connect()
    host.tell("net_data", conn, b"done")
    host.tell("net_end", conn)
    assert program.recv(100) + program.recv(100) == b"done"
    program.sendall(b"thanks")
    assert host.hear("net_data", conn).body == b"thanks"


def test_a_close_after_the_hosts_end_takes_nothing_from_a_program_that_is_slow(host: Host) -> None:
    program, conn = host.connect()
    host.tell("net_data", conn, bytes(PIECE))
    host.tell("net_data", conn, bytes(PIECE))
    host.tell("net_end", conn)
    host.tell("net_close", conn)
    got = 0
    while data := program.recv(8192):
        got += len(data)
    assert got == 2 * PIECE


def test_a_close_without_an_end_is_an_error_to_the_program(host: Host) -> None:
    program, conn = host.connect()
    host.tell("net_data", conn, b"half of a file")
    host.tell("net_close", conn)
    host.hear("net_close", conn)
    with pytest.raises(ConnectionResetError):
        read_to_the_end(program)


@pytest.mark.parametrize("sent", [0, WINDOW], ids=["room", "no room"])
def test_a_program_that_breaks_off_closes_its_connection_also_while_the_host_takes_nothing(
    host: Host, sent: int
) -> None:
    program, conn = host.connect()
    program.sendall(bytes(sent))
    assert len(host.hear_data(conn, sent)) == sent
    if sent:
        program.sendall(b"waits for room")
    program.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    program.close()
    host.hear("net_close", conn)


def test_programs_are_reported_where_the_proxy_is(host: Host) -> None:
    text = f"http://127.0.0.1:{PORT} http://127.0.0.1:{PORT} localhost,127.0.0.1,::1\n".encode()
    script = 'echo "$http_proxy $HTTPS_PROXY $no_proxy"'
    for state in ({}, {"cwd": None, "state": "keep"}, {"cwd": None, "state": "use"}):
        assert host.guest.run(script, **state).bytes_of("stdout") == text


# A call's end


def test_a_killed_call_leaves_no_connection_that_waits_for_an_answer(host: Host) -> None:
    call = host.guest.start_script(f"exec python3 -c \"{_ASKS} s.sendall(b'x'); s.recv(1)\"", timeout_s=60)
    assert host.hear("net_open", 1)
    assert host.hear("net_data", 1).body == b"x"
    host.guest.send({"id": call, "op": "cancel"})
    host.hear("net_end", 1)
    host.hear("net_close", 1)


def test_programs_that_live_and_have_only_ended_their_question_may_wait_for_long(host: Host) -> None:
    program, conn = host.connect()
    program.shutdown(socket.SHUT_WR)
    host.hear("net_end", conn)
    # IPv4 by an IPv6 socket, as some languages' own libraries do: the kernel lists it elsewhere.
    asks = f"import socket, sys; s = socket.socket(socket.AF_INET6); s.connect(('::ffff:127.0.0.1', {PORT}));"
    ask = asks + " s.shutdown(socket.SHUT_WR); sys.stdout.buffer.write(s.recv(100))"
    call = host.guest.start_script(f'python3 -c "{ask}"', timeout_s=30)
    assert host.hear("net_open", 2)
    host.hear("net_end", 2)
    time.sleep(1.2)  # longer than between two looks at who has left
    for number in (conn, 2):
        host.tell("net_data", number, b"at last")
        host.tell("net_end", number)
        host.hear("net_close", number)
    assert program.recv(100) == b"at last"
    assert host.guest.finish(call).bytes_of("stdout") == b"at last"


# Room


def test_programs_that_send_without_end_are_read_no_further_than_the_host_has_room(host: Host) -> None:
    programs = [host.connect() for _ in range(16)]
    before = host.guest.resident_bytes()
    for program, _ in programs:
        program.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(10_000):
                program.send(bytes(PIECE))
    call, data_frames = host.guest.start_script("echo here"), 0
    while (frame := host.guest.next_frame()).header.get("id") != call:
        host.keep(frame)
        data_frames += frame.header["ev"] == "net_data"
    assert frame.body == b"here\n", "a call is served meanwhile"
    assert host.guest.finish(call)["exit_code"] == 0
    assert data_frames <= 2 * 16, "no connection may say more than its window"
    for _, conn in programs:
        assert len(host.hear_data(conn, WINDOW)) == WINDOW
    assert host.guest.resident_bytes() - before < 2 * 1024 * 1024
    assert host.is_quiet()
    host.tell("net_room", programs[0][1], bytes=GRANT)
    assert len(host.hear_data(programs[0][1], GRANT)) == GRANT


def test_connections_without_a_reader_use_bounded_memory(host: Host) -> None:
    programs = [host.connect() for _ in range(32)]
    before = host.guest.resident_bytes()
    for _, conn in programs:
        host.tell("net_data", conn, bytes(PIECE))
        host.tell("net_data", conn, bytes(PIECE))
    host.settle()
    assert host.guest.resident_bytes() - before < 32 * WINDOW + 4 * 1024 * 1024


def test_a_megabyte_each_way_arrives_whole(host: Host) -> None:
    program, conn = host.connect()
    data, back = os.urandom(1024 * 1024), bytearray()

    def talk() -> None:
        program.sendall(data)
        program.shutdown(socket.SHUT_WR)
        while piece := program.recv(PIECE):
            back.extend(piece)

    talking = threading.Thread(target=talk)
    talking.start()
    got = b""
    while len(got) < len(data):
        piece = host.hear("net_data", conn).body
        got += piece
        if len(got) % GRANT == 0:
            host.tell("net_room", conn, bytes=GRANT)
    host.hear("net_end", conn)
    for at in range(0, len(data), GRANT):
        if at >= WINDOW:
            owed = 0
            while owed < GRANT:
                owed += host.hear("net_room", conn).header["bytes"]
        host.tell("net_data", conn, data[at : at + GRANT])
    host.tell("net_end", conn)
    talking.join(DEADLINE_S)
    assert got == data
    assert bytes(back) == data


# Without network, and beyond the limits


def test_a_sandbox_without_network_has_no_proxy_port() -> None:
    with running_guest(_OWN_NETWORK) as guest:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {PORT}))"
        assert b"ConnectionRefusedError" in guest.run(f'python3 -c "{connect}"').bytes_of("stderr")


@pytest.mark.parametrize("options", [[], ["--proxy", str(PORT)]], ids=["no network", "network"])
def test_word_of_a_connection_that_is_none_is_fatal(options: list[str]) -> None:
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
def test_a_host_that_breaks_the_rules_of_connections_is_left(
    host: Host, op: str, body: bytes, fields: dict[str, object]
) -> None:
    _, conn = host.connect()
    host.tell(op, conn, body, **fields)
    assert host.hear_fatal()
    assert host.guest.wait_exit() == 1


def test_one_connection_more_than_allowed_is_refused_and_the_others_go_on(host: Host) -> None:
    programs = [host.connect() for _ in range(MAX_TUNNELS)]
    with pytest.raises(ConnectionResetError):
        read_to_the_end(host.connect_unseen())
    programs[-1][0].sendall(b"x")
    assert host.hear("net_data", MAX_TUNNELS).body == b"x"
    host.tell("net_close", 1)
    host.hear("net_close", 1)
    host.connect()


def test_a_program_that_connects_without_a_pause_is_let_in_at_a_pace(host: Host) -> None:
    connects = f"import socket\nfor _ in range(1000): socket.create_connection(('127.0.0.1', {PORT})).close()"
    call = host.guest.start_script(f'timeout 0.5 python3 -c "{connects}"')
    opened, began_at = 0, time.monotonic()
    while (frame := host.guest.next_frame()).header.get("id") != call:
        if frame.header["ev"] == "net_open":
            opened += 1
            host.tell("net_end", frame.header["conn"])
            host.tell("net_close", frame.header["conn"])
    assert opened <= 100 + 100 * (time.monotonic() - began_at) + 1


def test_a_program_that_sends_byte_by_byte_is_read_at_a_pace(host: Host) -> None:
    sends = f"{_ASKS} s.setsockopt(6, 1, 1)\nwhile 1: s.sendall(b'x')"
    call = host.guest.start_script(f'timeout 0.5 python3 -c "{sends}"; true')
    frames, began_at = 0, time.monotonic()
    while (frame := host.guest.next_frame()).header.get("id") != call:
        if frame.header["ev"] == "net_data":
            frames += 1
            host.tell("net_room", 1, bytes=len(frame.body))
    assert frames <= 2000 + 2000 * (time.monotonic() - began_at) + 1
