"""A streamed output arrives complete, even if PID 1 is slow to read its last pieces."""

import fcntl
import os
import threading
import time

import pytest

from tests.support.guest.guest_harness import GUEST_PARENT

assert GUEST_PARENT
from guest import frames  # noqa: E402
from guest.call_pipes import ReportReader, ReportWriter  # noqa: E402
from guest.commands.exec_request import ExecRequest  # noqa: E402
from guest.commands.outputs import DRAIN_WINDOW_S, Outputs  # noqa: E402
from guest.frames import Outbox  # noqa: E402
from guest.paths import GuestPaths  # noqa: E402

_F_SETPIPE_SZ = 1031
PIECE = 30_000


def stream_request() -> ExecRequest:
    return ExecRequest({
        "id": "a" * 32, "op": "exec", "argv": ["true"], "cwd": "/workspace", "env": {}, "timeout_s": 5, "script_bytes": 0,
        "capture": {"stream": 1_000_000},
    })  # fmt: skip


@pytest.mark.parametrize("slow_s", [0.0, 2 * DRAIN_WINDOW_S])
def test_output_left_in_the_pipe_is_sent_to_a_slow_reader(slow_s: float) -> None:
    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, _F_SETPIPE_SZ, 4096)
    os.set_blocking(write_fd, False)
    writer = ReportWriter(write_fd)
    outputs = Outputs(stream_request(), writer, GuestPaths())
    os.write(outputs.stdout, b"a" * PIECE)
    (fd,) = [fd for fd, name in outputs.open_fds.items() if name == "stdout"]
    outputs.read(fd)
    assert writer.is_full, "the pipe to PID 1 took all: nothing is tested"
    os.write(outputs.stdout, b"b" * PIECE)
    outputs.close_write_ends()
    received: list[bytes] = []

    def read_reports() -> None:
        reader = ReportReader()
        threading.Event().wait(slow_s)
        while data := os.read(read_fd, 4096):
            received.extend(body for _, body in reader.feed(data))

    reader_thread = threading.Thread(target=read_reports)
    reader_thread.start()
    outputs.drain()
    os.close(write_fd)
    reader_thread.join()
    os.close(read_fd)

    assert b"".join(received) == b"a" * PIECE + b"b" * PIECE
    assert outputs.sizes()["stdout"] == {"total": 2 * PIECE, "head": 2 * PIECE, "tail": 0}


@pytest.mark.parametrize(("size", "is_read", "limit_s"), [(10, False, 20), (200_000, True, 20), (200_000, False, 0.1)])
def test_an_ending_guest_flushes_its_frames_within_a_time_limit(
    monkeypatch: pytest.MonkeyPatch, size: int, is_read: bool, limit_s: float
) -> None:
    monkeypatch.setattr(frames, "_LAST_FLUSH_S", limit_s)
    source, target = os.pipe()
    with os.fdopen(source, "rb") as reader, os.fdopen(target, "wb"):
        outbox = Outbox(target)
        outbox.put(bytes(size))
        reader_thread = threading.Thread(target=reader.read, args=(size if is_read else 0,))
        reader_thread.start()
        started = time.monotonic()
        outbox.flush_last()
        assert time.monotonic() - started < 10
        assert (outbox.size > 0) == (limit_s == 0.1)
        reader_thread.join()
