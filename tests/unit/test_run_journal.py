"""Replay of a run's log, and the entries that the log receives before they take effect."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode, ModelInterrupted, SandboxUnavailable
from contract.model_endpoints import Prices
from contract.run_events import ArtifactsCopied, CallFinished, SessionOpening
from orchestrator.dialects.model import Chunk, ModelRequest
from orchestrator.models.scripted import Calls, ScriptedModel
from orchestrator.runs.journal import Journal, LoggedModel
from store.run_log import RunLog
from store.runs import RunClaim
from store.usage import DAY_S, UsageStore
from tests.builders import KEY, build_call
from tests.fakes import StreamModel
from tests.run_harness import RunHarness

REQUEST = ModelRequest([{"role": "user", "content": "hello"}])
SOON_S = 15.0


@pytest.fixture
def harness(client: "redis.asyncio.Redis") -> RunHarness:
    return RunHarness(client)


async def claimed(harness: RunHarness) -> RunClaim:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    return claim


async def journal_of(harness: RunHarness, claim: RunClaim, on_taken: Any = lambda: None) -> Journal:
    return Journal(await RunLog.load(harness.client, "d", KEY, claim.attempt), on_taken, clock=lambda: 1.0)


async def read(model: LoggedModel) -> str:
    """Return the text of the model's next reply."""
    chunks = [chunk async for chunk in model.stream(REQUEST)]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def done(call: str, text: str = "fine") -> ToolResult:
    return ToolResult(call_id=call, name="echo", success=True, output=text)


async def test_a_reply_is_asked_for_and_its_tokens_count_once_however_often_it_is_replayed(harness: RunHarness) -> None:
    claim = await claimed(harness)
    requests: list[ModelRequest] = []
    for _ in range(3):
        journal = await journal_of(harness, claim)
        journal.bill("s1", Prices(1.0, 10.0))
        played = ScriptedModel(["one"])
        assert await read(LoggedModel(played, journal, {"temperature": 0.5})) == "one"
        requests += played.requests
    assert [request.extra for request in requests] == [{"temperature": 0.5}]
    usage = UsageStore(harness.client, "d")
    (row,) = await usage.read("acme", time.time() - DAY_S, time.time() + DAY_S)
    assert row.amounts == {"prompt_tokens": 1, "completion_tokens": 3, "cost_millionths": 31}
    assert await usage.read_session("acme", "s1") == row.amounts


async def test_a_reply_is_in_the_log_before_anybody_hears_of_it(harness: RunHarness) -> None:
    claim = await claimed(harness)
    stream = LoggedModel(ScriptedModel(["a long answer"]), await journal_of(harness, claim), {}).stream(REQUEST)
    await anext(stream)
    assert (await journal_of(harness, claim)).next_reply() is not None
    await stream.aclose()  # type: ignore[attr-defined]


async def test_only_calls_of_the_last_reply_of_the_log_may_have_been_sent(harness: RunHarness) -> None:
    claim = await claimed(harness)
    journal = await journal_of(harness, claim)
    model = LoggedModel(ScriptedModel(["one"]), journal, {})
    assert (journal.is_resumed, journal.is_catching_up) == (False, False)
    await read(model)
    assert not journal.is_catching_up
    resumed = await journal_of(harness, claim)
    model = LoggedModel(ScriptedModel(["two"]), resumed, {})
    assert (resumed.is_resumed, resumed.is_catching_up) == (True, False)
    await read(model)
    assert resumed.is_catching_up
    assert (resumed.sent_since("c1"), journal.sent_since("c1")) == (1.0, None)
    await read(model)
    assert not resumed.is_catching_up


async def test_an_incomplete_reply_is_neither_logged_nor_published(harness: RunHarness) -> None:
    async def torn(request: ModelRequest) -> AsyncIterator[Chunk]:
        yield {"choices": [{"index": 0, "delta": {"content": "half"}}]}
        raise ModelInterrupted("it broke off")

    claim = await claimed(harness)
    stream = LoggedModel(StreamModel(torn), await journal_of(harness, claim), {}).stream(REQUEST)
    with pytest.raises(ModelInterrupted):
        await anext(stream)
    assert (await journal_of(harness, claim)).next_reply() is None


async def test_halves_of_characters_do_not_keep_a_reply_out_of_the_log(harness: RunHarness) -> None:
    def chunk(text: str) -> Chunk:
        return {"choices": [{"index": 0, "delta": {"content": text}}]}

    async def halves(request: ModelRequest) -> AsyncIterator[Chunk]:
        for text in ("a \ud83d", "\ude00 and \ud800!"):
            yield chunk(text)

    claim = await claimed(harness)
    assert (
        await read(LoggedModel(StreamModel(halves), await journal_of(harness, claim), {})) == "a \U0001f600 and \ufffd!"
    )
    assert (
        await read(LoggedModel(ScriptedModel([]), await journal_of(harness, claim), {})) == "a \U0001f600 and \ufffd!"
    )


async def test_results_and_decisions_survive_the_process(harness: RunHarness) -> None:
    claim = await claimed(harness)
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
    assert resumed.artifacts is not None
    assert (resumed.artifacts.paths, resumed.artifacts.missing) == (("a.txt",), ("*.md",))


async def test_whose_run_was_taken_stops_and_never_comes_to_an_outcome(harness: RunHarness) -> None:
    claim = await claimed(harness)
    tasks: list[asyncio.Task[str]] = []
    journal = await journal_of(harness, claim, lambda: tasks[0].cancel())
    await harness.client.hset("toolcrew:d:t:acme:run.b-1", "claim", "another")
    tasks.append(asyncio.create_task(read(LoggedModel(ScriptedModel(["one"]), journal, {}))))
    await asyncio.wait(tasks, timeout=SOON_S)
    assert tasks[0].cancelled()
    assert await harness.client.llen("toolcrew:d:t:acme:run.b-1:log") == 0


async def test_the_run_time_survives_the_process_without_the_set_up(harness: RunHarness) -> None:
    claim = await claimed(harness)
    journal = await journal_of(harness, claim)
    await journal.record(SessionOpening, session="s1")
    assert (await journal_of(harness, claim)).spent_wall_s == 0.0
    journal.spent_wall_s = 7.0
    journal.begin()
    await journal.record(CallFinished, result=done("c1"))
    again = await journal_of(harness, claim)
    assert 7.0 <= again.spent_wall_s < 7.0 + SOON_S
    again.begin()
    await again.record(CallFinished, result=done("c2"))
    assert (await journal_of(harness, claim)).spent_wall_s >= again.spent_wall_s


async def test_a_run_whose_time_was_up_asks_its_model_nothing_more(harness: RunHarness) -> None:
    played = ScriptedModel(["one"])
    model = LoggedModel(played, await journal_of(harness, await claimed(harness)), {}, is_over=True)
    asking = asyncio.create_task(read(model))
    await asyncio.wait({asking}, timeout=0.05)
    assert (asking.done(), played.requests) == (False, [])
    asking.cancel()
    await asyncio.wait({asking})


async def test_a_lost_sandbox_stops_requests_to_the_model(harness: RunHarness) -> None:
    claim = await claimed(harness)
    journal = await journal_of(harness, claim)
    await read(LoggedModel(ScriptedModel([Calls([("echo", {})])]), journal, {}))
    await journal.record(
        CallFinished,
        result=ToolResult.failed(build_call(call_id="c1"), ErrorCode.SESSION_NOT_FOUND, "there is no such session"),
    )
    played = ScriptedModel(["a guess"])
    resumed = await journal_of(harness, claim)
    assert resumed.next_reply() is not None
    assert journal.next_reply() is None
    for candidate in (journal, resumed):
        with pytest.raises(SandboxUnavailable, match="retry the item"):
            await read(LoggedModel(played, candidate, {}))
    assert played.requests == []
