"""Anything that can run by name is a tool: functions, dicts and objects with `execute`, and objects with `_run`."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from toolcrew.contract.functions.call_context import CallContext
from toolcrew.contract.registry import Tool
from toolcrew.contract.schema import prepare_arguments
from toolcrew.orchestrator.functions.function_tools import as_tool, tool

CONTEXT = CallContext("c1", cwd="/here")


class Place(BaseModel):
    title: str


def run_tool(converted: Tool[Any], **arguments: Any) -> Any:
    """Run the tool as a dispatcher does: validate the arguments against the schema first."""
    prepared, _ = prepare_arguments(converted.spec, arguments)
    value = converted.handler(prepared, CONTEXT)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def test_an_object_with_execute_gets_the_context_as_second_argument() -> None:
    class Where:
        name = "where"
        description = "Where."
        parameters: ClassVar[dict[str, Any]] = {}

        def requires_permission(self) -> bool:
            return True

        def execute(self, args: dict[str, Any], context: CallContext) -> str:
            return context.cwd

    converted = as_tool(Where())
    assert converted.requires_permission is True
    assert (run_tool(converted), converted.spec.parameters) == ("/here", {"type": "object", "properties": {}})


SECOND_PARAMETERS: list[tuple[Callable[..., Any], Any]] = [
    (lambda args: "alone", "alone"),
    (lambda args, context: context.cwd, "/here"),
    (lambda args, anything: anything.cwd, "/here"),
    (lambda args, context=None: context.cwd, "/here"),
    (lambda args, verbose=False: verbose, False),
    (lambda *args: args[1].cwd, "/here"),
]


@pytest.mark.parametrize(("execute", "expected"), SECOND_PARAMETERS, ids=range(len(SECOND_PARAMETERS)))
def test_the_context_is_passed_only_to_functions_that_accept_it(execute: Callable[..., Any], expected: Any) -> None:
    assert run_tool(as_tool({"name": "x", "description": "X.", "execute": execute})) == expected


def test_a_tool_with_keyword_arguments_accepts_any_argument() -> None:
    class Anything:
        name = "anything"
        description = "Takes anything."

        def run(self, **kwargs: Any) -> dict[str, Any]:
            return kwargs

    assert run_tool(as_tool(Anything()), a=1) == {"a": 1}


@pytest.mark.parametrize(
    "value",
    [5, "name", None, {"name": "x"}, {"execute": print}, int, Place, object()],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_not_a_tool_is_refused_with_the_reason(value: Any) -> None:
    with pytest.raises(TypeError, match=r"needs|lacks|class|cannot convert|no function"):
        as_tool(value)


@pytest.mark.parametrize("name", ["my tool", "a" * 65, "wetter\u00fc", "a.b", "<lambda>", "a\n"])
def test_an_invalid_tool_name_is_refused(name: str) -> None:
    for make in (lambda: tool(name=name)(lambda city: city), lambda: as_tool({"name": name, "execute": print})):
        with pytest.raises(TypeError, match="names of 1 to 64 letters"):
            make()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"description": "x" * 9000}, "tool 't': `description` must have at most 8192 characters"),
        ({"description": 5}, "tool 't': `description`"),
        ({"timeout_s": -1}, "tool 't': `timeout_s`"),
    ],
)
def test_an_invalid_tool_field_is_named_in_the_error(part: dict[str, Any], expected: str) -> None:
    with pytest.raises(TypeError) as refused:
        as_tool({"name": "t", "execute": print, **part})
    assert str(refused.value).startswith(expected)


def test_a_failing_attribute_is_named_in_the_error() -> None:
    class Broken:
        name = "broken"
        description = "Breaks."
        invoke = print

        @property
        def args_schema(self) -> Any:
            raise RuntimeError("no schema today")

    with pytest.raises(TypeError, match=r"Broken .*RuntimeError: no schema today"):
        as_tool(Broken())
