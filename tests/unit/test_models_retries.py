"""Retries of failed requests: which requests and after which delay. First the arithmetic, then OpenAIModel against a
server that fails at first.
"""

from email.utils import formatdate

import pytest

from contract.errors import ContextWindowExceeded, ModelInterrupted
from orchestrator.dialects.model import Chunk, ModelRequest
from orchestrator.models.openai import OpenAIModel
from orchestrator.models.retries import RetryPolicy, parse_retry_after
from tests.model_endpoint import END, HELLO, ROLE, Waits, answer, cut_stream, failure, read, serving, stream

KEY = "sk-very-secret-key"
NOW = 1_800_000_000.0


def now() -> float:
    return NOW


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"base_s": -1}, {"max_wait_s": -1}, {"factor": 0.5}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not a valid retry policy"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after": "0"}, 0),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7),
        ({"retry-after": formatdate(NOW + 30, usegmt=True)}, 30),
        ({"retry-after": formatdate(NOW - 30, usegmt=True)}, 0),
        ({"retry-after": formatdate(NOW + 930, usegmt=True), "date": formatdate(NOW + 900, usegmt=True)}, 30),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1e3"}, None),
        ({"retry-after": "tomorrow"}, None),
        ({"retry-after": "Wed, 99 Foo 2026 99:99:99 GMT"}, None),
        ({"retry-after": "9" * 400}, float("inf")),
    ],
)
def test_retry_after_is_read_in_three_forms(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after(headers, now) == seconds


# Against a server


def build(url: str, waits: Waits, *, attempts: int = 3, streaming: bool = True) -> OpenAIModel:
    return OpenAIModel("m", url, KEY, 5.0, retries=RetryPolicy(attempts=attempts, sleep=waits), streaming=streaming)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
async def test_a_busy_server_is_retried(status: int, waits: Waits) -> None:
    async with serving([answer(status, {}), stream(END)]) as server:
        assert await read(build(server.url, waits)) == [END]
    [wait] = waits.kept
    assert 0 <= wait <= 0.5


async def test_a_used_up_quota_is_no_rate_limit(waits: Waits) -> None:
    async with serving(
        [answer(429, {"error": {"code": "insufficient_quota", "message": "pay"}}), stream(END)]
    ) as server:
        assert "quota is used up" in str(await failure(read(build(server.url, waits))))
    assert waits.kept == []


async def test_a_server_that_says_not_to_retry_is_obeyed(waits: Waits) -> None:
    async with serving([answer(503, {}, x_should_retry="false"), stream(END)]) as server:
        await failure(read(build(server.url, waits)))
    assert waits.kept == []


@pytest.mark.parametrize(
    ("reply", "wait_s"), [(answer(429, {}, retry_after="7"), 7.0), (answer(503, {}, retry_after_ms="1500"), 1.5)]
)
async def test_the_wait_that_the_server_asks_for_holds_all_requests(reply: bytes, wait_s: float, waits: Waits) -> None:
    async with serving([reply, stream(END)]) as server:
        model = build(server.url, waits)
        for _ in range(2):
            assert [chunk async for chunk in model.stream(ModelRequest([]))] == [END]
        await model.aclose()
    assert waits.kept == pytest.approx([wait_s, wait_s], abs=0.5)


async def test_a_too_long_wait_is_an_error(waits: Waits) -> None:
    async with serving([answer(429, {}, retry_after="3600"), stream(END)]) as server:
        sentence = str(await failure(read(build(server.url, waits))))
    assert "a wait of 3600 s, and the limit is 60 s" in sentence
    assert waits.kept == []


async def test_it_gives_up_after_the_attempts_and_says_how_many(waits: Waits) -> None:
    async with serving([answer(503, {})]) as server:
        assert "(tried 3 times)" in str(await failure(read(build(server.url, waits))))
        assert len(server.bodies) == 3
    assert len(waits.kept) == 2


@pytest.mark.parametrize(
    "broken",
    [
        stream(done=False),
        stream(ROLE, done=False),
        cut_stream(ROLE),
        stream({"error": {"message": "overloaded", "code": 503}}),
        stream({"error": {"message": "something broke"}}),
        stream({"object": "error", "message": "engine died", "code": 500}),
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {broken\n\n",
    ],
)
async def test_a_break_before_content_is_retried(broken: bytes, waits: Waits) -> None:
    async with serving([broken, stream(ROLE, HELLO, END)]) as server:
        assert await read(build(server.url, waits)) == [ROLE, HELLO, END]
    assert len(waits.kept) == 1


CALL = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "x"}}]}}]}
THOUGHT = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}


@pytest.mark.parametrize("part", [HELLO, CALL, THOUGHT])
@pytest.mark.parametrize("is_cut", [True, False])
async def test_a_break_after_content_is_an_error(part: Chunk, is_cut: bool, waits: Waits) -> None:
    chunks: list[Chunk] = []

    async def keep(model: OpenAIModel) -> None:
        async for chunk in model.stream(ModelRequest([])):
            chunks.append(chunk)

    async with serving([cut_stream(ROLE, part) if is_cut else stream(ROLE, part, done=False)]) as server:
        model = build(server.url, waits)
        with pytest.raises(ModelInterrupted):
            await keep(model)
        await model.aclose()
        assert len(server.bodies) == 1
    assert chunks == [ROLE, part]


async def test_an_error_of_the_server_after_a_part_is_an_interruption_with_its_words(waits: Waits) -> None:
    async with serving([stream(HELLO, {"error": {"message": f"out of memory {KEY}", "code": 500}})]) as server:
        error = await failure(read(build(server.url, waits)))
    assert isinstance(error, ModelInterrupted)
    assert "out of memory ***" in str(error)


async def test_a_reply_that_grows_too_long_is_no_interruption(waits: Waits) -> None:
    body = {"error": {"message": "context full", "type": "exceed_context_size_error", "n_ctx": 512}}
    async with serving([stream(HELLO, body)]) as server:
        error = await failure(read(build(server.url, waits)))
    assert isinstance(error, ContextWindowExceeded)
    assert error.limit_tokens == 512
