"""Rows S1-36 to S1-45 of the scenarios: the document's own program line by line, its example run, and replacements of
the decision. `npm run stage:3` is `python examples/weather_loop.py` here; `{ maxToolRounds: 5 }` is the argument
`max_tool_rounds=5`; names of `deps` are written in snake_case.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolcrew.orchestrator.dialects.model import Message
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk import tool_loop
from toolcrew.orchestrator.sdk.tool_loop import (
    ContextEngine,
    ToolLoopRegistry,
    create_output_controller,
    create_tool_registry,
    run_tool_loop,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = Path("examples", "weather_loop.py")
QUESTION = "What's the weather in Beijing?"


async def execute(args: dict[str, Any]) -> dict[str, Any]:
    return {"temp": 22, "city": args["city"]}


def usage_registry() -> ToolLoopRegistry:
    registry = create_tool_registry()
    registry.register(
        {
            "name": "get_weather",
            "description": "Get current weather for a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "execute": execute,
        }
    )
    return registry


class Gateway:
    """Decides as the model of the document does, from the messages of the conversation."""

    def __init__(self) -> None:
        self.request_count = 0

    async def chat(self, messages: list[Message]) -> str:
        self.request_count += 1
        if messages[-1]["content"] == '[Tool result for get_weather]\n{"temp": 22, "city": "Beijing"}':
            return '{ "tool": null, "reply": "22 degrees." }'
        return '{ "tool": "get_weather", "arguments": {"city": "Beijing"} }'


def usage_deps(gateway: Gateway) -> dict[str, Any]:
    return {
        "chat": gateway.chat,
        "context_engine": ContextEngine(),
        "output_controller": create_output_controller(),
        "tool_registry": usage_registry(),
    }


def test_s1_36_the_package_exports_what_a_program_needs() -> None:
    from toolcrew import create_output_controller, create_tool_registry, run_tool_loop

    names = (create_tool_registry, run_tool_loop, create_output_controller)
    assert names == (tool_loop.create_tool_registry, tool_loop.run_tool_loop, tool_loop.create_output_controller)


def test_s1_37_the_tool_of_the_document_is_registered_unchanged() -> None:
    spec = usage_registry().list()[0]
    assert (spec.name, spec.description) == ("get_weather", "Get current weather for a city")
    assert spec.parameters == {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


async def test_s1_38_an_async_function_of_the_arguments_may_return_an_object() -> None:
    result = await usage_registry().execute("get_weather", {"city": "Beijing"})
    assert (result.success, result.output) == (True, '{"temp": 22, "city": "Beijing"}')


async def test_s1_39_the_loop_takes_its_parts_by_name() -> None:
    gateway = Gateway()
    result = await run_tool_loop(usage_deps(gateway), "s1", QUESTION)
    assert (result.reply, gateway.request_count) == ("22 degrees.", 2)


async def test_s1_39_an_unknown_part_name_is_an_error() -> None:
    with pytest.raises(TypeError, match="model_gateway"):
        await run_tool_loop({**usage_deps(Gateway()), "model_gateway": Gateway()}, "s1", QUESTION)


async def test_s1_40_one_question_is_run_with_a_limit_of_rounds() -> None:
    gateway = Gateway()
    assert (
        await run_tool_loop(usage_deps(gateway), "s1", QUESTION, max_tool_rounds=5)
    ).stop_reason is StopReason.ANSWERED
    gateway = Gateway()
    assert (
        await run_tool_loop(usage_deps(gateway), "s1", QUESTION, max_tool_rounds=1)
    ).stop_reason is StopReason.MAX_ITERATIONS
    assert gateway.request_count == 1


async def test_s1_41_the_reply_of_the_result_is_the_reply_of_the_model() -> None:
    result = await run_tool_loop(usage_deps(Gateway()), "s1", QUESTION, max_tool_rounds=5)
    assert result.reply == "22 degrees."


def run_example(*arguments: str) -> list[str]:
    """Return the lines that the example prints. The environment holds only PATH, so that the example cannot call an
    endpoint.
    """
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def test_s1_42_and_43_the_example_runs_by_one_command_and_prints_every_step() -> None:
    assert run_example() == [
        f"user: {QUESTION}",
        "round 1",
        '  the model calls get_weather {"city": "Beijing"}',
        '  injected: [Tool result for get_weather] {"temp": 22, "city": "Beijing"}',
        "round 2",
        "model: It is 22 degrees in Beijing.",
    ]


def test_s1_43_the_example_registers_several_tools() -> None:
    registry = runpy.run_path(str(ROOT / EXAMPLE))["build_registry"]()
    assert [spec.name for spec in registry.list()] == ["get_weather", "list_cities"]


@pytest.mark.parametrize(
    "part",
    ["create_tool_registry", "build_tool_system_prompt", "parse_tool_decision", "execute_tool_call", "run_tool_loop"],
)
def test_s1_44_every_part_listed_as_implemented_exists(part: str) -> None:
    assert callable(getattr(tool_loop, part))
    assert (ROOT / EXAMPLE).is_file()


async def test_s1_45_a_registry_of_the_loop_serves_native_calls_unchanged() -> None:
    registry = usage_registry()
    model = ScriptedModel([Calls([("get_weather", {"city": "Beijing"})]), "22 degrees."])
    result = await Agent(model, NativeDialect(), registry.list(), registry.run_call).run(QUESTION)
    assert [tool["function"]["name"] for tool in model.requests[0].tools] == ["get_weather"]
    assert model.requests[1].messages[-1] == {
        "role": "tool",
        "tool_call_id": "call1n0",
        "content": '{"temp": 22, "city": "Beijing"}',
    }
    assert result.answer == "22 degrees."
