"""Streams to ports: bytes pass both ways, each direction ends by itself, and only programs of the sandbox answer."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.guest.stream_client import ClientStream, RunningServer, StreamError, running_stream_server


@contextlib.contextmanager
def listener(backlog: int = 16) -> Iterator[tuple[socket.socket, int]]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(backlog)
        listening.settimeout(60)
        yield listening, listening.getsockname()[1]


def receive_all(connection: socket.socket) -> bytes:
    blocks = []
    while block := connection.recv(65_536):
        blocks.append(block)
    return b"".join(blocks)


def error_of(server: RunningServer, port: int) -> str:
    with pytest.raises(StreamError) as caught:
        server.client.open("port", port=port).opened()
    return str(caught.value.code)


def test_each_direction_ends_by_itself(server: RunningServer) -> None:
    with listener() as (listening, port):
        stream = server.client.open("port", port=port)
        assert stream.opened() == {}
        connection, _ = listening.accept()
        stream.write(b"question", is_last=True)
        assert receive_all(connection) == b"question"
        connection.sendall(b"answer")
        stream.read_bytes(6)
        assert stream.end_fields is None
        connection.close()
        assert stream.end() == {}
        assert stream.data == b"answer"
        assert stream.pieces[-1] == (b"", 2)


def test_the_client_may_send_after_the_program_has_ended_its_side(server: RunningServer) -> None:
    with listener() as (listening, port):
        stream = server.client.open("port", port=port)
        stream.opened()
        connection, _ = listening.accept()
        connection.shutdown(socket.SHUT_WR)
        while not stream.pieces:
            stream.step()
        assert stream.pieces == [(b"", 2)]
        stream.write(b"late", is_last=True)
        assert receive_all(connection) == b"late"
        assert stream.end() == {}
        connection.close()


def test_many_bytes_pass_in_constant_memory_while_the_program_reads_slowly(server: RunningServer) -> None:
    data = os.urandom(8 << 20)
    with listener() as (listening, port):
        stream = server.client.open("port", port=port)
        stream.opened()
        connection, _ = listening.accept()
        before = server.memory_bytes
        while stream.send_limit > stream.sent:  # the program does not read: credit ends
            stream.write(data[stream.sent : min(stream.send_limit, stream.sent + 32_768)])
            server.client.call("stat", path=".")
            while any(frame.stream == stream.number for frame in server.client.frames):
                stream.step()
        assert stream.sent < len(data)
        assert server.memory_bytes - before < 2 << 20
        connection.settimeout(60)
        received = bytearray()
        while len(received) < stream.sent:
            received += connection.recv(65_536)
        assert received == data[: stream.sent]
        connection.close()


def test_a_program_that_sends_much_waits_for_credit(server: RunningServer) -> None:
    data = os.urandom(3 << 20)
    with listener() as (listening, port):
        stream = server.client.open("port", port=port, window=1000)
        stream.opened()
        connection, _ = listening.accept()
        connection.setblocking(False)
        sent = 0
        while True:
            try:
                sent += connection.send(data[sent : sent + 65_536])
            except BlockingIOError:
                break
            if sent == len(data):
                break
        connection.close()
        stream.grant(65_536)
        stream.write(b"", is_last=True)
        stream.end()
        assert stream.data == data[:sent]


def test_a_reset_is_an_error(server: RunningServer) -> None:
    with listener() as (listening, port):
        stream = server.client.open("port", port=port)
        stream.opened()
        connection, _ = listening.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        with pytest.raises(StreamError) as caught:
            stream.end()
        assert caught.value.code == "NETWORK_ERROR"


def test_a_client_that_leaves_closes_the_connection(server: RunningServer) -> None:
    with listener() as (listening, port):
        stream = server.client.open("port", port=port)
        stream.opened()
        connection, _ = listening.accept()
        stream.close()
        connection.settimeout(60)
        assert connection.recv(1) == b""
        connection.close()


def test_a_port_without_a_program_and_the_port_of_the_proxy_are_refused(server: RunningServer) -> None:
    with listener() as (listening, port):
        listening.close()
        assert error_of(server, port) == "NETWORK_ERROR"
    assert error_of(server, 3128) == "INVALID_ARGUMENTS"


def test_a_program_that_accepts_nothing_holds_at_most_16_connects(server: RunningServer) -> None:
    with listener(backlog=0) as (_, port):
        streams = [server.client.open("port", port=port) for _ in range(40)]
        server.client.call("stat", path=".")
        ends = [stream.end_fields for stream in streams if _has_ended(stream)]
        codes = [end["error"]["code"] for end in ends if end]
        assert codes
        assert set(codes) == {"RATE_LIMITED"}
        assert len(streams) - len(codes) <= 16 + 2
        for stream in streams:
            stream.close()
    with listener() as (_, other):
        assert server.client.open("port", port=other).opened() == {}


def test_a_connect_without_an_answer_ends(tmp_path: Path) -> None:
    faster = "from guest.streams import ports; ports._CONNECT_S = 0.2"
    with listener(backlog=0) as (_, port), running_stream_server(tmp_path, faster) as server:
        # The kernel answers the first one or two, although the program accepts none.
        for _ in range(3):
            last = server.client.open("port", port=port)
        with pytest.raises(StreamError) as caught:
            last.opened()
        assert caught.value.code == "NETWORK_ERROR"


def _has_ended(stream: ClientStream) -> bool:
    while any(frame.stream == stream.number for frame in stream.client.frames):
        stream.step()
    return stream.end_fields is not None
