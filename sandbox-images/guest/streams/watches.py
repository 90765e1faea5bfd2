"""The operation of the stream that watches a folder with inotify, and sends one JSON line per event.

The kernel's queue is the only queue: while the client does not read, this process waits. When the queue is full, the
kernel drops events and says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import struct

from guest.failures import INVALID_ARGUMENTS, RATE_LIMITED, RequestFailure
from guest.fields import printable
from guest.files.versions import NEW_SUFFIX, TEMPORARY_PREFIX
from guest.kernel import open_inotify, unwatch_folder, watch_folder
from guest.paths import KERNEL_FOLDERS
from guest.streams.entries import EntryReader, absolute, located, open_subfolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from guest.paths import GuestPaths
    from guest.streams.operations import ChildPipes

MAX_FOLDERS = 8192
"""Limit of the folders of one watch."""
_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO = 0x2, 0x4, 0x40, 0x80
_CREATE, _DELETE = 0x100, 0x200
_OVERFLOW, _IGNORED = 0x4000, 0x8000
_IS_FOLDER = 0x40000000
_ONLY_FOLDERS, _NO_LINKS, _ADD = 0x01000000, 0x02000000, 0x20000000
_MASK = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLY_FOLDERS | _NO_LINKS
# The kernel's name of a file without a name, such as a version that is not complete.
_NAMELESS = re.compile(rb"#\d+\Z")
_MAX_REPORTED = 65_536
"""Limit of the names that are remembered so that their creation is not reported twice."""
_NO_MOVE = (0, b"", False)
_HEADER = struct.Struct("iIII")
_READ_BYTES = 65_536
_SEND_BYTES = 32_768
_FULL = (errno.ENOSPC, errno.ENOMEM)
_WITH_ENTRY = ("create", "write", "chmod")
_EVENTS = {
    _CREATE: "create",
    _MOVED_TO: "create",
    _MODIFY: "write",
    _ATTRIB: "chmod",
    _DELETE: "remove",
    _MOVED_FROM: "rename",
}


def send_events(fields: dict[str, Any], paths: GuestPaths, pipes: ChildPipes) -> dict[str, object]:
    """Send the events of a folder until it is removed or the client leaves."""
    with located(fields["path"], paths) as entry:
        folder = open_subfolder(entry.directory, entry.name)
        path = absolute(fields["path"], paths).encode("utf-8", "surrogateescape")
        watcher = _Watcher(pipes, folder, path, fields["recursive"])
        watcher.watch_parent(entry.directory)
        watcher.begin()
        pipes.send_opened({})
        watcher.run()
    return {}


class _Watcher:
    """The watches below one folder. Names are relative to it; its own name is empty."""

    def __init__(self, pipes: ChildPipes, folder: int, path: bytes, recursive: bool) -> None:
        self._pipes = pipes
        self._folder = folder
        self._path = path
        self._recursive = recursive
        self._inotify = _open_inotify()
        self._names: dict[int, bytes] = {}
        self._root = self._add(b"")
        self._parent: int | None = None
        self._reader = EntryReader()
        self._lines = bytearray()
        # Names that were reported when a new folder was read. The kernel may report their creation as well.
        self._reported: set[bytes] = set()
        # The rename that the last event began: its cookie, the old name, and whether it is a folder.
        self._moved: tuple[int, bytes, bool] = _NO_MOVE

    def watch_parent(self, parent: int) -> None:
        """Watch the folder above for the removal of this one, which the kernel does not report of an open folder."""
        with contextlib.suppress(OSError):
            watch = watch_folder(self._inotify, b"/proc/self/fd/%d/" % parent, _DELETE | _ONLY_FOLDERS | _ADD)
            self._parent = watch if watch != self._root else None

    def begin(self) -> None:
        """Watch the folders below, if asked to. Raises RequestFailure when there are too many."""
        if not self._watch_below(b"", must_report=False):
            sentence = f"more than {MAX_FOLDERS} folders, or more than the kernel allows; watch a smaller folder"
            raise RequestFailure(INVALID_ARGUMENTS, f"{printable(self._path)}: {sentence}")

    def run(self) -> None:
        """Send events until the folder is removed. Raises BrokenPipeError when the client has left."""
        poller = select.poll()
        poller.register(self._inotify, select.POLLIN)
        # Without events: a pipe that its reader has closed is always reported.
        poller.register(self._pipes.output, 0)
        while self._root in self._names:
            if self._pipes.output in dict(poller.poll()):
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            self._reader.refresh()
            self._read_events()
            self._flush()
            if not poller.poll(0):
                # The kernel has reported everything that happened before the new folders were read.
                self._reported.clear()

    def _read_events(self) -> None:
        data = os.read(self._inotify, _READ_BYTES)
        at = 0
        while at < len(data):
            watch, mask, cookie, size = _HEADER.unpack_from(data, at)
            at += _HEADER.size + size
            self._process(watch, mask, cookie, data[at - size : at].rstrip(b"\0"))

    def _process(self, watch: int, mask: int, cookie: int, name: bytes) -> None:
        (moved, old_name, is_folder), self._moved = self._moved, _NO_MOVE
        is_target = bool(mask & _MOVED_TO) and cookie == moved
        if is_folder and not is_target:
            # The folder left the watched tree, or its new place is not known.
            self._forget_below(old_name)
        if mask & _OVERFLOW:
            self._recover()
        elif mask & _IGNORED:
            self._names.pop(watch, None)
        elif watch == self._parent:
            self._check_root()
        elif watch in self._names and name:
            below = os.path.join(self._names[watch], name)
            if mask & _MOVED_FROM:
                self._moved = (cookie, below, bool(mask & _IS_FOLDER))
            if name.startswith(TEMPORARY_PREFIX):
                return
            if is_target and os.path.basename(old_name).startswith(TEMPORARY_PREFIX):
                self._say_version(below, is_new=old_name.endswith(NEW_SUFFIX))
            else:
                self._process_name(mask, below, old_name if is_target else None)

    def _check_root(self) -> None:
        if os.fstat(self._folder).st_nlink == 0:
            self._say("remove", b"")
            del self._names[self._root]

    def _process_name(self, mask: int, name: bytes, old_name: bytes | None) -> None:
        """Report an event of a name. `old_name`: the name before a rename inside of the watched tree."""
        if mask & _CREATE and name in self._reported:
            self._reported.discard(name)
            return
        if mask & (_DELETE | _MOVED_FROM):
            self._reported.discard(name)
        self._say(next(_EVENTS[bit] for bit in _EVENTS if mask & bit), name)
        if mask & _IS_FOLDER and mask & (_CREATE | _MOVED_TO):
            if old_name is not None:
                self._rename_below(old_name, name)
            if not self._watch_below(name, must_report=bool(mask & _CREATE)):
                self._add_line({"event": "overflow"})

    def _say_version(self, name: bytes, is_new: bool) -> None:
        """Report a file that was written as a whole, like a file that was created, and then written."""
        for event in ("create", "chmod", "write") if is_new else ("write",):
            self._say(event, name)

    def _watch_below(self, name: bytes, must_report: bool) -> bool:
        """Watch a folder and all folders below it. Return False at a limit.

        `must_report`: report what is in them, which came before the watch.
        """
        pending = [name] if self._recursive else []
        while pending:
            name = pending.pop()
            try:
                # Watch before reading: what comes later is then reported by the kernel.
                self._add(name)
                found = self._read_folder(name)
            except OSError as error:
                if error.errno in _FULL:
                    return False
                # The folder has disappeared, or this user may not read it.
                continue
            pending += [below for below, is_folder in found if is_folder]
            if must_report:
                self._report_found(found)
        return True

    def _report_found(self, found: list[tuple[bytes, bool]]) -> None:
        for name, is_folder in found:
            if os.path.basename(name).startswith(TEMPORARY_PREFIX):
                continue
            if len(self._reported) < _MAX_REPORTED:
                self._reported.add(name)
            self._say("create", name)
            if not is_folder:
                self._say("write", name)

    def _read_folder(self, name: bytes) -> list[tuple[bytes, bool]]:
        """Return the names in a folder, each with whether it is a folder to watch."""
        with os.scandir(self._place(name)) as entries:
            names = [(os.path.join(name, entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
        return [(below, is_folder and self._show(below) not in KERNEL_FOLDERS) for below, is_folder in names]

    def _add(self, name: bytes) -> int:
        """Watch one folder. Raises OSError."""
        if len(self._names) >= MAX_FOLDERS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        watch = watch_folder(self._inotify, self._place(name), _MASK)
        self._names[watch] = name
        return watch

    def _forget_below(self, name: bytes) -> None:
        for watch in self._watches_below(name):
            unwatch_folder(self._inotify, watch)
            del self._names[watch]

    def _rename_below(self, old_name: bytes, name: bytes) -> None:
        for watch in self._watches_below(old_name):
            self._names[watch] = name + self._names[watch][len(old_name) :]

    def _watches_below(self, name: bytes) -> list[int]:
        start = name + b"/"
        return [watch for watch, folder in self._names.items() if folder == name or folder.startswith(start)]

    def _recover(self) -> None:
        """Report that events were lost, and watch the folders that were created or renamed meanwhile."""
        self._add_line({"event": "overflow"})
        old, self._names = self._names, {self._root: b""}
        self._watch_below(b"", must_report=False)
        for watch in old.keys() - self._names.keys():
            unwatch_folder(self._inotify, watch)

    def _say(self, event: str, name: bytes) -> None:
        line: dict[str, object] = {"event": event, "name": printable(name or b"."), "entry": None}
        if event in _WITH_ENTRY:
            # The file may have disappeared since.
            with contextlib.suppress(OSError):
                line["entry"] = self._reader.read(self._folder, name, self._show(name))
        if line["entry"] is not None or not (event in _WITH_ENTRY and _NAMELESS.match(os.path.basename(name))):
            self._add_line(line)

    def _add_line(self, line: dict[str, object]) -> None:
        self._lines += json.dumps(line).encode() + b"\n"
        if len(self._lines) >= _SEND_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._pipes.send(bytes(self._lines))
        self._lines.clear()

    def _show(self, name: bytes) -> bytes:
        return os.path.join(self._path, name) if name else self._path

    def _place(self, name: bytes) -> bytes:
        return b"/proc/self/fd/%d/%b" % (self._folder, name)


def _open_inotify() -> int:
    try:
        return open_inotify()
    except OSError as error:
        sentence = f"the kernel allows no more watches here ({error.strerror}); close some watches, then try again"
        raise RequestFailure(RATE_LIMITED, sentence) from None
