"""Reading what tenants have stored takes bounded memory, over all requests of a process."""

import asyncio
import json
import tracemalloc
import zlib
from types import SimpleNamespace

import pytest
import redis.asyncio

from tests.support.records.builders import KEY
from tests.support.runs.run_harness import RunHarness, build_outcome
from toolcrew.concurrency import read_memory
from toolcrew.concurrency.read_memory import ReadMemory
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.run_events import CallFinished
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.runs.client_batches import ClientBatches
from toolcrew.orchestrator.runs.run_forks import read_shared_steps
from toolcrew.store.blobs import PIECE_BYTES, Blobs
from toolcrew.store.run_log import RunLog, inflate_transcript, measure_transcript, pack_transcript

SIZE, COUNT = 200_000, 100


async def test_reads_of_all_requests_together_stay_below_the_limit() -> None:
    memory, running, highest = ReadMemory(total=120), 0, 0

    async def read(tenant: str) -> None:
        nonlocal running, highest
        async with memory.reserve(tenant, 30):
            running += 1
            highest = max(highest, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(read(f"tenant-{number}") for number in range(20)))
    assert highest == 3


async def test_a_tenant_with_large_reads_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_memory, "WAIT_S", 0.05)
    memory = ReadMemory(total=100)
    async with memory.reserve("greedy", 40):
        with pytest.raises(ToolFailure) as refused:
            async with memory.reserve("greedy", 40):
                pass
        assert refused.value.code is ErrorCode.RATE_LIMITED
        async with memory.reserve("other", 40):
            pass
    # Everything was given back.
    async with memory.reserve("greedy", 43), memory.reserve("other", 43):
        pass


async def test_large_reads_of_slow_clients_leave_memory_to_small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_memory, "WAIT_S", 0.05)
    memory = ReadMemory(total=1024)
    async with memory.reserve("slow", 448), memory.reserve("slower", 448):
        async with memory.reserve("other", 4):
            pass
        with pytest.raises(ToolFailure) as refused:
            async with memory.reserve("other", 5):
                pass
    assert refused.value.code is ErrorCode.RATE_LIMITED


async def test_a_read_that_never_fits_is_refused_at_once() -> None:
    with pytest.raises(ToolFailure) as refused:
        async with ReadMemory(total=100).reserve("acme", 51):
            pass
    assert refused.value.code is ErrorCode.FILE_TOO_LARGE


async def test_a_cancelled_read_gives_its_memory_back() -> None:
    memory, has_begun = ReadMemory(total=100), asyncio.Event()

    async def read() -> None:
        async with memory.reserve("acme", 50):
            has_begun.set()
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(read())
    await has_begun.wait()
    task.cancel()
    await asyncio.wait((task,))
    async with memory.reserve("acme", 50):
        pass


async def test_a_fork_reads_a_large_log_a_page_at_a_time(client: "redis.asyncio.Redis") -> None:
    harness = RunHarness(client)
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    log = await RunLog.load(client, "d", KEY, claim.attempt)
    for number in range(COUNT):
        result = ToolResult(call_id=f"b-1-1-{number}", name="bash_tool", success=True, output="x" * SIZE)
        await log.append(CallFinished(run="b-1", result=result))
    assert SIZE * COUNT < await harness.queue.runs.log_bytes("acme", "b-1") < 1.1 * SIZE * COUNT
    del log
    tracemalloc.start()
    try:
        _, entries = await harness.queue.runs.open_log("acme", "b-1", batch=None)
        shared = await read_shared_steps(entries, "b-1", 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert shared.count == COUNT
    assert peak < SIZE * COUNT * 0.8


def test_a_transcript_is_inflated_in_pieces() -> None:
    messages = [{"role": "user", "content": "\u4e16\ud800 " * 1_000_000, "score": float("nan")}]
    packed = pack_transcript(json.loads(json.dumps(messages)))
    tracemalloc.start()
    try:
        assert measure_transcript("r", [packed]) > 8_000_000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    [message] = json.loads(
        b"".join(inflate_transcript("r", [packed[:7], packed[7:], b"rest"])), parse_constant=pytest.fail
    )
    assert message == {**messages[0], "score": None}


async def test_a_file_of_a_session_is_reserved_before_it_is_read(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, blobs = ReadMemory(total=3 * PIECE_BYTES), Blobs(client, "d")
    monkeypatch.setattr("toolcrew.store.blobs.read_memory", lambda: memory)
    monkeypatch.setattr(read_memory, "WAIT_S", 0.05)
    data = bytes(PIECE_BYTES) + b"end"
    first, second = await blobs.leave("acme", data), await blobs.leave("acme", data)
    async with blobs.hold("acme", first) as (pieces, _):
        assert b"".join(pieces) == data
        with pytest.raises(ToolFailure) as refused:
            async with blobs.hold("acme", second):
                pass
    assert refused.value.code is ErrorCode.RATE_LIMITED
    assert memory.used == 0
    assert not await client.exists(first, second)


async def test_a_page_of_results_is_reserved_until_its_reader_has_received_it(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ReadMemory()
    monkeypatch.setattr("toolcrew.orchestrator.runs.client_batches.read_memory", lambda: memory)
    harness = RunHarness(client)
    await harness.submit(2)
    for claim in await harness.queue.claim(2):
        await harness.queue.finish(claim, build_outcome(claim))
    pool = SimpleNamespace(redis=client, keys=KEY, dispatcher=None)
    runs = ClientBatches(OrchestratorSettings(deployment="d"), pool, None, "acme")  # type: ignore[arg-type]
    outcomes = runs.outcomes("b")
    await anext(outcomes)
    assert memory.used > 0
    await outcomes.aclose()
    assert memory.used == 0


@pytest.mark.parametrize(
    "packed", [b"x", b"", zlib.compress(b"[]" * 1000)[:-2], zlib.compress(b" " * (65 * 1024 * 1024))]
)
def test_a_damaged_or_endless_transcript_is_refused(packed: bytes) -> None:
    with pytest.raises(ConfigError, match="transcript of run r"):
        measure_transcript("r", [packed])
