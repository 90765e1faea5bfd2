"""Names of tools as models write them, and messages without visible content."""

import time
from typing import Any

import pytest

from tests.support.records.builders import build_spec
from toolcrew.contract.calls import NO_OUTPUT, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.observations import NO_TEXT, build_wire_messages
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.loop.call_runner import find_meant_name
from toolcrew.orchestrator.loop.chat_messages import AIMessage, ToolMessage, convert_to_wire
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.models.scripted import Calls, Raw, ScriptedModel

OFFERED = {"bash_tool", "read_tool", "tools_list", "get"}
MEANT = [
    ("bash_tool", "bash_tool"),
    ("bash_tool<|channel|>commentary", "bash_tool"),
    ("bash_tool<|channel|>json", "bash_tool"),
    ("<|channel|>commentary to=functions.bash_tool", "bash_tool"),
    ("functions.bash_tool<|constrain|>json", "bash_tool"),
    ("functions.bash_tool", "bash_tool"),
    ("functions.bash_tool:0", "bash_tool"),
    ("function.bash_tool", "bash_tool"),
    ("functions::bash_tool", "bash_tool"),
    ("functions_bash_tool", "bash_tool"),
    ("default_api:bash_tool", "bash_tool"),
    ("default_api.bash_tool", "bash_tool"),
    ("tools.bash_tool", "bash_tool"),
    ("tool/bash_tool", "bash_tool"),
    ("bash_tool ", "bash_tool"),
    (" bash_tool\n", "bash_tool"),
    ("bash_tool()", "bash_tool"),
    ("`bash_tool`", "bash_tool"),
    ('"bash_tool"', "bash_tool"),
    ("bash_tool:", "bash_tool"),
    ("bash_toolbash_tool", "bash_tool"),
    ("tools_list", "tools_list"),
    ("tools.tools_list", "tools_list"),
    # These may mean another tool, or none.
    ("evil.bash_tool", None),
    ("bash_tool<|x|>read_tool", None),
    ("read_bash_tool", None),
    ("Bash_Tool", None),
    ("bash", None),
    ("", None),
    ("functions.", None),
    ("get_it", None),
    ("forget", None),
]


@pytest.mark.parametrize(("name", "meant"), MEANT)
def test_a_name_means_an_offered_tool_or_none(name: str, meant: str | None) -> None:
    assert find_meant_name(name, OFFERED) == meant


async def run(model: ScriptedModel, dialect: Any = None) -> tuple[Any, list[ToolCall]]:
    calls: list[ToolCall] = []

    async def run_call(call: ToolCall) -> ToolResult:
        calls.append(call)
        return ToolResult(call_id=call.id, name=call.name, success=True, output="\n", metadata={"exit_code": 0})

    specs = [build_spec("bash_tool", properties={}), build_spec("read_tool", properties={})]
    return await Agent(model, dialect or NativeDialect(), specs, run_call).run("go"), calls


@pytest.mark.parametrize(
    "part",
    ["()", "(", "{}", ":", ":1", ":12", "::", " :", "()\t", "`'", "to=", "final", "functions.", "<|", "<|a|>", "."],
)
@pytest.mark.parametrize("end", ["", "x", "\n-"])
def test_a_hostile_name_is_read_in_bounded_time(part: str, end: str) -> None:
    name = f"x{part * 128}"[: 128 - len(end)] + end
    started = time.process_time()
    assert find_meant_name(name, OFFERED) is None
    assert time.process_time() - started < 1.0


async def test_the_meant_tool_runs_and_the_history_has_the_name_of_the_model() -> None:
    model = ScriptedModel([Calls([("functions.bash_tool", {})]), "done"])
    result, calls = await run(model)
    assert ([call.name for call in calls], result.answer) == (["bash_tool"], "done")
    [entry] = model.requests[1].messages[2]["tool_calls"]
    assert entry["function"]["name"] == "functions_bash_tool"


@pytest.mark.parametrize("name", ["bash", "Bash", "BashTool", "Bash_Tool", "<tool_call>bash_tool", "repo.bash_tool"])
async def test_an_unknown_name_is_answered_with_the_nearest_tools(name: str) -> None:
    model = ScriptedModel([Calls([(name, {})]), "done"])
    await run(model)
    content = model.requests[1].messages[-1]["content"]
    assert content.startswith(f"Error [{ErrorCode.TOOL_NOT_FOUND}]")
    assert "similar name: bash_tool" in content


@pytest.mark.parametrize("output", ["", "\n", "  ", "\t\n ", None, "\u00a0"])
@pytest.mark.parametrize("metadata", [{}, {"exit_code": 0}, {"exit_code": 1}, {"exit_code": 7}])
def test_a_result_has_visible_text(output: str | None, metadata: dict[str, Any]) -> None:
    text = ToolResult(call_id="c", name="bash_tool", success=True, output=output, metadata=metadata).text()
    empty = ToolResult(call_id="c", name="bash_tool", success=True, output=NO_OUTPUT, metadata=metadata).text()
    assert text == empty
    assert text.strip()


BLANK = ["", " ", "\n\n", None]


@pytest.mark.parametrize("content", BLANK)
def test_messages_are_sent_with_visible_content_or_none(content: str | None) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash_tool", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": content},
        {"role": "assistant", "content": content},
    ]
    wire = build_wire_messages(messages)
    assert [message["content"] for message in wire] == ["go", None, NO_OUTPUT, NO_TEXT]
    assert [convert_to_wire(message)["content"] for message in messages[1:]] == [None, NO_OUTPUT, NO_TEXT]


def test_message_objects_are_sent_with_visible_content() -> None:
    assert convert_to_wire(ToolMessage("\n", "c1"))["content"] == NO_OUTPUT
    assert convert_to_wire(AIMessage(" "))["content"] == NO_TEXT


def reply(text: str) -> Chunk:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}


CALL = '{"tool": "bash_tool", "arguments": {}}'


@pytest.mark.parametrize(
    "text",
    [
        f"I will look.\n{CALL}",
        f"I will look: {CALL}\n",
        f"Sure!\n\n```json\n{CALL}\n```",
        f"<think>hm</think>I will look. {CALL}",
        f"I think {{so}}. {CALL}",
    ],
)
async def test_a_sentence_before_the_decision_does_not_prevent_the_call(text: str) -> None:
    done = 'It is so. {"tool": null, "reply": "done"}'
    result, calls = await run(ScriptedModel([Raw([reply(text)])] * 4 + [Raw([reply(done)])]), JsonDecisionDialect())
    assert (len(calls), result.answer, result.stop_reason) == (4, "done", StopReason.ANSWERED)


@pytest.mark.parametrize("text", [f"I will look. {CALL} Then I read.", f"{CALL} {CALL}", f"One: {CALL}\nTwo: {CALL}"])
async def test_a_decision_that_is_not_the_end_of_the_reply_does_not_run(text: str) -> None:
    _, calls = await run(ScriptedModel([Raw([reply(text)])] * 4), JsonDecisionDialect())
    assert calls == []


@pytest.mark.parametrize(
    "name",
    [
        "bash_tool<|channel|>" + "commentary " * 30,
        "assistant<|channel|>" + "commentary " * 30 + "<|x|>to=functions.bash_tool",
        "<|start|>assistant<|channel|>commentary to=bash_tool <|constrain|>json<|message|>" + '{"command": "ls"} ' * 40,
    ],
)
async def test_the_tool_of_a_name_that_is_too_long_runs(name: str) -> None:
    result, calls = await run(ScriptedModel([Calls([(name, {})]), "done"]))
    assert ([call.name for call in calls], result.answer) == (["bash_tool"], "done")


@pytest.mark.parametrize("name", ["x" * 129, "y" * 200_000, "x" * 61 + "<|x|>bash_tool_of_another" + "z" * 100])
async def test_a_name_that_is_too_long_and_means_no_tool_is_an_unknown_tool(name: str) -> None:
    model = ScriptedModel([Calls([(name, {})]), "done"])
    result, calls = await run(model)
    [observation] = [message for message in model.requests[-1].messages if message["role"] == "tool"]
    assert (calls, result.answer) == ([], "done")
    assert "TOOL_NOT_FOUND" in observation["content"]
    assert name[:40] in observation["content"]
    assert len(observation["content"]) < 1000
