"""docs/tools.md agrees with the tools' specs."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_page_of_the_tools_is_what_their_specs_say() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "tool_docs.py"))
    assert script["PAGE"].read_text() == script["build_page"](), "run .venv/bin/python scripts/tool_docs.py"
