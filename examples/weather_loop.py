"""The tool loop by JSON decisions, whole: the user asks, the model decides to call a tool, its result is injected, the
model replies.

From the project's folder: `python examples/weather_loop.py`. A fixed script plays the model; `--model NAME` asks the
model of that name at the endpoint that the environment names. `--model local` asks the small one on this machine, which
calls well but seldom finds the end.
"""

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

from contract.run_events import CallFinished, CallStarted, RunEvent, StepStarted
from orchestrator import ContextEngine, create_output_controller, create_tool_registry, run_tool_loop
from orchestrator.dialects.model import Message, Model
from orchestrator.models.choice import choose_model
from orchestrator.sdk.tool_loop import Chat, ToolLoopRegistry, ToolLoopResult
from orchestrator.settings import load_settings

QUESTION = "What's the weather in Beijing?"
WEATHER = {"Beijing": 22, "London": 11, "Nairobi": 25}


class ScriptedGateway:
    """Stands where a client of a model provider would: messages in, the reply's raw content out."""

    async def chat(self, messages: list[Message]) -> str:
        header, _, result = messages[-1]["content"].partition("\n")
        if header != "[Tool result for get_weather]":
            return '{"tool": "get_weather", "arguments": {"city": "Beijing"}}'
        weather = json.loads(result)
        return json.dumps({"tool": None, "reply": f"It is {weather['temp']} degrees in {weather['city']}."})


def build_registry() -> ToolLoopRegistry:
    """Two tools: one as a plain record, one as a function."""
    registry = create_tool_registry()
    registry.register(
        {
            "name": "get_weather",
            "description": "Get current weather for a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "execute": get_weather,
        }
    )
    registry.register(list_cities)
    return registry


async def get_weather(args: dict[str, Any]) -> dict[str, Any]:
    if args["city"] not in WEATHER:
        raise LookupError(f"no station in {args['city']}: ask list_cities")
    return {"temp": WEATHER[args["city"]], "city": args["city"]}


def list_cities() -> list[str]:
    """List the cities that have a weather station."""
    return sorted(WEATHER)


def show(event: RunEvent) -> None:
    if isinstance(event, StepStarted):
        say(f"round {event.step}")
    elif isinstance(event, CallStarted):
        say(f"  the model calls {event.call.name} {json.dumps(event.call.arguments, ensure_ascii=False)}")
    elif isinstance(event, CallFinished):
        say(f"  injected: [Tool result for {event.result.name}] {event.result.text()}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


async def answer(chat: Chat | Model, question: str) -> ToolLoopResult:
    deps = {
        "chat": chat,
        "context_engine": ContextEngine(),
        "output_controller": create_output_controller(),
        "tool_registry": build_registry(),
    }
    return await run_tool_loop(deps, "session-1", question, max_tool_rounds=5, on_event=show)


async def main() -> None:
    parser = argparse.ArgumentParser(description="One question through the tool loop.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", help="local, or a name at your endpoint; default: a script")
    asked = parser.parse_args()
    async with AsyncExitStack() as stack:
        chat: Chat | Model = ScriptedGateway().chat
        if asked.model is not None:
            chat = (await stack.enter_async_context(choose_model(load_settings(), asked.model))).model
        say(f"user: {asked.question}")
        result = await answer(chat, asked.question)
    say(f"model: {result.reply}")


if __name__ == "__main__":
    asyncio.run(main())
