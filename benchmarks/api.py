"""Measure the HTTP API: cost of a tool call, cost of 500 readers of one run, and duration of a list of 10,000 runs.

The baseline of a tool call is the SDK on the same stack. Calls use one persistent connection of a minimal HTTP
client, so that the figures describe the service and not a client library. The report also shows the same calls made
with httpx, which spends most of its time in httpx itself.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from benchmarks.processes import child_process
from benchmarks.report import Report, interleave, median
from benchmarks.sizes import size
from benchmarks.whole_path import awaited, whole_call
from toolcrew import ToolClient
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.settings import load_settings
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.connection import open_redis
from toolcrew.store.run_events import run_events_key
from toolcrew.store.tenants import RedisTenants

ROUNDS, WARM_UP = size((200, 20), (2, 1))
CALLS = size(200, 4)
READERS = size(500, 3)
EVENTS, PER_S = size((100, 10), (10, 10))
RUNS, AT_ONCE = size((10_000, 100), (120, 60))
PAGES = size(15, 2)
EVENT = json.dumps({"type": "TextArrived", "run": "x", "text": "some words of a model, as they come. " * 4})
CALL = {"name": "bash_tool", "arguments": {"command": "true"}}
TICKS_PER_S = 100


def run(rounds: int = ROUNDS) -> Report:
    return asyncio.run(_run(rounds))


async def _run(rounds: int) -> Report:
    report = Report(
        "api", notes=[f"medians of {rounds} interleaved rounds; {READERS} readers of one run, {PER_S} events a second"]
    )
    async with contextlib.AsyncExitStack() as stack:
        sdk = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        assert sdk.stack is not None
        broker = load_settings().broker(sdk.stack.redis_url)
        connection = open_redis(broker)
        stack.push_async_callback(connection.aclose)
        made = await ApiKeys(connection, broker.deployment, broker.signing_keys()).add(
            DEFAULT_TENANT, "admin", name="bench"
        )
        api = await stack.enter_async_context(_serving(broker, made.text))
        line = await stack.enter_async_context(_open_line(api.client.base_url.port or 0, made.text))
        session = await stack.enter_async_context(await sdk.open_session())
        path, body = f"/v1/sessions/{session.id}/calls", json.dumps(CALL).encode()
        cases: dict[str, Any] = {
            "nothing": awaited(lambda: line.ask("GET", "/healthz")),
            "sdk": awaited(lambda: whole_call(session)),
            "api": awaited(lambda: line.ask("POST", path, body)),
            "httpx": awaited(lambda: _ask(api.client, "POST", path, json=CALL)),
        }
        seconds = await interleave(cases, rounds, WARM_UP)
        report.add_ms("nothing", seconds["nothing"], "floor: GET /healthz")
        report.add_ms("sdk", seconds["sdk"], "bash_tool true by the SDK")
        report.add_ms("api", seconds["api"], "the same over HTTP")
        report.add(
            "overhead_ms", (median(seconds["api"]) - median(seconds["sdk"])) * 1000, "what HTTP adds", at_most=3.0
        )
        report.add(
            "processor_ms",
            await _added_ms(api, session, lambda: line.ask("POST", path, body)),
            "processor time of it in the service",
        )
        report.add("api_ratio", median(seconds["api"]) / median(seconds["sdk"]), "HTTP / SDK")
        report.add_ms("httpx", seconds["httpx"], "the same over HTTP, by httpx")
        durable_runs = DurableRuns(
            connection,
            broker.deployment,
            broker.signing_keys(),
            RedisTenants(connection, broker.deployment, broker.signing_keys()),
        )
        await _read_by_many(report, api, durable_runs, connection, broker.deployment)
        await _list_many(report, api, durable_runs)
        await durable_runs.hub.close()
    return report


async def _added_ms(api: "_Api", session: Session, call: Callable[[], Awaitable[object]]) -> float:
    """Return the CPU time of a call in the service, minus the CPU time of the same call with the SDK in this
    process.
    """
    began = time.process_time()
    for _ in range(CALLS):
        await whole_call(session)
    own, before = time.process_time() - began, api.processor_s()
    for _ in range(CALLS):
        await call()
    return (api.processor_s() - before - own) / CALLS * 1000


class _Api:
    """Service in a separate process, and a client of the service."""

    def __init__(self, client: httpx.AsyncClient, pid: int) -> None:
        self.client = client
        self._pid = pid

    def memory_bytes(self) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def processor_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class _Line:
    """A persistent HTTP connection, with one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self._reader = reader
        self._writer = writer
        self._common = f"Host: bench\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n".encode()

    async def ask(self, method: str, path: str, body: bytes = b"") -> Any:
        """Send a request and return the JSON of the response. Raises RuntimeError when the status is not 200."""
        length = b"Content-Length: %d\r\n" % len(body) if body else b""
        self._writer.write(
            b"%s %s HTTP/1.1\r\n%s%s\r\n%s" % (method.encode(), path.encode(), self._common, length, body)
        )
        status, *headers = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        fields = dict(header.lower().split(b": ", 1) for header in headers if header)
        answer = await self._reader.readexactly(int(fields[b"content-length"]))
        if not status.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"{method} {path}: {status!r} {answer!r}")
        return json.loads(answer)


@contextlib.asynccontextmanager
async def _open_line(port: int, key: str) -> AsyncIterator[_Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield _Line(reader, writer, key)
    finally:
        writer.close()
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def _serving(broker: BrokerSettings, key: str) -> AsyncIterator[_Api]:
    port = reserve_port()
    argv = [sys.executable, "-m", "toolcrew.orchestrator", "serve", "api", "--port", str(port), "--concurrency", "0"]
    environment = {
        "TOOLCREW_REDIS_URL": broker.redis_url.get_secret_value(),
        "TOOLCREW_API_RATE": "1000000",
    }
    with tempfile.TemporaryDirectory() as folder, child_process(argv, environment, Path(folder) / "log") as child:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits) as client:
            await _until_ready(client)
            yield _Api(client, child.pid)


async def _until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/v1/runs")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


async def _ask(client: httpx.AsyncClient, method: str, path: str, **options: Any) -> httpx.Response:
    response = await client.request(method, path, **options)
    response.raise_for_status()
    return response


async def _read_by_many(
    report: Report, api: _Api, durable_runs: DurableRuns, connection: "redis.asyncio.Redis", deployment: str
) -> None:
    run = await durable_runs.start(DEFAULT_TENANT, RunBody(instruction="a run that nobody works"))
    key, before = run_events_key(deployment, DEFAULT_TENANT, run.id), api.memory_bytes()
    got, are_there = [0] * READERS, asyncio.Semaphore(0)

    async def read(number: int) -> None:
        async with api.client.stream("GET", f"/v1/runs/{run.id}/events") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("retry"):
                    are_there.release()
                got[number] += line.startswith("event: TextArrived")

    reading = [asyncio.ensure_future(read(number)) for number in range(READERS)]
    for _ in range(READERS):
        await are_there.acquire()
    report.add("readers_bytes", api.memory_bytes() - before, f"{READERS} readers that wait")
    began, had = time.monotonic(), api.processor_s()
    for number in range(EVENTS):
        await connection.xadd(key, {"e": EVENT})
        await asyncio.sleep(max(0.0, began + (number + 1) / PER_S - time.monotonic()))
    took, used = time.monotonic() - began, api.processor_s() - had
    await durable_runs.cancel(DEFAULT_TENANT, run.id)
    await asyncio.gather(*reading)
    if got != [EVENTS] * READERS:
        raise RuntimeError(f"readers got {min(got)} to {max(got)} of {EVENTS} events")
    report.add("told_bytes", api.memory_bytes() - before, "the same after all events", at_most=150 * 2**20)
    report.add("told_ratio", used / took, "processor time while they are told / time")
    report.add("told_ms", used / EVENTS / READERS * 1000, "processor time of one event to one reader")


async def _list_many(report: Report, api: _Api, durable_runs: DurableRuns) -> None:
    for _ in range(0, RUNS, AT_ONCE):
        await asyncio.gather(
            *(durable_runs.start(DEFAULT_TENANT, RunBody(instruction="Count the files.")) for _ in range(AT_ONCE))
        )
    for name, query, label in (
        ("list", "limit=50", "a page of 50"),
        ("failed", "limit=50&state=failed", "those that failed, of which there are none"),
    ):
        took = []
        for _ in range(PAGES):
            began = time.perf_counter()
            await _ask(api.client, "GET", f"/v1/runs?{query}")
            took.append(time.perf_counter() - began)
        report.add_ms(f"{name}_of_{RUNS}", took, f"of {RUNS} runs {label}")
