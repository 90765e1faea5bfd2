"""The streams and requests about files: their fields, and the children that serve them."""

from __future__ import annotations

from guest.fields import optional, read_fields, read_flag, read_text, whole
from guest.streams import file_requests, file_streams, listings, watches
from guest.streams.handlers import StreamService
from guest.streams.metadata import parse_metadata
from guest.streams.operations import OperationStream
from guest.users import choose_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from guest.fields import Reader
    from guest.paths import GuestPaths
    from guest.streams.handlers import CallFunction, CallReply, Opener, Poller, StreamContext
    from guest.streams.operations import ChildPipes

    Request = Callable[[dict[str, Any], GuestPaths], dict[str, object]]
    Stream = Callable[[dict[str, Any], GuestPaths, ChildPipes], dict[str, object]]

_MAX_POSITION = (1 << 63) - 1
_PATH: dict[str, Reader] = {"path": read_text, "user": optional(read_text)}
_MODE = optional(whole(0, 0o7777))
_REQUESTS: dict[str, tuple[Request, dict[str, Reader]]] = {
    "stat": (file_requests.stat_entry, _PATH),
    "make_folder": (file_requests.make_folder, {**_PATH, "mode": _MODE}),
    "move": (file_requests.move, {"source": read_text, "target": read_text, "user": _PATH["user"]}),
    "remove": (file_requests.remove, _PATH),
    "set_metadata": (file_requests.set_metadata, {**_PATH, "metadata": parse_metadata}),
}
_STREAMS: dict[str, tuple[Stream, dict[str, Reader]]] = {
    "read": (
        file_streams.read_file,
        {**_PATH, "offset": whole(0, _MAX_POSITION, 0), "bytes": optional(whole(0, _MAX_POSITION))},
    ),
    "write": (
        file_streams.write_file,
        {**_PATH, "offset": optional(whole(0, _MAX_POSITION)), "mode": _MODE, "metadata": optional(parse_metadata)},
    ),
    "list": (listings.list_folder, {**_PATH, "depth": whole(1, listings.MAX_DEPTH, 1)}),
    "watch": (watches.send_events, {**_PATH, "recursive": read_flag}),
}


class FileService(StreamService):
    """Serves the streams and requests about files. Their children can use all files that the sandbox's user may use."""

    def __init__(self, paths: GuestPaths) -> None:
        super().__init__()
        self._paths = paths.with_all_files()
        self._requests: dict[int, OperationStream] = {}
        self.openers = {what: self._build_opener(*stream) for what, stream in _STREAMS.items()}
        self.calls = {op: self._build_call(*request) for op, request in _REQUESTS.items()}

    def register(self, poller: Poller) -> None:
        """Wait for the children of the requests."""
        for request in self._requests.values():
            request.register(poller)

    def serve(self, fd: int, events: int) -> None:
        """Pass the answer of a request on."""
        request = self._requests[fd]
        request.serve(fd, events)
        if request.is_done:
            del self._requests[fd]

    def leave(self) -> None:
        """Leave the children."""
        for request in self._requests.values():
            request.leave()
        self._requests.clear()

    def _build_opener(self, stream: Stream, readers: dict[str, Reader]) -> Opener:
        def open_stream(context: StreamContext, header: dict[str, Any]) -> OperationStream:
            fields = read_fields(header, "what", readers)
            user = choose_user(fields["user"])
            return OperationStream(
                context, lambda pipes: stream(fields, self._paths, pipes), user, takes_data=header["what"] == "write"
            )

        return open_stream

    def _build_call(self, request: Request, readers: dict[str, Reader]) -> CallFunction:
        def call(header: dict[str, Any], reply: CallReply) -> None:
            fields = read_fields(header, "op", readers)
            user = choose_user(fields["user"])
            stream = OperationStream(_ReplyClient(reply), lambda _: request(fields, self._paths), user)
            self._requests[stream.output] = stream

        return call


class _ReplyClient:
    """The client of a request: it gets one answer, and no stream."""

    room = 0

    def __init__(self, reply: CallReply) -> None:
        self.end = reply.send
        self.fail = reply.fail

    def opened(self, fields: Mapping[str, object]) -> None:
        """Do nothing."""

    def send(self, data: bytes) -> None:
        """Do nothing."""

    def grant(self, count: int) -> None:
        """Do nothing."""
