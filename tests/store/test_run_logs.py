"""A run's log on a real Redis: only the holder appends, nothing is appended twice, and entries that Redis lost are
written again.
"""

from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as LostConnection

from tests.support.records.builders import KEY
from tests.support.runs.run_harness import RunHarness
from toolcrew.contract.run_events import SessionOpening
from toolcrew.orchestrator.dialects.native_assembler import NativeCallAssembler
from toolcrew.orchestrator.runs.chunks import join_chunks
from toolcrew.store import run_log
from toolcrew.store.run_log import PAGE, RunAttempt, RunLog, RunTaken

LOG = "toolcrew:d:t:acme:run.b-1:log"


@pytest.fixture
def harness(client: "redis.asyncio.Redis") -> RunHarness:
    return RunHarness(client)


async def claim_log(harness: RunHarness) -> RunLog:
    """Return the log of a run that was just claimed."""
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    return await load(harness, claim.token)


async def load(harness: RunHarness, claim_field: str) -> RunLog:
    return await RunLog.load(harness.client, "d", KEY, RunAttempt("acme", "b-1", 1, claim_field))


def opening(number: int) -> SessionOpening:
    return SessionOpening(run="b-1", at=number, session=f"s{number}")


async def test_log_of_several_pages_is_read_completely(harness: RunHarness) -> None:
    log = await claim_log(harness)
    for number in range(2 * PAGE):
        await log.append(opening(number))
    assert (await load(harness, "")).entries == log.entries


async def test_process_that_lost_the_run_appends_nothing(harness: RunHarness) -> None:
    log = await claim_log(harness)
    await harness.client.hset("toolcrew:d:t:acme:run.b-1", "claim", "another")
    with pytest.raises(RunTaken):
        await log.append(opening(1))
    assert await harness.client.llen(LOG) == 0


async def test_lost_reply_does_not_repeat_a_log_entry(harness: RunHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "RETRY_S", (0.0,))
    log = await claim_log(harness)
    original_append, lost = run_log._APPEND.run, [LostConnection("cut"), LostConnection("cut")]

    async def append(client: Any, **values: Any) -> Any:
        reply = await original_append(client, **values)
        if lost:
            raise lost.pop()
        return reply

    monkeypatch.setattr(run_log._APPEND, "run", append)
    await log.append(opening(1))
    await log.append(opening(2))
    assert (await load(harness, "")).entries == [opening(1), opening(2)]


async def test_entries_lost_by_redis_are_appended_again(harness: RunHarness) -> None:
    log = await claim_log(harness)
    for number in range(4):
        await log.append(opening(number))
    await harness.client.rpop(LOG, 3)
    await log.append(opening(4))
    assert (await load(harness, "")).entries == [opening(number) for number in range(5)]


def text_chunk(text: str, **fields: Any) -> dict[str, Any]:
    return {"id": "r", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields}


def call_chunk(index: int, text: str) -> dict[str, Any]:
    call = {"index": index, "function": {"arguments": text}}
    return {"id": "r", "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}


def call_start(index: int) -> dict[str, Any]:
    call = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": "echo", "arguments": ""}}
    return {"id": "r", "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}


def test_text_and_argument_chunks_are_joined() -> None:
    chunks = [
        text_chunk("a"),
        text_chunk("b"),
        call_start(0),
        call_chunk(0, '{"x"'),
        call_chunk(0, ": 1}"),
        call_chunk(1, "{}"),
    ]
    assert join_chunks(chunks) == [text_chunk("ab"), call_start(0), call_chunk(0, '{"x": 1}'), call_chunk(1, "{}")]
    assert chunks[0] == text_chunk("a")


def test_chunks_with_other_fields_are_not_joined() -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 1}}
    unjoinable = [
        text_chunk("a", usage={"prompt_tokens": 1}),
        {"odd": 1},
        {"choices": None},
        {"choices": [1]},
        text_chunk("b", id="other"),
    ]
    assert join_chunks([*unjoinable, end, usage]) == [*unjoinable, end, usage]


PIECES = st.lists(
    st.one_of(
        st.builds(text_chunk, st.text(max_size=3)),
        st.builds(call_chunk, st.integers(0, 2), st.text(max_size=3)),
        st.builds(call_start, st.integers(0, 2)),
    ),
    max_size=30,
)


@given(PIECES)
def test_joined_chunks_assemble_to_the_same_reply(chunks: list[dict[str, Any]]) -> None:
    def read(reply_chunks: list[dict[str, Any]]) -> tuple[str, object]:
        assembler, text = NativeCallAssembler(), ""
        for chunk in reply_chunks:
            delta = chunk["choices"][0]["delta"]
            text += delta.get("content") or ""
            assembler.feed(chunk)
        return text, assembler.finish(strict=False)

    joined = join_chunks(chunks)
    assert len(joined) <= len(chunks)
    assert read(joined) == read(chunks)
