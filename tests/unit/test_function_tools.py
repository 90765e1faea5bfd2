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

from contract.errors import ErrorCode, ToolFailure
from contract.functions.call_context import CallContext
from contract.registry import Tool
from contract.schema import prepare_arguments
from orchestrator.functions.function_tools import as_tool, tool

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


def properties(made: Tool[Any]) -> dict[str, Any]:
    found = made.spec.parameters["properties"]
    assert isinstance(found, dict)
    return found


def run(made: Tool[Any], **arguments: Any) -> Any:
    """Run the tool as a dispatcher does: validate the arguments against the schema first."""
    prepared, _ = prepare_arguments(made.spec, arguments)
    value = made.handler(prepared, CONTEXT)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


# The decorator


def test_a_bare_decorator_makes_a_tool_of_name_docstring_and_hints() -> None:
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


def test_what_is_decorated_stays_callable_as_the_function() -> None:
    @tool
    def double(n: int) -> int:
        """Twice."""
        return 2 * n

    assert double(4) == double(n=4) == 8
    assert (double.__name__, double.__doc__, str(inspect.signature(double))) == ("double", "Twice.", "(n: int) -> int")  # type: ignore[attr-defined]


# Types


def everything(
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


def test_every_kind_of_hint_has_its_json_form_and_comes_back_as_its_own_type() -> None:
    found = properties(as_tool(everything))
    assert found["unit"] == {"type": "string", "enum": ["C", "F"]}
    assert found["colour"] == {"type": "string", "enum": ["red", "blue"]}
    place = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "height": {"type": "integer", "default": 0}},
        "required": ["title"],
    }
    assert found["place"] == {**place, "description": "of the thing"}
    assert found["limit"] == {"type": ["integer", "null"], "default": None}
    assert found["text"] == {"type": "string", "description": "own", "maxLength": 5, "default": ""}
    assert found["tags"] == {"type": ["array", "null"], "items": {"type": "string"}, "default": None}
    assert found["number"] == {"type": "integer", "description": "by default", "minimum": 1, "default": 3}
    assert found["anything"] == {"default": None}
    things = {"place": {"title": "Oslo"}, "pair": {"left": 1, "right": 2}, "options": {"deep": True}}
    got = run(as_tool(everything), unit="C", colour="blue", **things)
    assert (got["colour"], got["place"], got["pair"]) == (Colour.BLUE, Place(title="Oslo"), Pair(1, 2))
    assert (got["options"], got["limit"], got["number"]) == ({"deep": True}, None, 3)


def test_a_type_that_contains_itself_keeps_its_definition() -> None:
    @tool
    def walk(node: Node) -> str:
        return node.children[0].name

    assert properties(walk)["node"] == {"$ref": "#/$defs/Node"}
    assert run(walk, node={"name": "a", "children": [{"name": "b"}]}) == "b"
    with pytest.raises(ToolFailure):
        run(walk, node={"name": "a", "children": [{"name": 5}]})


def test_what_only_the_function_can_check_is_reported_as_invalid_arguments() -> None:
    def even(n: int) -> int:
        if n % 2:
            raise ValueError("must be even")
        return n

    @tool
    def halve(n: Annotated[int, AfterValidator(even)]) -> int:
        return n // 2

    with pytest.raises(ToolFailure, match=r"halve: parameter 'n': .*must be even") as refused:
        run(halve, n=3)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


def test_a_default_that_is_no_json_stays_the_functions_own() -> None:
    marker = object()

    @tool
    def find(key: str, default: Any = marker, limit: float = math.inf) -> bool:
        return default is marker and limit == math.inf

    assert properties(find) == {"key": {"type": "string"}, "default": {}, "limit": {"type": "number"}}
    assert run(find, key="a") is True


# Signatures


def test_an_optional_context_is_one_and_a_context_of_another_type_is_not() -> None:
    def ask(context: str, where: CallContext | None = None) -> str:
        return f"{context} {where.cwd if where else ''}"

    assert list(properties(as_tool(ask))) == ["context"]
    assert run(as_tool(ask), context="x") == "x /here"


def test_parameters_of_every_kind_are_filled_and_open_functions_take_more() -> None:
    @tool
    def label(name: str, **labels: int) -> dict[str, Any]:
        return {"name": name, **labels}

    @tool
    def mixed(a: int, /, b: int, *, c: int = 3) -> list[int]:
        return [a, b, c]

    assert run(mixed, a=1, b=2) == [1, 2, 3]
    assert label.spec.parameters["additionalProperties"] == {"type": "integer"}
    assert run(label, name="a", x=1) == {"name": "a", "x": 1}
    with pytest.raises(ToolFailure):
        run(label, name="a", x="one")


def test_methods_partials_and_callable_objects_are_functions() -> None:
    class Shop:
        """Sells."""

        def price(self, item: str) -> str:
            """Its price."""
            return item * 2

        async def __call__(self, item: str) -> str:
            return item

    assert (as_tool(Shop().price).name, run(as_tool(Shop().price), item="a")) == ("price", "aa")
    assert run(as_tool(functools.partial(Shop().price, item="b"))) == "bb"
    called = as_tool(Shop())
    assert (called.name, called.spec.description, run(called, item="c")) == ("Shop", "Sells.", "c")


def takes_star(city: str, *more: str) -> None: ...
def takes_callable(city: str, then: Callable[[], None]) -> None: ...
def takes_object(city: str, thing: asyncio.Lock) -> None: ...
def takes_unknown(city: str, thing: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def takes_self(self, city: str) -> None: ...  # type: ignore[no-untyped-def]
def generates() -> Any:
    yield 1


UNFIT = [
    (takes_star, "more"),
    (takes_callable, "then"),
    (takes_object, "thing"),
    (takes_unknown, "thing"),
    (takes_self, "self"),
    (generates, "generator"),
]


@pytest.mark.parametrize(("function", "parameter"), UNFIT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_signature_no_model_could_fill_in_names_function_and_parameter(
    function: Callable[..., Any], parameter: str
) -> None:
    with pytest.raises(TypeError) as refused:
        tool(function)
    assert f"'{function.__name__}'" in str(refused.value)
    assert parameter in str(refused.value)
    with pytest.raises(TypeError, match=r"@tool\(name="):
        tool("search")  # type: ignore[call-overload]
