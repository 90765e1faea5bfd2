"""Measure the egress proxy: throughput of a tunnel, and the cost of opening a tunnel.

The baseline is a relay that only copies bytes over the same sockets.
"""

import asyncio
import contextlib
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.processes import child_process
from benchmarks.report import Case, Report, interleave, median, timed
from benchmarks.sizes import size

ROUNDS = size(9, 2)
WARM_UP = size(2, 1)
DOWNLOAD_BYTES = size(64 * 1024 * 1024, 1024 * 1024)
OPENINGS = size(50, 3)
_RELAY = """
import asyncio, sys

async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()

async def serve(reader, writer):
    await reader.readline()
    while await reader.readline() != b"\\r\\n":
        pass
    host_reader, host_writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    writer.write(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    await asyncio.gather(copy(reader, host_writer), copy(host_reader, writer))
    writer.close()
    host_writer.close()

async def main():
    async with await asyncio.start_unix_server(serve, sys.argv[1]) as server:
        await server.serve_forever()

asyncio.run(main())
"""


def _serve_bytes(listening: socket.socket) -> None:
    piece = bytes(1024 * 1024)

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            for _ in range(int(connection.recv(20))):
                connection.sendall(piece)

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()


@contextlib.contextmanager
def _bytes_server() -> Iterator[int]:
    """Start a server that sends as many MiB as a client requests; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_serve_bytes, args=(listening,), daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def _download(path: Path, port: int, mebibytes: int) -> None:
    rules = {
        "hosts": ["127.0.0.1"],
        "private_hosts": ["127.0.0.1"],
        "ports": [port],
        "max_bytes": 2**50,
        "bytes_per_second": 2**40,
    }
    opening = json.dumps({"v": 1, "tenant": "bench", "session": "bench", "rules": rules})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))
        client.sendall(f"{opening}\nCONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
        answer = client.recv(1000)
        if b" 200 " not in answer:
            raise RuntimeError(f"no tunnel: {answer!r}")
        client.sendall(b"%d" % mebibytes)
        remaining = mebibytes * 1024 * 1024
        while remaining:
            got = len(client.recv(min(remaining, 1024 * 1024)))
            if not got:
                raise RuntimeError(f"the tunnel ended {remaining} bytes before its end")
            remaining -= got


def _open_tunnels(path: Path, port: int) -> None:
    for _ in range(OPENINGS):
        _download(path, port, 0)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"nobody listens at {path}")
        time.sleep(0.01)


def run(rounds: int = ROUNDS) -> Report:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrew-bench-")))
        port = stack.enter_context(_bytes_server())
        proxy, relay = folder / "egress.sock", folder / "relay.sock"
        environment = {"TOOLCREW_EGRESS_SOCKET": str(proxy), "TOOLCREW_LOG_LEVEL": "INFO"}
        stack.enter_context(
            child_process([sys.executable, "-m", "toolcrew.workers.egress"], environment, folder / "egress.log")
        )
        stack.enter_context(
            child_process([sys.executable, "-c", _RELAY, str(relay), str(port)], {}, folder / "relay.log")
        )
        wait_for(proxy)
        wait_for(relay)
        whole = DOWNLOAD_BYTES // (1024 * 1024)
        cases: dict[str, Case] = {
            "relay": timed(lambda: _download(relay, port, whole)),
            "proxy": timed(lambda: _download(proxy, port, whole)),
            "relay_open": timed(lambda: _open_tunnels(relay, port)),
            "proxy_open": timed(lambda: _open_tunnels(proxy, port)),
        }
        seconds = asyncio.run(interleave(cases, rounds, WARM_UP))
    return _report(seconds, rounds)


def _report(seconds: dict[str, list[float]], rounds: int) -> Report:
    report = Report(
        "egress",
        notes=[
            f"medians of {rounds} interleaved rounds; {DOWNLOAD_BYTES >> 20} MiB a download, {OPENINGS} tunnels a round"
        ],
    )
    for case, label in (("relay", "floor: a relay that copies"), ("proxy", "ours: judged, counted and paced")):
        report.add(f"{case}_per_s", (DOWNLOAD_BYTES >> 20) / median(seconds[case]), f"{label}, MiB")
        report.add(
            f"{case}_open_ms", median(seconds[f"{case}_open"]) / OPENINGS * 1000, f"{label}, a tunnel opened and closed"
        )
    report.add(
        "throughput_ratio",
        median(seconds["relay"]) / median(seconds["proxy"]),
        "throughput, ours to the floor's",
        at_least=0.5,
    )
    report.add(
        "open_ratio",
        median(seconds["proxy_open"]) / median(seconds["relay_open"]),
        "opening, ours to the floor's",
        at_most=6.0,
    )
    return report
