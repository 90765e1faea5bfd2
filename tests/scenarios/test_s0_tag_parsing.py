"""Rows S0-01 to S0-08 of the scenarios: calls as tags in the text, and the moment at which calls and the surrounding
text leave a stream.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from tests.support.records.fakes import StreamModel
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.run_events import CallFinished, CallStarted, RunEvent, TextArrived
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest
from toolcrew.orchestrator.dialects.tag_events import MalformedTag, TagCall, TagEvent, Text
from toolcrew.orchestrator.dialects.tag_parser import TagStreamParser
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.functions.function_tools import tool
from toolcrew.orchestrator.loop.agent import Agent, RunResult
from toolcrew.orchestrator.models.scripted import ScriptedModel
from toolcrew.orchestrator.sdk.local_tools import LocalTools

SEARCH = """<tool_action name="vector-search">
  <query value="读取文件" />
  <limit value="5" />
</tool_action>"""
THREE_CHUNKS = (
    '思考: 我需要搜索...<tool_action name="',
    'vector-search"><query value="test"',
    '" /></tool_action>接下来...',
)


class EventRecorder:
    """Records events as they happen, and waits for an event."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self._changed = asyncio.Event()

    def record(self, event: RunEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, is_it: Callable[["EventRecorder"], bool]) -> None:
        """Wait until `is_it` holds. Raises TimeoutError if the condition needs more input."""
        async with asyncio.timeout(SOON_S):
            while not is_it(self):
                self._changed.clear()
                await self._changed.wait()

    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextArrived))

    def has(self, kind: type[RunEvent]) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def texts_and_calls(self) -> list[str]:
        """Return the texts, with adjacent texts joined, and the marks of calls."""
        messages: list[str] = []
        for event in self.events:
            if isinstance(event, CallStarted | CallFinished):
                messages.append(f"[{type(event).__name__}]")
            elif isinstance(event, TextArrived) and messages and not messages[-1].startswith("["):
                messages[-1] += event.text
            elif isinstance(event, TextArrived):
                messages.append(event.text)
        return messages


@tool(name="vector-search")
async def vector_search(query: str, limit: int = 10) -> str:
    """Search the code base."""
    return f"{limit} of {query}"


async def work(model: Any, observer: EventRecorder | None = None, tools: Sequence[Any] = (vector_search,)) -> RunResult:
    local = LocalTools(tools)
    agent = Agent(model, TagsDialect(), local.specs(), local.run_call, on_event=(observer or EventRecorder()).record)
    async with asyncio.timeout(SOON_S):
        return await agent.run("找一下")


def chunk(text: str) -> Chunk:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def parse(*chunks: str) -> list[TagEvent]:
    parser = TagStreamParser()
    return [event for text in chunks for event in parser.feed(text)] + parser.finish()


# S0-01 to S0-04: parsing


def test_s0_01_a_call_tag_with_parameter_tags_is_a_call() -> None:
    raw = '<tool_action name="工具名称"><参数名 value="参数值" /></tool_action>'
    assert parse(raw) == [TagCall("工具名称", {"参数名": "参数值"}, raw)]


def test_s0_01_an_incomplete_tag_is_no_call() -> None:
    for end in range(len(SEARCH)):
        assert not any(isinstance(event, TagCall) for event in parse(SEARCH[:end])), SEARCH[:end]
    assert any(isinstance(event, TagCall) for event in parse(SEARCH))


def test_s0_02_name_and_parameters_are_parsed_as_strings() -> None:
    assert parse(SEARCH) == [TagCall("vector-search", {"query": "读取文件", "limit": "5"}, SEARCH)]


async def test_s0_02_the_tool_is_called_and_its_result_is_returned_to_the_model() -> None:
    model = ScriptedModel([SEARCH, "找到了。"])
    result = await work(model)
    assert (result.answer, result.steps) == ("找到了。", 2)
    assert "5 of 读取文件" in model.requests[1].messages[-1]["content"]


@pytest.mark.parametrize("is_read_only", [False, True], ids=["writing", "read-only"])
@pytest.mark.parametrize("between", ["\n", "", " then "], ids=["line end", "nothing", "text"])
async def test_s0_03_several_calls_run_in_order_each_with_its_own_result(between: str, is_read_only: bool) -> None:
    ran: list[str] = []

    @tool(read_only=is_read_only)
    async def step(number: int) -> str:
        """One step."""
        ran.append(f"begin {number}")
        # Long enough for the next call to begin, if it does not wait for this one.
        for _ in range(200):
            await asyncio.sleep(0)
        ran.append(f"end {number}")
        if number == 2:
            raise LookupError("no second")
        return f"did {number}"

    reply = between.join(f'<tool_action name="step"><number value="{number}" /></tool_action>' for number in (1, 2, 3))
    result = await work(ScriptedModel([reply, "done"]), tools=[step])
    assert ran == ["begin 1", "end 1", "begin 2", "end 2", "begin 3", "end 3"]
    messages = [message for message in result.transcript if message["role"] == "tool"]
    assert [message["content"] for message in messages] == [
        "did 1",
        "Error [INTERNAL]: LookupError: no second",
        "did 3",
    ]
    assert len({message["tool_call_id"] for message in messages}) == 3


def test_s0_04_an_unclosed_tag_becomes_a_call_when_it_is_closed() -> None:
    parser = TagStreamParser()
    begun, end = SEARCH[:-1], SEARCH[-1:]
    assert [event for character in begun for event in parser.feed(character)] == []
    assert parser.feed(end) == [TagCall("vector-search", {"query": "读取文件", "limit": "5"}, SEARCH)]


async def test_s0_04_a_tag_that_is_never_closed_is_not_run_or_shown_and_the_model_is_informed() -> None:
    ran: list[str] = []

    @tool(name="vector-search")
    async def search(query: str) -> str:
        """Search."""
        ran.append(query)
        return query

    unclosed, observer = '好。<tool_action name="vector-search"><query value="读取文件" />', EventRecorder()
    model = ScriptedModel([unclosed, "I stop."])
    result = await work(model, observer, [search])
    assert (ran, result.answer, observer.has(CallStarted)) == ([], "I stop.", False)
    assert observer.text() == "好。I stop."
    assert "unclosed" in model.requests[1].messages[-1]["content"]
    [_, malformed] = parse(unclosed)
    assert isinstance(malformed, MalformedTag)
    assert (malformed.reason, malformed.name, malformed.raw) == (
        "unclosed",
        "vector-search",
        unclosed.removeprefix("好。"),
    )


# S0-05 to S0-08: streams


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 1000])
def test_s0_05_a_tag_is_detected_for_every_chunk_size(size: int) -> None:
    text = f"前 {SEARCH} 后"
    events = parse(*(text[start : start + size] for start in range(0, len(text), size)))
    assert [event for event in events if isinstance(event, TagCall)] == parse(SEARCH)
    assert "".join(event.text for event in events if isinstance(event, Text)) == "前  后"


def test_s0_06_a_tag_is_held_back_until_its_last_character_completes_the_call() -> None:
    text = f"Let me look. {SEARCH}"
    parser = TagStreamParser()
    out = [parser.feed(character) for character in text]
    shown = "".join(event.text for events in out for event in events if isinstance(event, Text))
    assert shown == "Let me look. "
    assert out[-1] == parse(SEARCH)
    assert all(events == [] for events in out[len("Let me look. ") : -1])


async def test_s0_06_a_complete_tag_runs_while_the_stream_continues() -> None:
    observer = EventRecorder()

    async def stream(request: ModelRequest) -> AsyncIterator[Chunk]:
        if len(request.messages) > 2:
            yield chunk("好了")
            return
        for text in ("我看看。<tool_", 'action name="vector-search"><query value="读取文件" />', "</tool_action>"):
            yield chunk(text)
        # The stream does not end before the call has.
        await observer.until(lambda so_far: so_far.has(CallFinished))

    result = await work(StreamModel(stream), observer)
    assert (result.answer, observer.texts_and_calls()) == (
        "好了",
        ["我看看。", "[CallStarted]", "[CallFinished]", "好了"],
    )


def test_s0_07_the_three_chunks_give_the_text_the_call_and_the_rest_in_order() -> None:
    parser = TagStreamParser()
    first, second, third = (parser.feed(text) for text in THREE_CHUNKS)
    assert first == [Text("思考: 我需要搜索...")]
    assert second == []
    raw = "".join(THREE_CHUNKS).removeprefix("思考: 我需要搜索...").removesuffix("接下来...")
    assert third == [TagCall("vector-search", {"query": "test"}, raw), Text("接下来...")]


async def test_s0_07_text_before_the_tag_is_shown_at_once_and_text_after_it_after_the_tool() -> None:
    observer = EventRecorder()
    entries: list[tuple[str, str]] = []

    @tool(name="vector-search")
    async def search(query: str) -> str:
        """Search."""
        entries.append((query, observer.text()))
        return "found"

    async def stream(request: ModelRequest) -> AsyncIterator[Chunk]:
        if len(request.messages) > 2:
            yield chunk("完成")
            return
        yield chunk(THREE_CHUNKS[0])
        # Nothing further is sent before the user has seen this.
        await observer.until(lambda so_far: so_far.text() == "思考: 我需要搜索...")
        yield chunk(THREE_CHUNKS[1])
        yield chunk(THREE_CHUNKS[2])

    result = await work(StreamModel(stream), observer, [search])
    assert entries == [("test", "思考: 我需要搜索...")]
    assert observer.texts_and_calls() == ["思考: 我需要搜索...", "[CallStarted]", "[CallFinished]", "接下来...完成"]
    assert result.answer == "完成"


@pytest.mark.parametrize(
    "plain", ["普通文本", "a < b and c > d", "<div>text</div>", "tool_action", "line\n", "<tool_box name="]
)
def test_s0_08_a_chunk_without_the_marker_is_passed_on_unchanged(plain: str) -> None:
    parser = TagStreamParser()
    assert [parser.feed("开头 "), parser.feed(plain)] == [[Text("开头 ")], [Text(plain)]]


async def test_s0_08_a_plain_chunk_is_shown_before_the_next_chunk_arrives() -> None:
    observer, pieces = EventRecorder(), ["你好", ", ", "world", " 1 < 2", "!"]

    async def stream(_: ModelRequest) -> AsyncIterator[Chunk]:
        for at, word in enumerate(pieces, start=1):
            yield chunk(word)
            await observer.until(lambda so_far, at=at: so_far.text() == "".join(pieces[:at]))  # type: ignore[misc]

    assert (await work(StreamModel(stream), observer)).answer == "".join(pieces)


def test_s0_08_only_a_possible_start_of_the_marker_is_held_back() -> None:
    parser = TagStreamParser()
    assert parser.feed("see <tool_") == [Text("see ")]
    assert "".join(event.text for event in parser.feed("box") if isinstance(event, Text)) == "<tool_box"
