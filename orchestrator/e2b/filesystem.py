"""The service `filesystem.Filesystem` of E2B's sandboxes."""

import asyncio
import posixpath
import secrets
import stat
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

from starlette.requests import Request

from toolcrew.contract.calls import R
from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.file_views import FileEntry, FileEvent
from toolcrew.orchestrator.e2b.connect_rpc import ConnectError, MessageStream, SendMessage, read_one
from toolcrew.orchestrator.e2b.sandbox import EnvdSandbox
from toolcrew.orchestrator.streams.rows import parse_answer_fields, parse_row, read_row_lines
from toolcrew.orchestrator.streams.stream import Stream

METADATA_PREFIX: Final = "e2b."
MAX_DEPTH: Final = 1_000
MAX_ENTRIES: Final = 100_000
MAX_WATCHERS: Final = 32
MAX_EVENTS: Final = 10_000
"""Events of a watcher that its client has not fetched. The oldest are dropped."""
QUIET_S: Final = 0.03
"""Seconds without an event after which the events of a change are complete."""
LONGEST_QUIET_S: Final = 0.25
_TYPES: Final = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY"}
_EVENTS: Final = {
    "create": "EVENT_TYPE_CREATE",
    "write": "EVENT_TYPE_WRITE",
    "remove": "EVENT_TYPE_REMOVE",
    "rename": "EVENT_TYPE_RENAME",
    "chmod": "EVENT_TYPE_CHMOD",
}


class FilesystemService:
    """Files of one sandbox."""

    def __init__(self, sandbox: EnvdSandbox) -> None:
        self._sandbox = sandbox
        self._watchers: OrderedDict[str, _Watcher] = OrderedDict()

    async def stat(self, message: Mapping[str, Any], user: str | None) -> dict[str, Any]:
        """Return the entry of a path."""
        path = await self._path(message, "path", user)
        return {"entry": await self._describe_answer(await self._sandbox.call("stat", path=path, user=user), user)}

    async def make_dir(self, message: Mapping[str, Any], user: str | None) -> dict[str, Any]:
        """Create a folder and its parents."""
        path = await self._path(message, "path", user)
        answer = await self._sandbox.call("make_folder", path=path, user=user)
        if not answer["created"]:
            raise ConnectError("already_exists", f"{path} exists")
        return {"entry": await self._describe_answer(answer, user)}

    async def move(self, message: Mapping[str, Any], user: str | None) -> dict[str, Any]:
        """Rename a file or folder, and create the parents of its new place."""
        source = await self._path(message, "source", user)
        target = await self._path(message, "destination", user)
        answer = await self._sandbox.call("move", source=source, target=target, user=user)
        return {"entry": await self._describe_answer(answer, user)}

    async def remove(self, message: Mapping[str, Any], user: str | None) -> dict[str, Any]:
        """Remove a file, or a folder with its content. A missing path is no error."""
        await self._sandbox.call("remove", path=await self._path(message, "path", user), user=user)
        return {}

    async def list_dir(self, message: Mapping[str, Any], user: str | None) -> dict[str, Any]:
        """Return the entries of a folder, in all levels up to `depth`."""
        path = await self._path(message, "path", user)
        depth = message.get("depth") or 1
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= MAX_DEPTH:
            raise ConnectError("invalid_argument", f"'depth' must be from 1 to {MAX_DEPTH}")
        entries = []
        async with await self._sandbox.open("list", path=path, depth=depth, user=user) as stream:
            async for row in _read_rows(FileEntry, stream):
                entries.append(await self._describe(row, user))
                if len(entries) > MAX_ENTRIES:
                    raise ConnectError("resource_exhausted", f"the folder has more than {MAX_ENTRIES} entries")
        return {"entries": entries}

    async def watch_dir(self, request: Request, user: str | None) -> MessageStream:
        """Send the events of a folder until the client leaves."""
        message = await read_one(request)

        async def produce(send: SendMessage) -> None:
            stream = await self._watch(message, user)
            async with stream:
                await send({"start": {}})
                async for event in _read_rows(FileEvent, stream):
                    described = await self.describe_event(event, message, user)
                    if described is not None:
                        await send({"filesystem": described})

        return MessageStream(produce)

    async def create_watcher(self, message: Mapping[str, Any], user: str | None) -> dict[str, Any]:
        """Watch a folder for a client that fetches the events."""
        if len(self._watchers) >= MAX_WATCHERS:
            self._watchers.popitem(last=False)[1].close()
        watcher = _Watcher(await self._watch(message, user))
        name = secrets.token_hex(8)
        self._watchers[name] = watcher
        watcher.begin(self, message, user)
        return {"watcherId": name}

    async def get_watcher_events(self, message: Mapping[str, Any], _: str | None) -> dict[str, Any]:
        """Return the events since the last request."""
        return {"events": await self._find_watcher(message).take()}

    async def remove_watcher(self, message: Mapping[str, Any], _: str | None) -> dict[str, Any]:
        """End a watcher."""
        self._find_watcher(message).close()
        del self._watchers[str(message["watcherId"])]
        return {}

    def close(self) -> None:
        """End all watchers."""
        for watcher in self._watchers.values():
            watcher.close()
        self._watchers.clear()

    def _find_watcher(self, message: Mapping[str, Any]) -> "_Watcher":
        watcher = self._watchers.get(str(message.get("watcherId")))
        if watcher is None:
            raise ConnectError("not_found", "there is no such watcher: create it again")
        return watcher

    async def _path(self, message: Mapping[str, Any], name: str, user: str | None) -> str:
        path = message.get(name, "")
        if not isinstance(path, str):
            raise ConnectError("invalid_argument", f"'{name}' must be a text")
        return await self._sandbox.resolve(path, user)

    async def _watch(self, message: Mapping[str, Any], user: str | None) -> Stream:
        path = await self._path(message, "path", user)
        try:
            return await self._sandbox.open("watch", path=path, recursive=bool(message.get("recursive")), user=user)
        except ToolFailure as failure:
            if failure.code is ErrorCode.NOT_A_DIRECTORY:
                raise ConnectError("invalid_argument", failure.message) from None
            raise

    async def describe_event(
        self, event: FileEvent, message: Mapping[str, Any], user: str | None
    ) -> dict[str, Any] | None:
        kind = _EVENTS.get(event.event)
        if kind is None:
            return None
        described: dict[str, Any] = {"name": event.name, "type": kind}
        if message.get("includeEntry") and event.entry is not None:
            described["entry"] = await self._describe(event.entry, user)
        return described

    async def _describe_answer(self, answer: Mapping[str, Any], user: str | None) -> dict[str, Any]:
        return await self._describe(parse_answer_fields(FileEntry, answer.get("entry")), user)

    async def _describe(self, entry: FileEntry, user: str | None) -> dict[str, Any]:
        """Return an entry for the client. A link has the type of its target."""
        kind = await self._find_type(entry.target or "", user) if entry.type == "symlink" else entry.type
        described = {
            "name": entry.name,
            "type": _TYPES.get(kind, "FILE_TYPE_UNSPECIFIED"),
            "path": posixpath.normpath(entry.path),
            "size": str(entry.size),
            "mode": entry.mode & 0o777,
            "permissions": stat.filemode(_FORMATS.get(entry.type, 0) | entry.mode),
            "owner": entry.owner,
            "group": entry.group,
            "modifiedTime": format_instant(entry.modified_at, "milliseconds"),
            "metadata": {
                name.removeprefix(METADATA_PREFIX): text
                for name, text in entry.metadata.items()
                if name.startswith(METADATA_PREFIX)
            },
        }
        return described if entry.target is None else {**described, "symlinkTarget": entry.target}

    async def _find_type(self, target: str, user: str | None) -> str:
        with suppress(ToolFailure):
            answer = await self._sandbox.call("stat", path=target, user=user)
            return parse_answer_fields(FileEntry, answer.get("entry")).type
        return ""


class _Watcher:
    """A watch whose events wait for the client."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self, service: FilesystemService, message: Mapping[str, Any], user: str | None) -> None:
        self._task = asyncio.create_task(self._collect(service, message, user))

    async def take(self) -> list[dict[str, Any]]:
        """Return the events, also those of changes that were made just before and are on their way."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_QUIET_S):
                if not self._events:
                    await self._arrived.wait()
                while self._arrived.is_set():
                    self._arrived.clear()
                    await asyncio.sleep(QUIET_S)
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _collect(self, service: FilesystemService, message: Mapping[str, Any], user: str | None) -> None:
        # A lost sandbox ends the watch. The client then finds no more events.
        with suppress(ToolFailure, OperatorError):
            async with self._stream:
                async for event in _read_rows(FileEvent, self._stream):
                    described = await service.describe_event(event, message, user)
                    if described is not None:
                        self._events.append(described)
                        self._arrived.set()


_FORMATS: Final = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK}


async def _read_rows(kind: type[R], stream: Stream) -> AsyncIterator[R]:
    async for lines in read_row_lines(stream):
        for line in lines:
            yield parse_row(kind, line)
