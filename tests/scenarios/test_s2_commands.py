"""Rows S2-13 to 16 and S4-21 to 23 of the scenarios: the command execution tool, with the real registry and the real
guest.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.guest.guest_harness import Guest, needs_namespace, running_guest
from tests.support.guest.guest_tools import GuestTools
from tests.support.records.builders import build_context
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.workers.tools.builtin import build_registry
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES

pytestmark = needs_namespace


class Agent:
    """The agent that calls bash_tool."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self._tools = GuestTools(guest)

    def bash(self, command: str = "", timeout_s: float = 30, **arguments: Any) -> ToolResult:
        context = build_context(timeout_s=timeout_s)
        return self._tools.run("bash_tool", context, command=command, **arguments)


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with running_guest() as running:
        yield running


@pytest.fixture
def agent(guest: Guest) -> Agent:
    return Agent(guest)


def test_s2_13_an_agent_executes_commands_that_build_on_each_other(agent: Agent) -> None:
    """S2-13: several commands, each building on the folder, variables and functions of those before it."""
    steps = (
        "mkdir -p report && cd report && export TITLE='Sales 2026'",
        "total() { awk '{ n += $2 } END { print n }' \"$1\"; }; printf 'a 3\\nb 4\\n' > data",
        'echo "$TITLE: $(total data)" > out.txt; cat out.txt',
    )
    results = [agent.bash(step) for step in steps]
    assert all(result.success for result in results)
    assert results[-1].output == "Sales 2026: 7\n"


def test_s2_14_a_simple_command_returns_standard_output_and_error(agent: Agent) -> None:
    """S2-14: `ls -la` of an existing path and of a missing path."""
    (agent.guest.workspace / "seen.txt").write_text("x")
    result = agent.bash("ls -la seen.txt missing.txt", cwd=str(agent.guest.workspace))
    assert result.success
    assert "seen.txt" in str(result.metadata["stdout"])
    assert "cannot access 'missing.txt'" in str(result.metadata["stderr"])
    assert str(result.output).endswith("\n[exit code 2]")


def test_s2_15_a_command_above_its_time_limit_is_killed_with_a_timeout_error(agent: Agent) -> None:
    """S2-15: the output up to the limit is returned, and no process continues."""
    started = time.monotonic()
    result = agent.bash("echo before; setsid sleep 1000 & sleep 1000", timeout_s=0.3)
    assert time.monotonic() - started < 30
    assert (result.success, result.error_code, result.output) == (False, ErrorCode.TIMEOUT, "before\n")
    assert result.kill is not None
    assert result.kill.survivors == 0
    assert agent.guest.wait_alone(), agent.guest.others()


@pytest.mark.parametrize(
    "command", ["rm -rf /", "sudo rm -rf --no-preserve-root /", "mkfs.ext4 /dev/sda", ":(){ :|:& };:"]
)
def test_s2_16_a_dangerous_command_is_refused_with_a_security_error(agent: Agent, command: str) -> None:
    """S2-16: the refused command does not run."""
    result = agent.bash(f"touch ran; {command}")
    assert (result.success, result.error_code) == (False, ErrorCode.SECURITY_REFUSED)
    assert result.text().startswith("Error [SECURITY_REFUSED]: ")
    assert not (agent.guest.workspace / "ran").exists()


def test_s4_21_the_registry_provides_a_tool_for_shell_commands() -> None:
    """S4-21: with a schema and limits that a model reads."""
    tool = build_registry().get("bash_tool")
    assert tool is not None
    assert {"command", "timeout", "cwd", "stdin", "background"} <= set(tool.spec.parameters["properties"])  # type: ignore[arg-type, operator]


def test_s4_22_a_command_runs_in_a_shell_and_returns_both_streams_and_the_exit_code(agent: Agent) -> None:
    """S4-22: the shell handles a pipe, a substitution and a redirection."""
    result = agent.bash('printf "%s\\n" a b | wc -l; echo "$((6 * 7))" >&2; exit 3')
    assert result.success
    assert (result.metadata["stdout"], result.metadata["stderr"], result.metadata["exit_code"]) == ("2\n", "42\n", 3)


def test_s4_23_the_limit_ends_the_command_and_the_next_command_works(agent: Agent) -> None:
    """S4-23: even a command that ignores the first signal is ended."""
    result = agent.bash("trap '' TERM; sleep 1000; sleep 1000", timeout_s=0.2)
    assert (result.error_code, "limit of 0.2 s" in str(result.error)) == (ErrorCode.TIMEOUT, True)
    assert agent.bash("echo well").output == "well\n"


def test_s2_13_a_background_job_runs_next_to_other_commands(agent: Agent) -> None:
    """S2-13: a server runs in the background. The agent sends input and queries while other commands run."""
    started = agent.bash("echo up; while read word; do echo got $word; done", background=True)
    job = started.metadata["job_id"]
    assert "[log: " in str(started.output)
    assert agent.bash("echo beside").output == "beside\n"
    agent.bash(action="input", job_id=job, stdin="it\n", close_stdin=True)
    output = ""
    while "has ended" not in output:
        output += str(agent.bash(action="poll", job_id=job).output)
    assert "got it\n" in output
    assert "[job-1 has ended, exit code" in output


def test_s2_14_a_long_output_is_shown_in_part_and_stored_in_a_file(agent: Agent) -> None:
    """S2-14: head and tail in whole lines, and the call that shows the part between them."""
    result = agent.bash("seq 1 50000")
    text = str(result.output)
    assert result.truncated
    assert len(text) < MAX_OUTPUT_BYTES + 1000
    assert text.startswith("1\n2\n")
    assert text.endswith("49999\n50000\n")
    assert result.spill is not None
    assert Path(result.spill.path).read_text() == "".join(f"{n}\n" for n in range(1, 50001))
    shown, _, rest = text.partition("[... ")
    offset = int(rest.partition('"offset": ')[2].partition("}")[0])
    assert shown.splitlines()[-1] == str(offset - 1)
    assert '"file_path": "' + result.spill.path in rest
