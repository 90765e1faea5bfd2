"""`toolcrew top` on a terminal: drawn anew every second and with every key, also while Redis is away."""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from contract.errors import BrokerUnavailable
from orchestrator.cli.terminal_overview import VIEWS, Shown, build_overview_screen, count_rows
from store.overview import OverviewReader

EVERY_S = 1.0
READ_WITHIN_S = 3.0
_ARROWS = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
}
_ARROWS |= {b"\x1bOC": "right", b"\x1bOD": "left"}


class LiveOverview:
    """Shows what the reader tells until q, Ctrl-C or the end of the terminal."""

    def __init__(self, reader: OverviewReader, console: Console) -> None:
        self._reader = reader
        self._console = console
        self._shown = Shown(None)
        self._changed = asyncio.Event()
        self._is_over = False

    async def run(self) -> None:
        """Returns when it is to end; the terminal is then as it was."""
        loop = asyncio.get_running_loop()
        for number, act in ((signal.SIGINT, self._end), (signal.SIGWINCH, self._changed.set)):
            loop.add_signal_handler(number, act)
        try:
            with _keys(self._take), Live(console=self._console, screen=True, auto_refresh=False) as live:
                async with asyncio.TaskGroup() as tasks:
                    reading = tasks.create_task(self._keep_reading())
                    while not self._is_over:
                        self._changed.clear()
                        self._draw(live)
                        await self._changed.wait()
                    reading.cancel()
        finally:
            for number in (signal.SIGINT, signal.SIGWINCH):
                loop.remove_signal_handler(number)

    async def _keep_reading(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            next_at = loop.time() + EVERY_S
            try:
                async with asyncio.timeout(READ_WITHIN_S):
                    self._shown = replace(self._shown, overview=await self._reader.read(), trouble="")
            except BrokerUnavailable as error:
                self._shown = replace(self._shown, trouble=str(error))
            except TimeoutError:
                self._shown = replace(
                    self._shown, trouble=f"Redis has not answered for {READ_WITHIN_S:g} s: see that it is up"
                )
            self._changed.set()
            await asyncio.sleep(max(0.0, next_at - loop.time()))

    def _draw(self, live: Live) -> None:
        size = self._console.size
        lines = build_overview_screen(self._shown, size.width, size.height)
        live.update(Group(*(Text.assemble(line, end="\n", no_wrap=True) for line in lines)), refresh=True)

    def _take(self, pressed: bytes) -> None:
        """What was typed; b"" is the end of the terminal."""
        if pressed in (b"", b"q", b"Q", b"\x1b"):
            self._end()
        elif (arrow := _ARROWS.get(pressed)) is not None:
            self._move(arrow)

    def _move(self, arrow: str) -> None:
        shown = self._shown
        if arrow in ("left", "right"):
            at = VIEWS.index(shown.view) + (1 if arrow == "right" else -1)
            self._shown = replace(shown, view=VIEWS[at % len(VIEWS)], offset=0)
        elif shown.overview is not None:
            last = max(0, count_rows(shown.overview, shown.view) - 1)
            self._shown = replace(shown, offset=min(last, max(0, shown.offset + (1 if arrow == "down" else -1))))
        self._changed.set()

    def _end(self) -> None:
        self._is_over = True
        self._changed.set()


@contextmanager
def _keys(take: Callable[[bytes], None]) -> Iterator[None]:
    """Every key as it is pressed, without being shown; nothing when stdin is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    loop, file = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(file)
    tty.setcbreak(file)

    def read() -> None:
        pressed = b""
        with suppress(OSError):
            pressed = os.read(file, 64)
        take(pressed)

    loop.add_reader(file, read)
    try:
        yield
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)
