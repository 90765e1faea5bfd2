"""The registry of tools: replacing, finding, filtering, and many threads at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from jsonschema import SchemaError

from contract.registry import Tool, ToolRegistry, filter_specs
from tests.builders import build_spec


def build_tool(name: str, handler: str = "handler") -> Tool[str]:
    return Tool(build_spec(name), handler)


def names(registry: ToolRegistry[str], *wanted: str) -> list[str]:
    return [spec.name for spec in registry.specs(wanted or "all")]


def test_a_tool_is_found_under_its_name_and_an_unknown_one_is_none() -> None:
    tool = build_tool("a")
    registry = ToolRegistry([tool])
    assert registry.get("a") is tool
    assert registry.get("b") is None


def test_a_tool_of_the_same_name_replaces_the_first() -> None:
    registry = ToolRegistry([build_tool("a", "old"), build_tool("b")])
    registry.register(build_tool("a", "new"))
    found = registry.get("a")
    assert found is not None
    assert (found.handler, len(registry)) == ("new", 2)


def test_a_tool_whose_schema_is_none_is_refused_when_it_is_registered() -> None:
    spec = build_spec().model_copy(update={"parameters": {"type": "string"}})
    with pytest.raises(SchemaError):
        ToolRegistry([Tool(spec, "handler")])


def test_specs_come_in_the_order_of_their_names() -> None:
    registry = ToolRegistry([build_tool("b"), build_tool("c"), build_tool("a")])
    assert names(registry) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("wanted", "given"),
    [(["b"], ["b"]), (["b", "nothing"], ["b"]), ([], []), (["all"], ["a", "b"]), (["b", "all"], ["a", "b"]), (("a", "a"), ["a"])],
)
def test_a_filter_keeps_what_it_names(wanted: list[str], given: list[str]) -> None:
    registry = ToolRegistry([build_tool("a"), build_tool("b")])
    assert [spec.name for spec in registry.specs(wanted)] == given


def test_one_name_as_plain_text_is_one_name_and_not_its_letters() -> None:
    specs = [build_spec("a"), build_spec("b"), build_spec("ab")]
    assert [spec.name for spec in filter_specs(specs, "ab")] == ["ab"]
    assert len(filter_specs(specs, "all")) == 3


def test_a_name_is_case_sensitive_and_exact() -> None:
    registry = ToolRegistry([build_tool("a")])
    assert [registry.get(name) for name in ("A", "a ", "")] == [None, None, None]


def test_a_list_of_specs_is_a_snapshot() -> None:
    registry = ToolRegistry([build_tool("a")])
    before = registry.specs()
    registry.register(build_tool("b"))
    before.clear()
    assert names(registry) == ["a", "b"]


def test_a_registry_made_of_none_is_empty() -> None:
    registry: ToolRegistry[str] = ToolRegistry()
    assert (len(registry), registry.specs()) == (0, [])


def test_many_threads_register_find_and_list_at_once() -> None:
    registry: ToolRegistry[str] = ToolRegistry()
    threads, each = 16, 40
    together = threading.Barrier(threads)

    def work(number: int) -> list[str]:
        together.wait()
        seen = []
        for at in range(each):
            registry.register(build_tool(f"tool-{number}-{at}"))
            registry.register(build_tool("shared", f"by-{number}"))
            shared = registry.get("shared")
            assert shared is not None
            seen.append(shared.handler)
            listed = [spec.name for spec in registry.specs()]
            assert listed == sorted(listed)
        return seen

    with ThreadPoolExecutor(threads) as pool:
        handlers = {handler for seen in pool.map(work, range(threads)) for handler in seen}
    assert len(registry) == threads * each + 1
    assert handlers <= {f"by-{number}" for number in range(threads)}
