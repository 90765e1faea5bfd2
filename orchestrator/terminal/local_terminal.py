"""The standard streams of a command: a terminal in raw mode, or pipes and files."""

import asyncio
import os
import signal
import termios
import tty
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from toolcrew.orchestrator.terminal.escape_filter import EscapeFilter

STDIN, STDOUT, STDERR = 0, 1, 2
_READ_BYTES: Final = 32 * 1024
_WRITE_BYTES: Final = 1024
"""Bytes of one write. A terminal that is ready takes them at once."""
_DETACH: Final = b"\x10\x11"
"""ctrl-p ctrl-q, as `docker attach` has it."""


class LocalTerminal:
    """A terminal that passes every key to a program of a sandbox. The end of the block restores it."""

    def __enter__(self) -> Self:
        self._modes: list[Any] = termios.tcgetattr(STDIN)
        # Keys that were typed before are for the program.
        tty.setraw(STDIN, termios.TCSADRAIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGWINCH)
        # Not when the output is drained: a terminal that is stopped would never be restored.
        termios.tcsetattr(STDIN, termios.TCSANOW, self._modes)

    def on_resize(self, handler: Callable[[], object]) -> None:
        """Call `handler` when the size has changed."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, handler)


def is_interactive() -> bool:
    """Return whether a person types at a terminal and reads there."""
    return os.isatty(STDIN) and os.isatty(STDOUT)


def read_size() -> tuple[int, int]:
    """Return the columns and rows of the terminal."""
    size = os.get_terminal_size(STDOUT)
    return max(size.columns, 1), max(size.lines, 1)


async def read_input() -> bytes:
    """Return the next bytes of standard input; b"" at its end."""
    await _wait_ready(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader, STDIN)
    try:
        return os.read(STDIN, _READ_BYTES)
    except OSError:
        # The terminal was closed.
        return b""


class OutputWriter:
    """Writes the output of a program to a standard stream. On a terminal it is filtered."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._filter = EscapeFilter() if os.isatty(fd) else None

    async def write(self, data: bytes) -> None:
        """Write bytes. Raises OSError when the other side is closed."""
        await self._write_all(self._filter.feed(data) if self._filter is not None else data)

    async def reset(self) -> None:
        """Undo what the program changed at the terminal."""
        if self._filter is not None:
            await self._write_all(self._filter.reset())

    async def _write_all(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        at = 0
        while at < len(data):
            await _wait_ready(loop.add_writer, loop.remove_writer, self._fd)
            at += os.write(self._fd, data[at : at + _WRITE_BYTES])


class DetachKeys:
    """Finds the keys ctrl-p ctrl-q in what a person types. ctrl-p is held back until the next key."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Return the bytes for the program, and whether the person wants to detach."""
        before, keys, _ = (self._held + data).partition(_DETACH)
        self._held = before[-1:] if not keys and before.endswith(_DETACH[:1]) else b""
        return before[: len(before) - len(self._held)], bool(keys)


async def _wait_ready(add: Callable[..., object], remove: Callable[[int], object], fd: int) -> None:
    ready = asyncio.Event()
    try:
        add(fd, ready.set)
    except PermissionError:
        # A file is always ready.
        return
    try:
        await ready.wait()
    finally:
        remove(fd)
