"""Foreign tools: objects in LangChain's shape, without LangChain, and every form that becomes an OpenAI tool. JSON
Schemas are adapted for a model without loss of meaning.
"""

import asyncio
import inspect
import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from toolcrew.contract.functions.call_context import CallContext
from toolcrew.contract.functions.function_schemas import is_async
from toolcrew.contract.functions.json_schemas import close_schema, drop_titles, plain_schema
from toolcrew.contract.registry import Tool
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.functions.function_tools import as_tool, tool
from toolcrew.orchestrator.functions.langchain_shape import is_langchain_shaped
from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool


class Point(BaseModel):
    """A point."""

    x: int
    y: int = 0


class WeatherArgs(BaseModel):
    """Weather of a city."""

    city: str = Field(description="Its name.")
    at: Point | None = None


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Its name."},
        "at": {
            "anyOf": [
                {
                    "type": "object",
                    "description": "A point.",
                    "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
                    "required": ["x"],
                },
                {"type": "null"},
            ],
            "default": None,
        },
    },
    "required": ["city"],
}
PLAIN = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def shaped(**parts: Any) -> Any:
    """Return an object with name, description and these attributes."""
    return SimpleNamespace(name="get_weather", description="Get it.", **parts)


def described(
    parameters: Any, *, name: str = "get_weather", description: str = "Get it.", **more: Any
) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters, **more},
    }


def run(value: Any, **arguments: Any) -> Any:
    result = as_tool(value).handler(arguments, CallContext("c1"))
    return asyncio.run(result) if inspect.iscoroutine(result) else result


# What is accepted


def echo(value: Any) -> Any:
    return value


INCOMPLETE = [
    SimpleNamespace(name="x", args_schema=WeatherArgs, invoke=echo),
    SimpleNamespace(description="x", args_schema=WeatherArgs, invoke=echo),
    shaped(args_schema=WeatherArgs),
    shaped(invoke=echo),
    WeatherArgs,
]


@pytest.mark.parametrize(
    "value", INCOMPLETE, ids=["no description", "no name", "no invoke", "no schema", "a model class"]
)
def test_object_without_a_required_attribute_is_not_langchain_shaped(value: Any) -> None:
    assert not is_langchain_shaped(value)


# Its schema


SCHEMAS = [
    ({"tool_call_schema": {"title": "W", "description": "d", **PLAIN}, "args_schema": WeatherArgs}, PLAIN),
    ({"tool_call_schema": WeatherArgs, "args_schema": {"type": "object", "properties": {}}}, WEATHER),
    ({"args_schema": WeatherArgs}, WEATHER),
    ({"args_schema": PLAIN}, PLAIN),
    ({"get_input_schema": lambda: WeatherArgs}, WEATHER),
]


@pytest.mark.parametrize(
    ("parts", "parameters"),
    SCHEMAS,
    ids=[
        "tool_call_schema dict",
        "tool_call_schema class",
        "args_schema class",
        "args_schema dict",
        "get_input_schema",
    ],
)
def test_schema_comes_from_the_first_attribute_that_has_one(parts: dict[str, Any], parameters: Any) -> None:
    value = shaped(invoke=echo, **parts)
    assert convert_to_openai_tool(value) == described(parameters)
    assert as_tool(value).spec.parameters == plain_schema(parameters, null_as_type=True)


class OldTool:
    """LangChain's `Tool`: a schema computed from `*args, **kwargs`, and `args` that says what it really takes."""

    name = "search"
    description = "Searches."
    args_schema = None
    args: ClassVar[dict[str, Any]] = {"tool_input": {"type": "string"}}
    tool_call_schema: ClassVar[dict[str, Any]] = {"type": "object", "properties": {"args": {}, "kwargs": {}}}

    def _run(self, *args: Any, **kwargs: Any) -> str:
        return f"found {args[0]}"


ONE_STRING = {"type": "object", "properties": {"__arg1": {"type": "string"}}, "required": ["__arg1"]}


def test_tool_without_schema_or_type_hints_takes_one_string() -> None:
    assert convert_to_openai_tool(OldTool())["function"]["parameters"] == ONE_STRING
    assert run(OldTool(), __arg1="x") == "found x"
    value = shaped(args_schema=None, _run=lambda text: text * 2)
    assert as_tool(value).spec.parameters == ONE_STRING
    assert run(value, __arg1="x") == "xx"


def test_annotations_of_run_replace_a_missing_schema() -> None:
    class Weather:
        name = "get_weather"
        description = "Get it."
        args_schema = None

        def _run(self, city: str) -> str:
            return f"sunny in {city}"

    assert convert_to_openai_tool(Weather())["function"]["parameters"]["properties"] == {"city": {"type": "string"}}
    assert run(Weather(), city="Oslo") == "sunny in Oslo"


# Its call


async def async_echo(value: Any) -> Any:
    return {"async": value}


CALLS = [
    ({"ainvoke": async_echo, "invoke": lambda value: {"sync": value}}, {"async": {"city": "Oslo"}}, True),
    ({"invoke": lambda value: {"sync": value}, "_run": lambda city: city}, {"sync": {"city": "Oslo"}}, False),
    ({"_run": lambda city: {"run": city}}, {"run": "Oslo"}, False),
]


@pytest.mark.parametrize(("parts", "expected", "on_loop"), CALLS, ids=["ainvoke", "invoke", "_run"])
def test_tool_is_called_by_ainvoke_then_invoke_then_run(parts: dict[str, Any], expected: Any, on_loop: bool) -> None:
    value = shaped(args_schema=WeatherArgs, **parts)
    assert run(value, city="Oslo") == expected
    assert is_async(as_tool(value).handler) is on_loop


def test_invoke_receives_only_the_arguments() -> None:
    """The second parameter of `invoke` is LangChain's own configuration."""
    assert run(shaped(args_schema=PLAIN, invoke=lambda value, config=None, **_: config), city="x") is None
    assert threading.current_thread() is threading.main_thread()


# convert_to_openai_tool: dicts


def test_openai_tool_entry_is_returned_unchanged() -> None:
    for entry in (
        described(PLAIN),
        {"type": "web_search"},
        {"type": "mcp", "server_label": "x"},
        {"type": "web_search_preview_2025_03_11"},
    ):
        assert convert_to_openai_tool(entry) == entry


FORMS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "Get it.", "parameters": PLAIN},
    {"name": "get_weather", "description": "Get it.", "input_schema": PLAIN},
    {"toolSpec": {"name": "get_weather", "description": "Get it.", "inputSchema": {"json": PLAIN}}},
    {"title": "get_weather", "description": "Get it.", **PLAIN},
    {"name": "get_weather", "description": "Get it.", "parameters": PLAIN, "execute": echo},
]


@pytest.mark.parametrize("form", FORMS, ids=["openai", "anthropic", "bedrock", "json-schema", "execute"])
def test_dict_form_is_converted_to_an_openai_tool(form: dict[str, Any]) -> None:
    assert convert_to_openai_tool(form) == described(PLAIN)


def test_convert_to_openai_tool_refuses_values_that_are_not_tools() -> None:
    for value in ({}, {"description": "x"}, 5, None, int):
        with pytest.raises(ValueError, match=r"tool|class"):
            convert_to_openai_tool(value)
    for inner in ({}, {"name": "t"}, {"name": "t", "inputSchema": {}}, None, "t"):
        with pytest.raises(ValueError, match="a tool with `toolSpec` is incomplete"):
            convert_to_openai_tool({"toolSpec": inner})


# convert_to_openai_tool: Python


class Query(TypedDict):
    """Asks."""

    text: str


def get_weather(city: str) -> None:
    """Get it.

    Args:
        city: Its name.
    """


def test_class_function_and_object_with_execute_are_converted() -> None:
    text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    assert convert_to_openai_tool(Query) == described(text, name="Query", description="Asks.")
    city = {"city": {"type": "string", "description": "Its name."}}
    assert convert_to_openai_tool(get_weather) == described({**PLAIN, "properties": city})
    executable = shaped(parameters=WeatherArgs, execute=echo)
    assert convert_to_openai_tool(executable) == described(WEATHER)
    assert as_tool(executable).spec.parameters == WEATHER


def test_tool_and_tool_spec_are_converted_by_their_spec() -> None:
    spec = ToolSpec(name="get_weather", description="Get it.", parameters=PLAIN)
    assert convert_to_openai_tool(spec) == convert_to_openai_tool(Tool(spec, None)) == described(PLAIN)
    local_tool = tool(name="echo")(lambda city: city)
    assert convert_to_openai_tool(local_tool)["function"]["parameters"] == local_tool.spec.parameters


# strict


def test_strict_forbids_extra_properties_and_requires_all() -> None:
    function = convert_to_openai_tool(WeatherArgs, strict=True)["function"]
    inner = function["parameters"]["properties"]["at"]["anyOf"][0]
    assert function["strict"] is True
    for schema in (function["parameters"], inner):
        assert (schema["additionalProperties"], schema["required"]) == (False, list(schema["properties"]))
    assert convert_to_openai_tool(described(PLAIN), strict=False) == described(PLAIN, strict=False)
    closed = convert_to_openai_tool(described(PLAIN), strict=True)["function"]
    assert (closed["strict"], closed["parameters"]["additionalProperties"]) == (True, False)


@pytest.mark.parametrize(
    "form", [described(PLAIN, strict=False), {"name": "get_weather", "parameters": PLAIN, "strict": False}]
)
def test_strict_argument_that_contradicts_the_tool_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"get_weather.*strict"):
        convert_to_openai_tool(form, strict=True)
    assert convert_to_openai_tool(form)["function"]["strict"] is False


# JSON Schemas


POINT = {"title": "Point", "type": "object", "properties": {"x": {"type": "integer", "title": "X"}}}


def test_inlined_reference_keeps_the_sibling_keywords() -> None:
    schema = {
        "properties": {"at": {"$ref": "#/$defs/Point", "description": "here"}},
        "$defs": {"Point": {**POINT, "description": "any"}},
    }
    assert plain_schema(schema) == {
        "properties": {"at": {"type": "object", "description": "here", "properties": {"x": {"type": "integer"}}}}
    }


def test_mutually_recursive_definitions_are_kept() -> None:
    def refers(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{name}"}}}

    plain = plain_schema({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": refers("B"), "B": refers("A")}})
    assert plain["properties"]["a"] == {"$ref": "#/$defs/A"}
    assert plain["$defs"]["A"]["properties"]["next"]["properties"]["next"] == {"$ref": "#/$defs/A"}


def test_exponentially_nested_definitions_stay_small() -> None:
    twice = {f"D{i}": {"properties": {side: {"$ref": f"#/$defs/D{i + 1}"} for side in "ab"}} for i in range(30)}
    plain = plain_schema({"properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": {**twice, "D30": {"type": "integer"}}})
    assert len(str(plain)) < 100_000
    validator = Draft202012Validator(plain)
    assert validator.is_valid({"a": {"b": {"a": {"b": {}}}}})
    value: Any = "no integer"
    for side in "ba" * 15:
        value = {side: value}
    assert not validator.is_valid({"a": value})


def test_drop_titles_keeps_a_property_or_default_named_title() -> None:
    schema = {"title": "T", "properties": {"title": {"title": "Title", "type": "string"}}, "default": {"title": "kept"}}
    assert drop_titles(schema) == {"properties": {"title": {"type": "string"}}, "default": {"title": "kept"}}


NULL = {"type": "null"}
UNIONS: list[tuple[list[Any], dict[str, Any] | None]] = [
    ([{"type": "integer"}, NULL], {"type": ["integer", "null"]}),
    ([{"type": "integer", "minimum": 1}, NULL], {"type": ["integer", "null"], "minimum": 1}),
    ([{"type": "integer"}, {"type": "string"}], {"type": ["integer", "string"]}),
    (
        [{"type": "array", "items": {"type": "integer"}}, NULL],
        {"type": ["array", "null"], "items": {"type": "integer"}},
    ),
    ([{"type": "string", "enum": ["a"]}, NULL], None),
    ([{"type": "string", "const": "a"}, NULL], None),
    ([{"$ref": "#/$defs/A"}, NULL], None),
    ([{"type": "string", "maxLength": 2}, {"type": "string"}], None),
]


@pytest.mark.parametrize(
    ("branches", "merged"),
    UNIONS,
    ids=["null", "keyword", "two types", "array", "enum", "const", "reference", "two keywords"],
)
def test_union_becomes_a_type_list_only_if_equivalent(branches: list[Any], merged: dict[str, Any] | None) -> None:
    assert plain_schema({"anyOf": branches}, null_as_type=True) == (merged or {"anyOf": branches})
    assert plain_schema({"anyOf": branches}) == {"anyOf": branches}


def test_close_schema_does_not_change_its_argument() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"b": {}}}}},
    }
    closed = close_schema(schema)
    assert closed["required"] == ["a"]
    assert closed["properties"]["a"]["items"] == {
        "type": "object",
        "properties": {"b": {}},
        "additionalProperties": False,
        "required": ["b"],
    }
    assert "required" not in schema
