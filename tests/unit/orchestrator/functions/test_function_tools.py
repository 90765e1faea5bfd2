"""Functions as tools: the schema that a model reads, and the conversion of arguments back for the function."""

import asyncio
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import AfterValidator, BaseModel, Field
from typing_extensions import TypedDict

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.call_context import CallContext
from toolcrew.contract.registry import Tool
from toolcrew.contract.schema import prepare_arguments
from toolcrew.orchestrator.functions.function_tools import as_tool, tool

CONTEXT = CallContext("c1", cwd="/here")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    """Somewhere."""

    title: str
    height: int = 0


class Node(BaseModel):
    name: str
    children: list["Node"] = []


class Options(TypedDict):
    deep: bool


@dataclass
class Pair:
    left: int
    right: int


def properties(converted: Tool[Any]) -> dict[str, Any]:
    schema = converted.spec.parameters["properties"]
    assert isinstance(schema, dict)
    return schema


def run_tool(converted: Tool[Any], **arguments: Any) -> Any:
    """Run the tool as a dispatcher does: validate the arguments against the schema first."""
    prepared, _ = prepare_arguments(converted.spec, arguments)
    value = converted.handler(prepared, CONTEXT)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def test_a_docstring_that_describes_missing_parameters_is_refused() -> None:
    def search(query: str, context: CallContext) -> str:
        """Search.

        Args:
            query: What to find.
            context: Not shown to the model.
            limit: How many results.
            Note: the results are sorted.
        """
        return query

    with pytest.raises(TypeError, match=r"tool 'search'.*limit.*query, context") as refused:
        tool(search)
    assert "Note" not in str(refused.value)


def test_a_docstring_may_describe_names_of_open_arguments() -> None:
    def search(query: str, **options: str) -> str:
        """Search.

        Args:
            query: What to find.
            language: One of the options.
        """
        return query

    assert tool(search).spec.name == "search"


def test_the_decorator_reads_name_docstring_and_type_hints() -> None:
    @tool
    def get_weather(city: str, days: int = 3) -> dict[str, Any]:
        """Get the weather.

        For a city.

        Args:
            city (str): Its name,
                in English.
            days: How many: at most 7.

        Returns:
            A dict.
        """
        return {"city": city}

    assert (get_weather.name, get_weather.spec.description) == ("get_weather", "Get the weather.\n\nFor a city.")
    assert get_weather.spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name, in English."},
            "days": {"type": "integer", "default": 3, "description": "How many: at most 7."},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert get_weather.spec.pool == "local"


def test_a_decorated_function_stays_callable() -> None:
    @tool
    def double(n: int) -> int:
        """Twice."""
        return 2 * n

    assert double(4) == double(n=4) == 8
    assert (double.__name__, double.__doc__, str(inspect.signature(double))) == ("double", "Twice.", "(n: int) -> int")  # type: ignore[attr-defined]


def all_parameter_kinds(
    unit: Literal["C", "F"],
    colour: Colour,
    place: Place,
    pair: Pair,
    options: Options,
    limit: Optional[int] = None,  # noqa: UP045
    text: Annotated[str, Field(description="own", max_length=5)] = "",
    tags: list[str] | None = None,
    many: dict[str, float] | None = None,
    number: int = Field(3, description="by default", ge=1),
    anything=None,  # type: ignore[no-untyped-def]
) -> dict[str, Any]:
    """Takes all kinds.

    Args:
        text: not this
        place: of the thing
    """
    return dict(locals())


def test_every_type_hint_has_a_schema_and_converts_arguments_back() -> None:
    schema = properties(as_tool(all_parameter_kinds))
    assert schema["unit"] == {"type": "string", "enum": ["C", "F"]}
    assert schema["colour"] == {"type": "string", "enum": ["red", "blue"]}
    place = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "height": {"type": "integer", "default": 0}},
        "required": ["title"],
    }
    assert schema["place"] == {**place, "description": "of the thing"}
    assert schema["limit"] == {"type": ["integer", "null"], "default": None}
    assert schema["text"] == {"type": "string", "description": "own", "maxLength": 5, "default": ""}
    assert schema["tags"] == {"type": ["array", "null"], "items": {"type": "string"}, "default": None}
    assert schema["number"] == {"type": "integer", "description": "by default", "minimum": 1, "default": 3}
    assert schema["anything"] == {"default": None}
    things = {"place": {"title": "Oslo"}, "pair": {"left": 1, "right": 2}, "options": {"deep": True}}
    arguments = run_tool(as_tool(all_parameter_kinds), unit="C", colour="blue", **things)
    assert (arguments["colour"], arguments["place"], arguments["pair"]) == (
        Colour.BLUE,
        Place(title="Oslo"),
        Pair(1, 2),
    )
    assert (arguments["options"], arguments["limit"], arguments["number"]) == ({"deep": True}, None, 3)


def test_a_recursive_type_keeps_its_definition() -> None:
    @tool
    def walk(node: Node) -> str:
        return node.children[0].name

    assert properties(walk)["node"] == {"$ref": "#/$defs/Node"}
    assert run_tool(walk, node={"name": "a", "children": [{"name": "b"}]}) == "b"
    with pytest.raises(ToolFailure):
        run_tool(walk, node={"name": "a", "children": [{"name": 5}]})


def test_a_failed_validator_is_reported_as_invalid_arguments() -> None:
    def even(n: int) -> int:
        if n % 2:
            raise ValueError("must be even")
        return n

    @tool
    def halve(n: Annotated[int, AfterValidator(even)]) -> int:
        return n // 2

    with pytest.raises(ToolFailure, match=r"halve: parameter 'n': .*must be even") as refused:
        run_tool(halve, n=3)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


class Window(BaseModel):
    lines: int = None  # type: ignore[assignment]
    title: str = ""


def test_a_parameter_may_be_left_out_if_its_default_does_not_fit_its_type() -> None:
    @tool
    def find(q: str, n: int = None, mode: Literal["a"] = None, window: Window = None) -> Any:  # type: ignore[assignment]  # noqa: RUF013
        return q, n, mode, window

    assert run_tool(find, q="x") == ("x", None, None, None)
    assert run_tool(find, q="x", n=None, mode=None, window=None) == ("x", None, None, None)
    assert run_tool(find, q="x", n=2.0, window={"lines": None, "title": None}) == ("x", 2, None, Window())
    assert type(run_tool(find, q="x", n=2.0)[1]) is int


def test_null_for_an_optional_parameter_means_its_default() -> None:
    @tool
    def find(q: str = "all", limit: int | None = 3) -> tuple[str, int | None]:
        return q, limit

    assert run_tool(find, q=None, limit=None) == ("all", None)


def test_a_default_that_is_not_json_is_left_to_the_function() -> None:
    marker = object()

    @tool
    def find(key: str, default: Any = marker, limit: float = math.inf) -> bool:
        return default is marker and limit == math.inf

    assert properties(find) == {"key": {"type": "string"}, "default": {}, "limit": {"type": "number"}}
    assert run_tool(find, key="a") is True


def test_the_context_parameter_is_found_by_its_type() -> None:
    def ask(context: str, where: CallContext | None = None) -> str:
        return f"{context} {where.cwd if where else ''}"

    assert list(properties(as_tool(ask))) == ["context"]
    assert run_tool(as_tool(ask), context="x") == "x /here"


def test_all_parameter_kinds_and_keyword_arguments_are_passed() -> None:
    @tool
    def label(name: str, **labels: int) -> dict[str, Any]:
        return {"name": name, **labels}

    @tool
    def mixed(a: int, /, b: int, *, c: int = 3) -> list[int]:
        return [a, b, c]

    assert run_tool(mixed, a=1, b=2) == [1, 2, 3]
    assert label.spec.parameters["additionalProperties"] == {"type": "integer"}
    assert run_tool(label, name="a", x=1) == {"name": "a", "x": 1}
    with pytest.raises(ToolFailure):
        run_tool(label, name="a", x="one")


def test_methods_partials_and_callable_objects_become_tools() -> None:
    class Shop:
        """Sells."""

        def price(self, item: str) -> str:
            """Its price."""
            return item * 2

        async def __call__(self, item: str) -> str:
            return item

    assert (as_tool(Shop().price).name, run_tool(as_tool(Shop().price), item="a")) == ("price", "aa")
    assert run_tool(as_tool(functools.partial(Shop().price, item="b"))) == "bb"
    callable_tool = as_tool(Shop())
    assert (callable_tool.name, callable_tool.spec.description, run_tool(callable_tool, item="c")) == (
        "Shop",
        "Sells.",
        "c",
    )


def takes_star(city: str, *more: str) -> None: ...
def takes_callable(city: str, then: Callable[[], None]) -> None: ...
def takes_object(city: str, thing: asyncio.Lock) -> None: ...
def takes_unknown(city: str, thing: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def takes_self(self, city: str) -> None: ...  # type: ignore[no-untyped-def]
def is_generator() -> Any:
    yield 1


UNSUPPORTED = [
    (takes_star, "more"),
    (takes_callable, "then"),
    (takes_object, "thing"),
    (takes_unknown, "thing"),
    (takes_self, "self"),
    (is_generator, "generator"),
]


@pytest.mark.parametrize(("function", "parameter"), UNSUPPORTED, ids=lambda value: getattr(value, "__name__", ""))
def test_an_unsupported_parameter_is_named_in_the_error(function: Callable[..., Any], parameter: str) -> None:
    with pytest.raises(TypeError) as refused:
        tool(function)
    assert f"'{function.__name__}'" in str(refused.value)
    assert parameter in str(refused.value)
    with pytest.raises(TypeError, match=r"@tool\(name="):
        tool("search")  # type: ignore[call-overload]
