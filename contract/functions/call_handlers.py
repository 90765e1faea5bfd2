"""Handlers: what is called with a call's arguments and context, made of functions that take less or other things."""

from collections.abc import Callable
from typing import Any

from contract.functions.call_context import CallContext, CallHandler, KnownHandler
from contract.functions.function_schemas import is_async, read_function, takes_second_argument


def build_execute_handler(execute: Callable[..., Any], *, is_alone: bool = False) -> CallHandler:
    """`execute(args, context)`; `execute(args)` where a second argument is not taken, or is not ours to give
    (`is_alone`).
    """
    if not is_alone and takes_second_argument(execute):
        return KnownHandler(execute, is_async(execute))
    return KnownHandler(lambda arguments, _: execute(arguments), is_async(execute))


def build_function_handler(function: Callable[..., Any], name: str | None = None) -> CallHandler:
    """`function` with its arguments by name, in its own types, and the context where it asks for it."""
    shape = read_function(function, name=name)

    def run(arguments: dict[str, Any], context: CallContext) -> Any:
        places, named = shape.bind(arguments, context)
        return function(*places, **named)

    return KnownHandler(run, is_async(function))
