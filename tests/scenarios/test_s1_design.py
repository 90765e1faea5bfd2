"""Rows S1-01 to S1-21 of the scenarios: tools, the registry, the model's decisions, the path of results, and the data
that each part passes to the next.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from toolcrew.contract.registry import Tool
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Message
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tag_values import build_tag_call
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.functions.function_tools import convert_to_openai_tool
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.tool_loop import (
    ContextEngine,
    ToolDecisionOutput,
    ToolLoopDeps,
    ToolLoopRegistry,
    ToolLoopResult,
    build_tool_system_prompt,
    create_output_controller,
    create_tool_registry,
    parse_tool_decision,
    run_tool_loop,
)

QUESTION = "What's the weather in Beijing?"
CALL = '{ "tool": "get_weather", "arguments": {"city": "Beijing"} }'
TIME = {"name": "get_time", "description": "Get the time", "execute": lambda args: "noon"}
REPLY = '{ "tool": null, "reply": "It is 22 degrees in Beijing." }'


class Weather:
    """The registry with the document's tool, and the cities that the tool was called with."""

    def __init__(self) -> None:
        self.cities: list[str] = []
        self.registry: ToolLoopRegistry = create_tool_registry()
        self.registry.register(
            {
                "name": "get_weather",
                "description": "Get current weather for a city",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
                "execute": self._execute,
            }
        )

    async def _execute(self, args: dict[str, Any]) -> dict[str, Any]:
        self.cities.append(args["city"])
        return {"temp": 22, "city": args["city"]}


class Gateway:
    """A chat function that gives these replies, repeats the last one, and records its requests."""

    def __init__(self, *replies: str) -> None:
        self._replies = replies
        self.requests: list[list[Message]] = []

    async def chat(self, messages: list[Message]) -> str:
        self.requests.append([dict(message) for message in messages])
        return self._replies[min(len(self.requests), len(self._replies)) - 1]


async def ask(gateway: Gateway, weather: Weather, rounds: int = 5, **parts: Any) -> ToolLoopResult:
    return await run_tool_loop(ToolLoopDeps(gateway.chat, weather.registry, **parts), "s1", QUESTION, rounds)


async def test_s1_01_the_model_chooses_a_tool_and_receives_its_result() -> None:
    weather, gateway = Weather(), Gateway(CALL, REPLY)
    result = await ask(gateway, weather)
    assert (result.reply, weather.cities) == ("It is 22 degrees in Beijing.", ["Beijing"])
    assert "22" in gateway.requests[1][-1]["content"]


async def test_s1_02_the_loop_consists_of_gateway_context_engine_output_controller_and_registry() -> None:
    assert {part.name for part in fields(ToolLoopDeps)} == {
        "chat",
        "context_engine",
        "output_controller",
        "tool_registry",
    }
    parsed: list[str] = []

    class Controller:
        def parse(self, raw: str) -> ToolDecisionOutput:
            parsed.append(raw)
            return parse_tool_decision(raw)

    gateway, engine = Gateway(REPLY), ContextEngine("Be brief.")
    await ask(gateway, Weather(), context_engine=engine, output_controller=Controller())
    assert (len(gateway.requests), parsed, len(engine.messages("s1"))) == (1, [REPLY], 2)
    assert gateway.requests[0][0]["content"].startswith("Be brief.")


async def test_s1_03_a_tool_is_a_name_a_description_parameters_and_an_execute_function() -> None:
    weather = Weather()
    made = weather.registry.get("get_weather")
    assert isinstance(made, Tool)
    assert (made.spec.name, made.spec.description) == ("get_weather", "Get current weather for a city")
    assert made.spec.parameters == {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    assert (await weather.registry.execute("get_weather", {"city": "Rome"})).success


@pytest.mark.parametrize("missing", ["name", "execute"])
def test_s1_03_a_tool_without_a_name_or_an_execute_function_is_refused(missing: str) -> None:
    parts: dict[str, Any] = {
        "name": "t",
        "description": "d",
        "parameters": {"type": "object"},
        "execute": lambda args: args,
    }
    del parts[missing]
    with pytest.raises(TypeError, match=missing):
        create_tool_registry([parts])


@pytest.mark.parametrize(
    ("dialect", "reply"),
    [
        (JsonDecisionDialect, CALL),
        (NativeDialect, Calls([("get_weather", {"city": "Beijing"})])),
        (TagsDialect, build_tag_call("get_weather", {"city": "Beijing"})),
    ],
    ids=["json", "native", "tags"],
)
async def test_s1_04_one_tool_serves_every_dialect(dialect: Callable[[], Dialect], reply: Any) -> None:
    weather = Weather()
    model = ScriptedModel([reply, REPLY])
    await Agent(model, dialect(), weather.registry.specs(), weather.registry.run_call).run(QUESTION)
    assert weather.cities == ["Beijing"]
    assert '{"temp": 22, "city": "Beijing"}' in model.requests[1].messages[-1]["content"]


def test_s1_05_tools_are_registered_in_one_place_and_found_by_name() -> None:
    registry = Weather().registry
    registry.register(TIME)
    assert [spec.name for spec in registry.list()] == ["get_time", "get_weather"]
    found = registry.get("get_time")
    assert found is not None
    assert found.name == "get_time"
    assert registry.get("get_news") is None


def test_s1_06_the_list_of_tools_serves_a_prompt_and_the_tools_field_of_an_api() -> None:
    registry = Weather().registry
    assert "get_weather: Get current weather for a city" in build_tool_system_prompt(registry.list())
    assert [convert_to_openai_tool(spec) for spec in registry.list()] == [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get current weather for a city",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        }
    ]


async def test_s1_07_the_system_prompt_describes_the_tools_and_requires_json_only() -> None:
    gateway = Gateway(REPLY)
    await ask(gateway, Weather())
    system = gateway.requests[0][0]
    assert system["role"] == "system"
    assert "get_weather: Get current weather for a city" in system["content"]
    assert "city (string, required)" in system["content"]
    assert "one JSON object and nothing else" in system["content"]
    assert '{"tool": "NAME", "arguments": {' in system["content"]
    assert '{"tool": null, "reply": "TEXT"}' in system["content"]


def test_s1_08_a_decision_that_names_a_tool_is_a_call() -> None:
    assert parse_tool_decision('{ "tool": "name", "arguments": {"a": [1, null]} }') == ToolDecisionOutput(
        "name", {"a": [1, None]}
    )


def test_s1_09_a_decision_without_a_tool_is_a_reply() -> None:
    assert parse_tool_decision('{ "tool": null, "reply": "..." }') == ToolDecisionOutput(None, {}, "...")


INVALID_DECISIONS = [
    "It is warm.",
    "[]",
    '{"tool": 5}',
    '{"tool": null}',
    '{"reply": "x"}',
    '{"tool": "a", "arguments": []}',
    '{"tool": "a"',
    "",
]


@pytest.mark.parametrize("raw", INVALID_DECISIONS)
def test_s1_10_the_output_controller_refuses_an_invalid_decision(raw: str) -> None:
    with pytest.raises(ValueError):
        create_output_controller().parse(raw)


async def test_s1_10_an_invalid_decision_runs_nothing_and_the_model_may_try_again() -> None:
    weather, gateway = Weather(), Gateway('I call {"tool": "get_weather", "arguments": {"city": "Rome"}} now', REPLY)
    result = await ask(gateway, weather)
    assert (weather.cities, result.reply) == ([], "It is 22 degrees in Beijing.")
    assert "Malformed decision" in gateway.requests[1][-1]["content"]


async def test_s1_10_repeated_invalid_decisions_end_the_loop_with_the_raw_text_as_the_reply() -> None:
    weather, gateway = Weather(), Gateway("It is warm.")
    result = await ask(gateway, weather)
    assert (weather.cities, result.reply, result.stop_reason) == ([], "It is warm.", StopReason.MALFORMED_REPLY)


async def test_s1_11_the_result_is_a_user_message_and_the_model_is_called_again() -> None:
    engine, gateway = ContextEngine(), Gateway(CALL, REPLY)
    await ask(gateway, Weather(), context_engine=engine)
    assert len(gateway.requests) == 2
    injected = {"role": "user", "content": '[Tool result for get_weather]\n{"temp": 22, "city": "Beijing"}'}
    assert gateway.requests[1][-1] == injected
    assert engine.messages("s1") == [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": CALL},
        injected,
        {"role": "assistant", "content": REPLY},
    ]


async def test_s1_12_rounds_repeat_until_the_model_calls_no_tool() -> None:
    weather, gateway = Weather(), Gateway(CALL, CALL.replace("Beijing", "Rome"), CALL.replace("Beijing", "Oslo"), REPLY)
    result = await ask(gateway, weather)
    assert (weather.cities, result.rounds, result.stop_reason) == (["Beijing", "Rome", "Oslo"], 4, StopReason.ANSWERED)


@pytest.mark.parametrize("rounds", [1, 5])
async def test_s1_12_rounds_end_at_the_limit(rounds: int) -> None:
    weather, gateway = Weather(), Gateway(CALL)
    result = await ask(gateway, weather, rounds)
    assert (len(gateway.requests), weather.cities, result.rounds) == (rounds, ["Beijing"] * rounds, rounds)
    assert result.stop_reason is StopReason.MAX_ITERATIONS
    assert result.reply == CALL


# S1-13 to S1-21: the architecture


async def test_s1_13_a_registered_tool_can_be_called_from_then_on() -> None:
    weather = Weather()
    gateway = Gateway('{"tool": "get_time", "arguments": {}}', REPLY)
    weather.registry.register(TIME)
    await ask(gateway, weather)
    assert gateway.requests[1][-1]["content"] == "[Tool result for get_time]\nnoon"


async def test_s1_14_the_system_prompt_lists_the_registered_tools() -> None:
    weather, gateway = Weather(), Gateway(REPLY)
    await ask(gateway, weather)
    weather.registry.register(TIME)
    await ask(gateway, weather)
    first, second = (request[0]["content"] for request in gateway.requests)
    assert ["get_weather: " in first, "get_time: " in first] == [True, False]
    assert ["get_weather: " in second, "get_time: " in second] == [True, True]


async def test_s1_15_messages_are_system_user_assistant_and_results_as_user() -> None:
    gateway = Gateway(CALL, REPLY)
    await ask(gateway, Weather())
    assert [message["role"] for message in gateway.requests[1]] == ["system", "user", "assistant", "user"]


async def test_s1_15_the_context_engine_adds_the_history_of_the_session() -> None:
    engine, weather, gateway = ContextEngine(), Weather(), Gateway(CALL, REPLY, '{"tool": null, "reply": "Still 22."}')
    await ask(gateway, weather, context_engine=engine)
    await run_tool_loop(ToolLoopDeps(gateway.chat, weather.registry, engine), "s1", "And now?")
    await run_tool_loop(ToolLoopDeps(gateway.chat, weather.registry, engine), "s2", "Who am I?")
    assert [message["role"] for message in gateway.requests[2]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert [message["content"] for message in gateway.requests[3][1:]] == ["Who am I?"]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
async def test_s1_16_the_gateway_takes_messages_and_returns_the_raw_content(is_async: bool) -> None:
    gateway, requests = Gateway(REPLY), []

    def chat(messages: list[Message]) -> str:
        requests.append(messages)
        return REPLY

    result = await run_tool_loop(ToolLoopDeps(gateway.chat if is_async else chat, Weather().registry), "s1", QUESTION)
    assert result.reply == "It is 22 degrees in Beijing."
    [messages] = gateway.requests if is_async else requests
    assert messages[-1] == {"role": "user", "content": QUESTION}


async def test_s1_17_the_controller_gets_the_raw_content_and_its_decision_is_used() -> None:
    class Own:
        """Reads `NAME CITY`. Any other text is a reply."""

        def parse(self, raw: str) -> ToolDecisionOutput:
            name, _, city = raw.partition(" ")
            return (
                ToolDecisionOutput(name, {"city": city}) if name == "get_weather" else ToolDecisionOutput(None, {}, raw)
            )

    weather = Weather()
    result = await ask(Gateway("get_weather Oslo", "Cold."), weather, output_controller=Own())
    assert (weather.cities, result.reply) == (["Oslo"], "Cold.")


async def test_s1_18_without_a_tool_call_the_loop_ends_with_the_reply() -> None:
    weather, gateway = Weather(), Gateway(REPLY)
    result = await ask(gateway, weather)
    assert (result.reply, result.rounds, len(gateway.requests), weather.cities) == (
        "It is 22 degrees in Beijing.",
        1,
        1,
        [],
    )


async def test_s1_18_a_tag_inside_a_reply_is_plain_text() -> None:
    weather, tag = Weather(), build_tag_call("get_weather", {"city": "Oslo"})
    result = await ask(Gateway(json.dumps({"tool": None, "reply": tag})), weather)
    assert (result.reply, weather.cities) == (tag, [])


async def test_s1_19_a_named_tool_is_executed_by_the_registry_with_the_arguments() -> None:
    weather, gateway = Weather(), Gateway(CALL, REPLY)
    await ask(gateway, weather)
    by_hand = await weather.registry.execute("get_weather", {"city": "Beijing"})
    assert weather.cities == ["Beijing", "Beijing"]
    assert gateway.requests[1][-1]["content"].endswith(by_hand.text())


async def test_s1_19_an_unknown_tool_is_reported_to_the_model() -> None:
    gateway = Gateway('{"tool": "get_news", "arguments": {}}', REPLY)
    result = await ask(gateway, Weather())
    assert "Tool not found: get_news" in gateway.requests[1][-1]["content"]
    assert result.reply == "It is 22 degrees in Beijing."


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (CALL, '[Tool result for get_weather]\n{"temp": 22, "city": "Beijing"}'),
        ('{"tool": "get_time", "arguments": {}}', "[Tool result for get_time]\nnoon"),
        (
            '{"tool": "get_weather", "arguments": {"city": 5}}',
            "[Tool result for get_weather]\nError [INVALID_ARGUMENTS]: ",
        ),
    ],
    ids=["object", "text", "error"],
)
async def test_s1_20_a_result_is_a_user_message_under_its_header(call: str, expected: str) -> None:
    weather, gateway = Weather(), Gateway(call, REPLY)
    weather.registry.register(TIME)
    await ask(gateway, weather)
    assert gateway.requests[1][-1]["role"] == "user"
    assert gateway.requests[1][-1]["content"].startswith(expected)


async def test_s1_21_the_next_round_contains_all_earlier_messages_and_the_result() -> None:
    gateway = Gateway(CALL, CALL.replace("Beijing", "Rome"), REPLY)
    await ask(gateway, Weather())
    first, second, third = gateway.requests
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert [message["content"] for message in third[-2:]] == [
        CALL.replace("Beijing", "Rome"),
        '[Tool result for get_weather]\n{"temp": 22, "city": "Rome"}',
    ]
