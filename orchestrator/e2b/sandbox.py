"""One sandbox as E2B's clients see it: its streams, and the users and homes of its image."""

import re
import time
from collections.abc import Mapping
from typing import Any

from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.stream_protocol import BULK_WINDOW_BYTES
from toolcrew.orchestrator.e2b.connect_rpc import ConnectError
from toolcrew.orchestrator.streams.client import Streams, StreamTarget
from toolcrew.orchestrator.streams.stream import Stream

DEFAULT_USER = "user"
ROOT = "root"
_MAX_PASSWD_BYTES = 256 * 1024
_FRESH_S = 5.0
_USER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class EnvdSandbox:
    """The streams of one sandbox. `default_user`: the user of requests that name none."""

    def __init__(self, streams: Streams, target: StreamTarget, default_user: str | None = None) -> None:
        self._streams = streams
        self._target = target
        self._default_user = default_user
        self._homes: dict[str, str] = {}
        self._read_at = float("-inf")

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Make a request of docs/stream-protocol.md. Raises ToolFailure, OperatorError."""
        return await self._streams.call(self._target, {"op": op, **fields})

    async def open(self, what: str, **fields: Any) -> Stream:
        """Open a stream of docs/stream-protocol.md. Raises ToolFailure, OperatorError."""
        opening: Mapping[str, Any] = {"what": what, **fields}
        if what in ("process", "attach"):
            return await self._streams.open(self._target, opening)
        return await self._streams.open(self._target, opening, window=BULK_WINDOW_BYTES)

    async def find_user(self, name: str) -> str | None:
        """Return the user of a request for the stream server: None is the user of the sandbox. Raises ConnectError."""
        homes = await self._read_homes()
        if not name:
            name = self._default_user or (DEFAULT_USER if DEFAULT_USER in homes else "")
        if name and (not _USER_NAME.fullmatch(name) or name not in homes):
            raise ConnectError("unauthenticated", f"the sandbox has no user '{name[:64]}': use another user")
        return name or None

    async def resolve(self, path: str, user: str | None) -> str:
        """Return an absolute path. A relative path, and `~`, begin at the home of the user. Raises ConnectError."""
        if "\0" in path or len(path) > 4096:
            raise ConnectError("invalid_argument", "the path has a zero byte, or more than 4096 characters")
        home = (await self._read_homes()).get(user or "", "/workspace")
        if path in ("", "~") or path.startswith("~/"):
            return home + path[1:]
        return path if path.startswith("/") else f"{home}/{path}"

    async def _read_homes(self) -> dict[str, str]:
        """Return the homes of users, from the sandbox. Its programs may have changed them: they concern only it."""
        if time.monotonic() - self._read_at < _FRESH_S:
            return self._homes
        homes = {}
        for line in (await self._read_passwd()).splitlines():
            fields = line.split(":")
            if len(fields) == 7 and fields[5].startswith("/"):
                homes[fields[0]] = fields[5]
        self._homes, self._read_at = homes, time.monotonic()
        return homes

    async def _read_passwd(self) -> str:
        data = bytearray()
        try:
            async with await self.open("read", path="/etc/passwd", bytes=_MAX_PASSWD_BYTES) as stream:
                while (piece := await stream.read()) is not None:
                    data += piece.data
        except ToolFailure:
            return ""
        return data.decode(errors="replace")
