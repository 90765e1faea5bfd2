"""A tenant tries to use another tenant's tools, or to find out whether such tools exist. The response is the same as
for a name that does not exist.
"""

import json

import pytest

from tests.support.records.builders import KEY, build_call, build_context, build_spec
from tests.support.records.fakes import (
    AnsweringTransport,
    FakeSandboxClient,
    MemoryBlobs,
    MemoryLedger,
    StaticCatalog,
    build_executor,
)
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.specs import Catalog, ToolSpec
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.store.tools import WorkerCatalogStore
from toolcrew.workers.tools.base import Outcome, WorkerRegistry, WorkerTool

TENANT_TOOL = build_spec("bolts_tool", tenants=("bolt",))
SHARED_TOOL = build_spec("common_tool")


def _succeed(call: ToolCall, _: ToolContext) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True)


async def _dispatch(name: str, tenant: str) -> tuple[ToolResult, int]:
    """Return the result, and the number of calls that were sent to a worker."""
    transport = AnsweringTransport(_succeed)
    dispatcher = Dispatcher(transport, TenantCatalog(StaticCatalog(TENANT_TOOL, SHARED_TOOL)), KEY, queue_wait_s=60)
    result = await dispatcher.dispatch(Request(build_call(name), tenant, "s1", "host.h1.b00t"))
    return result, len(transport.deliveries)


def _execute(name: str, tenant: str) -> ToolResult:
    """Return the result of a worker that has the tool, for a queued call of this tenant."""
    registry = WorkerRegistry(
        [WorkerTool(spec, lambda arguments, bench: Outcome("ran")) for spec in (TENANT_TOOL, SHARED_TOOL)]
    )
    executor = build_executor(
        registry, FakeSandboxClient(), MemoryLedger(), MemoryBlobs(), {"host": "h1", "queue": "q"}
    )
    return executor.execute(build_call(name), build_context(tenant=tenant))


def _describe(result: ToolResult, name: str) -> tuple[ErrorCode | None, str]:
    return result.error_code, str(result.error).replace(name, "NAME")


@pytest.mark.parametrize("tenant", ["acme", "BOLT", "bolt2", "default"])
async def test_a_tool_of_another_tenant_looks_like_an_unknown_tool(tenant: str) -> None:
    refused, sent = await _dispatch("bolts_tool", tenant)
    unknown, _ = await _dispatch("nuts_tool", tenant)
    assert (_describe(refused, "bolts_tool"), sent) == (_describe(unknown, "nuts_tool"), 0)
    assert refused.error_code is ErrorCode.TOOL_NOT_FOUND
    assert "bolts_tool" not in json.dumps(refused.metadata), "not among the nearest names either"


async def test_a_tenant_can_call_its_own_tool() -> None:
    result, sent = await _dispatch("bolts_tool", "bolt")
    assert (result.success, sent) == (True, 1)


def test_a_worker_refuses_a_queued_call_for_a_tool_of_another_tenant() -> None:
    refused, unknown = _execute("bolts_tool", "acme"), _execute("nuts_tool", "acme")
    assert _describe(refused, "bolts_tool") == _describe(unknown, "nuts_tool")
    assert _execute("bolts_tool", "bolt").output == "ran"


def test_the_list_of_known_tool_names_does_not_contain_tenant_tools() -> None:
    entries = WorkerCatalogStore(None, "default", KEY)._build_entries(
        {"tools": Catalog(tools=(TENANT_TOOL, SHARED_TOOL))}
    )  # type: ignore[arg-type]
    assert json.loads(entries[1][1]) == ["common_tool"]


def test_a_tool_spec_without_tenants_is_encoded_as_in_earlier_releases() -> None:
    assert "tenants" not in SHARED_TOOL.model_dump_json()
    assert ToolSpec.model_validate_json(TENANT_TOOL.model_dump_json()).tenants == ("bolt",)
