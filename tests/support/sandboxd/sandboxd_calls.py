"""Send requests to a sandboxd in this process: calls through the client, and raw frames."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from tests.support.stack.waiting import SOON_S
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.sandboxd.frames import MAX_DOWN, FrameDecoder, encode_frame

EXEC = {"op": "exec", "argv": ["true"], "timeout_s": 5}


async def call(
    client: SandboxClient, name: str, request: dict[str, Any] | None = None, body: bytes = b"", **how: Any
) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(lambda: client.call(name, request or EXEC, body, **how)), SOON_S)


async def raw_exchange(path: Path, *frames: bytes, answers: int = 1) -> list[dict[str, Any]]:
    """Send the frames unchanged and return the received headers. Reads until `answers` headers have arrived, or until
    the end.
    """
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(b"".join(frames))
        decoder, got = FrameDecoder(MAX_DOWN), list[Any]()
        # If the peer closes before reading everything, the kernel reports a reset or an end.
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(SOON_S):
                while len(got) < answers and (data := await reader.read(65536)):
                    got += [frame.header for frame in decoder.feed(data)]
        return got
    finally:
        writer.close()


def frame(header: dict[str, Any], body: bytes = b"") -> bytes:
    return encode_frame(header, body, max_total=MAX_DOWN)
