"""A stream server as a child process over a socket pair, and the client's side of its channel, driven frame by frame."""

import contextlib
import json
import secrets
import select
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.guest.guest_harness import DEADLINE_S, GUEST_PARENT, PYTHON
from toolcrew.contract.stream_protocol import SERVER_RESTART, FrameKind, StreamDecoder, StreamFrame

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    "from guest.streams import entry; from guest.paths import GuestPaths;"
    "exec(sys.argv[2]);"
    "paths = [path.encode() for path in sys.argv[3:6]];"
    "entry.serve_streams(0, 0, GuestPaths(tuple(paths[:-1]), paths[-1]))"
)


class StreamError(Exception):
    """The server has answered with an error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(error["message"])
        self.code = error["code"]


class StreamClient:
    """The client's side of a channel. It checks that the server keeps to positions and credits."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.decoder = StreamDecoder()
        self.last_number = 0
        self.epochs = 0
        self.frames: list[StreamFrame] = []
        """Frames that arrived and were not taken."""

    def send_raw(self, data: bytes) -> None:
        self.channel.sendall(data)

    def send(self, kind: FrameKind, stream: int = 0, offset: int = 0, payload: bytes = b"", flags: int = 0) -> None:
        self.send_raw(StreamFrame(kind, stream, offset, payload, flags).encode())

    def receive(self, deadline_s: float = DEADLINE_S) -> bool:
        """Read what has arrived. Return False if nothing arrives. Fails the test at the end of the channel."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        if not poller.poll(deadline_s * 1000):
            return False
        data = self.channel.recv(1 << 18)
        assert data, "the channel is closed"
        self.frames += self.decoder.feed(data)
        return True

    def take(self, kind: FrameKind, stream: int | None = None) -> StreamFrame:
        """Return the next frame of this kind and stream. Other frames stay."""
        while True:
            for frame in self.frames:
                if frame.kind is kind and stream in (None, frame.stream):
                    self.frames.remove(frame)
                    return frame
            assert self.receive(), f"no {kind.name} arrives; there are {self.frames[:5]}"

    def begin_epoch(self) -> None:
        """Begin an epoch and drop everything before."""
        self.epochs += 1
        payload = self.epochs.to_bytes(4, "big") + secrets.token_bytes(16)
        self.send(FrameKind.EPOCH, payload=payload)
        while not any(frame.payload == payload for frame in self.frames):
            assert self.receive(), "the server does not answer"
        while self.frames.pop(0).payload != payload:
            pass
        self.last_number = 0

    def await_restart(self) -> None:
        """Wait until the server says that it has no streams."""
        assert self.take(FrameKind.EPOCH).payload == SERVER_RESTART

    def next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def ask(self, op: str, **fields: Any) -> int:
        number = self.next_number()
        self.send(FrameKind.CALL, number, payload=json.dumps({"op": op, **fields}).encode())
        return number

    def finish(self, number: int) -> dict[str, Any]:
        return _parse(self.take(FrameKind.REPLY, number))

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request. Raises StreamError."""
        return self.finish(self.ask(op, **fields))

    def open(self, what: str, *, window: int = 65_536, **fields: Any) -> "ClientStream":
        """Open a stream and grant a window. Raises StreamError."""
        number = self.next_number()
        self.send(FrameKind.OPEN, number, payload=json.dumps({"what": what, **fields}).encode())
        stream = ClientStream(self, number)
        if window:
            stream.grant(window)
        return stream


class ClientStream:
    """One open stream."""

    def __init__(self, client: StreamClient, number: int) -> None:
        self.client = client
        self.number = number
        self.granted = 0
        self.received = 0
        self.sent = 0
        self.send_limit = 0
        self.pieces: list[tuple[bytes, int]] = []
        """The data that arrived, with flags."""
        self.opened_fields: dict[str, Any] | None = None
        self.end_fields: dict[str, Any] | None = None

    def grant(self, count: int) -> None:
        self.granted += count
        self.client.send(FrameKind.CREDIT, self.number, self.granted)

    def step(self) -> None:
        """Take the next frame of the stream."""
        while not any(frame.stream == self.number for frame in self.client.frames):
            assert self.client.receive(), "the server sends nothing more"
        frame = next(frame for frame in self.client.frames if frame.stream == self.number)
        self.client.frames.remove(frame)
        assert self.end_fields is None, "a frame after END"
        if frame.kind is FrameKind.OPENED:
            assert self.opened_fields is None
            self.opened_fields = json.loads(frame.payload)
        elif frame.kind is FrameKind.DATA:
            assert frame.offset == self.received
            self.received += len(frame.payload)
            assert self.received <= self.granted
            self.pieces.append((frame.payload, frame.flags))
        elif frame.kind is FrameKind.CREDIT:
            assert frame.offset >= self.send_limit
            self.send_limit = frame.offset
        else:
            assert frame.kind is FrameKind.END
            self.end_fields = json.loads(frame.payload)

    def opened(self) -> dict[str, Any]:
        """Return the fields of OPENED. Raises StreamError."""
        while self.opened_fields is None:
            if self.end_fields is not None:
                raise StreamError(self.end_fields["error"])
            self.step()
        return self.opened_fields

    def end(self, *, grants: bool = True) -> dict[str, Any]:
        """Read to the end. Return the fields of END. Raises StreamError."""
        while self.end_fields is None:
            self.step()
            if grants and self.granted - self.received < 32_768:
                self.grant(65_536)
        if "error" in self.end_fields:
            raise StreamError(self.end_fields["error"])
        return self.end_fields

    def read_until(self, text: bytes) -> bytes:
        """Read until the data contains the text."""
        while text not in self.data:
            assert self.end_fields is None, self.end_fields
            self.step()
            if self.granted - self.received < 32_768:
                self.grant(65_536)
        return self.data

    def read_bytes(self, count: int) -> bytes:
        """Read until `count` bytes have arrived."""
        while self.received < count:
            self.step()
            if self.granted - self.received < 32_768:
                self.grant(65_536)
        return self.data

    @property
    def data(self) -> bytes:
        return b"".join(piece for piece, _ in self.pieces)

    def data_of(self, flag: int) -> bytes:
        """Return the data of the pieces with this flag of standard error (0 or 1)."""
        return b"".join(piece for piece, flags in self.pieces if flags & 1 == flag)

    def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send data as the credit allows, until the stream ends."""
        while data or is_last:
            while self.send_limit <= self.sent and data and self.end_fields is None:
                self.step()
            if self.end_fields is not None:
                return
            piece, data = (
                data[: min(32_768, self.send_limit - self.sent)],
                data[min(32_768, self.send_limit - self.sent) :],
            )
            flags = 2 if is_last and not data else 0
            self.client.send(FrameKind.DATA, self.number, self.sent, piece, flags)
            self.sent += len(piece)
            if flags:
                return

    def close(self) -> None:
        self.client.send(FrameKind.CLOSE, self.number)


class RunningServer:
    """A running stream server."""

    def __init__(self, client: StreamClient, process: subprocess.Popen[bytes], base: Path) -> None:
        self.client = client
        self.process = process
        self.workspace = base / "workspace"
        self.tmp = base / "tmp"

    @property
    def memory_bytes(self) -> int:
        """Return the resident memory of the server that it shares with no file."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("RssAnon:")[2].split()[0]) * 1024

    def restart_client(self) -> StreamClient:
        """Return a new client of the same channel, as a new gateway is one."""
        client = StreamClient(self.client.channel)
        client.epochs = self.client.epochs
        self.client = client
        return client


@contextlib.contextmanager
def running_stream_server(base: Path, extra: str = "") -> Iterator[RunningServer]:
    """Start a stream server, whose client has begun an epoch. `extra`: code that runs before the server starts."""
    for name in ("workspace", "tmp", "output"):
        (base / name).mkdir(exist_ok=True)
    own, servers = socket.socketpair()
    paths = [str(base / name) for name in ("workspace", "tmp", "output")]
    process = subprocess.Popen(
        [PYTHON, "-I", "-S", "-c", _BOOT, str(GUEST_PARENT), extra, *paths], stdin=servers.fileno()
    )
    servers.close()
    try:
        client = StreamClient(own)
        client.begin_epoch()
        yield RunningServer(client, process, base)
    finally:
        own.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _parse(frame: StreamFrame) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(frame.payload)
    if "error" in fields:
        raise StreamError(fields["error"])
    return fields
