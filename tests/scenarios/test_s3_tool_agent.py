"""Rows S3-01 to S3-14 of the scenarios: native function calling for ToolAgent and CustomAgent, and the fallback without
it.
"""

import json
import logging
from typing import Any

import pytest

from tests.support.models.model_endpoint import END, HELLO, serving, stream
from toolcrew.orchestrator.dialects.model import Message
from toolcrew.orchestrator.functions.function_tools import convert_to_openai_tool
from toolcrew.orchestrator.loop.chat_messages import AIMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.models.scripted import Calls, Raw, ScriptedModel
from toolcrew.orchestrator.sdk.tool_agent import CustomAgent, LLMClient, ToolAgent

MESSAGES: list[ChatMessage | Message] = [SystemMessage("Be brief."), HumanMessage("北京天气?")]
BEIJING = Calls([("get_weather", {"city": "北京"})])
CALL_TEXT = '{"tool": "get_weather", "arguments": {"city": "北京"}}'


class WeatherTool:
    """A tool in the shape of a BaseTool: a name, a description and `_run`."""

    name = "get_weather"
    description = "Get current weather for a city"

    def __init__(self, error: Exception | None = None) -> None:
        self.cities: list[str] = []
        self._error = error

    def _run(self, city: str) -> str:
        self.cities.append(city)
        if self._error is not None:
            raise self._error
        return f"22 degrees in {city}"


SCHEMA = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def system_of(model: ScriptedModel, at: int = 0) -> str:
    return str(model.requests[at].messages[0]["content"])


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


# S3-01 to S3-03: tools as a function schema


def test_s3_01_a_base_tool_becomes_a_function_schema() -> None:
    assert convert_to_openai_tool(WeatherTool()) == SCHEMA


async def test_s3_01_the_schemas_are_sent_in_the_field_tools_and_not_in_the_system_prompt() -> None:
    async with serving([stream(HELLO, END)]) as server:
        model = OpenAIModel("m", server.url, "key", 5.0, retries=0)
        await ToolAgent(model).bind_tools([WeatherTool()])._generate(MESSAGES)
        await model.aclose()
    assert server.bodies[0]["tools"] == [SCHEMA]
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "北京天气?"},
    ]


async def test_s3_02_bound_tools_are_stored_as_schemas_and_sent_with_the_next_request() -> None:
    model = ScriptedModel(["Warm."])
    agent = ToolAgent(LLMClient(model))
    agent.bind_tools([WeatherTool()])
    assert agent.schemas == [SCHEMA]
    await agent._generate(MESSAGES)
    assert model.requests[0].tools == [SCHEMA]
    assert system_of(model) == "Be brief."


async def test_s3_02_binding_again_replaces_the_bound_tools() -> None:
    model = ScriptedModel(["Warm."])
    other = {"name": "other", "description": "d", "parameters": {"type": "object", "properties": {}}}
    await ToolAgent(model).bind_tools([WeatherTool()]).bind_tools([other])._generate(MESSAGES)
    assert [tool["function"]["name"] for tool in model.requests[0].tools] == ["other"]


async def test_s3_03_without_tools_the_field_is_not_sent_and_the_text_is_unchanged() -> None:
    async with serving([stream(HELLO, END)]) as server:
        model = OpenAIModel("m", server.url, "key", 5.0, retries=0)
        reply = await ToolAgent(model).bind_tools([WeatherTool()]).bind_tools([])._generate(MESSAGES)
        await model.aclose()
    assert "tools" not in server.bodies[0]
    assert (reply.content, reply.tool_calls) == ("hé\U0001f600", [])


# S3-04 to S3-07: the field tool_calls


@pytest.mark.parametrize(
    "text",
    [CALL_TEXT, f"```json\n{CALL_TEXT}\n```", '<tool_action name="get_weather"><city value="北京" /></tool_action>'],
)
async def test_s3_04_calls_in_the_text_are_ignored_only_the_field_tool_calls_counts(text: str) -> None:
    reply = await ToolAgent(ScriptedModel([text])).bind_tools([WeatherTool()])._generate(MESSAGES)
    assert (reply.content, reply.tool_calls) == (text, [])


async def test_s3_05_model_calls_have_id_name_and_parsed_arguments() -> None:
    model = ScriptedModel([Calls([("get_weather", {"city": "北京"}), ("get_weather", {"city": "上海"})], "我看看。")])
    reply = await ToolAgent(model).bind_tools([WeatherTool()])._generate(MESSAGES)
    assert isinstance(reply, AIMessage)
    assert (reply.content, reply.finish_reason) == ("我看看。", "tool_calls")
    assert [(call["id"], call["name"], call["arguments"]) for call in reply.tool_calls] == [
        ("call1n0", "get_weather", {"city": "北京"}),
        ("call1n1", "get_weather", {"city": "上海"}),
    ]


async def test_s3_06_plain_text_is_an_ordinary_message_with_an_empty_list_of_calls() -> None:
    reply = await ToolAgent(ScriptedModel(["22 度。"])).bind_tools([WeatherTool()])._generate(MESSAGES)
    assert isinstance(reply, AIMessage)
    assert (reply.content, reply.tool_calls, reply.finish_reason) == ("22 度。", [], "stop")


BAD_ARGUMENTS = ['{"city": "北京"', "city=北京", '["北京"]', '{"city": NaN}', '{"a": 1}{"b": 2}']


@pytest.mark.parametrize("raw", BAD_ARGUMENTS)
async def test_s3_07_invalid_json_arguments_raise_with_the_tool_name_and_the_raw_text(raw: str) -> None:
    agent = ToolAgent(ScriptedModel([Calls([("get_weather", raw)])])).bind_tools([WeatherTool()])
    with pytest.raises(ValueError) as raised:
        await agent._generate(MESSAGES)
    assert "get_weather" in str(raised.value)
    assert raw in str(raised.value)


async def test_s3_07_invalid_json_arguments_end_the_conversation_before_any_tool_runs() -> None:
    tool = WeatherTool()
    agent = CustomAgent(
        ToolAgent(ScriptedModel([Calls([("get_weather", {"city": "a"}), ("get_weather", "{")])])).bind_tools([tool])
    )
    with pytest.raises(ValueError, match="get_weather"):
        await agent.run("北京天气?")
    assert tool.cities == []


# S3-08 to S3-11: running tools


async def test_s3_08_results_are_tool_messages_of_the_history_until_there_is_a_text_response() -> None:
    tool, model = WeatherTool(), ScriptedModel([BEIJING, Calls([("get_weather", {"city": "上海"})]), "都是 22 度。"])
    agent = CustomAgent(ToolAgent(model).bind_tools([tool]))
    reply = await agent.run("天气?")
    assert (reply.content, tool.cities) == ("都是 22 度。", ["北京", "上海"])
    assert [type(message) for message in agent.history] == [
        HumanMessage,
        AIMessage,
        ToolMessage,
        AIMessage,
        ToolMessage,
        AIMessage,
    ]


async def test_s3_09_the_result_has_the_id_of_its_call_and_is_sent_in_the_next_round() -> None:
    model = ScriptedModel([BEIJING, "22 度。"])
    agent = CustomAgent(ToolAgent(model).bind_tools([WeatherTool()]))
    reply = await agent.run("北京天气?")
    message = agent.history[2]
    assert isinstance(message, ToolMessage)
    assert (message.content, message.tool_call_id, message.status) == ("22 degrees in 北京", "call1n0", "success")
    assert model.requests[1].messages[-1] == {
        "role": "tool",
        "tool_call_id": "call1n0",
        "content": "22 degrees in 北京",
    }
    assert json.loads(model.requests[1].messages[-2]["tool_calls"][0]["function"]["arguments"]) == {"city": "北京"}
    assert reply == agent.history[-1]


async def test_s3_09_a_tool_that_is_bound_later_can_run() -> None:
    tool, model = WeatherTool(), ScriptedModel([BEIJING, "22 度。"])
    tool_agent = ToolAgent(model)
    agent = CustomAgent(tool_agent)
    tool_agent.bind_tools([tool])
    await agent.run("北京天气?")
    assert tool.cities == ["北京"]


async def test_s3_10_an_unknown_tool_is_reported_and_the_loop_continues() -> None:
    model = ScriptedModel([Calls([("get_news", {})]), "没有。"])
    agent = CustomAgent(ToolAgent(model).bind_tools([WeatherTool()]))
    assert (await agent.run("新闻?")).content == "没有。"
    assert "Tool not found: get_news" in model.requests[1].messages[-1]["content"]


async def test_s3_10_an_exception_of_a_tool_is_the_content_of_its_message_and_the_loop_continues() -> None:
    model = ScriptedModel([BEIJING, "我不知道。"])
    agent = CustomAgent(ToolAgent(model).bind_tools([WeatherTool(RuntimeError("the station is down"))]))
    reply = await agent.run("北京天气?")
    message = agent.history[2]
    assert isinstance(message, ToolMessage)
    assert ("RuntimeError: the station is down" in message.content, message.tool_call_id, message.status) == (
        True,
        "call1n0",
        "error",
    )
    assert "the station is down" in model.requests[1].messages[-1]["content"]
    assert reply.content == "我不知道。"


@pytest.mark.parametrize(("limit", "rounds"), [({}, 5), ({"max_iterations": 2}, 2)], ids=["default", "2"])
async def test_s3_11_the_loop_stops_at_its_limit_with_the_last_response_and_a_warning(
    limit: dict[str, Any], rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    tool, model = WeatherTool(), ScriptedModel([Calls(BEIJING.calls, f"第 {number} 次") for number in range(1, 8)])
    reply = await CustomAgent(ToolAgent(model).bind_tools([tool]), **limit).run("北京天气?")
    assert (len(model.requests), len(tool.cities)) == (rounds, rounds)
    assert reply.content == f"第 {rounds} 次"
    assert "event=max_iterations_reached" in warnings_of(caplog)


async def test_s3_11_an_answer_within_the_limit_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    await CustomAgent(ToolAgent(ScriptedModel([BEIJING, "22 度。"])).bind_tools([WeatherTool()]), max_iterations=2).run(
        "北京天气?"
    )
    assert warnings_of(caplog) == ""


# S3-12 to S3-14: the fallback


async def test_s3_12_without_function_calling_schemas_are_in_the_prompt_and_calls_in_the_text() -> None:
    tool, model = WeatherTool(), ScriptedModel([f"我查一下: {CALL_TEXT}", "22 度。"])
    agent = CustomAgent(ToolAgent(LLMClient(model, function_calling=False)).bind_tools([tool]), instruction="Be brief.")
    reply = await agent.run("北京天气?")
    assert all(request.tools == [] for request in model.requests)
    assert system_of(model).startswith("Be brief.")
    system = system_of(model)
    assert json.JSONDecoder().raw_decode(system, system.index("[{"))[0] == [SCHEMA["function"]]
    assert (tool.cities, reply.content) == (["北京"], "22 度。")
    assert "22 degrees in 北京" in model.requests[1].messages[-1]["content"]


async def test_s3_13_the_fallback_is_enabled_by_its_switch_only_and_logs_a_deprecation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ScriptedModel(["Warm."])
    await ToolAgent(LLMClient(model, function_calling=False)).bind_tools([WeatherTool()])._generate(MESSAGES)
    assert (model.requests[0].tools, "get_weather" in system_of(model)) == ([], True)
    assert "deprecated" in warnings_of(caplog)
    assert "function_calling=False" in warnings_of(caplog)


async def test_s3_13_native_function_calling_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    await ToolAgent(LLMClient(ScriptedModel(["Warm."]))).bind_tools([WeatherTool()])._generate(MESSAGES)
    assert warnings_of(caplog) == ""


NO_CALLS = [
    "今天很暖和。",
    '{"tool": "get_weather", "arguments": {"city": ',
    '{"tool": 5, "arguments": {}}',
    '{"city": "北京"}',
    "{}",
    "[1, 2]",
    '```json\n{"temp": 22}\n```',
    '{"tool": "get_weather", "arguments": "北京"}',
]


@pytest.mark.parametrize("text", NO_CALLS)
async def test_s3_14_a_text_without_a_valid_call_is_an_ordinary_response(text: str) -> None:
    tool = WeatherTool()
    reply = await CustomAgent(
        ToolAgent(LLMClient(ScriptedModel([text]), function_calling=False)).bind_tools([tool])
    ).run("北京天气?")
    assert (reply.content, reply.tool_calls, tool.cities) == (text, [], [])


async def test_s3_14_an_empty_reply_is_an_ordinary_response() -> None:
    reply = await ToolAgent(
        LLMClient(ScriptedModel([Raw([chunk("stop", content="")])]), function_calling=False)
    )._generate(MESSAGES)
    assert (reply.content, reply.tool_calls) == ("", [])
