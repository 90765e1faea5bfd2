"""Schemas as models and MCP clients receive them. Some of them refuse all tools because of one schema."""

from typing import Any

import pytest

from tests.support.records.builders import build_spec
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool
from toolcrew.orchestrator.mcp.calls import build_tool


def shown_to_a_model(spec: ToolSpec) -> Any:
    return convert_to_openai_tool(spec)["function"]["parameters"]


def shown_to_an_mcp_client(spec: ToolSpec) -> Any:
    return build_tool(spec).input_schema


SHOWN = [shown_to_a_model, shown_to_an_mcp_client]
ARRAYS = [
    ({"type": "array"}, {"type": "array", "items": {}}),
    ({"type": ["array", "null"]}, {"type": ["array", "null"], "items": {}}),
    ({"type": "array", "items": {"type": "array"}}, {"type": "array", "items": {"type": "array", "items": {}}}),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, {"anyOf": [{"type": "array", "items": {}}, {"type": "null"}]}),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}]},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {}},
    ),
    ({"type": "array", "items": {"not": {}}}, {"type": "array", "items": {"not": {}}}),
    ({"type": "object"}, {"type": "object"}),
]


@pytest.mark.parametrize("show", SHOWN)
@pytest.mark.parametrize(("given", "shown"), ARRAYS)
def test_every_array_has_items(given: dict[str, Any], shown: dict[str, Any], show: Any) -> None:
    assert show(build_spec(properties={"a": given}))["properties"]["a"] == shown


def test_a_tool_without_parameters_has_properties() -> None:
    spec = build_spec().model_copy(update={"parameters": {"type": "object"}})
    assert shown_to_a_model(spec) == {"type": "object", "properties": {}}
    assert convert_to_openai_tool({"name": "f", "parameters": {"type": "object"}})["function"]["parameters"] == {
        "type": "object",
        "properties": {},
    }
