"""docs/tools.md agrees with the tools' specs."""

import runpy
from pathlib import Path

from contract.specs import ToolSpec
from contract.tool_pages import render_tool

ROOT = Path(__file__).parent.parent.parent


def test_the_page_of_the_tools_is_what_their_specs_say() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "tool_docs.py"))
    assert script["PAGE"].read_text() == script["build_page"](), "run .venv/bin/python scripts/tool_docs.py"


def test_a_tool_without_parameters_says_so() -> None:
    page = render_tool(ToolSpec(name="now", description="The time.", parameters={"type": "object"}))
    assert "No parameters." in page
    assert "- Flags: none." in page
