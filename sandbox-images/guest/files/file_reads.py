"""Handle the file request that reads a whole file. The file is streamed and never held in memory as a whole."""

from __future__ import annotations

import os

from guest.confinement import find_entry, open_pinned, pin_file
from guest.failures import FILE_TOO_LARGE, RequestFailure, describe_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest.files.requests import ReadFileRequest
    from guest.paths import GuestPaths
    from guest.request_context import RequestContext, Watch

_BLOCK = 262_144


def read_file(request: ReadFileRequest, context: RequestContext) -> dict[str, object]:
    """Send a whole file.

    Raises RequestFailure. FILE_TOO_LARGE is raised before any data is sent, unless the file grows during the read.
    """
    fd, shown = _open_file(request.path, context.paths)
    declared = os.fstat(fd).st_size
    if declared > request.max_bytes:
        raise _too_large(shown, declared, request.max_bytes)
    size = 0
    for block in _blocks(fd, shown, context.watch):
        size += len(block)
        if size > request.max_bytes:
            raise _too_large(shown, size, request.max_bytes)
        context.writer.send("file", block)
    return {"size": size}


def _open_file(path: str, paths: GuestPaths) -> tuple[int, str]:
    entry = find_entry(path, paths, to_read=True, is_exact=True)
    try:
        return open_pinned(pin_file(entry), os.O_RDONLY), entry.shown
    except OSError as error:
        raise describe_os_error(error, entry.shown) from None
    finally:
        entry.close()


def _blocks(fd: int, shown: str, watch: Watch) -> Iterator[bytes]:
    while True:
        watch.check()
        try:
            block = os.read(fd, _BLOCK)
        except OSError as error:
            raise describe_os_error(error, shown) from None
        if not block:
            return
        yield block


def _too_large(shown: str, size: int, allowed: int) -> RequestFailure:
    return RequestFailure(FILE_TOO_LARGE, f"{shown}: has {size} bytes, more than {allowed}", size=size)
