"""The complete tool loop with JSON decisions: the user asks, the model calls a tool, the loop adds the result to the
prompt, and the model replies.

Run from the project's folder: `python examples/weather_loop.py`. A script replaces the model. `--model NAME` uses a
model at the endpoint of the environment. `--model local` uses the small model on this machine, which calls tools well
but often does not stop.
"""

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

from toolcrew import (
    CallFinished,
    CallStarted,
    Chat,
    ContextEngine,
    Message,
    Model,
    RunEvent,
    StepStarted,
    ToolLoopRegistry,
    ToolLoopResult,
    choose_model,
    create_output_controller,
    create_tool_registry,
    load_settings,
    run_tool_loop,
)

QUESTION = "What's the weather in Beijing?"
WEATHER = {"Beijing": 22, "London": 11, "Nairobi": 25}


class ScriptedGateway:
    """Replaces the client of a model provider: takes messages and returns the raw content of the reply."""

    async def chat(self, messages: list[Message]) -> str:
        header, _, result = messages[-1]["content"].partition("\n")
        if header != "[Tool result for get_weather]":
            return '{"tool": "get_weather", "arguments": {"city": "Beijing"}}'
        weather = json.loads(result)
        return json.dumps({"tool": None, "reply": f"It is {weather['temp']} degrees in {weather['city']}."})


def build_registry() -> ToolLoopRegistry:
    """Register two tools: one as a plain record, one as a function."""
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
        print_line(f"round {event.step}")
    elif isinstance(event, CallStarted):
        print_line(f"  the model calls {event.call.name} {json.dumps(event.call.arguments, ensure_ascii=False)}")
    elif isinstance(event, CallFinished):
        print_line(f"  injected: [Tool result for {event.result.name}] {event.result.text()}")


def print_line(line: str) -> None:
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
    parser = argparse.ArgumentParser(description="Ask one question with the tool loop.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", help="local, or the name of a model at your endpoint; default: a script")
    arguments = parser.parse_args()
    async with AsyncExitStack() as stack:
        chat: Chat | Model = ScriptedGateway().chat
        if arguments.model is not None:
            chat = (await stack.enter_async_context(choose_model(load_settings(), arguments.model))).model
        print_line(f"user: {arguments.question}")
        result = await answer(chat, arguments.question)
    print_line(f"model: {result.reply}")


if __name__ == "__main__":
    asyncio.run(main())
