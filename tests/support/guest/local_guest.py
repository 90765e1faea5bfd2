"""A guest for archives without a container. The guest runs exec requests on this host, with the host's bash and tar."""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from toolcrew.workers.sandboxd.frames import Frame


class LocalGuest:
    """A local guest. `was_held`: the reader was slow. `most_in_flight`: size of the largest body that the guest
    received, in bytes.
    """

    def __init__(self) -> None:
        self.was_held = asyncio.Event()
        self.most_in_flight = 0
        self._held: set[object] = set()
        self._may_read = threading.Event()
        self._may_read.set()

    async def ask(
        self,
        request: Mapping[str, Any],
        *,
        sink: Callable[[Frame], None] | None = None,
        body: AsyncIterator[bytes] | None = None,
        body_bytes: int = 0,
    ) -> dict[str, Any]:
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(b"".join([piece async for piece in body]) if body is not None else b"")
            assert stdin.tell() == body_bytes
            self.most_in_flight = max(self.most_in_flight, body_bytes)
            stdin.seek(0)
            process = _start(request, stdin, stderr)
            loop, take = asyncio.get_running_loop(), sink or (lambda _: None)

            def show(chunk: bytes) -> None:
                if "stream" in request["capture"]:
                    # The output is read in a thread, but the sink belongs to the event loop.
                    loop.call_soon_threadsafe(take, Frame({"ev": "data", "stream": "stdout"}, chunk))

            try:
                code = await asyncio.to_thread(self._run, process, show)
            finally:
                # A cancelled request leaves the reading thread behind. The event lets that thread continue, and the
                # kill ends its read.
                self._may_read.set()
                _end(process)
            stderr.seek(0)
            take(Frame({"ev": "data", "stream": "stderr"}, stderr.read()))
            return {"ev": "done", "exit_code": code, "timed_out": False}

    def _run(self, process: "subprocess.Popen[bytes]", show: Callable[[bytes], None]) -> int:
        assert process.stdout is not None
        with process.stdout:
            while self._may_read.wait() and (chunk := os.read(process.stdout.fileno(), 65_536)):
                show(chunk)
            return process.wait()

    def hold(self, holder: object) -> None:
        self.was_held.set()
        self._held.add(holder)
        self._may_read.clear()

    @property
    def is_held(self) -> bool:
        return bool(self._held)

    def release(self, holder: object) -> None:
        self._held.discard(holder)
        if not self._held:
            self._may_read.set()


def of_this_host(argv: list[str]) -> list[str]:
    """Return the arguments with a program of this host instead of the toolkit's."""
    return [os.path.basename(argv[0]), *argv[1:]]


def _start(request: Mapping[str, Any], stdin: Any, stderr: Any) -> "subprocess.Popen[bytes]":
    environment = {"PATH": os.environ["PATH"], **request["env"]}
    return subprocess.Popen(
        of_this_host(request["argv"]),
        cwd="/",
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process as a guest does: first with a signal that lets a script clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(1)
