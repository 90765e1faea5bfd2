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

from toolcrew.contract.errors import OperatorError, ToolFailure
from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.mcp.imports import ImportedTool
from toolcrew.workers.tools.base import WorkerRegistry, WorkerTool

log = structlog.get_logger(__name__)

_VERSION_BYTES = 8
FIRST_RETRY_S = 30.0
"""Pause after the first failure of a server, in seconds. Each further failure doubles the pause, up to the interval
of a server without failures.
"""


@dataclass(frozen=True)
class ServerState:
    """The last list of a server's tools, and whether the server speaks a revision without sessions
    (ToolSource.is_sessionless).
    """

    is_sessionless: bool | None
    tools: tuple[ImportedTool, ...]


class SharedLists:
    """Tool lists in memory that processes share. Create the object before the fork. One process writes, the others
    read. The memory has no name, and the kernel frees it when the last process ends.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("mcp-lists", os.MFD_CLOEXEC)
        self._version = 0

    def write(self, servers: Mapping[str, ServerState]) -> None:
        """Replace the lists of all servers."""
        self._version += 1
        states = {
            name: {
                "is_sessionless": server.is_sessionless,
                "tools": [[tool.name, tool.spec.model_dump_json()] for tool in server.tools],
            }
            for name, server in servers.items()
        }
        data = self._version.to_bytes(_VERSION_BYTES) + json.dumps(states).encode()
        with self._locked(fcntl.LOCK_EX):
            os.ftruncate(self._fd, len(data))
            view, at = memoryview(data), 0
            while at < len(data):
                at += os.pwrite(self._fd, view[at:], at)

    def read_changed(self) -> dict[str, ServerState]:
        """Return the lists if another process wrote them since the last read or the fork; otherwise an empty dict."""
        if int.from_bytes(os.pread(self._fd, _VERSION_BYTES, 0)) == self._version:
            return {}
        with self._locked(fcntl.LOCK_SH):
            data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        self._version = int.from_bytes(data[:_VERSION_BYTES])
        return {
            name: ServerState(
                server["is_sessionless"],
                tuple(
                    ImportedTool(tool_name, ToolSpec.model_validate_json(spec)) for tool_name, spec in server["tools"]
                ),
            )
            for name, server in json.loads(data[_VERSION_BYTES:]).items()
        }

    @contextmanager
    def _locked(self, lock_type: int) -> Iterator[None]:
        # POSIX locks belong to a process. A flock lock would belong to the file description, which all forked processes
        # share, so it would not exclude them.
        fcntl.lockf(self._fd, lock_type)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


class ToolSource(Protocol):
    """A server with tools to offer. `is_sessionless`: whether the server speaks a revision of the protocol without
    sessions; None before the first listing.
    """

    is_sessionless: bool | None

    @property
    def name(self) -> str: ...

    def list_tools(self) -> list[Any]:
        """Return the unchecked list of tools within a bounded time. Raises ToolFailure and OperatorError."""
        ...

    def import_tools(self, listed: Iterable[Any]) -> tuple[ImportedTool, ...]:
        """Return the tools that can be offered. Omitted tools are logged."""
        ...

    def build(self, tool: ImportedTool) -> WorkerTool: ...

    def end_session(self, tenant: str, session: str) -> bool:
        """End the server's session for a session of toolcrew that is closed. Return False if there is none. Raises
        ToolFailure and OperatorError.
        """
        ...


@dataclass
class _Server:
    """A server and its schedule. `digest`: the hash of its last list; None before the first list. `pause_s`: the
    pause after the last failure.
    """

    source: ToolSource
    due_at: float
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
        sources: Sequence[ToolSource],
        refresh_s: float,
        at_once: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._servers = {source.name: _Server(source, clock()) for source in sources}
        self._refresh_s = refresh_s
        self._at_once = at_once
        self._clock = clock
        self._owner = os.getpid()
        self._shared = SharedLists() if sources else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mcp-servers", daemon=True)
        self.again_s = FIRST_RETRY_S
        """Seconds until the next try after an unexpected exception."""
        self.on_change: Callable[[], None] = lambda: None

    def list_due_servers(self) -> float:
        """List the servers that are due, `at_once` at a time. Returns the seconds until the next server is due."""
        due_servers = [server for server in self._servers.values() if server.due_at <= self._clock()]
        if due_servers:
            with ThreadPoolExecutor(min(self._at_once, len(due_servers))) as pool:
                listed = list(pool.map(self._list_tools, due_servers))
            changes = [
                self._register_tools(server, tools)
                for server, tools in zip(due_servers, listed, strict=True)
                if tools is not None
            ]
            if any(changes):
                self._share()
                self.on_change()
        return min((server.due_at - self._clock() for server in self._servers.values()), default=self._refresh_s)

    def start(self) -> None:
        """Start the thread. A process that is forked at the same time has the complete registry, and its lock is
        free.
        """
        if self._servers:
            self._registry.lock_during_fork()
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Returns at once and does not wait for a running request."""
        self._stop.set()

    def copy_updates(self) -> None:
        """Copy the current tools from the process that lists the servers. Call this in a process of the pool; it is
        cheap if nothing has changed.
        """
        if self._shared is None or os.getpid() == self._owner:
            return
        for name, state in self._shared.read_changed().items():
            server = self._servers[name]
            server.source.is_sessionless = state.is_sessionless
            self._replace_tools(server, state.tools)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(max(0.0, pause_s)):
            try:
                pause_s = self.list_due_servers()
            except Exception:  # outermost handler: a bug with one server must not end the refresh of all
                log.exception("mcp_refresh_failed", retry_in_s=self.again_s)
                pause_s = self.again_s

    def _list_tools(self, server: _Server) -> tuple[ImportedTool, ...] | None:
        """Return the tools of a server; None if they are unchanged or the server failed."""
        source, started = server.source, self._clock()
        try:
            listed = source.list_tools()
            digest = hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).digest()
            tools = source.import_tools(listed) if digest != server.digest else None
        except (ToolFailure, OperatorError) as error:
            self._delay(server)
            if server.tools:
                log.warning("mcp_server_silent", server=source.name, error=str(error), retry_in_s=server.pause_s)
            else:
                log.error("mcp_server_without_tools", server=source.name, error=str(error), retry_in_s=server.pause_s)
            return None
        except Exception:  # outermost handler: a bug with one server must not delay the tools of the others
            self._delay(server)
            log.exception("mcp_server_failed", server=source.name, retry_in_s=server.pause_s)
            return None
        server.pause_s, server.due_at = 0.0, self._clock() + self._refresh_s
        if tools is None:
            return None
        server.digest = digest
        took_s = round(self._clock() - started, 3)
        log.info("mcp_tools_found", server=source.name, tools=[tool.spec.name for tool in tools], took_s=took_s)
        return tools

    def _delay(self, server: _Server) -> None:
        """Schedule the next try after a longer pause than the last one."""
        server.pause_s = min(max(FIRST_RETRY_S, server.pause_s * 2), self._refresh_s)
        server.due_at = self._clock() + server.pause_s

    def _register_tools(self, server: _Server, tools: tuple[ImportedTool, ...]) -> bool:
        """Put a new list of a server's tools into the registry. Return whether tools were added, changed or removed."""
        try:
            return self._replace_tools(server, self._find_free(server, tools))
        except Exception:  # the edge: as above
            # Nothing was changed. Without a digest the next listing is processed again.
            server.digest = None
            self._delay(server)
            log.exception("mcp_server_failed", server=server.source.name, retry_in_s=server.pause_s)
            return False

    def _find_free(self, server: _Server, tools: tuple[ImportedTool, ...]) -> list[ImportedTool]:
        """Return the tools whose names no tool of another source has."""
        free = []
        for tool in tools:
            if tool.spec.name in server.tools or self._registry.get(tool.spec.name) is None:
                free.append(tool)
            else:
                log.error(
                    "mcp_tool_left_out",
                    server=server.source.name,
                    name=tool.spec.name,
                    reason="another tool has its name",
                )
        return free

    def _replace_tools(self, server: _Server, tools: Iterable[ImportedTool]) -> bool:
        """Make exactly these tools of the server available in the registry. Return whether the registry changed."""
        current = {tool.spec.name: tool for tool in tools}
        removed = [name for name in server.tools if name not in current]
        new = [server.source.build(tool) for name, tool in current.items() if server.tools.get(name) != tool]
        server.tools = current
        for name in removed:
            self._registry.unregister(name)
        for built in new:
            self._registry.register(built)
        return bool(removed or new)

    def _share(self) -> None:
        if self._shared is not None:
            states = {
                name: ServerState(server.source.is_sessionless, tuple(server.tools.values()))
                for name, server in self._servers.items()
            }
            self._shared.write(states)
