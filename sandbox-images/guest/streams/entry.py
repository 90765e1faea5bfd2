"""The start of the stream server: the process that PID 1 has forked, or a program of the host, becomes the server."""

from __future__ import annotations

import os
import signal

from guest.kernel import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, set_process_flag, set_title
from guest.streams.children import Children
from guest.streams.file_service import FileService
from guest.streams.ports import PortService
from guest.streams.process_service import ProcessService
from guest.streams.server import StreamServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths
    from guest.streams.handlers import EventSource

TITLE = b"streams"
"""Title of the stream server. `pkill -f python3` must not end it."""


def build_services(paths: GuestPaths, children: Children) -> list[EventSource]:
    """Return what the server serves. The last one kills what the others have left at the end."""
    return [children, FileService(paths), PortService(), ProcessService(paths, children, lambda _: None)]


def serve_streams(incoming: int, outgoing: int, paths: GuestPaths) -> None:
    """Be the stream server of the channel until it is closed."""
    # Ignore SIGXFSZ: a write beyond the file size limit must fail with an error and not end this process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    set_title(TITLE, b"")
    set_process_flag(PR_SET_CHILD_SUBREAPER, 1)
    # From here on, no program can read, stop or trace this process.
    set_process_flag(PR_SET_DUMPABLE, 0)
    os.chdir("/")
    os.umask(0o022)
    StreamServer(incoming, outgoing, build_services(paths, Children())).run()
