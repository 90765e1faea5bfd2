"""Profiles: the choice for a model, the tools that a profile shows, and the repair of replies without a call."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.run_events import ReplyRepaired, RunEvent
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.fences import find_command
from toolcrew.orchestrator.dialects.json_decision import RESULT_HEAD, RESULT_HINT, JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Chunk, Message, ModelRequest
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.profiles import SMALL, STANDARD, ModelProfile
from toolcrew.orchestrator.dialects.tag_values import build_tag_call
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool
from toolcrew.orchestrator.loop.agent import TRIED, Agent, RunResult
from toolcrew.orchestrator.loop.limits import ReActOptions, StopReason
from toolcrew.orchestrator.models.capabilities import Capabilities, CapabilityCache, ModelFacts
from toolcrew.orchestrator.models.choice import ChosenModel, choose_profile
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.workers.tools.builtin import BASH_TOOL, EDIT_TOOL

NO_FACTS = ModelFacts()
BLOCK = "Run this:\n```bash\n$ wc -l < a.txt\n```\n"
CALL = Calls([("bash_tool", {"command": "ls"})])


class Endpoint:
    """A model at an endpoint whose list of models returns `facts`."""

    def __init__(self, name: str, facts: ModelFacts | None = NO_FACTS) -> None:
        self.name = name
        self.facts = facts
        self.described = 0
        self.address = "http://a.example/v1"

    async def describe(self) -> ModelFacts | None:
        self.described += 1
        return self.facts

    def without_fallback(self) -> "Endpoint":
        return self

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        yield {}

    async def aclose(self) -> None: ...


@pytest.mark.parametrize(
    ("chosen", "profile"),
    [
        (ChosenModel(Endpoint("a", ModelFacts(context_window=4096))), SMALL),
        (ChosenModel(Endpoint("a-70b", ModelFacts(context_window=8192))), SMALL),
        (ChosenModel(Endpoint("a", ModelFacts(32_768, 1_543_714_304))), SMALL),
        (ChosenModel(Endpoint("a-1.5b", ModelFacts(32_768, 8_000_000_000))), STANDARD),
        (ChosenModel(Endpoint("Qwen/Qwen2.5-Coder-1.5B-Instruct", ModelFacts(32_768))), SMALL),
        (ChosenModel(Endpoint("gemma-3-270m-it")), SMALL),
        (ChosenModel(Endpoint("Qwen3-30B-A3B")), STANDARD),
        (ChosenModel(Endpoint("mixtral-8x7b")), STANDARD),
        (ChosenModel(Endpoint("gpt-5-mini")), STANDARD),
        (ChosenModel(Endpoint("a"), capabilities=Capabilities(parameters=500_000_000)), SMALL),
        (ChosenModel(Endpoint("a-1b"), profile=STANDARD), STANDARD),
        (ChosenModel(ScriptedModel([])), STANDARD),
    ],
)
async def test_auto_profile_is_chosen_by_window_size_and_name(chosen: ChosenModel, profile: ModelProfile) -> None:
    assert (await choose_profile("auto", chosen, CapabilityCache(None)))[0] is profile


async def test_named_profile_needs_no_request_and_model_list_is_read_once() -> None:
    model, cache = Endpoint("a-1b"), CapabilityCache(None)
    assert (await choose_profile("standard", ChosenModel(model), cache))[0] is STANDARD
    assert model.described == 0
    await asyncio.gather(*(choose_profile(None, ChosenModel(model), cache) for _ in range(3)))
    assert model.described == 1
    with pytest.raises(ConfigError, match="large"):
        await choose_profile("large", ChosenModel(model), cache)


async def test_profile_lookup_is_repeated_after_a_missing_reply() -> None:
    model, cache = Endpoint("a", None), CapabilityCache(None)
    assert (await choose_profile(None, ChosenModel(model), cache))[0] is STANDARD
    model.facts = ModelFacts(parameters=1_000_000_000)
    assert (await choose_profile(None, ChosenModel(model), cache))[0] is SMALL


def test_small_profile_shortens_descriptions_and_parameters() -> None:
    bash, edit = (convert_to_openai_tool(spec)["function"] for spec in SMALL.present([BASH_TOOL.spec, EDIT_TOOL.spec]))
    assert list(bash["parameters"]["properties"]) == ["command"]
    assert bash["description"].count(".") == 1
    assert {"file_path", "old_string", "new_string", "edits"} <= edit["parameters"]["properties"].keys()
    assert STANDARD.present([BASH_TOOL.spec]) == [BASH_TOOL.spec]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (BLOCK, "wc -l < a.txt"),
        ("```sh\nls\n```\nand\n```bash\nrm x\n```", "ls"),
        ("```python\nprint(1)\n```", None),
        ("```\nls\n```", None),
        ("```bash\n\n```", None),
        ("```bash\n```\nls\n```", None),
        ("```bash\nls", None),
        ("no code", None),
    ],
)
def test_command_is_found_in_a_shell_code_block(text: str, command: str | None) -> None:
    assert find_command(text) == command


def test_hostile_code_blocks_take_linear_time() -> None:
    # In quadratic time, these take more than the limit of a test.
    for text in ("```bash\n" * 500_000, "```bash\n" + "\n ```x" * 500_000, "```bash" + " " * 4_000_000 + "x"):
        assert find_command(text) is None


async def run(
    model: ScriptedModel, profile: ModelProfile, **fields: Any
) -> tuple[RunResult, list[ToolCall], list[RunEvent]]:
    calls, events = list[ToolCall](), list[RunEvent]()
    exit_code = fields.pop("exit_code", 0)

    async def run_call(call: ToolCall) -> ToolResult:
        calls.append(call)
        return ToolResult(call_id=call.id, name=call.name, success=True, output="14", metadata={"exit_code": exit_code})

    agent = Agent(
        model,
        fields.pop("dialect", NativeDialect(profile=profile)),
        [BASH_TOOL.spec],
        run_call,
        on_event=events.append,
        profile=profile,
        **fields,
    )
    return await agent.run("How many lines?"), calls, events


async def run_nothing(call: ToolCall) -> ToolResult:
    raise AssertionError("no call was expected")


def repairs_in(events: list[RunEvent]) -> list[str]:
    return [event.repair for event in events if isinstance(event, ReplyRepaired)]


async def test_small_profile_runs_a_command_from_a_code_block() -> None:
    model = ScriptedModel([BLOCK, "It has 14 lines."])
    result, calls, events = await run(model, SMALL)
    assert ([call.arguments for call in calls], result.answer) == ([{"command": "wc -l < a.txt"}], "It has 14 lines.")
    assert repairs_in(events) == ["code_block"]
    assert "14" in str(model.requests[1].messages[-1]["content"])


async def test_answer_without_a_call_gets_one_reminder() -> None:
    model = ScriptedModel(["I guess 3.", "It has 3 lines."])
    result, calls, events = await run(model, SMALL)
    assert (calls, result.answer, result.steps) == ([], "It has 3 lines.", 2)
    assert repairs_in(events) == ["reminder"]
    assert "bash_tool" in str(model.requests[1].messages[-1]["content"])
    result, calls, events = await run(ScriptedModel(["I guess 3.", CALL, "14."]), SMALL)
    assert (len(calls), result.answer, repairs_in(events)) == (1, "14.", ["reminder"])


@pytest.mark.parametrize("reply", [BLOCK, "Done."])
async def test_standard_profile_repairs_nothing(reply: str) -> None:
    result, calls, events = await run(ScriptedModel([reply]), STANDARD)
    assert (calls, result.answer, repairs_in(events)) == ([], reply, [])


async def test_reminder_does_not_exceed_the_budget() -> None:
    result, _, events = await run(ScriptedModel(["3."]), SMALL, options=ReActOptions(max_iterations=1))
    assert (result.answer, repairs_in(events)) == ("3.", [])


@pytest.mark.parametrize("request_", ["Count the lines of /workspace/a.txt.", "`/a` fails."])
async def test_request_with_an_absolute_path_gets_no_file_list(request_: str) -> None:
    model = ScriptedModel(["14."])
    agent = Agent(model, NativeDialect(), [], run_nothing, files="Files:\na.txt")
    await agent.run(request_)
    assert model.requests[0].messages[-1]["content"] == request_


async def test_small_model_that_repeats_a_failed_call_is_stopped() -> None:
    result, calls, _ = await run(ScriptedModel([CALL] * 9), SMALL, exit_code=1, options=ReActOptions(max_iterations=9))
    assert (len(calls), result.stop_reason) == (4, StopReason.REPEATED_FAILURE)


async def test_small_model_that_repeats_a_failed_call_begins_again_without_its_steps() -> None:
    model = ScriptedModel([CALL, CALL, CALL, "14."])
    result, calls, events = await run(model, SMALL, exit_code=1, options=ReActOptions(max_iterations=9))
    assert (len(calls), result.answer, repairs_in(events)) == (3, "14.", ["restart", "restart"])
    first, second, *restarted = model.requests
    assert len(second.messages) > len(first.messages)
    command = calls[0].arguments["command"]
    for request in restarted:
        assert request.messages[:-1] == first.messages[:-1]
        assert request.messages[-1]["content"] == f"{first.messages[-1]['content']}\n\n{TRIED}\n{command}"
        assert request.extra["temperature"] > 0
    assert [message["role"] for message in result.transcript].count("tool") == 3


async def test_standard_model_that_repeats_a_failed_call_keeps_its_steps() -> None:
    model = ScriptedModel([CALL, CALL, "14."])
    await run(model, STANDARD, exit_code=1)
    assert model.requests[2].messages[: len(model.requests[1].messages)] == model.requests[1].messages


@pytest.mark.parametrize(("text", "has_hint"), [("14", True), ("Error [TIMEOUT]: not done", False)])
def test_answer_hint_follows_only_a_successful_result(text: str, has_hint: bool) -> None:
    result: Message = {"role": "user", "content": f"{RESULT_HEAD}bash_tool]\n{text}"}
    [message] = JsonDecisionDialect(profile=SMALL).build_request([result], []).messages
    assert str(message["content"]).endswith(RESULT_HINT) is has_hint


@pytest.mark.parametrize("profile", [SMALL, STANDARD])
@pytest.mark.parametrize("kind", [NativeDialect, TagsDialect, JsonDecisionDialect])
async def test_each_request_starts_with_the_previous_request(kind: type[Dialect], profile: ModelProfile) -> None:
    """Servers cache the beginning of a conversation."""
    call: Any = CALL
    if kind is TagsDialect:
        call = build_tag_call("bash_tool", {"command": "ls"})
    if kind is JsonDecisionDialect:
        call = '{"tool": "bash_tool", "arguments": {"command": "ls"}}'
    end = '{"tool": null, "reply": "14"}' if kind is JsonDecisionDialect else "14"
    model = ScriptedModel([call, call, call, end])
    await run(model, profile, dialect=kind(profile=profile))  # type: ignore[call-arg]
    assert len(model.requests) == 4
    for before, after in zip(model.requests, model.requests[1:], strict=False):
        assert after.messages[: len(before.messages)] == before.messages
        assert (after.tools, after.extra) == (before.tools, before.extra)
