"""Replay of a run's log, and the entries that the log receives before they take effect."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from tests.support.records.builders import KEY, build_call
from tests.support.records.fakes import StreamModel
from tests.support.runs.run_harness import RunHarness
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ModelInterrupted, SandboxUnavailable
from toolcrew.contract.model_endpoints import Prices
from toolcrew.contract.run_events import ArtifactsCopied, CallFinished, SessionOpening
from toolcrew.orchestrator.dialects.model import Chunk, Model, ModelRequest
from toolcrew.orchestrator.loop.reply_stream import ReplyChanged
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.model_account import ModelAccount
from toolcrew.orchestrator.runs.run_gate import UngatedRun
from toolcrew.orchestrator.runs.run_model import RunModel
from toolcrew.store.run_log import RunLog
from toolcrew.store.run_queue import RunClaim
from toolcrew.store.usage import DAY_S, ReplySpending, UsageStore

REQUEST = ModelRequest([{"role": "user", "content": "hello"}])


@pytest.fixture
def harness(client: "redis.asyncio.Redis") -> RunHarness:
    return RunHarness(client)


@pytest.fixture
async def claim(harness: RunHarness) -> RunClaim:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    return claim


async def journal_of(harness: RunHarness, claim: RunClaim, on_taken: Any = lambda: None) -> Journal:
    return Journal(await RunLog.load(harness.client, "d", KEY, claim.attempt), on_taken, clock=lambda: 1.0)


def build_model(model: Model, journal: Journal, **sampling: object) -> RunModel:
    async def allow() -> None:
        """Every budget has room."""

    async def count(_: ReplySpending) -> int:
        return 0

    return RunModel(model, ModelAccount(allow, count, Prices(1.0, 10.0)), journal, UngatedRun(), sampling)


async def read(model: RunModel) -> str:
    """Return the text of the model's next reply."""
    chunks = [chunk async for chunk in model.stream(REQUEST)]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def done(call: str, text: str = "fine") -> ToolResult:
    return ToolResult(call_id=call, name="echo", success=True, output=text)


async def test_replayed_reply_is_requested_and_billed_once(claim: RunClaim, harness: RunHarness) -> None:
    requests: list[ModelRequest] = []
    for _ in range(3):
        journal = await journal_of(harness, claim)
        journal.bill("s1")
        model_script = ScriptedModel(["one"])
        assert await read(build_model(model_script, journal, temperature=0.5)) == "one"
        requests += model_script.requests
    assert [request.extra for request in requests] == [{"temperature": 0.5}]
    usage = UsageStore(harness.client, "d")
    (row,) = await usage.read("acme", time.time() - DAY_S, time.time() + DAY_S)
    assert row.amounts == {"prompt_tokens": 1, "completion_tokens": 3, "cost_millionths": 31}
    assert await usage.read_session("acme", "s1") == row.amounts


async def test_stream_ends_after_its_reply_is_logged(claim: RunClaim, harness: RunHarness) -> None:
    chunks = build_model(ScriptedModel(["a long answer"]), await journal_of(harness, claim)).stream(REQUEST)
    await anext(chunks)
    assert (await journal_of(harness, claim)).next_reply() is None
    async for _ in chunks:
        pass
    assert (await journal_of(harness, claim)).next_reply() is not None


async def test_only_calls_of_the_last_logged_reply_count_as_sent(claim: RunClaim, harness: RunHarness) -> None:
    journal = await journal_of(harness, claim)
    model = build_model(ScriptedModel(["one"]), journal)
    assert (journal.is_resumed, journal.is_catching_up) == (False, False)
    await read(model)
    assert not journal.is_catching_up
    resumed = await journal_of(harness, claim)
    model = build_model(ScriptedModel(["two"]), resumed)
    assert (resumed.is_resumed, resumed.is_catching_up) == (True, False)
    await read(model)
    assert resumed.is_catching_up
    assert (resumed.sent_since("c1"), journal.sent_since("c1")) == (1.0, None)
    await read(model)
    assert not resumed.is_catching_up


async def test_incomplete_reply_is_not_logged(claim: RunClaim, harness: RunHarness) -> None:
    async def stream_then_break(request: ModelRequest) -> AsyncIterator[Chunk]:
        yield {"choices": [{"index": 0, "delta": {"content": "half"}}]}
        raise ModelInterrupted("it broke off")

    stream = build_model(StreamModel(stream_then_break), await journal_of(harness, claim)).stream(REQUEST)
    assert (await anext(stream))["choices"]
    with pytest.raises(ModelInterrupted):
        await anext(stream)
    assert (await journal_of(harness, claim)).next_reply() is None


async def test_reply_with_lone_surrogates_is_logged(claim: RunClaim, harness: RunHarness) -> None:
    def chunk(text: str) -> Chunk:
        return {"choices": [{"index": 0, "delta": {"content": text}}]}

    async def stream_surrogates(request: ModelRequest) -> AsyncIterator[Chunk]:
        for text in ("a \ud83d", "\ude00 and \ud800!"):
            yield chunk(text)

    with pytest.raises(ReplyChanged) as changed:
        await read(build_model(StreamModel(stream_surrogates), await journal_of(harness, claim)))
    (changed_chunk,) = changed.value.chunks
    assert changed_chunk["choices"][0]["delta"] == {"content": "a \U0001f600 and \ufffd!"}
    assert await read(build_model(ScriptedModel([]), await journal_of(harness, claim))) == "a \U0001f600 and \ufffd!"


async def test_results_and_reviews_are_read_back_from_the_log(claim: RunClaim, harness: RunHarness) -> None:
    journal = await journal_of(harness, claim)
    refusal = ToolResult.failed(build_call(call_id="c2"), ErrorCode.PERMISSION_DENIED, "no")
    await journal.record(CallFinished, result=done("c1"))
    await journal.record_review("c1", build_call(call_id="c1", text="changed"))
    await journal.record_review("c2", refusal)
    await journal.record(ArtifactsCopied, paths=("a.txt",), missing=("*.md",))
    resumed = await journal_of(harness, claim)
    assert resumed.result_of("c1") == done("c1")
    assert isinstance(approved := resumed.review_of("c1"), ToolCall)
    assert approved.arguments == {"text": "changed"}
    assert resumed.review_of("c2") == refusal
    assert (resumed.result_of("c2"), resumed.review_of("c3")) == (None, None)
    assert (resumed.artifacts.paths, resumed.artifacts.missing) == (("a.txt",), ("*.md",))


async def test_process_that_lost_the_run_stops_at_the_next_reply(claim: RunClaim, harness: RunHarness) -> None:
    tasks: list[asyncio.Task[str]] = []
    journal = await journal_of(harness, claim, lambda: tasks[0].cancel())
    await harness.client.hset("toolcrew:d:t:acme:run.b-1", "claim", "another")
    tasks.append(asyncio.create_task(read(build_model(ScriptedModel(["one"]), journal))))
    await asyncio.wait(tasks, timeout=SOON_S)
    assert tasks[0].cancelled()
    assert await harness.client.llen("toolcrew:d:t:acme:run.b-1:log") == 0


async def test_run_time_is_kept_across_processes_without_the_session_setup(
    claim: RunClaim, harness: RunHarness
) -> None:
    journal = await journal_of(harness, claim)
    await journal.record(SessionOpening, session="s1")
    assert (await journal_of(harness, claim)).spent_wall_s == 0.0
    journal.spent_wall_s = 7.0
    journal.begin()
    await journal.record(CallFinished, result=done("c1"))
    next_journal = await journal_of(harness, claim)
    assert 7.0 <= next_journal.spent_wall_s < 7.0 + SOON_S
    next_journal.begin()
    await next_journal.record(CallFinished, result=done("c2"))
    assert (await journal_of(harness, claim)).spent_wall_s >= next_journal.spent_wall_s


async def test_lost_sandbox_stops_model_requests(claim: RunClaim, harness: RunHarness) -> None:
    journal = await journal_of(harness, claim)
    await read(build_model(ScriptedModel([Calls([("echo", {})])]), journal))
    await journal.record(
        CallFinished,
        result=ToolResult.failed(build_call(call_id="c1"), ErrorCode.SESSION_NOT_FOUND, "there is no such session"),
    )
    model_script = ScriptedModel(["a guess"])
    resumed = await journal_of(harness, claim)
    assert resumed.next_reply() is not None
    assert journal.next_reply() is None
    for candidate in (journal, resumed):
        with pytest.raises(SandboxUnavailable, match="retry the item"):
            await read(build_model(model_script, candidate))
    assert model_script.requests == []
