"""`python -m orchestrator.operations.pressure_server`: what the pool is asked for, as JSON over HTTP, for autoscalers.
It tells numbers and nobody's name.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import asdict
from typing import Any

from contract.errors import BrokerUnavailable, ToolcrewError
from contract.names import POOL_QUEUES
from orchestrator.settings import load_settings
from store.connection import open_redis
from store.pressure import Pressure
from telemetry.logs import get_logger

log = get_logger(__name__)

REQUEST_S = 5.0
MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 32
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class PressureServer:
    """Answers `GET /queues/<queue>` for the shared queues, `/hosts`, and `/alive`, which says only that it runs. One
    answer a connection.
    """

    def __init__(self, pressure: Pressure) -> None:
        self._pressure = pressure
        self._open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self._open += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                if self._open <= MAX_CONNECTIONS:
                    status, told = await self._answer(await reader.readuntil(b"\r\n\r\n"))
                    writer.write(_encode(status, told))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("request_unfinished")
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> tuple[int, dict[str, Any]]:
        match head.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" "):
            case ["GET", path, _]:
                return await self._found(path.partition("?")[0])
            case [_, _, _]:
                return 405, {"error": "only GET is answered"}
            case _:
                return 400, {"error": "this is no HTTP request"}

    async def _found(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            if path == "/alive":
                return 200, {"alive": True}
            if path == "/hosts":
                return 200, asdict(await self._pressure.hosts())
            queue = path.removeprefix("/queues/")
            if queue in POOL_QUEUES.values():
                return 200, (await self._pressure.queue(queue)).as_json()
        except BrokerUnavailable as error:
            return 503, {"error": str(error)}
        return 404, {
            "error": f"there are /hosts, /alive, {', '.join(f'/queues/{queue}' for queue in POOL_QUEUES.values())}"
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.operations.pressure_server",
        description="Tells autoscalers what the pool is asked for.",
    )
    parser.add_argument("--address", default="0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args()
    try:
        return asyncio.run(_run(asked.address, asked.port))
    except (ToolcrewError, OSError) as error:
        sys.stderr.write(f"pressure: {error}\n")
        return 1


async def _run(address: str, port: int) -> int:
    broker = load_settings().broker()
    client = open_redis(broker)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    served = PressureServer(Pressure(client, broker.deployment)).serve
    try:
        async with await asyncio.start_server(served, address, port, limit=MAX_REQUEST_BYTES):
            await stop.wait()
    finally:
        await client.aclose()
    return 0


def _encode(status: int, told: dict[str, Any]) -> bytes:
    body = json.dumps(told).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


if __name__ == "__main__":
    sys.exit(main())
