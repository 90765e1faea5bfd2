"""LangChain's own tools in the registry, of every kind that the real library makes: their descriptions for models,
and the outcomes of calls.
"""

import asyncio
import warnings
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from orchestrator import LocalTools, as_tool

pytest.importorskip("langchain_core")

from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import (
    BaseTool,
    InjectedToolArg,
    InjectedToolCallId,
    StructuredTool,
    Tool,
    ToolException,
    tool,
)


def call(made: Any, **arguments: Any) -> ToolResult:
    """Return the reply that a model gets for the call."""
    ours = as_tool(made)
    return asyncio.run(LocalTools([ours]).run_call(ToolCall(id="call-1", name=ours.name, arguments=arguments)))


def parameters(made: Any) -> dict[str, Any]:
    return dict(as_tool(made).spec.parameters)


class Point(BaseModel):
    x: int
    y: int = 0


@tool(parse_docstring=True)
def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@tool
async def shift(points: list[Point], by: Point) -> list[Point]:
    """Shift points."""
    return [Point(x=point.x + by.x, y=point.y + by.y) for point in points]


def subtract(a: int, b: int) -> int:
    """Subtract."""
    return a - b


async def subtract_async(a: int, b: int) -> int:
    """Subtract."""
    return a - b


class Repeat(BaseTool):
    name: str = "repeat"
    description: str = "Repeat a word."

    def _run(self, word: str, times: int = 2) -> str:
        return word * times


class RepeatAsync(Repeat):
    async def _arun(self, word: str, times: int = 2) -> str:
        return f"async {word * times}"


class Refusing(BaseTool):
    name: str = "refusing"
    description: str = "Refuses."

    def _run(self, what: str) -> str:
        raise ToolException(f"no {what} today")


def runnable_tool(function: Any, **fields: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LangChain calls it beta
        return RunnableLambda(function).as_tool(name="run_it", description="Run it.", **fields)


def upper(text: str) -> str:
    return text.upper()


A_AND_B = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    ("made", "arguments", "output"),
    [
        (add, {"a": 1}, "3"),
        (shift, {"points": [{"x": 1}], "by": {"x": 2, "y": 3}}, '[{"x": 3, "y": 3}]'),
        (StructuredTool.from_function(subtract), {"a": 3, "b": 1}, "2"),
        (StructuredTool.from_function(coroutine=subtract_async), {"a": 3, "b": 1}, "2"),
        (StructuredTool(name="by_schema", description="d", args_schema=A_AND_B, func=subtract), {"a": 3, "b": 1}, "2"),
        (Repeat(), {"word": "ab"}, "abab"),
        (RepeatAsync(), {"word": "ab", "times": 1}, "async ab"),
        (Tool(name="single", description="d", func=upper), {"__arg1": "ab"}, "AB"),
        (runnable_tool(upper), {"__arg1": "ab"}, "AB"),
        (runnable_tool(lambda given: given["a"] * 10, arg_types={"a": int}), {"a": 4}, "40"),
    ],
)
def test_every_kind_of_tool_runs_with_a_models_arguments(made: Any, arguments: dict[str, Any], output: str) -> None:
    result = call(made, **arguments)
    assert (result.error, result.output) == (None, output)


def test_a_model_receives_the_tools_own_parameters() -> None:
    result = parameters(add)
    assert result["properties"] == {
        "a": {"type": "integer", "description": "The first."},
        "b": {"type": "integer", "description": "The second.", "default": 2},
    }
    assert (result["required"], as_tool(add).spec.description) == (["a"], "Add two numbers.")
    assert parameters(StructuredTool(name="by_schema", description="d", args_schema=A_AND_B, func=subtract)) == A_AND_B


def test_an_artifact_becomes_metadata() -> None:
    @tool(response_format="content_and_artifact")
    def measure(n: int) -> tuple[str, dict[str, int]]:
        """Measure."""
        return f"measured {n}", {"n": n}

    result = call(measure, n=3)
    assert (result.output, result.metadata) == ("measured 3", {"n": 3})


def test_a_tools_exception_is_a_failure_whether_it_handles_it_or_not() -> None:
    raised, handled = call(Refusing(), what="tea"), call(Refusing(handle_tool_error=True), what="tea")
    assert (raised.success, raised.error) == (False, "ToolException: no tea today")
    assert (handled.success, handled.error) == (False, "no tea today")


def test_what_models_must_not_choose_is_hidden_and_keeps_its_default() -> None:
    @tool
    def whoami(greeting: str, user: Annotated[str, InjectedToolArg] = "unknown") -> str:
        """Greet."""
        return f"{greeting} {user}"

    assert list(parameters(whoami)["properties"]) == ["greeting"]
    assert call(whoami, greeting="hi").output == "hi unknown"
    # The attacker's aim: to use another identity.
    assert call(whoami, greeting="hi", user="root").error_code is ErrorCode.INVALID_ARGUMENTS


def test_a_tool_that_wants_the_calls_id_or_the_runs_configuration_gets_ours() -> None:
    @tool
    def echo_call_id(word: str, tool_call_id: Annotated[str, InjectedToolCallId], config: RunnableConfig) -> str:
        """Tell."""
        return f"{word} {tool_call_id if isinstance(config, dict) else None}"

    class Schema(BaseModel):
        word: str

    @tool(args_schema=Schema)
    def told_by_schema(word: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Tell."""
        return f"{word} {tool_call_id}"

    assert list(parameters(echo_call_id)["properties"]) == ["word"]
    assert call(echo_call_id, word="a").output == "a call-1"
    assert call(told_by_schema, word="a").output == "a call-1"


def test_a_tool_that_only_its_framework_can_call_is_refused_at_once() -> None:
    @tool
    def of_graph(word: str, store: Annotated[dict[str, Any], InjectedToolArg]) -> str:
        """Needs a graph."""
        return word

    with pytest.raises(TypeError, match="only LangChain or LangGraph can supply the parameter 'store'"):
        as_tool(of_graph)
