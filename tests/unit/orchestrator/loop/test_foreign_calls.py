"""Calls that a server returned as text: they do not run, and they are no answer."""

import time

import pytest

from tests.support.records.builders import build_spec
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.foreign_calls import FOREIGN_CALL, find_foreign_call
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.models.scripted import ScriptedModel

JSON = '{"name": "echo", "arguments": {"text": "a"}}'
CALLS = [
    f"<tool_call>\n{JSON}\n</tool_call>",
    f"I look.\n<tool_call>\n{JSON}\n</tool_call>",
    "<tool_call>\n<function=echo>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
    JSON,
    f"```json\n{JSON}\n```",
    f"[{JSON}]",
    '{"type": "function", "name": "echo", "parameters": {"text": "a"}}',
    '{"type": "function", "function": {"name": "echo", "arguments": "{}"}}',
    f'{{"tool_calls": [{JSON}]}}',
    '<|python_tag|>{"name": "echo", "parameters": {"text": "a"}}',
    f"[TOOL_CALLS][{JSON}]",
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>echo\n```json\n{"text": "a"}\n```',
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.echo:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    '<function_calls>\n<invoke name="echo">\n<parameter name="text">a</parameter>\n</invoke>\n</function_calls>',
    '<|channel|>commentary to=functions.echo <|constrain|>json<|message|>{"text": "a"}',
]
ANSWERS = [
    "The model writes `<tool_call>` and then echo.",
    f"Write it like this:\n```\n<tool_call>\n{JSON}\n</tool_call>\n```\nThen echo runs.",
    '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
    '{"name": "other", "arguments": {}}',
    '{"name": "echo", "size": 3}',
    '{"name": "echo", "arguments": 3}',
    f"The decision is {JSON}",
    "[1, 2]",
    "[" * 100_000,
    "echo",
    "",
]


@pytest.mark.parametrize("text", CALLS)
def test_a_call_in_another_notation_is_found(text: str) -> None:
    assert find_foreign_call(text, ["read", "echo"]) == "echo"


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_is_no_call(text: str) -> None:
    assert find_foreign_call(text, ["read", "echo"]) is None


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call>\n", "```\n", " ", "[", '{"name":', "\n"])
def test_a_call_is_looked_for_in_linear_time(piece: str) -> None:
    began = time.thread_time()
    find_foreign_call(piece * (4_000_000 // len(piece)), ["echo"])
    assert time.thread_time() - began < 5


async def run_call(call: ToolCall) -> ToolResult:
    raise AssertionError(call)


@pytest.mark.parametrize("dialect", [NativeDialect(), TagsDialect()], ids=lambda one: one.name)
async def test_the_model_may_write_the_call_again(dialect: Dialect) -> None:
    model = ScriptedModel([CALLS[0], "done"])
    result = await Agent(model, dialect, [build_spec("echo")], run_call).run("go")
    assert (result.stop_reason, result.answer) == (StopReason.ANSWERED, "done")
    assert FOREIGN_CALL in str(model.requests[-1].messages[-1]["content"])


async def test_a_model_that_writes_only_such_calls_does_not_answer() -> None:
    model = ScriptedModel([CALLS[0]] * 5)
    result = await Agent(model, NativeDialect(), [build_spec("echo")], run_call).run("go")
    assert result.stop_reason is StopReason.MALFORMED_REPLY


async def test_without_tools_such_a_text_is_an_answer() -> None:
    result = await Agent(ScriptedModel([CALLS[0]]), NativeDialect(), [], run_call).run("go")
    assert (result.stop_reason, result.answer) == (StopReason.ANSWERED, CALLS[0])
