"""What a model is told of its tools."""

from contract.registry import Tool
from contract.specs import ToolSpec
from orchestrator.dialects.tags import Call, TagStreamParser
from orchestrator.prompts import DEFAULT_INSTRUCTION, build_system_prompt, convert_to_openai_tool, generate_tool_prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "of the file"},
        "limit": {"type": ["integer", "null"], "default": 5},
        "mode": {"enum": ["a", "b"]},
    },
    "required": ["path"],
}
SPEC = ToolSpec(name="read_tool", description="Reads a file.", parameters=SCHEMA)


def test_the_tool_prompt_names_describes_and_lists_parameters() -> None:
    prompt = generate_tool_prompt([SPEC])
    assert "read_tool: Reads a file." in prompt
    assert "path (string, required): of the file" in prompt
    assert "limit (integer or null, optional, default 5)" in prompt


def test_the_tool_prompts_example_is_a_call_that_the_parser_reads() -> None:
    calls = [event for event in TagStreamParser().feed(generate_tool_prompt([SPEC])) if isinstance(event, Call)]
    assert [(call.name, list(call.arguments)) for call in calls] == [("read_tool", ["path"])]


def test_without_tools_the_prompt_says_so_and_shows_no_tag() -> None:
    prompt = generate_tool_prompt([])
    assert "No tools are currently available" in prompt
    assert "tool_action" not in prompt


def test_every_tool_is_in_the_prompt() -> None:
    other = ToolSpec(name="list_tool", description="Lists.", parameters={"type": "object", "properties": {}})
    assert "list_tool: Lists.\n  (no parameters)" in generate_tool_prompt([SPEC, other])


def test_specs_tools_and_mappings_convert_alike() -> None:
    expected = {"type": "function", "function": {"name": "read_tool", "description": "Reads a file.", "parameters": SCHEMA}}
    mapping = {"name": "read_tool", "description": "Reads a file.", "parameters": SCHEMA}
    assert [convert_to_openai_tool(tool) for tool in (SPEC, Tool(SPEC, None), mapping)] == [expected] * 3


def test_an_empty_instruction_becomes_the_default_one() -> None:
    assert build_system_prompt("  ") == DEFAULT_INSTRUCTION


def test_the_tool_prompt_follows_the_instruction() -> None:
    assert build_system_prompt("Be brief.", "Tools.") == "Be brief.\n\nTools."
