"""Rows S0-18 to S0-20 of the scenarios: the description of the tools for a model that calls by tags."""

import pytest

from tests.support.records.builders import build_spec
from toolcrew.orchestrator.dialects.prompts import generate_tool_prompt
from toolcrew.orchestrator.dialects.tag_events import TagCall
from toolcrew.orchestrator.dialects.tag_parser import TagStreamParser
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.functions.function_tools import tool


@tool(name="vector-search")
async def vector_search(query: str, limit: int = 10) -> str:
    """Search the code base by meaning.

    Args:
        query: what to look for
        limit: how many hits
    """
    return query * limit


@tool(name="read_tool")
async def read_tool(file_path: str) -> str:
    """Read one file."""
    return file_path


def example_calls(prompt: str) -> list[TagCall]:
    return [event for event in TagStreamParser().feed(prompt) if isinstance(event, TagCall)]


def test_s0_18_the_tool_descriptions_are_part_of_the_system_prompt() -> None:
    specs = [vector_search.spec]
    system = TagsDialect().build_system("你是一个助手。", specs)
    assert system.startswith("你是一个助手。")
    assert generate_tool_prompt(specs) in system


def test_s0_19_the_prompt_lists_every_tool_with_name_description_and_parameters() -> None:
    prompt = generate_tool_prompt([vector_search, read_tool])
    assert all(
        item in prompt for item in ("vector-search: Search the code base by meaning.", "read_tool: Read one file.")
    )
    lines = [line.strip() for line in prompt.splitlines()]
    assert "query (string, required): what to look for" in lines
    assert "limit (integer, optional, default 10): how many hits" in lines
    assert "file_path (string, required)" in lines


def test_s0_19_the_example_in_the_prompt_is_a_tag_call_of_a_listed_tool() -> None:
    calls = example_calls(generate_tool_prompt([vector_search, read_tool]))
    assert calls
    assert {call.name for call in calls} <= {"vector-search", "read_tool"}
    assert set(calls[0].arguments) == {"query"}


@pytest.mark.parametrize(
    "described",
    [
        vector_search,
        vector_search.spec,
        {
            "name": "vector-search",
            "description": "Search the code base by meaning.",
            "parameters": vector_search.spec.parameters,
        },
    ],
    ids=["tool", "spec", "dict"],
)
def test_s0_19_a_tool_is_described_equally_as_object_spec_or_dict(described: object) -> None:
    prompt = generate_tool_prompt([described])  # type: ignore[list-item]
    assert "vector-search: Search the code base by meaning." in prompt
    assert [call.name for call in example_calls(prompt)][:1] == ["vector-search"]


def test_s0_20_the_tool_prompt_without_tools_only_says_that_there_are_none() -> None:
    prompt = generate_tool_prompt([])
    assert "No tools are currently available" in prompt
    assert "<tool_action" not in prompt
    assert len(prompt.splitlines()) == 1


def test_s0_20_the_system_prompt_without_tools_says_that_there_are_none() -> None:
    assert "No tools are currently available" in TagsDialect().build_system("", [])
    assert "No tools are currently available" not in TagsDialect().build_system("", [build_spec()])
