"""Error messages of the adapters when their framework is not installed. Nothing else needs the frameworks."""

import subprocess
import sys

import pytest


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("adapter", "module", "extra"),
    [("langchain", "langchain_core", "langchain"), ("openai_agents", "agents", "openai-agents")],
)
def test_a_missing_framework_is_said_with_the_extra_that_brings_it(adapter: str, module: str, extra: str) -> None:
    result = run_python(
        f"import sys; sys.modules[{module!r}] = None\n"
        f"try:\n import orchestrator.adapters.{adapter}\nexcept Exception as error:\n print(type(error).__name__, "
        "error)"
    )
    assert result == f"ConfigError the package '{module}' is not installed: pip install 'toolcrew[{extra}]'"


def test_the_sdk_loads_no_framework() -> None:
    code = (
        "import sys, orchestrator.sdk.client; print([m for m in ('langchain_core', 'langgraph', 'agents') if m in "
        "sys.modules])"
    )
    assert run_python(code) == "[]"
