"""A `toolcrew` command at a terminal of its own."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

WITHIN_S = 60.0


class PtyCommand:
    """A running command, and the other side of its terminal. `screen`: everything that it has written."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int, slave: int) -> None:
        self.process = process
        self.screen = b""
        self._master = master
        self._slave = slave

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def wait_for(self, text: bytes) -> None:
        """Read until the screen has a text."""
        deadline = time.monotonic() + WITHIN_S
        while text not in self.screen:
            assert time.monotonic() < deadline, (text, self.screen)
            self._read(0.2)

    def wait(self) -> int:
        """Return the exit code."""
        deadline = time.monotonic() + WITHIN_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.screen
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.process.wait()

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        self.screen += os.read(self._master, 65536)
        return True


@contextmanager
def at_terminal(*arguments: str, env: Mapping[str, str], cols: int = 80, rows: int = 24) -> Iterator[PtyCommand]:
    """Run a command at a new terminal, which is its controlling terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
    argv = [sys.executable, "-m", "toolcrew.orchestrator", *arguments]
    process = subprocess.Popen(
        argv,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, **env},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        yield PtyCommand(process, master, slave)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
