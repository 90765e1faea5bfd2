"""Loading of operators' tools. Broken or conflicting tools stop the start, and the error names their source."""

import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.names import BUILTIN_TOOLS
from toolcrew.workers.custom.loading import load_custom_tools
from toolcrew.workers.skills.tool import build_skill_tool
from toolcrew.workers.tools.base import WorkerTool
from toolcrew.workers.tools.builtin import build_registry
from toolcrew.workers.web.webfetch import WEBFETCH_SPEC
from toolcrew.workers.web.websearch import WEBSEARCH_SPEC

WriteModule = Callable[..., str]

QUOTE = """
from toolcrew import tool

@tool(timeout_s=7, read_only=True, validators=[lambda arguments: "weights are above 0" if arguments["weight_kg"] <= 0 else None])
def quote_shipping(weight_kg: float, express: bool = False) -> dict:
    '''Price of an order.

    Args:
        weight_kg: What it weighs.
    '''
    return {"price": weight_kg * (2 if express else 1)}
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """Write a module that can be imported until the test ends. Return its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(text: str, name: str = "house_tools") -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def load(*modules: str, points: tuple[EntryPoint, ...] = ()) -> tuple[WorkerTool, ...]:
    return load_custom_tools(modules, find_entry_points=lambda: points)


def build_entry_point(value: str, name: str = "house") -> EntryPoint:
    return EntryPoint(name, value, "toolcrew.tools")


def refusal(*modules: str, points: tuple[EntryPoint, ...] = ()) -> str:
    with pytest.raises(ConfigError) as refused:
        load(*modules, points=points)
    return str(refused.value)


def test_the_tools_of_a_module_keep_their_declared_specification(write_module: WriteModule) -> None:
    (quote,) = load(write_module(QUOTE))
    spec = quote.spec
    assert (spec.name, spec.pool, spec.timeout_s, spec.read_only) == ("quote_shipping", "tools", 7, True)
    assert spec.description == "Price of an order."
    properties = spec.parameters["properties"]
    assert properties == {
        "weight_kg": {"type": "number", "description": "What it weighs."},
        "express": {"type": "boolean", "default": False},
    }


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("house_tools:one", ["one"]),
        ("house_tools:plain", ["plain"]),
        ("house_tools:both", ["one", "two"]),
        ("house_tools", ["one", "two"]),
    ],
    ids=["a tool", "a function", "a list", "a module"],
)
def test_an_entry_point_loads_a_tool_function_list_or_module(
    write_module: WriteModule, value: str, names: list[str]
) -> None:
    write_module(
        "from toolcrew import tool\n@tool\ndef one(): 'One.'\n@tool\ndef two(): 'Two.'\ndef plain(): "
        "'Plain.'\nboth = [one, two]\n"
    )
    assert [served.name for served in load(points=(build_entry_point(value),))] == names


def test_a_tool_loaded_twice_is_served_once(write_module: WriteModule) -> None:
    name = write_module(QUOTE)
    assert (
        len(load(name, name, points=(build_entry_point(name), build_entry_point(f"{name}:quote_shipping", "again"))))
        == 1
    )


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("import surely_not_there", ["ModuleNotFoundError", "surely_not_there"]),
        ("1 / 0", ["ZeroDivisionError"]),
        ("raise SystemExit('no licence')", ["SystemExit", "no licence"]),
        ("def broken(:", ["SyntaxError"]),
        ("def forgotten(): 'No decorator.'", ["no tool", "@tool"]),
        (
            "import io\nfrom toolcrew import tool\n@tool\ndef bad(x: io.StringIO): 'Bad.'",
            ["TypeError", "'bad'", "parameter 'x'"],
        ),
        (
            "from toolcrew import tool\n@tool(name='bad name')\ndef f(): 'Bad.'",
            ["TypeError", "bad name"],
        ),
    ],
)
def test_a_broken_module_is_named_in_the_error(write_module: WriteModule, text: str, fragments: list[str]) -> None:
    message = refusal(write_module(text, "broken_tools"))
    assert "'broken_tools' of TOOLCREW_TOOL_MODULES" in message
    assert all(fragment in message for fragment in [*fragments, "fix the module"]), message


@pytest.mark.parametrize(
    ("value", "message"),
    [("house_tools:number", "is a int"), ("house_tools:empty", "empty list"), ("house_tools:absent", "AttributeError")],
)
def test_an_entry_point_that_names_no_tool_is_refused(write_module: WriteModule, value: str, message: str) -> None:
    write_module("number = 5\nempty = []\n")
    message = refusal(points=(build_entry_point(value),))
    assert message in message
    assert f"entry point 'house = {value}'" in message


@pytest.mark.parametrize("name", sorted(BUILTIN_TOOLS))
def test_the_name_of_a_builtin_tool_is_refused(write_module: WriteModule, name: str) -> None:
    module = write_module(f"from toolcrew import tool\n@tool(name='{name}')\ndef mine(): 'Mine.'")
    message = refusal(module)
    assert (module in message, f"'{name}'" in message, "built-in" in message) == (True, True, True)


def test_two_tools_with_one_name_are_refused_with_both_modules(write_module: WriteModule) -> None:
    one, other = write_module(QUOTE, "one_house"), write_module(QUOTE, "other_house")
    message = refusal(one, other)
    assert all(fragment in message for fragment in ("quote_shipping", "'one_house'", "'other_house'"))


def test_builtin_tool_names_match_the_builtin_tools() -> None:
    builtin_names = {spec.name for spec in build_registry().specs() if spec.audience == "model"}
    assert builtin_names | {WEBFETCH_SPEC.name, WEBSEARCH_SPEC.name, build_skill_tool(()).name} == BUILTIN_TOOLS


ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples" / "order_tools"


def test_the_order_tools_example_passes_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    files = sorted((EXAMPLE / "tests").glob("test_*.py"))
    tests = [value for file in files for name, value in runpy.run_path(str(file)).items() if name.startswith("test_")]
    assert len(tests) == 7
    for test in tests:
        test()
