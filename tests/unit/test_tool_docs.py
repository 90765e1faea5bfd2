"""docs/tools.md agrees with the tools' specs."""

import runpy
from pathlib import Path

from contract.specs import ToolSpec
from contract.tool_pages import render_tool

ROOT = Path(__file__).parent.parent.parent


def test_the_page_of_the_tools_is_what_their_specs_say() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "tool_docs.py"))
    assert script["PAGE"].read_text() == script["build_page"](), "run .venv/bin/python scripts/tool_docs.py"


def test_a_page_reports_parameters_limits_flags_and_other_names() -> None:
    spec = ToolSpec(
        name="order_tool",
        description="Look an order up.",
        parameters={
            "type": "object",
            "properties": {
                "number": {"type": "integer", "minimum": 1, "description": "which | order"},
                "fields": {"type": "array", "items": {"type": "string"}, "default": []},
                "edits": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"old": {}, "new": {}}},
                    "maxItems": 3,
                },
                "kind": {"type": ["string", "null"], "enum": ["a", "b"]},
            },
            "required": ["number"],
        },
        pool="tools",
        timeout_s=5,
        max_timeout_s=60,
        dangerous=True,
        aliases={"id": "number"},
        command_parameter="kind",
    )
    page = render_tool(spec)
    assert page.startswith("## order_tool\n\nLook an order up.\n")
    assert "| `number` | integer | required | at least 1 | which \\| order |" in page
    assert "| `fields` | array of string | `[]` |  |  |" in page
    assert "| `edits` | array of {old, new} |  | at most 3 items |  |" in page
    assert '| `kind` | string or null |  | one of `"a"`, `"b"` |  |' in page
    assert "- Runs in the pool of operators' tools, outside the sandbox. Timeout: 5 s by default, 60 s at most." in page
    assert "- Flags: dangerous." in page
    assert "`id` for `number`" in page
    assert "command in `kind`" in page


def test_a_tool_without_parameters_says_so() -> None:
    page = render_tool(ToolSpec(name="now", description="The time.", parameters={"type": "object"}))
    assert "No parameters." in page
    assert "- Flags: none." in page
