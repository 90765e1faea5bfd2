"""Attacks that hold resources of the API: idle connections, streams, unread responses, and unfinished bodies."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from tests.conftest import RedisProcess
from tests.support.api.api_harness import ApiHarness, open_api
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.concurrency.read_memory import ReadMemory
from toolcrew.orchestrator.api import shares
from toolcrew.orchestrator.api.calls import NewCall, _stream
from toolcrew.orchestrator.api.shares import ConcurrencyLimit, FairQueue
from toolcrew.orchestrator.api.sse import EventStream, ServerEvent
from toolcrew.orchestrator.http import body_limits, server
from toolcrew.orchestrator.http.piece_responses import PIECE_BYTES, FileAnswer, PieceResponse, split_pieces
from toolcrew.orchestrator.http.server import HeadTimeoutProtocol
from toolcrew.orchestrator.sessions.session import Session

LONG_LINE = "x" * 100_000


def address(api: ApiHarness) -> tuple[str, int]:
    host, port = api.url.removeprefix("http://").split(":")
    return host, int(port)


@contextlib.asynccontextmanager
async def idle_connections(api: ApiHarness, number: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    opened = [await asyncio.open_connection(*address(api)) for _ in range(number)]
    try:
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()


async def test_idle_connections_above_the_limit_are_closed_and_new_requests_are_served(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 50)
    async with idle_connections(api, 60) as readers:
        # The first connections have been closed.
        assert await asyncio.wait_for(readers[0].read(), SOON_S) == b""
        async with api.client(api.keys["acme"]) as client:
            assert (await client.get("/v1/runs")).status_code == 200


async def test_requests_are_served_next_to_two_thousand_idle_connections(api: ApiHarness) -> None:
    async with idle_connections(api, 2000), api.client(api.keys["acme"]) as client:
        assert (await client.get("/v1/runs")).status_code == 200


async def test_an_open_event_stream_survives_the_connection_limit(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await start_run(api)
    async with api["acme"].stream("GET", f"/v1/runs/{run}/events") as stream:
        lines = stream.aiter_lines()
        assert await anext(lines) == "retry: 2000"
        monkeypatch.setattr(server, "MAX_CONNECTIONS", 10)
        async with idle_connections(api, 30):
            await api["rival"].get("/v1/runs")
            assert (await api["acme"].post(f"/v1/runs/{run}/cancel")).json()["state"] == "cancelled"
            assert "event: RunEnded" in [line async for line in lines]


async def start_run(api: ApiHarness) -> str:
    """Start a run that no orchestrator executes."""
    return str((await api["acme"].post("/v1/runs", json={"instruction": "x"})).json()["id"])


async def test_a_key_has_a_limit_of_streams_that_does_not_affect_other_keys(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "STREAMS_OF_A_KEY", 2)
    run = await start_run(api)
    path = f"/v1/runs/{run}/events"
    async with contextlib.AsyncExitStack() as open_ones:
        for _ in range(2):
            assert (await open_ones.enter_async_context(api["acme"].stream("GET", path))).status_code == 200
        refused = await open_ones.enter_async_context(api["acme"].stream("GET", path))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert b"TOO_MANY_REQUESTS" in await refused.aread()
        async with api["operator"].stream("GET", path, params={"tenant": "acme"}) as other:
            assert other.status_code == 200
    async with asyncio.timeout(SOON_S):
        # The service notices the closed connections a moment later.
        while True:
            async with api["acme"].stream("GET", path) as again:
                if again.status_code == 200:
                    break
            await asyncio.sleep(0.02)


async def test_a_client_that_reads_no_response_is_disconnected(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SLOW_CLIENT_S", 0.3)
    with socket.socket() as slow_client:
        # The buffers are so small that the service's own memory would have to hold the responses.
        slow_client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(slow_client.connect, address(api))
        slow_client.settimeout(30)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await asyncio.to_thread(send_endless_requests, slow_client)


def send_endless_requests(slow_client: socket.socket) -> None:
    request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(100_000):
        slow_client.sendall(request * 20)


async def test_a_body_is_not_read_without_a_valid_key(api: ApiHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limits, "LINGER_S", 0.2)
    reader, writer = await asyncio.open_connection(*address(api))
    writer.write(
        b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{"
    )
    answer = await asyncio.wait_for(reader.read(), SOON_S)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 401")


async def test_the_memory_of_all_bodies_is_limited(api: ApiHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limits, "BODY_MEMORY_BYTES", 100_000)
    refused = await api["acme"].post("/v1/runs", json={"instruction": "x" * 200_000})
    assert (refused.status_code, refused.json()["code"]) == (503, "NOT_READY")
    for _ in range(5):
        # The held resources are released each time.
        assert (await api["acme"].post("/v1/runs", json={"instruction": "x" * 60_000})).status_code == 202


@contextlib.asynccontextmanager
async def unfinished_bodies(api: ApiHarness, number: int, of_bytes: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Open requests of acme whose bodies have begun and do not continue."""
    head = (
        f"POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.keys['acme']}\r\nContent-Length: "
        f"{of_bytes}\r\n\r\n{{"
    )
    opened = [await asyncio.open_connection(*address(api)) for _ in range(number)]
    try:
        for _, writer in opened:
            writer.write(head.encode())
            await writer.drain()
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()


async def test_a_tenant_whose_bodies_fill_its_share_is_refused_and_another_is_served(api: ApiHarness) -> None:
    most = body_limits.TENANT_BYTES // body_limits.JSON_BYTES
    async with unfinished_bodies(api, 300, body_limits.JSON_BYTES) as readers:
        answers = [asyncio.ensure_future(reader.read()) for reader in readers]
        refused: list[bytes] = []
        for answer in asyncio.as_completed(answers):
            refused.append(await answer)
            if len(refused) == len(readers) - most:
                break
        assert {answer.split(b"\r\n")[0] for answer in refused} == {b"HTTP/1.1 429 Too Many Requests"}
        assert b"until other requests have ended" in refused[0]
        large = {"instruction": "x" * 1_000_000}
        assert (await asyncio.wait_for(api["rival"].post("/v1/runs", json=large), SOON_S)).status_code == 202
        assert (await api["acme"].post("/v1/runs", json={"instruction": "x" * 100})).status_code == 429
        for waiting in answers:
            waiting.cancel()
    # The service notices a moment later that the connections were closed.
    await wait_until_async(
        lambda: api["acme"].post("/v1/runs", json={"instruction": "x" * 100}),
        SOON_S,
        "taken",
        accepts=lambda answer: answer.status_code == 202,
    )


async def test_the_rate_limit_of_a_key_is_checked_before_the_body_is_read(
    redis_server: RedisProcess, five_at_once: None
) -> None:
    async with (
        open_api(redis_server.url, api_rate=0.01) as api,
        unfinished_bodies(api, 10, 1000) as readers,
    ):
        answers = await asyncio.gather(*(asyncio.wait_for(reader.readline(), SOON_S) for reader in readers[5:]))
        assert answers == [b"HTTP/1.1 429 Too Many Requests\r\n"] * 5
        assert (await api["rival"].post("/v1/runs", json={"instruction": "x"})).status_code == 202


async def test_a_request_with_a_body_counts_once_in_the_rate_limit(
    redis_server: RedisProcess, five_at_once: None
) -> None:
    async with open_api(redis_server.url, api_rate=0.01) as api:
        answers = [
            await api["acme"].post("/v1/runs", json={"instruction": "x"}, headers={"Idempotency-Key": "a"})
            for _ in range(6)
        ]
        assert [answer.status_code for answer in answers] == [202] * 5 + [429]


async def test_a_concurrency_limit_is_enforced_and_its_entry_is_removed_when_idle() -> None:
    turns, inside, most = ConcurrencyLimit(2), 0, 0

    async def take() -> None:
        nonlocal inside, most
        async with turns.enter("k"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(take() for _ in range(10)))
    assert (most, turns._semaphores) == (2, {})


async def test_the_fair_queue_alternates_between_tenants() -> None:
    fair, order = FairQueue(), list[str]()

    async def take(tenant: str) -> None:
        async with fair.enter(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(take(tenant) for tenant in ("a", "a", "a", "a", "b", "c", "b")))
    assert order[:3] == ["a", "b", "c"]
    assert sorted(order) == ["a", "a", "a", "a", "b", "b", "c"]


async def test_a_file_is_sent_in_chunks_and_its_resources_are_released_afterwards() -> None:
    sent: list[int] = []
    let_go = asyncio.Event()
    held = contextlib.AsyncExitStack()
    held.callback(let_go.set)

    async def send(message: object) -> None:
        assert isinstance(message, dict)
        assert not let_go.is_set()
        sent.append(len(message.get("body", b"")))

    reservation = await held.enter_async_context(ReadMemory().reserve("acme", PIECE_BYTES * 3))
    answer = FileAnswer(split_pieces(b"x" * (PIECE_BYTES * 2 + 1)), reservation, {}, held)
    await answer({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert sent == [0, PIECE_BYTES, PIECE_BYTES, 1, 0]
    assert let_go.is_set()


async def test_a_client_that_reads_nothing_releases_the_memory_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.orchestrator.http.piece_responses.WRITE_WITHIN_S", 0.2)
    memory, held = ReadMemory(total=PIECE_BYTES * 4), contextlib.AsyncExitStack()
    reservation = await held.enter_async_context(memory.reserve("acme", PIECE_BYTES * 2))
    answer = FileAnswer(split_pieces(bytes(PIECE_BYTES * 2)), reservation, {}, held)

    async def send(message: object) -> None:
        if isinstance(message, dict) and message.get("body"):
            await asyncio.Event().wait()

    async with asyncio.timeout(SOON_S):
        await answer({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    async with memory.reserve("acme", PIECE_BYTES * 2):
        pass


async def test_a_client_that_reads_slowly_is_disconnected_although_it_takes_every_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolcrew.orchestrator.http.piece_responses.WRITE_WITHIN_S", 0.3)
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"x"

    async def send(message: object) -> None:
        nonlocal taken
        if isinstance(message, dict) and message.get("body"):
            await asyncio.sleep(0.1)
            taken += 1

    async with asyncio.timeout(SOON_S):
        answer = PieceResponse(pieces(), {}, contextlib.AsyncExitStack())
        await answer({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert taken <= 3


async def test_memory_of_sent_pieces_is_released_before_the_end() -> None:
    memory, held, free = ReadMemory(total=PIECE_BYTES * 6), contextlib.AsyncExitStack(), list[int]()
    reservation = await held.enter_async_context(memory.reserve("acme", PIECE_BYTES * 3))
    answer = FileAnswer(split_pieces(bytes(PIECE_BYTES * 3)), reservation, {}, held)

    async def send(message: object) -> None:
        if isinstance(message, dict) and message.get("body"):
            free.append(PIECE_BYTES * 6 - memory.used)

    await answer({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert [size // PIECE_BYTES for size in free] == [3, 4, 5]
    assert memory.used == 0


async def test_an_event_stream_produces_no_more_events_than_its_reader_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    async def events() -> AsyncIterator[ServerEvent]:
        nonlocal made
        while True:
            made += 1
            yield ServerEvent("output", LONG_LINE, str(made))

    admitted = 0

    async def send(_: object) -> None:
        nonlocal admitted
        admitted += 1
        if admitted == 10:
            await asyncio.Event().wait()

    monkeypatch.setattr("toolcrew.orchestrator.http.piece_responses.WRITE_WITHIN_S", 0.2)
    await EventStream(events())({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert made <= admitted + 1


class FakeConnection(asyncio.Transport):
    """A connection whose other end reads as much as the test decides. `size`: unread bytes."""

    size = 0
    is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_slow_client_that_keeps_reading_is_not_disconnected() -> None:
    connection = HeadTimeoutProtocol(uvicorn.Config(lambda: None, log_config=None), ServerState(), {})
    line = FakeConnection()
    connection.connection_made(line)
    line.size = 10_000_000
    connection.pause_writing()
    for _ in range(3):
        line.size -= 1_000_000
        connection._judge_taking()
        assert not line.is_aborted
    connection._judge_taking()
    assert line.is_aborted
    connection.connection_lost(OSError())


class HangingSession:
    """A session whose calls never end by themselves."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def call(self, *_: object, **__: object) -> None:
        self.begun.set()
        await asyncio.Event().wait()


async def test_a_client_disconnect_during_a_call_leaves_no_task() -> None:
    session = HangingSession()
    following = asyncio.ensure_future(anext(_stream(cast(Session, session), NewCall(name="bash"), None)))
    await session.begun.wait()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_slow_batch_upload_does_not_delay_another_tenant(api: ApiHarness) -> None:
    lines = "".join(f'{{"id": "{number}", "instruction": "{"x" * 600_000}"}}\n' for number in range(8))
    lines_of = {"Content-Type": "application/jsonl"}
    head = (
        f"POST /v1/batches HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.keys['acme']}\r\nContent-Length: "
        "100000000\r\n\r\n"
    )
    writers = []
    try:
        answers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*address(api))
            writers.append(writer)
            writer.write(head.encode() + lines.encode()[:4_500_000])
            answers.append(asyncio.ensure_future(reader.readline()))
        # One of two requests of the same key is refused, so the other request is being read.
        (answered,), (waiting,) = await asyncio.wait(answers, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert answered.result().startswith(b"HTTP/1.1 429")
        waiting.cancel()
        assert (await api["rival"].post("/v1/batches", content=lines, headers=lines_of)).status_code == 201
    finally:
        for writer in writers:
            writer.close()
