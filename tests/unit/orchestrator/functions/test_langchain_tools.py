"""LangChain's own tools in the registry, of every kind that the real library makes: their descriptions for models,
and the outcomes of calls.
"""

import asyncio
import warnings
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from toolcrew import LocalTools, as_tool
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode

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


def call(langchain_tool: Any, **arguments: Any) -> ToolResult:
    """Return the reply that a model gets for the call."""
    local_tool = as_tool(langchain_tool)
    return asyncio.run(
        LocalTools([local_tool]).run_call(ToolCall(id="call-1", name=local_tool.name, arguments=arguments))
    )


def parameters(langchain_tool: Any) -> dict[str, Any]:
    return dict(as_tool(langchain_tool).spec.parameters)


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
    ("langchain_tool", "arguments", "output"),
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
        (runnable_tool(lambda arguments: arguments["a"] * 10, arg_types={"a": int}), {"a": 4}, "40"),
    ],
)
def test_every_kind_of_langchain_tool_runs(langchain_tool: Any, arguments: dict[str, Any], output: str) -> None:
    result = call(langchain_tool, **arguments)
    assert (result.error, result.output) == (None, output)


def test_model_receives_the_parameters_of_the_langchain_tool() -> None:
    result = parameters(add)
    assert result["properties"] == {
        "a": {"type": "integer", "description": "The first."},
        "b": {"type": "integer", "description": "The second.", "default": 2},
    }
    assert (result["required"], as_tool(add).spec.description) == (["a"], "Add two numbers.")
    assert parameters(StructuredTool(name="by_schema", description="d", args_schema=A_AND_B, func=subtract)) == A_AND_B


def test_langchain_artifact_becomes_result_metadata() -> None:
    @tool(response_format="content_and_artifact")
    def measure(n: int) -> tuple[str, dict[str, int]]:
        """Measure."""
        return f"measured {n}", {"n": n}

    result = call(measure, n=3)
    assert (result.output, result.metadata) == ("measured 3", {"n": 3})


def test_tool_exception_is_a_failed_result_handled_or_not() -> None:
    raised, handled = call(Refusing(), what="tea"), call(Refusing(handle_tool_error=True), what="tea")
    assert (raised.success, raised.error) == (False, "ToolException: no tea today")
    assert (handled.success, handled.error) == (False, "no tea today")


def test_injected_argument_is_hidden_and_cannot_be_set_by_the_model() -> None:
    @tool
    def whoami(greeting: str, user: Annotated[str, InjectedToolArg] = "unknown") -> str:
        """Greet."""
        return f"{greeting} {user}"

    assert list(parameters(whoami)["properties"]) == ["greeting"]
    assert call(whoami, greeting="hi").output == "hi unknown"
    # The attacker's aim: to use another identity.
    assert call(whoami, greeting="hi", user="root").error_code is ErrorCode.INVALID_ARGUMENTS


def test_injected_call_id_and_config_are_supplied() -> None:
    @tool
    def echo_call_id(word: str, tool_call_id: Annotated[str, InjectedToolCallId], config: RunnableConfig) -> str:
        """Tell."""
        return f"{word} {tool_call_id if isinstance(config, dict) else None}"

    class Schema(BaseModel):
        word: str

    @tool(args_schema=Schema)
    def echo_with_schema(word: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Tell."""
        return f"{word} {tool_call_id}"

    assert list(parameters(echo_call_id)["properties"]) == ["word"]
    assert call(echo_call_id, word="a").output == "a call-1"
    assert call(echo_with_schema, word="a").output == "a call-1"


def test_tool_with_an_injected_store_is_refused_at_registration() -> None:
    @tool
    def of_graph(word: str, store: Annotated[dict[str, Any], InjectedToolArg]) -> str:
        """Needs a graph."""
        return word

    with pytest.raises(TypeError, match="only LangChain or LangGraph can supply the parameter 'store'"):
        as_tool(of_graph)
