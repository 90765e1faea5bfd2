"""File operations of streams. Each runs in a child process of the stream server.

A file operation may wait for a slow disk, walk a large folder, or need the rights of another user. In a child, nothing
of this delays the server's other streams, and the rights end with the process. A fork takes about 1 ms. The pipes to
and from the child hold a bounded number of bytes, so a child is as fast as its client.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import struct

from guest.failures import (
    CANCELLED,
    FILE_TOO_LARGE,
    INTERNAL,
    NOT_A_REGULAR_FILE,
    PATH_NOT_ALLOWED,
    RATE_LIMITED,
    RequestFailure,
    describe_os_error,
)
from guest.kernel import close_descriptors_except
from guest.streams.client_bytes import ClientBytes
from guest.streams.frames import MAX_DATA_BYTES, MAX_JSON_BYTES
from guest.streams.handlers import StreamHandler
from guest.users import become

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import NoReturn, Protocol

    from guest.streams.handlers import Poller
    from guest.users import User

    class Client(Protocol):
        """The client of an operation: a StreamContext, or the client of one request."""

        @property
        def room(self) -> int: ...

        def opened(self, fields: Mapping[str, object]) -> None: ...

        def send(self, data: bytes) -> None: ...

        def grant(self, count: int) -> None: ...

        def end(self, fields: Mapping[str, object]) -> None: ...

        def fail(self, failure: RequestFailure) -> None: ...

    Operation = Callable[["ChildPipes"], Mapping[str, object]]

_RECORD = struct.Struct(">BI")
_OPENED, _DATA, _END, _FAILED, _LAST = range(5)
_READ_BYTES = 65_536
_PUBLIC_CODES = {NOT_A_REGULAR_FILE: PATH_NOT_ALLOWED}
"""Codes that only the host's side of calls knows -> codes that clients know."""


class ChildPipes:
    """The child's ends of the pipes. All functions wait for the server. Raises BrokenPipeError when it has left."""

    def __init__(self, output: int, incoming: int) -> None:
        self.output = output
        self._incoming = incoming

    @property
    def descriptors(self) -> tuple[int, int]:
        """Return the descriptors of both ends."""
        return self.output, self._incoming

    def send_opened(self, fields: Mapping[str, object]) -> None:
        """Open the stream. Raises RequestFailure when the fields are too large for a frame."""
        self._write(_OPENED, _encode(fields))

    def send(self, data: bytes) -> None:
        """Send bytes of the stream."""
        for at in range(0, len(data), MAX_DATA_BYTES):
            self._write(_DATA, data[at : at + MAX_DATA_BYTES])

    def end(self, fields: Mapping[str, object]) -> None:
        """End the stream with its result. Raises RequestFailure when the fields are too large for a frame."""
        self._write(_END, _encode(fields))

    def fail(self, failure: RequestFailure) -> None:
        """End the stream with an error."""
        code = _PUBLIC_CODES.get(failure.code, failure.code)
        self._write(_FAILED, json.dumps([code, failure.message]).encode())

    def receive(self) -> Iterator[bytes]:
        """Yield the client's bytes. Raises RequestFailure(CANCELLED) when the client leaves before its last byte."""
        while True:
            kind, size = _RECORD.unpack(self._read(_RECORD.size))
            yield self._read(size)
            if kind == _LAST:
                return

    def _write(self, kind: int, payload: bytes) -> None:
        view = memoryview(_RECORD.pack(kind, len(payload)) + payload)
        while view:
            view = view[os.write(self.output, view) :]

    def _read(self, size: int) -> bytes:
        blocks: list[bytes] = []
        while size:
            block = os.read(self._incoming, size)
            if not block:
                raise RequestFailure(CANCELLED, "the client has left")
            blocks.append(block)
            size -= len(block)
        return b"".join(blocks)


def _encode(fields: Mapping[str, object]) -> bytes:
    data = json.dumps(fields).encode()
    if len(data) > MAX_JSON_BYTES:
        raise RequestFailure(FILE_TOO_LARGE, "the description of the file is too large: shorten its path or metadata")
    return data


class OperationStream(StreamHandler):
    """Runs an operation in a child, and relays between the child and the client.

    When the client leaves, the pipes are closed. The child learns this at its next byte, cleans up and ends.
    `takes_data`: the client sends bytes.
    """

    def __init__(
        self, client: Client, operation: Operation, user: User | None = None, takes_data: bool = False
    ) -> None:
        """Start the child. Raises RequestFailure."""
        self._client = client
        self._takes_data = takes_data
        self.output, self._input = _start_child(operation, user)
        self._records = bytearray()
        self._piece_left = 0
        self._incoming = ClientBytes(client.grant)
        self.is_done = False

    def register(self, poller: Poller) -> None:
        """Wait for the child: its output while the client has room, and its input while bytes wait for it."""
        if not self._piece_left or self._client.room > 0:
            poller.register(self.output, select.POLLIN)
        if self._incoming:
            poller.register(self._input, select.POLLOUT)

    def serve(self, fd: int, events: int) -> None:
        """Relay what the child has written, or the bytes that wait for it."""
        if self.is_done:
            return
        if fd == self._input:
            self._feed_child()
            return
        data = os.read(self.output, _READ_BYTES)
        if not data:
            self._finish()
            self._client.fail(RequestFailure(INTERNAL, "the process of this file operation was killed; try again"))
            return
        self._records += data
        self.resume()

    def resume(self) -> None:
        """Relay what was read from the child, as far as the client has room."""
        while not self.is_done and (self._relay_piece() if self._piece_left else self._relay_record()):
            pass

    def take(self, data: bytes, is_last: bool) -> None:
        """Pass bytes of the client to the child."""
        if not self._takes_data:
            super().take(data, is_last)
        self._incoming.add(data, _RECORD.pack(_LAST if is_last else _DATA, len(data)))
        self._feed_child()

    def leave(self) -> None:
        """Leave the child, which then ends."""
        if not self.is_done:
            self._finish()

    def _relay_piece(self) -> bool:
        """Send bytes of the current piece. Return whether to continue."""
        count = min(self._piece_left, len(self._records), self._client.room)
        self._client.send(bytes(self._records[:count]))
        del self._records[:count]
        self._piece_left -= count
        return count > 0

    def _relay_record(self) -> bool:
        """Process the next record, if it is complete. Return whether to continue."""
        if len(self._records) < _RECORD.size:
            return False
        kind, size = _RECORD.unpack_from(self._records)
        if kind == _DATA:
            self._piece_left = size
        elif len(self._records) < _RECORD.size + size:
            return False
        else:
            self._process(kind, json.loads(self._records[_RECORD.size : _RECORD.size + size]))
        del self._records[: _RECORD.size + (0 if kind == _DATA else size)]
        return True

    def _process(self, kind: int, fields: dict[str, object]) -> None:
        if kind == _OPENED:
            self._client.opened(fields)
            if self._takes_data:
                self._incoming.grant()
            return
        self._finish()
        if kind == _END:
            self._client.end(fields)
        else:
            self._client.fail(RequestFailure(*map(str, fields)))

    def _feed_child(self) -> None:
        try:
            self._incoming.write(self._write_input)
        except BrokenPipeError:
            # The child has ended. Its output says why.
            self._incoming.clear()

    def _write_input(self, data: bytearray) -> int:
        return os.write(self._input, data)

    def _finish(self) -> None:
        self.is_done = True
        os.close(self.output)
        os.close(self._input)


def _start_child(operation: Operation, user: User | None) -> tuple[int, int]:
    """Return the server's ends of the pipes from and to a new child. Raises RequestFailure."""
    opened: list[int] = []
    try:
        opened += os.pipe()
        opened += os.pipe()
        output, child_output, child_input, to_child = opened
        os.set_blocking(to_child, False)
        if os.fork() == 0:
            _run_child(ChildPipes(child_output, child_input), operation, user)
    except OSError as error:
        for fd in opened:
            os.close(fd)
        sentence = f"the sandbox cannot start a process for this file operation ({error.strerror}); end some processes"
        raise RequestFailure(RATE_LIMITED, sentence) from None
    os.close(child_output)
    os.close(child_input)
    return output, to_child


def _run_child(pipes: ChildPipes, operation: Operation, user: User | None) -> NoReturn:
    """Be the child. No code of the server runs in it after the operation."""
    try:
        _leave_server(pipes)
        _report(pipes, operation, user)
    finally:
        os._exit(0)


def _leave_server(pipes: ChildPipes) -> None:
    """Release what belongs to the server: its channel, its terminals, its signals."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1):
        os.dup2(null, fd, inheritable=False)
    close_descriptors_except(*pipes.descriptors)
    # A collection would touch, and so copy, the memory that the child shares with the server.
    gc.disable()


def _report(pipes: ChildPipes, operation: Operation, user: User | None) -> None:
    """Run the operation as the user, and send its result or its error."""
    try:
        if user is not None:
            become(user)
        pipes.end(operation(pipes))
    except BrokenPipeError:
        # The client has left.
        return
    except RequestFailure as failure:
        pipes.fail(failure)
    except OSError as error:
        pipes.fail(describe_os_error(error, "the file operation"))
    # The outermost handler of this process: even after a bug, the client must get an answer.
    except Exception as error:  # noqa: BLE001
        pipes.fail(RequestFailure(INTERNAL, f"{type(error).__name__} in a file operation"))
