"""Measure streams of a real sandbox through the gateway, next to plain TLS between two processes of this host.

`echo`: one byte to a `cat` in the sandbox and back. `beside`: the same, while another stream of the session floods.
"""

import asyncio
import contextlib
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from benchmarks.report import Report, median, percentile
from benchmarks.sizes import size
from toolcrew import ToolClient
from toolcrew.contract.stream_protocol import BULK_WINDOW_BYTES
from toolcrew.orchestrator.streams import Stream, Streams, StreamTarget
from toolcrew.store.audit import local_actor

MIB = 1024 * 1024
KEYS = size(300, 5)
FLOOD_MIB = size(48, 1)
"""More than the burst of a session, so that its limit of 32 MiB a second would show."""
_TICKS_PER_S = 100

Echo = Callable[[], Awaitable[None]]


def run() -> Report:
    return asyncio.run(_measure())


async def _measure() -> Report:
    report = Report("streams", notes=[f"{KEYS} keys one after another, floods of {FLOOD_MIB} MiB"])
    async with _open_floor() as port:
        await _measure_floor(report, port)
    async with ToolClient.embedded(workers_only=True) as client, await client.open_session() as session:
        assert client.stack is not None
        streams = Streams(client._pool, client.stack.deployment)
        target = StreamTarget(session.tenant, session.id, local_actor())
        gateway = client.stack.pids["stream-gateway"][0]
        try:
            await _measure_streams(report, streams, target, gateway)
        finally:
            await streams.close()
    values = {figure.key: figure.value for figure in report.figures}
    report.add("more_ms", values["echo_ms"] - values["tls_echo_ms"], "what the gateway and the sandbox cost a key, p50")
    return report


async def _measure_streams(report: Report, streams: Streams, target: StreamTarget, gateway: int) -> None:
    async def start(*argv: str, window: int = 65_536) -> Stream:
        return await streams.open(target, {"what": "process", "argv": [*argv], "stdin": True}, window=window)

    cat = await start("cat")

    async def echo() -> None:
        await cat.write(b"k")
        await cat.read()

    _add_keys(report, "echo", await _time(echo), "a key through the gateway to `cat` in a sandbox")
    before = _read_cpu_s(gateway)
    flood = await start("head", "-c", str(FLOOD_MIB * MIB), "/dev/zero", window=BULK_WINDOW_BYTES)
    report.add("up_per_s", FLOOD_MIB / await _drain(flood), "one stream out of the sandbox, MiB/s")
    report.add(
        "gateway_per_mib_ms", (_read_cpu_s(gateway) - before) / FLOOD_MIB * 1000, "processor time of the gateway"
    )
    endless = await start("cat", "/dev/zero", window=BULK_WINDOW_BYTES)
    draining = asyncio.create_task(_drain(endless))
    _add_keys(report, "beside", await _time(echo), "a key beside a flood of the same session")
    endless.close()
    with contextlib.suppress(Exception):  # the stream was closed
        await draining


async def _measure_floor(report: Report, port: int) -> None:
    reader, writer = await _connect(port)
    writer.write(b"e")

    async def echo() -> None:
        writer.write(b"k")
        await reader.readexactly(1)

    _add_keys(report, "tls_echo", await _time(echo), "a key to another process over TLS and back")
    writer.close()
    reader, writer = await _connect(port)
    writer.write(b"f" + (FLOOD_MIB * MIB).to_bytes(8, "big"))
    began = time.perf_counter()
    while await reader.read(MIB):
        pass
    report.add("tls_per_s", FLOOD_MIB / (time.perf_counter() - began), "a flood over TLS, MiB/s")
    writer.close()


def _add_keys(report: Report, name: str, seconds: list[float], label: str) -> None:
    report.add(f"{name}_ms", median(seconds) * 1000, f"{label}, p50")
    report.add(f"{name}_p99_ms", percentile(seconds, 0.99) * 1000, f"{label}, p99")


async def _time(echo: Echo) -> list[float]:
    seconds = []
    for _ in range(KEYS):
        began = time.perf_counter()
        await echo()
        seconds.append(time.perf_counter() - began)
    return seconds


async def _drain(stream: Stream) -> float:
    began = time.perf_counter()
    while await stream.read() is not None:
        pass
    return time.perf_counter() - began


def _read_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)


@contextlib.asynccontextmanager
async def _open_floor() -> AsyncIterator[int]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.tls_peer", stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield int(await child.stdout.readline())
    finally:
        child.terminate()
        await child.wait()
