"""Sends a command's output to its caller while the command runs."""

import codecs

from toolcrew.workers.tools.base import ToolEnvironment
from toolcrew.workers.tools.text import fold

LIVE_BYTES = 1024 * 1024
"""Bytes of output that are sent before a call ends. The result contains the rest."""
_SHOWN_AS = {"live": "stdout", "live_stderr": "stderr"}


class ShownOutput:
    """Receives the streams of a request. Sends the live streams to the caller and collects the others."""

    def __init__(self, environment: ToolEnvironment) -> None:
        self._environment = environment
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in _SHOWN_AS}
        self._collected: dict[str, bytearray] = {}

    def take(self, stream: str, data: bytes) -> None:
        if stream not in _SHOWN_AS:
            self._collected.setdefault(stream, bytearray()).extend(data)
            return
        text = self._decoders[stream].decode(data).replace("\0", "\ufffd")
        if text:
            self._environment.show(_SHOWN_AS[stream], fold(text) if "\r" not in text else text)

    @property
    def streams(self) -> dict[str, bytes]:
        return {name: bytes(data) for name, data in self._collected.items()}
