"""A replacement for a host's engine in a separate process: `python -m tests.chaos.engine_relay SOCKET` forwards
everything to the real engine.

A kill of the relay breaks every connection to the engine, including attached sandboxes. A pause makes the engine
hang. The real engine is not affected.
"""

import asyncio
import contextlib
import sys
from pathlib import Path

from tests.support.sandboxd.engine_stubs import relayed_engine


async def serve(path: Path) -> None:
    """Serve until the process is ended."""
    async with relayed_engine(path):
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    socket = Path(sys.argv[1])
    # A killed predecessor has left its socket file.
    socket.unlink(missing_ok=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(socket))
