"""A stand-in for a host's engine as a process of its own: `python -m tests.chaos.engine_relay SOCKET` passes all on to
the real one.

Killed, every connection to the engine breaks, attached sandboxes included; paused, the engine hangs. The real one never
notices.
"""

import asyncio
import contextlib
import sys
from pathlib import Path

from tests.engine_stubs import relayed_engine


async def serve(path: Path) -> None:
    """Until it is ended."""
    async with relayed_engine(path):
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    socket = Path(sys.argv[1])
    # A predecessor that was killed has left its own.
    socket.unlink(missing_ok=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(socket))
