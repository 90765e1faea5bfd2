"""Rows S4-03, 04, 07 to 11 and 31 to 33 of the scenarios: a tool's description, the registry, and the validation of
arguments.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.records.builders import KEY, build_call, build_context, build_spec
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, StaticCatalog, build_executor
from toolcrew.contract.calls import ToolCall, ToolContext
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.registry import Tool, ToolRegistry
from toolcrew.contract.schema import check_schema, prepare_arguments
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.in_process_transport import InProcessTransport
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.tools.builtin import build_registry

SEARCH = build_spec(
    "search", properties={"query": {"type": "string"}, "limit": {"type": "integer", "default": 10}}, required=["query"]
)


def refusal(arguments: dict[str, Any], checks: Any = ()) -> ToolFailure:
    with pytest.raises(ToolFailure) as refused:
        prepare_arguments(SEARCH, arguments, checks=checks)
    return refused.value


def test_s4_03_every_tool_has_a_unique_name_a_description_and_a_json_schema() -> None:
    specs = build_registry().specs()
    assert len({spec.name for spec in specs}) == len(specs) > 0
    assert all(spec.description for spec in specs)
    for spec in specs:
        check_schema(spec.parameters)


def test_s4_04_a_tool_gets_arguments_and_context_and_returns_a_result() -> None:
    received: list[tuple[dict[str, Any], ToolContext]] = []

    def handler(arguments: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        received.append((arguments, bench.context))
        return Outcome("found")

    context = build_context()
    registry = ToolRegistry([WorkerTool(SEARCH, handler)])
    executor = build_executor(registry, FakeSandboxClient(), MemoryLedger(), MemoryBlobs(), {"host": "h", "queue": "q"})
    result = executor.execute(build_call("search", query="a"), context)
    assert (result.success, result.output) == (True, "found")
    assert received == [({"query": "a", "limit": 10}, context)]


async def test_s4_04_a_tool_may_be_asynchronous() -> None:
    async def search(query: str, limit: int) -> str:
        return f"{limit} of {query}"

    dispatcher = Dispatcher(
        InProcessTransport({"search": search}, KEY), TenantCatalog(StaticCatalog(SEARCH)), KEY, queue_wait_s=1
    )
    result = await dispatcher.dispatch(
        Request(ToolCall(id="c", name="search", arguments={"query": "a"}), "acme", None, "q")
    )
    assert result.output == "10 of a"


def test_s4_07_a_registry_manages_its_tools() -> None:
    registry = ToolRegistry([Tool(SEARCH, "handler")])
    assert (len(registry), [spec.name for spec in registry.specs()]) == (1, ["search"])


def test_s4_08_a_name_is_the_key_and_the_same_name_replaces() -> None:
    registry = ToolRegistry([Tool(SEARCH, "old")])
    registry.register(Tool(SEARCH, "new"))
    found = registry.get("search")
    assert found is not None
    assert (found.handler, len(registry)) == ("new", 1)


def test_s4_08_a_registry_supports_concurrent_access() -> None:
    registry: ToolRegistry[int] = ToolRegistry()

    def register_and_read(number: int) -> int:
        registry.register(Tool(build_spec(f"tool-{number}"), number))
        registry.specs()
        found = registry.get(f"tool-{number}")
        return -1 if found is None else found.handler

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(register_and_read, range(200))) == list(range(200))
    assert len(registry) == 200


class Interrupting(str):
    """Name of a tool. While a registry compares it, another thread uses the registry."""

    interrupt: Callable[[], None] = staticmethod(lambda: None)

    def __lt__(self, other: str) -> bool:
        self.interrupt()
        return str(self) < str(other)

    __hash__ = str.__hash__


CHANGES: dict[str, Callable[[ToolRegistry[int]], object]] = {
    "register": lambda registry: registry.register(Tool(build_spec("new"), 9)),
    "unregister": lambda registry: registry.unregister("a"),
    "disable": lambda registry: registry.disable("a"),
    "enable": lambda registry: registry.enable("b"),
    "get": lambda registry: registry.get("a"),
    "switch": lambda registry: registry.switch("a"),
    "len": len,
    "specs": lambda registry: registry.specs(),
    "describe": lambda registry: registry.describe(),
}


@pytest.mark.parametrize("read", ["specs", "describe"])
@pytest.mark.parametrize("change", CHANGES)
def test_s4_08_a_registry_is_used_by_one_thread_at_a_time(change: str, read: str) -> None:
    registry: ToolRegistry[int] = ToolRegistry()
    for number, name in enumerate(("a", "b", "c")):
        spec = build_spec(name).model_copy(update={"name": Interrupting(name)})
        registry.register(Tool(spec, number))
    is_done, overlapped, threads = threading.Event(), list[bool](), list[threading.Thread]()

    def change_registry() -> None:
        CHANGES[change](registry)
        is_done.set()

    def interrupt() -> None:
        # Only in the first comparison of the thread that reads.
        if not threads:
            threads.append(threading.Thread(target=change_registry))
            threads[0].start()
            overlapped.append(is_done.wait(0.2))

    Interrupting.interrupt = staticmethod(interrupt)
    try:
        assert len(getattr(registry, read)()) == 3
        threads[0].join(20)
    finally:
        Interrupting.interrupt = staticmethod(lambda: None)
    assert (overlapped, is_done.is_set()) == ([False], True)


def test_s4_09_a_lookup_returns_the_tool_or_none() -> None:
    tool = Tool(SEARCH, "handler")
    registry = ToolRegistry([tool])
    assert registry.get("search") is tool
    assert registry.get("nothing") is None


def test_s4_10_listing_returns_metadata_and_can_be_filtered_by_name() -> None:
    registry = ToolRegistry([Tool(SEARCH, 1), Tool(build_spec("other"), 2)])
    assert registry.specs(["search"]) == [SEARCH]
    assert [spec.name for spec in registry.specs()] == ["other", "search"]


def test_s4_11_a_filter_passes_only_the_named_tools_and_all_passes_every_tool() -> None:
    registry = ToolRegistry([Tool(build_spec(name), name) for name in ("a", "b", "c")])
    assert [spec.name for spec in registry.specs(["a", "c"])] == ["a", "c"]
    assert [spec.name for spec in registry.specs("all")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "message"), [({"query": 5}, "'query' must be string"), ({}, "'query' is required")]
)
def test_s4_31_a_type_mismatch_or_a_missing_field_is_an_error(arguments: dict[str, Any], message: str) -> None:
    failure = refusal(arguments)
    assert (failure.code, message in failure.message) == (ErrorCode.INVALID_ARGUMENTS, True)


def test_s4_32_the_default_of_the_schema_is_used_for_a_missing_parameter() -> None:
    assert prepare_arguments(SEARCH, {"query": "a"})[0] == {"query": "a", "limit": 10}
    assert prepare_arguments(SEARCH, {"query": "a", "limit": 3})[0] == {"query": "a", "limit": 3}


def test_s4_33_a_custom_check_refuses_with_details() -> None:
    failure = refusal(
        {"query": "a", "limit": 99}, [lambda arguments: "limit 99 is above 50 for a fuzzy query; give 50 or less"]
    )
    assert (failure.code, failure.message) == (
        ErrorCode.INVALID_ARGUMENTS,
        "search: limit 99 is above 50 for a fuzzy query; give 50 or less",
    )
