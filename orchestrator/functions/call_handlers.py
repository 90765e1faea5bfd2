"""Handlers: what is called in this process with a call's arguments and context, made of functions that take less or other things."""

from collections.abc import Callable
from typing import Any

from orchestrator.functions.call_context import CallContext, LocalHandler
from orchestrator.functions.function_schemas import is_async, read_function, takes_second_argument


def build_execute_handler(execute: Callable[..., Any], *, is_alone: bool = False) -> LocalHandler:
    """`execute(args, context)`; `execute(args)` where a second argument is not taken, or is not ours to give (`is_alone`)."""
    if not is_alone and takes_second_argument(execute):
        return calling(execute, is_async(execute))
    return calling(lambda arguments, _: execute(arguments), is_async(execute))


def build_function_handler(function: Callable[..., Any], name: str | None = None) -> LocalHandler:
    """`function` with its arguments by name, in its own types, and the context where it asks for it."""
    shape = read_function(function, name=name)

    def run(arguments: dict[str, Any], context: CallContext) -> Any:
        places, named = shape.bind(arguments, context)
        return function(*places, **named)

    return calling(run, is_async(function))


def calling(run: LocalHandler, is_coroutine: bool) -> LocalHandler:
    """`run`, as a coroutine function when what it calls is one: that is how a transport knows where to run it."""
    if not is_coroutine:
        return run

    async def run_async(arguments: dict[str, Any], context: CallContext) -> Any:
        return await run(arguments, context)

    return run_async
