"""The whole output of a command, in a file that the guest writes while it comes, once it is more than a result has room
for.
"""

from __future__ import annotations

import contextlib
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths

QUOTA_BYTES = 67_108_864
"""Of all spill files of a session together, and so of one."""
COUNTED_BYTES = 8_388_608
"""Of a longer file the lines are not counted: that would cost as much as writing it."""
_PREFIX, _SUFFIX = b"command-", b".txt"


class Spill:
    """Takes all that a command prints. Up to `limit_bytes` and `limit_lines` it is only remembered, beyond that it lies
    in a file.

    It never fails its command: where there is no room the rest is not kept, which `is_whole` tells.
    """

    __slots__ = (
        "_fd",
        "_limit_bytes",
        "_limit_lines",
        "_output",
        "_pending",
        "_room",
        "is_whole",
        "lines",
        "name",
        "written",
    )

    def __init__(self, paths: GuestPaths, limit_bytes: int, limit_lines: int) -> None:
        self._output = paths.output
        self._limit_bytes = limit_bytes
        self._limit_lines = limit_lines
        self._pending: list[bytes] | None = []
        self._fd: int | None = None
        self._room = limit_bytes
        self.name: bytes | None = None
        self.lines = 0
        self.written = 0
        self.is_whole = True

    def add(self, data: bytes) -> None:
        if self._pending is not None:
            self.lines += data.count(b"\n")
            self._pending.append(data)
            self._room -= len(data)
            if self._room < 0 or self.lines > self._limit_lines:
                self._begin(self._pending)
        elif self._fd is not None:
            self._write(data)

    def as_field(self) -> dict[str, object] | None:
        """`spill` of the done event: None when no file was needed, or none could be made."""
        if self.name is None:
            return None
        path = os.path.join(self._output, self.name).decode()
        lines = self.lines if self.written <= COUNTED_BYTES else None
        return {"path": path, "bytes": self.written, "lines": lines, "whole": self.is_whole}

    @property
    def is_missing(self) -> bool:
        """Whether a file was needed and could not be made."""
        return self._pending is None and self.name is None

    def _begin(self, pending: list[bytes]) -> None:
        self._pending = None
        self.lines = 0
        name = _PREFIX + os.urandom(4).hex().encode() + _SUFFIX
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._room = QUOTA_BYTES - sum(size for _, size, _ in _list_spills(self._output))
        try:
            self._fd = os.open(os.path.join(self._output, name), flags, 0o600)
        except OSError:
            self.is_whole = False
            return
        self.name = name
        self._write(b"".join(pending))

    def _write(self, data: bytes) -> None:
        whole, data = data, self._fit(data)
        view = memoryview(data)
        while view and self._fd is not None:
            try:
                count = os.write(self._fd, view)
            except OSError:
                # The place for outputs is full: of what else lies there only spills are ours to drop.
                if self._drop_oldest():
                    continue
                self._stop()
                break
            view = view[count:]
        done = data[: len(data) - len(view)] if view else data
        self.written += len(done)
        if self.written <= COUNTED_BYTES:
            self.lines += done.count(b"\n")
        self._room -= len(done)
        if len(data) < len(whole):
            # Room that others leave later is not for what comes then: it would follow a gap.
            self._stop()

    def _fit(self, data: bytes) -> bytes:
        """The part of `data` that the quota has room for, once older files have made way."""
        while len(data) > self._room and self._drop_oldest():
            pass
        return data if len(data) <= self._room else data[: max(0, self._room)]

    def _drop_oldest(self) -> bool:
        spills = sorted(entry for entry in _list_spills(self._output) if entry[2] != self.name)
        for _, size, name in spills:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._output, name))
                self._room += size
                return True
        return False

    def _stop(self) -> None:
        self.is_whole = False
        self._fd = None


def _list_spills(output: bytes) -> list[tuple[int, int, bytes]]:
    """When each was last written, its size, its name."""
    found = []
    try:
        names = os.listdir(output)
    except OSError:
        return []
    for name in names:
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(output, name))
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime_ns, status.st_size, name))
    return found
