"""The stream server's side of the protocol: epochs, positions, credits, and what it refuses."""

import json
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.guest.stream_client import RunningServer, StreamError, running_stream_server
from toolcrew.contract.stream_protocol import EPOCH_HEADER, FrameKind, StreamFrame

_SERVICE = """
import time
from guest.failures import RequestFailure
from guest.streams import handlers
class Echo(handlers.StreamHandler):
    def __init__(self, context, fields):
        self.context, self.pending, self.is_last = context, b"", False
        context.opened({"name": fields.get("name")})
        context.grant(fields.get("window", 65536))
    def take(self, data, is_last):
        if data == b"fail":
            raise RequestFailure("TIMEOUT", "as asked")
        if data == b"os":
            raise FileNotFoundError(2, "x")
        self.pending += data
        self.is_last = is_last
        self.resume()
    def resume(self):
        while self.pending and self.context.room:
            size = self.context.room
            self.context.send(self.pending[:size])
            self.context.grant(len(self.pending[:size]))
            self.pending = self.pending[size:]
        if self.is_last and not self.pending:
            self.context.end({"ended": True})
class Flood(handlers.StreamHandler):
    def __init__(self, context, fields):
        self.context = context
        context.opened({})
    def resume(self):
        while self.context.room:
            self.context.send(b"f" * self.context.room)
class Service(handlers.StreamService):
    def __init__(self):
        super().__init__()
        self.openers = {"echo": Echo, "flood": Flood}
        self.calls = {"add": self.add, "later": self.later, "large": lambda _, reply: reply.send({"x": "y" * 70_000})}
    def add(self, fields, reply):
        reply.send({"sum": fields["a"] + fields["b"]})
    def later(self, fields, reply):
        self.reply, self.wake_at = reply, time.monotonic() + 0.02
    def wake(self):
        self.wake_at = None
        self.reply.send({"late": not self.reply.is_closed})
build = entry.build_services
entry.build_services = lambda *arguments: [*build(*arguments), Service()]
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_stream_server(tmp_path, _SERVICE) as running:
        yield running


def test_a_ping_is_returned(server: RunningServer) -> None:
    server.client.send(FrameKind.PING, payload=b"\0 bytes")
    assert server.client.take(FrameKind.PONG).payload == b"\0 bytes"


def test_requests_are_answered_also_later_and_out_of_order(server: RunningServer) -> None:
    late = server.client.ask("later")
    assert server.client.call("add", a=1, b=2) == {"sum": 3}
    assert server.client.finish(late) == {"late": True}


@pytest.mark.parametrize(("op", "code"), [("none", "INVALID_ARGUMENTS"), ("large", "INTERNAL")])
def test_a_request_that_fails_is_answered(server: RunningServer, op: str, code: str) -> None:
    with pytest.raises(StreamError) as failure:
        server.client.call(op)
    assert failure.value.code == code


def test_a_stream_returns_every_byte_and_its_end(server: RunningServer) -> None:
    data = (b"any bytes, also " + EPOCH_HEADER) * 20_000
    stream = server.client.open("echo", name="n")
    assert stream.opened() == {"name": "n"}
    for at in range(0, len(data), 20_000):
        stream.write(data[at : at + 20_000], is_last=at + 20_000 >= len(data))
        stream.read_bytes(min(at + 20_000, len(data)))
    assert stream.end() == {"ended": True}
    assert stream.data == data


def test_one_byte_credits_return_every_byte(server: RunningServer) -> None:
    stream = server.client.open("echo", window=0)
    stream.opened()
    stream.write(b"abcdef", is_last=True)
    while stream.end_fields is None:
        stream.grant(1)
        stream.step()
        if stream.received == 6:
            break
    assert stream.end(grants=False) == {"ended": True}
    assert stream.data == b"abcdef"


@pytest.mark.parametrize(("data", "code"), [(b"fail", "TIMEOUT"), (b"os", "FILE_NOT_FOUND")])
def test_an_error_of_a_handler_ends_its_stream_alone(server: RunningServer, data: bytes, code: str) -> None:
    other, stream = server.client.open("echo"), server.client.open("echo")
    stream.write(data)
    with pytest.raises(StreamError) as failure:
        stream.end()
    assert failure.value.code == code
    other.write(b"x", is_last=True)
    assert other.end() == {"ended": True}


def test_frames_for_an_ended_stream_are_dropped(server: RunningServer) -> None:
    stream = server.client.open("echo")
    stream.write(b"", is_last=True)
    stream.end()
    server.client.send(FrameKind.DATA, stream.number, 500, b"x")
    server.client.send(FrameKind.CREDIT, stream.number, 5)
    stream.close()
    assert server.client.call("add", a=1, b=1) == {"sum": 2}


def test_the_65th_stream_is_refused(server: RunningServer) -> None:
    streams = [server.client.open("echo", window=0) for _ in range(65)]
    with pytest.raises(StreamError) as failure:
        streams[-1].opened()
    assert failure.value.code == "INVALID_ARGUMENTS"
    streams[0].close()
    assert server.client.open("echo").opened() == {"name": None}


def frame(kind: FrameKind, stream: int = 0, offset: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    return StreamFrame(kind, stream, offset, payload, flags).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 20,
        frame(FrameKind.OPEN, 1, payload=b'{"what": "echo"}'),
        frame(FrameKind.OPEN, 3, payload=b"[]"),
        frame(FrameKind.OPEN, 3, payload=b"[" * 60_000),
        frame(FrameKind.OPEN, 3, payload=b'{"what": 1, "what": 2}'),
        frame(FrameKind.CALL, 1, payload=b"{}"),
        frame(FrameKind.DATA, 1, 1, b"x"),
        frame(FrameKind.DATA, 1, 0, b"x" * 32_768) * 3,
        frame(FrameKind.DATA, 1, 0, b"x", 2) + frame(FrameKind.DATA, 1, 1, b"x"),
        frame(FrameKind.DATA, 9, 0, b"x"),
        frame(FrameKind.CLOSE, 9),
        frame(FrameKind.CREDIT, 0, 5),
        frame(FrameKind.CREDIT, 1, 1 << 63),
        frame(FrameKind.OPENED, 1, payload=b"{}"),
        frame(FrameKind.END, 1, payload=b"{}"),
        frame(FrameKind.REPLY, 1, payload=b"{}"),
    ],
)
def test_a_violation_ends_the_epoch_and_a_new_one_begins(server: RunningServer, data: bytes) -> None:
    client = server.client
    client.frames.clear()
    stream = client.open("echo", window=0)
    stream.opened()
    client.take(FrameKind.CREDIT)
    client.send_raw(data)
    client.send(FrameKind.PING, payload=b"dropped")
    client.await_restart()
    client.begin_epoch()
    client.frames.clear()
    assert client.call("add", a=2, b=2) == {"sum": 4}
    assert not any(frame.payload == b"dropped" for frame in client.frames)


def test_a_new_epoch_in_the_middle_of_a_frame_forgets_the_streams(server: RunningServer) -> None:
    for round_number in range(200):
        client = server.restart_client()
        client.send_raw(frame(FrameKind.DATA, 1, 0, b"y" * 100)[: round_number % 121])
        client.begin_epoch()
        stream = client.open("echo", name=round_number)
        assert stream.opened() == {"name": round_number}
        stream.write(b"once")
        assert stream.read_until(b"once") == b"once"


def test_keys_go_before_bulk(server: RunningServer) -> None:
    client = server.client
    floods = [client.open("flood", window=8 << 20) for _ in range(4)]
    keys = client.open("echo")
    keys.opened()
    for key in range(20):
        before = sum(frame.kind is FrameKind.DATA and frame.stream != keys.number for frame in client.frames)
        keys.write(b"%c" % (65 + key))
        keys.read_until(b"%c" % (65 + key))
        after = sum(frame.kind is FrameKind.DATA and frame.stream != keys.number for frame in client.frames)
        # The socket's buffer and one read hold some pieces; a turn of all floods for each key would be more.
        assert after - before < 40
    assert floods[0].opened() == {}


def test_a_client_that_does_not_read_makes_the_server_hold_little(server: RunningServer) -> None:
    client = server.client
    before = server.memory_bytes
    client.channel.setblocking(False)
    sent, requests = 0, frame(FrameKind.PING, payload=b"p" * 64) * 500
    poller = select.poll()
    poller.register(client.channel, select.POLLOUT)
    while poller.poll(500) and sent < 4 << 20:
        sent += client.channel.send(requests)
    assert sent < 4 << 20
    assert server.memory_bytes - before < 4 << 20


def test_the_server_ends_with_its_channel(server: RunningServer) -> None:
    server.client.channel.close()
    assert server.process.wait(20) == 0


def test_json_of_the_server_is_ascii_without_blanks(server: RunningServer) -> None:
    number = server.client.ask("add", a="ä", b="ö")
    reply = server.client.take(FrameKind.REPLY, number).payload
    assert reply.isascii()
    assert json.loads(reply) == {"sum": "äö"}
