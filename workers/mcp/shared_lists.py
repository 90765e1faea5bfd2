"""The tools of MCP servers as one process of a worker found them, for those that run its calls: plain data in memory
that they share.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from contract.specs import ToolSpec
from workers.mcp.imports import ImportedTool

_VERSION_BYTES = 8


@dataclass(frozen=True)
class Told:
    """What is known of one server."""

    stands_alone: bool | None
    tools: tuple[ImportedTool, ...]


class SharedLists:
    """Made before the processes that read it are forked; one process writes. It has no name, and vanishes with the last
    of them.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("mcp-lists", os.MFD_CLOEXEC)
        self._version = 0

    def write(self, servers: Mapping[str, Told]) -> None:
        """All of them, in the place of what was told before."""
        self._version += 1
        told = {
            name: {
                "stands_alone": server.stands_alone,
                "tools": [[tool.name, tool.spec.model_dump_json()] for tool in server.tools],
            }
            for name, server in servers.items()
        }
        data = self._version.to_bytes(_VERSION_BYTES) + json.dumps(told).encode()
        with self._locked(fcntl.LOCK_EX):
            os.ftruncate(self._fd, len(data))
            view, at = memoryview(data), 0
            while at < len(data):
                at += os.pwrite(self._fd, view[at:], at)

    def read_news(self) -> dict[str, Told]:
        """What was written since this process read it last, or was forked; else nothing."""
        if int.from_bytes(os.pread(self._fd, _VERSION_BYTES, 0)) == self._version:
            return {}
        with self._locked(fcntl.LOCK_SH):
            data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        self._version = int.from_bytes(data[:_VERSION_BYTES])
        return {
            name: Told(
                server["stands_alone"],
                tuple(ImportedTool(theirs, ToolSpec.model_validate_json(spec)) for theirs, spec in server["tools"]),
            )
            for name, server in json.loads(data[_VERSION_BYTES:]).items()
        }

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        # Of a process, where flock would be of the descriptor, which all of them share.
        fcntl.lockf(self._fd, kind)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
