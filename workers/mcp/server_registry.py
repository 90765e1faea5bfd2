"""The tools of MCP servers in a worker's registry, kept as the servers list them: asked at the start, and again and
again while it works.
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
"""How long after a failure a server is asked again; twice as long after each further one, up to what a good one
waits.
"""


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


class Source(Protocol):
    """A server whose tools are offered. `stands_alone`: how it is spoken to, None before it was asked."""

    stands_alone: bool | None

    @property
    def name(self) -> str: ...

    def list_tools(self) -> list[Any]:
        """What it lists, unchecked, within a bounded time. Raises ToolFailure and OperatorError."""
        ...

    def import_tools(self, listed: Iterable[Any]) -> tuple[ImportedTool, ...]:
        """Those that can be offered; what is left out is logged."""
        ...

    def build(self, tool: ImportedTool) -> WorkerTool: ...


@dataclass
class _Asked:
    """`digest`: of the list that its tools are from; None: it has never given one. `pause_s`: after its last
    failure.
    """

    source: Source
    due: float
    digest: bytes | None = None
    pause_s: float = 0.0
    tools: dict[str, ImportedTool] = field(default_factory=dict)


class ServerRegistry:
    """Made and filled before the pool's processes are forked, worked by a thread of the process that made it. The
    others take over what it found (`look`).

    `refresh_s`: how often a server that answers is asked; `at_once`: how many are. `on_change`: called after tools
    came, changed or went.
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
        """Seconds until the next try after a bug of ours ended one."""
        self.on_change: Callable[[], None] = lambda: None

    def ask_due(self) -> float:
        """Ask those whose time has come, `at_once` at a time. Gives how many seconds from now the next is due."""
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
        """A process that is forked meanwhile has the registry whole, and its lock free."""
        if self._asked:
            self._registry.lock_during_fork()
            self._thread.start()

    def stop(self) -> None:
        """Returns at once; a question on its way is left."""
        self._stop.set()

    def look(self) -> None:
        """In a process of the pool: have the tools as the process that asks the servers has them now. Cheap while
        nothing changed.
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
        """Its tools; None when they are as they were, or it did not say."""
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
        """Ask again after a longer pause than the last one."""
        asked.pause_s = min(max(FIRST_AGAIN_S, asked.pause_s * 2), self._refresh_s)
        asked.due = self._clock() + asked.pause_s

    def _take(self, asked: _Asked, tools: tuple[ImportedTool, ...]) -> bool:
        """Put the tools of a server into the registry. Return True if they have changed."""
        try:
            return self._place(asked, self._free(asked, tools))
        except Exception:  # the edge: as above
            # Nothing was changed. Without a digest the list is taken anew.
            asked.digest = None
            self._delay(asked)
            log.exception("mcp_server_failed", server=asked.source.name, again_s=asked.pause_s)
            return False

    def _free(self, asked: _Asked, tools: tuple[ImportedTool, ...]) -> list[ImportedTool]:
        """The tools whose names no other tool has."""
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
        """Have exactly these of the server in the registry; whether that is a change."""
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
