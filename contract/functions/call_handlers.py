"""Builders of handlers `(arguments, context)` from functions with other signatures."""

from collections.abc import Callable
from typing import Any

from toolcrew.contract.functions.call_context import CallContext, CallHandler, FunctionHandler
from toolcrew.contract.functions.function_schemas import is_async, read_function, takes_second_argument


def build_execute_handler(execute: Callable[..., Any], *, is_alone: bool = False) -> CallHandler:
    """Return a handler that calls `execute(args, context)`. The handler calls `execute(args)` if `execute` takes no
    second argument, or if `is_alone` is true: a second parameter of `execute` then has another meaning than the
    context.
    """
    if not is_alone and takes_second_argument(execute):
        return FunctionHandler(execute, is_async(execute))
    return FunctionHandler(lambda arguments, _: execute(arguments), is_async(execute))


def build_function_handler(function: Callable[..., Any], name: str | None = None) -> CallHandler:
    """Return a handler that calls `function` with arguments by name, converted to the annotated types. The handler
    passes the context if the function has a parameter for it.
    """
    shape = read_function(function, name=name)

    def run(arguments: dict[str, Any], context: CallContext) -> Any:
        positional, keywords = shape.bind(arguments, context)
        return function(*positional, **keywords)

    return FunctionHandler(run, is_async(function))
