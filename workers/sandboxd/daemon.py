"""sandboxd as a process: listen, serve until a signal, and take everything down at the end."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence

import structlog

from workers.lifeline import hold_lifeline
from workers.sandboxd.engine import Engine
from workers.sandboxd.house import House, open_house
from workers.sandboxd.server import OWNER, Server
from workers.settings import SandboxdSettings
from workers.unix_listening import refuse_second, unlink_own

log = structlog.get_logger(__name__)

ORPHAN_GRACE_S = 15.0
"""How long sandboxd outlives the keeper of an embedded stack: as long as that would have waited for the removal of all sandboxes."""
END_FOR_GOOD = signal.SIGUSR1
"""Ends as SIGTERM does, and keeps nothing whatever the setting says: the embedded stack goes, and with it the folder of its sandboxd."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, END_FOR_GOOD)


async def run(settings: SandboxdSettings) -> None:
    """Serve until SIGTERM, SIGINT or END_FOR_GOOD. Raises SandboxUnavailable when this host cannot isolate, OSError when the socket is taken."""
    hold_lifeline(ORPHAN_GRACE_S)
    engine = Engine()
    try:
        with cancelled_by_signals() as asked:
            await _run(settings, engine, asked)
    except asyncio.CancelledError:
        log.info("sandboxd_stopped")
    finally:
        engine.close()


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[Sequence[int]]:
    """Signals that ask for the end cancel the task that is in here, once: what it holds is then taken down in order. Gives those that came."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    asked: list[int] = []

    def end(number: int) -> None:
        asked.append(number)
        if len(asked) == 1:
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        yield asked
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _run(settings: SandboxdSettings, engine: Engine, asked: Sequence[int]) -> None:
    # Before anything is swept: the sandboxes of a sandboxd that lives are no leftovers.
    refuse_second(settings.sandboxd_socket, owner=OWNER)
    async with open_house(settings, engine) as house:
        server = Server(house.sessions, house.plans, house.checkpoints, house.shelf, uids=settings.allowed_uids(), facts=house.describe)
        await _serve(settings, server, house, asked)


async def _serve(settings: SandboxdSettings, server: Server, house: House, asked: Sequence[int]) -> None:
    """Until it is cancelled, by a signal that is then among those asked."""
    path = settings.sandboxd_socket
    listening = await server.listen(path, settings.sandboxd_socket_mode)
    inode = path.stat().st_ino
    log.info("sandboxd_ready", socket=str(path), image=settings.sandbox_image, runtime=settings.sandbox_runtime)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(house.keeper.keep())
            tasks.create_task(house.pools.keep_filled())
    finally:
        listening.close()
        # Before the long part of the end: a successor may listen at the same path by then.
        unlink_own(path, inode)
        await house.close(for_good=END_FOR_GOOD in asked)
        await server.close_connections()
