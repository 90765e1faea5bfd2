"""The names in a directory, for whoever took it for a file."""

from __future__ import annotations

import heapq
import os

from guest.files.suggestions import escaped
from guest.files.text_requests import EMPTY_ANSWER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest.bench import Bench
    from guest.confinement import Place

MAX_NAMES = 100
_STRIDE = 1024


def list_folder(place: Place, max_bytes: int, bench: Bench) -> dict[str, object]:
    """Send the first names in order, one a line, a slash behind directories: at most MAX_NAMES, and `max_bytes`. Raises OSError."""
    fd = os.open(place.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.directory)
    seen = _Seen(bench)
    with os.scandir(fd) as entries:
        hidden = os.path.relpath(bench.places.state, os.readlink(f"/proc/self/fd/{fd}".encode()))
        names = heapq.nsmallest(MAX_NAMES, seen.pass_on(entry for entry in entries if os.fsencode(entry.name) != hidden), key=_order)
    lines: list[bytes] = []
    for entry in names:
        line = escaped(os.fsencode(entry.name)).encode() + (b"/" if entry.is_dir(follow_symlinks=False) else b"") + b"\n"
        max_bytes -= len(line)
        if max_bytes < 0:
            break
        lines.append(line)
    bench.writer.send("file", b"".join(lines))
    return {**EMPTY_ANSWER, "kind": "directory", "count": len(lines), "entries": seen.count}


class _Seen:
    """Counts the entries that go by, and asks for the limit now and then."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.count = 0

    def pass_on(self, entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        for entry in entries:
            self.count += 1
            if self.count % _STRIDE == 0:
                self._bench.watch.check()
            yield entry


def _order(entry: os.DirEntry[str]) -> bytes:
    return os.fsencode(entry.name)
