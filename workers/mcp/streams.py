"""The body of an answer over HTTP, read as it comes until the one message in it that was asked for: JSON, or a stream
of events.
"""

from workers.mcp.messages import Reply, broken, parse_json, parse_reply

MAX_EVENTS = 10_000
"""Of one answer: progress and logs beside it."""


class ReplyReader:
    """Finds the reply to request `number`. `take` is given the pieces, `finish` is called at the body's end. Both raise
    ToolFailure(HTTP_ERROR).
    """

    def __init__(self, server: str, number: int, *, is_stream: bool) -> None:
        self._server = server
        self._number = number
        self._is_stream = is_stream
        self._held = bytearray()
        self._data: list[bytes] = []
        self._events = 0
        self.reply: Reply | None = None

    def take(self, piece: bytes) -> bool:
        """True once the reply is there."""
        if not self._is_stream:
            self._held += piece
            return False
        # Of a long line every piece is searched once.
        if b"\n" not in piece:
            self._held += piece
            return False
        *lines, rest = (bytes(self._held) + piece).split(b"\n")
        self._held = bytearray(rest)
        for line in lines:
            self._take_line(line.removesuffix(b"\r"))
            if self.reply is not None:
                return True
        return False

    def finish(self) -> Reply:
        """The reply."""
        if not self._is_stream:
            self.reply = parse_reply(parse_json(bytes(self._held), self._server), self._number)
        elif self.reply is None:
            self._take_line(bytes(self._held))
            self._take_line(b"")
        if self.reply is None:
            raise broken(self._server, "its answer is none to what was asked")
        return self.reply

    def _take_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            self._end_event()

    def _end_event(self) -> None:
        text, self._data = b"\n".join(self._data), []
        self._events += 1
        if self._events > MAX_EVENTS:
            raise broken(self._server, f"more than {MAX_EVENTS} events came before its answer")
        if text.strip():
            self.reply = parse_reply(parse_json(text, self._server), self._number)
