"""A durable run reads a reply while it streams, and a resumed run reads it from the log. Both must find the same calls:
a call that only one of them finds would run twice, or never.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolcrew.orchestrator.dialects.base import CallRequested, Dialect, MalformedCall, ReplyEnd, Text
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.runs.journal import build_logged_reply

TEXTS = [
    *("a", " ", "\n", "```\n", "<think>", "</think>", "`</think>`", "\ud83d", "\ude00", "\U0001f600"),
    *('<tool_action name="echo">', '<text value="x"/>', "</tool_action>", "<tool_", "action", '{"tool": "echo",'),
    *(' "arguments": {}}', "}", "<|channel|>"),
]


def build_chunk(delta: dict[str, Any], finish_reason: str | None = None) -> Chunk:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def build_call_delta(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    call = {"index": index, "function": function}
    return {"tool_calls": [call if call_id is None else {**call, "id": call_id, "type": "function"}]}


CALL_DELTAS = st.builds(
    build_call_delta,
    st.integers(0, 2),
    st.sampled_from([None, "c1", "c2"]),
    st.sampled_from([None, None, "echo", "ec\ud83d"]),
    st.sampled_from(["", '{"text": ', '"x"', "}", "\ud83d", "\ude00", "{}"]),
)
DELTAS = st.one_of(
    st.sampled_from(TEXTS).map(lambda text: {"content": text}),
    st.sampled_from(TEXTS).map(lambda text: {"content": text}),
    CALL_DELTAS,
    st.sampled_from(["be", "cause"]).map(lambda text: {"reasoning_content": text}),
)


def read(dialect: Dialect, chunks: list[Chunk]) -> tuple[str, list[CallRequested | MalformedCall], ReplyEnd]:
    reader = dialect.open_reader("run", 1)
    events = [event for chunk in chunks for event in reader.feed(chunk)]
    last, end = reader.finish()
    events += last
    text = "".join(event.text for event in events if isinstance(event, Text))
    return text, [event for event in events if not isinstance(event, Text)], end


@pytest.mark.parametrize("dialect", [NativeDialect(), TagsDialect(), JsonDecisionDialect()], ids=lambda one: one.name)
@settings(max_examples=400, deadline=None)
@given(deltas=st.lists(DELTAS, max_size=12), ending=st.sampled_from(["stop", "tool_calls", "length"]))
def test_logged_reply_is_read_like_its_stream(dialect: Dialect, deltas: list[dict[str, Any]], ending: str) -> None:
    chunks = [*map(build_chunk, deltas), build_chunk({}, ending)]
    logged, is_changed = build_logged_reply(chunks)
    if not is_changed:
        assert read(dialect, chunks) == read(dialect, list(logged))
