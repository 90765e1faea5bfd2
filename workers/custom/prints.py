"""What a tool prints goes to the worker's log, line by line: it is for its author, not for the model."""

import io

import structlog

log = structlog.get_logger(__name__)

MAX_LINE_CHARS = 2000
MAX_CHARS = 64 * 1024
"""Of one call; what is more is counted."""


class PrintLog(io.TextIOBase):
    """A text file for one call's prints. `close` logs what stands on a line without end, and how much was left out."""

    def __init__(self, tool: str, call_id: str) -> None:
        self._log = log.bind(tool=tool, call=call_id)
        self._line = ""
        self._room = MAX_CHARS
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.closed:
            # A thread that outlives its call: there is no call any more that it could print for.
            return len(text)
        kept = text[: self._room]
        self._room -= len(kept)
        self._dropped += len(text) - len(kept)
        *lines, self._line = (self._line + kept).split("\n")
        while len(self._line) > MAX_LINE_CHARS:
            lines.append(self._line[:MAX_LINE_CHARS])
            self._line = self._line[MAX_LINE_CHARS:]
        for line in lines:
            self._log.info("tool_printed", text=line[:MAX_LINE_CHARS])
        return len(text)

    def close(self) -> None:
        if not self.closed:
            if self._line:
                self._log.info("tool_printed", text=self._line)
            if self._dropped:
                self._log.warning("tool_printed_too_much", dropped_chars=self._dropped)
        super().close()
