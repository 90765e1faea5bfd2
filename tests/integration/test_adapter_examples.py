"""Run the examples of docs/integrations.md as programs, on a real stack."""

import subprocess
import sys

import pytest

from tests.support.stack.stack import ROOT, Stack

pytestmark = pytest.mark.stack


def run_example(stack: Stack, name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        env=stack.footprint.environment({"TOOLCREW_REDIS_URL": stack.redis_url, "PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_langgraph_example_recovers_from_a_failure_and_ends(stack: Stack) -> None:
    pytest.importorskip("langgraph")
    result = run_example(stack, "langgraph_tools.py")
    assert "tool: Error [FILE_NOT_FOUND]" in result
    assert "\ntool: 15\n" in result
    assert result.endswith("The sum is 15.\n")


def test_the_agents_example_stops_for_an_approval_and_ends(stack: Stack) -> None:
    pytest.importorskip("agents")
    result = run_example(stack, "openai_agents_tools.py")
    assert result.startswith("approved: write_tool")
    assert "\ntool: 15\n" in result
    assert result.endswith("The sum is 15.\n")
