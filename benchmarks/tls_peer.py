"""The floor of `benchmarks/streams.py`: a program that returns bytes over TLS, or sends as many as are asked for.

The first byte of a connection is `e` (echo) or `f` (flood, followed by 8 bytes with the number of bytes).
"""

import asyncio
import sys

from toolcrew.workers.stream_gateway.certificate import make_certificate

_PIECE = bytes(32_768)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if await reader.readexactly(1) == b"f":
        remaining = int.from_bytes(await reader.readexactly(8), "big")
        while remaining > 0:
            writer.write(_PIECE[:remaining])
            remaining -= len(_PIECE)
            await writer.drain()
    else:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, ssl=make_certificate().context)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
