"""Tools of MCP servers in a worker's registry. Each server is listed at the start and then at regular intervals, and
the registry follows the changes.
"""

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from contract.errors import OperatorError, ToolFailure
from contract.specs import ToolSpec
from workers.mcp.imports import ImportedTool
from workers.tools.base import WorkerRegistry, WorkerTool

log = structlog.get_logger(__name__)

_VERSION_BYTES = 8
FIRST_AGAIN_S = 30.0
"""Pause after the first failure of a server, in seconds. Each further failure doubles the pause, up to the interval
of a server without failures.
"""


@dataclass(frozen=True)
class Told:
    """The known state of a server."""

    stands_alone: bool | None
    tools: tuple[ImportedTool, ...]


class SharedLists:
    """Tool lists in memory that processes share. Create the object before the fork. One process writes, the others
    read. The memory has no name, and the kernel frees it when the last process ends.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("mcp-lists", os.MFD_CLOEXEC)
        self._version = 0

    def write(self, servers: Mapping[str, Told]) -> None:
        """Replace the lists of all servers."""
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
        """Return the lists if another process wrote them since the last read or the fork; otherwise an empty dict."""
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
        # POSIX locks belong to a process. A flock would belong to the descriptor, which all processes share, and
        # exclude nothing.
        fcntl.lockf(self._fd, kind)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


class Source(Protocol):
    """A server with tools to offer. `stands_alone`: the server's revision; None before the first listing."""

    stands_alone: bool | None

    @property
    def name(self) -> str: ...

    def list_tools(self) -> list[Any]:
        """Return the unchecked list of tools within a bounded time. Raises ToolFailure and OperatorError."""
        ...

    def import_tools(self, listed: Iterable[Any]) -> tuple[ImportedTool, ...]:
        """Return the tools that can be offered. Omitted tools are logged."""
        ...

    def build(self, tool: ImportedTool) -> WorkerTool: ...


@dataclass
class _Asked:
    """A server and its schedule. `digest`: the hash of its last list; None before the first list. `pause_s`: the
    pause after the last failure.
    """

    source: Source
    due: float
    digest: bytes | None = None
    pause_s: float = 0.0
    tools: dict[str, ImportedTool] = field(default_factory=dict)


class ServerRegistry:
    """Registry of the MCP servers of a worker. Create and fill it before the pool's processes are forked. A thread of
    the creating process lists the servers. The other processes copy the results (`look`).

    `refresh_s`: the interval for a server without failures. `at_once`: the number of servers that are listed at the
    same time. `on_change`: called after tools were added, changed or removed.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        sources: Sequence[Source],
        refresh_s: float,
        at_once: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._asked = {source.name: _Asked(source, clock()) for source in sources}
        self._refresh_s = refresh_s
        self._at_once = at_once
        self._clock = clock
        self._owner = os.getpid()
        self._shared = SharedLists() if sources else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mcp-servers", daemon=True)
        self.again_s = FIRST_AGAIN_S
        """Seconds until the next try after an unexpected exception."""
        self.on_change: Callable[[], None] = lambda: None

    def ask_due(self) -> float:
        """List the servers that are due, `at_once` at a time. Returns the seconds until the next server is due."""
        due = [asked for asked in self._asked.values() if asked.due <= self._clock()]
        if due:
            with ThreadPoolExecutor(min(self._at_once, len(due))) as pool:
                listed = list(pool.map(self._ask, due))
            changes = [self._take(asked, tools) for asked, tools in zip(due, listed, strict=True) if tools is not None]
            if any(changes):
                self._share()
                self.on_change()
        return min((asked.due - self._clock() for asked in self._asked.values()), default=self._refresh_s)

    def start(self) -> None:
        """Start the thread. A process that is forked at the same time has the complete registry, and its lock is
        free.
        """
        if self._asked:
            self._registry.lock_during_fork()
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Returns at once and does not wait for a running request."""
        self._stop.set()

    def look(self) -> None:
        """Copy the current tools from the process that lists the servers. Call this in a process of the pool; it is
        cheap if nothing has changed.
        """
        if self._shared is None or os.getpid() == self._owner:
            return
        for name, told in self._shared.read_news().items():
            asked = self._asked[name]
            asked.source.stands_alone = told.stands_alone
            self._place(asked, told.tools)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(max(0.0, pause_s)):
            try:
                pause_s = self.ask_due()
            except Exception:  # the edge of the thread: a bug with one server must not end the refresh of all
                log.exception("mcp_refresh_failed", again_s=self.again_s)
                pause_s = self.again_s

    def _ask(self, asked: _Asked) -> tuple[ImportedTool, ...] | None:
        """Return the tools of a server; None if they are unchanged or the server failed."""
        source, started = asked.source, self._clock()
        try:
            listed = source.list_tools()
            digest = hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).digest()
            tools = source.import_tools(listed) if digest != asked.digest else None
        except (ToolFailure, OperatorError) as error:
            self._delay(asked)
            if asked.tools:
                log.warning("mcp_server_silent", server=source.name, error=str(error), again_s=asked.pause_s)
            else:
                log.error("mcp_server_without_tools", server=source.name, error=str(error), again_s=asked.pause_s)
            return None
        except Exception:  # the edge: a bug with one server must not hold up the tools of the others
            self._delay(asked)
            log.exception("mcp_server_failed", server=source.name, again_s=asked.pause_s)
            return None
        asked.pause_s, asked.due = 0.0, self._clock() + self._refresh_s
        if tools is None:
            return None
        asked.digest = digest
        took_s = round(self._clock() - started, 3)
        log.info("mcp_tools_found", server=source.name, tools=[tool.spec.name for tool in tools], took_s=took_s)
        return tools

    def _delay(self, asked: _Asked) -> None:
        """Schedule the next try after a longer pause than the last one."""
        asked.pause_s = min(max(FIRST_AGAIN_S, asked.pause_s * 2), self._refresh_s)
        asked.due = self._clock() + asked.pause_s

    def _take(self, asked: _Asked, tools: tuple[ImportedTool, ...]) -> bool:
        """Put the tools of a server into the registry. Returns whether the tools have changed."""
        try:
            return self._place(asked, self._free(asked, tools))
        except Exception:  # the edge: as above
            # Nothing was changed. Without a digest the next listing is processed again.
            asked.digest = None
            self._delay(asked)
            log.exception("mcp_server_failed", server=asked.source.name, again_s=asked.pause_s)
            return False

    def _free(self, asked: _Asked, tools: tuple[ImportedTool, ...]) -> list[ImportedTool]:
        """Return the tools whose names are not used by another tool."""
        free = []
        for tool in tools:
            if tool.spec.name in asked.tools or self._registry.get(tool.spec.name) is None:
                free.append(tool)
            else:
                log.error(
                    "mcp_tool_left_out", server=asked.source.name, name=tool.spec.name, why="another tool has its name"
                )
        return free

    def _place(self, asked: _Asked, tools: Iterable[ImportedTool]) -> bool:
        """Make exactly these tools of the server available in the registry. Returns whether anything changed."""
        after = {tool.spec.name: tool for tool in tools}
        gone = [name for name in asked.tools if name not in after]
        new = [asked.source.build(tool) for name, tool in after.items() if asked.tools.get(name) != tool]
        asked.tools = after
        for name in gone:
            self._registry.unregister(name)
        for built in new:
            self._registry.register(built)
        return bool(gone or new)

    def _share(self) -> None:
        if self._shared is not None:
            told = {
                name: Told(asked.source.stands_alone, tuple(asked.tools.values()))
                for name, asked in self._asked.items()
            }
            self._shared.write(told)
