"""The registry of tools: replacing, finding, filtering, and access by many threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from jsonschema import SchemaError

from contract.registry import Switch, Tool, ToolRegistry
from tests.builders import build_spec


def build_tool(name: str, handler: str = "handler") -> Tool[str]:
    return Tool(build_spec(name), handler)


def names(registry: ToolRegistry[str], *wanted: str) -> list[str]:
    return [spec.name for spec in registry.specs(wanted or "all")]


def test_a_tool_with_an_invalid_schema_is_refused_when_it_is_registered() -> None:
    spec = build_spec().model_copy(update={"parameters": {"type": "string"}})
    with pytest.raises(SchemaError):
        ToolRegistry([Tool(spec, "handler")])


def test_a_disabled_tool_is_listed_and_found_but_not_shown_to_a_model() -> None:
    tool = build_tool("a")
    registry = ToolRegistry([tool, build_tool("b")])
    assert registry.disable("a", Switch(by="ada"))
    assert registry.get("a") is tool
    assert names(registry) == ["b"]
    assert names(registry, "a", "all") == ["b"]
    assert [(state.name, state.description, state.state) for state in registry.describe()] == [
        ("a", "The tool a.", "disabled"),
        ("b", "The tool b.", "enabled"),
    ]
    assert (registry.switch("a"), registry.switch("b")) == (Switch(by="ada"), None)


def test_a_replaced_tool_stays_disabled_until_it_is_enabled() -> None:
    registry = ToolRegistry([build_tool("a", "old")])
    registry.disable("a")
    registry.register(build_tool("a", "new"))
    assert names(registry) == []
    assert registry.enable("a")
    assert (names(registry), registry.switch("a")) == (["a"], None)


def test_an_empty_registry_can_neither_disable_nor_enable_a_tool() -> None:
    registry: ToolRegistry[str] = ToolRegistry()
    assert (registry.disable("a"), registry.enable("a"), registry.describe()) == (False, False, [])
    assert (len(registry), registry.specs()) == (0, [])


def test_a_session_tool_cannot_be_disabled() -> None:
    registry = ToolRegistry([Tool(build_spec("session.open", audience="session"), "handler")])
    with pytest.raises(ValueError, match="cannot be disabled"):
        registry.disable("session.open")


def test_many_threads_disable_enable_and_list_tools_at_once() -> None:
    registry = ToolRegistry([build_tool(f"tool-{number}") for number in range(20)])

    def work(number: int) -> None:
        for _ in range(10):
            registry.disable(f"tool-{number}")
            assert len(registry.describe()) == 20
            assert f"tool-{number}" not in names(registry)
            registry.enable(f"tool-{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(20)))
    assert len(names(registry)) == 20
