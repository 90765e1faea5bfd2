"""Loading of operators' tools from packages and modules. Broken or conflicting tools stop the start, and the error
names their source.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from contract.errors import ConfigError
from contract.names import BUILTIN_TOOLS
from tests.builders import build_call, build_context
from workers.custom.loading import load_custom_tools
from workers.skills.tool import build_skill_tool
from workers.tools.base import ToolEnvironment, WorkerResources, WorkerTool
from workers.tools.builtin import build_registry
from workers.web.webfetch import WEBFETCH_SPEC
from workers.web.websearch import WEBSEARCH_SPEC

WriteModule = Callable[..., str]

QUOTE = """
from contract.functions import tool

@tool(timeout_s=7, read_only=True, validators=[lambda given: "weights are above 0" if given["weight_kg"] <= 0 else None])
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


def point(value: str, name: str = "house") -> EntryPoint:
    return EntryPoint(name, value, "toolcrew.tools")


def refusal(*modules: str, points: tuple[EntryPoint, ...] = ()) -> str:
    with pytest.raises(ConfigError) as refused:
        load(*modules, points=points)
    return str(refused.value)


def test_the_tools_of_a_named_module_run_in_the_pool_of_tools_as_they_were_declared(write_module: WriteModule) -> None:
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
def test_an_entry_point_may_name(write_module: WriteModule, value: str, names: list[str]) -> None:
    write_module(
        "from contract.functions import tool\n@tool\ndef one(): 'One.'\n@tool\ndef two(): 'Two.'\ndef plain(): "
        "'Plain.'\nboth = [one, two]\n"
    )
    assert [served.name for served in load(points=(point(value),))] == names


def test_a_tool_that_is_named_twice_is_served_once(write_module: WriteModule) -> None:
    name = write_module(QUOTE)
    assert len(load(name, name, points=(point(name), point(f"{name}:quote_shipping", "again")))) == 1


def test_installed_packages_are_asked_by_default(write_module: WriteModule, tmp_path: Path) -> None:
    write_module(QUOTE)
    info = tmp_path / "house_tools-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-tools\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[toolcrew.tools]\nhouse = house_tools\n")
    assert "house_tools" in {found.value for found in importlib.metadata.entry_points(group="toolcrew.tools")}
    assert "quote_shipping" in {served.name for served in load_custom_tools()}
    write_module("import surely_not_there")
    del sys.modules["house_tools"]
    with pytest.raises(
        ConfigError,
        match=r"the package 'house-tools' .entry point 'house = house_tools'. cannot be loaded: ModuleNotFoundError",
    ):
        load_custom_tools()


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("import surely_not_there", ["ModuleNotFoundError", "surely_not_there"]),
        ("1 / 0", ["ZeroDivisionError"]),
        ("raise SystemExit('no licence')", ["SystemExit", "no licence"]),
        ("def broken(:", ["SyntaxError"]),
        ("def forgotten(): 'No decorator.'", ["no tool", "@tool"]),
        (
            "import io\nfrom contract.functions import tool\n@tool\ndef bad(x: io.StringIO): 'Bad.'",
            ["TypeError", "'bad'", "parameter 'x'"],
        ),
        ("from contract.functions import tool\n@tool(name='bad name')\ndef f(): 'Bad.'", ["TypeError", "bad name"]),
    ],
)
def test_a_broken_module_is_named_with_what_is_wrong_and_what_to_do(
    write_module: WriteModule, text: str, fragments: list[str]
) -> None:
    sentence = refusal(write_module(text, "broken_tools"))
    assert "'broken_tools' of TOOLCREW_TOOL_MODULES" in sentence
    assert all(word in sentence for word in [*fragments, "fix the module"]), sentence


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("house_tools:number", "is a int"),
        ("house_tools:empty", "empty list"),
        ("house_tools:absent", "AttributeError"),
    ],
)
def test_an_entry_point_that_names_no_tool_is_refused(write_module: WriteModule, value: str, message: str) -> None:
    write_module("number = 5\nempty = []\n")
    sentence = refusal(points=(point(value),))
    assert message in sentence
    assert f"entry point 'house = {value}'" in sentence


@pytest.mark.parametrize("name", sorted(BUILTIN_TOOLS))
def test_the_name_of_a_built_in_tool_is_refused(write_module: WriteModule, name: str) -> None:
    module = write_module(f"from contract.functions import tool\n@tool(name='{name}')\ndef mine(): 'Mine.'")
    sentence = refusal(module)
    assert (module in sentence, f"'{name}'" in sentence, "built-in" in sentence) == (True, True, True)


def test_two_tools_of_one_name_are_refused_with_both_places(write_module: WriteModule) -> None:
    one, other = write_module(QUOTE, "one_house"), write_module(QUOTE, "other_house")
    sentence = refusal(one, other)
    assert all(word in sentence for word in ("quote_shipping", "'one_house'", "'other_house'"))


def test_a_foreign_tool_object_is_served_through_as_tool(write_module: WriteModule) -> None:
    module = write_module(
        "from orchestrator import as_tool\n"
        "class Search:\n"
        "    name, description, parameters = 'search', 'Searches.', {'type': 'object', 'properties': {'q': {'type': "
        "'string'}}}\n"
        "    async def execute(self, args, context): return [args['q'], context.tenant]\n"
        "search = as_tool(Search())\n"
    )
    (search,) = load(module)
    outcome = search.handler({"q": "x"}, ToolEnvironment(build_call("search"), build_context(), WorkerResources({})))
    assert (search.spec.pool, outcome.output) == ("tools", '["x", "acme"]')


def test_the_names_of_built_in_tools_are_those_of_the_built_in_tools() -> None:
    ours = {spec.name for spec in build_registry().specs() if spec.audience == "model"}
    assert ours | {WEBFETCH_SPEC.name, WEBSEARCH_SPEC.name, build_skill_tool(()).name} == BUILTIN_TOOLS
