"""The embedded model does the demo's jobs natively: real weights, real server, commands really run (five programs, in a folder of their own)."""

import os
import shlex
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from contract.calls import ToolResult
from contract.errors import ConfigError, ModelUnavailable
from contract.specs import ToolSpec
from orchestrator.dialects.base import CallRequested
from orchestrator.dialects.native import NativeDialect
from orchestrator.models.base import Message, ModelRequest
from orchestrator.models.local import LocalModelServer
from orchestrator.models.openai import OpenAIModel
from orchestrator.models.weights import DEFAULT_CACHE, load_weights

pytestmark = [pytest.mark.model, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

ALLOWED = {"wc", "sha256sum", "awk", "cat", "ls"}
NOTES = "The release meeting moved to Friday at noon.\nBring the budget draft.\n"
PEOPLE = "alice,paris,34 bob,madrid,27 carol,berlin,31 dave,rome,45 erin,oslo,29 frank,vienna,52 grace,lisbon,38 heidi,prague,41 ivan,sofia,33 judy,dublin,26"
JOBS = {
    "How many lines are in /workspace/data.csv? Use the tool.": "11",
    "Compute the sha256 checksum of /workspace/notes.txt.": "e84618161ee29ffaeb98ac4f5c8c95535b5eaf839730282323fa7370bf8d35c6",
    "Use awk to print the sum of the numbers in /workspace/numbers.txt.": "157",
}
BASH = ToolSpec(
    name="bash_tool",
    description="Run one bash command and return its output.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "the bash command"}},
        "required": ["command"],
    },
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[LocalModelServer]:
    try:
        weights = load_weights(cache_dir=DEFAULT_CACHE, hub_url=None)
    except ConfigError as error:
        pytest.skip(str(error))
    async with LocalModelServer(weights) as running:
        yield running


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text(NOTES)
    (tmp_path / "numbers.txt").write_text("12\n30\n45\n70\n")
    (tmp_path / "data.csv").write_text("\n".join(["name,city,age", *PEOPLE.split()]) + "\n")
    return tmp_path


def run(command: str, workspace: Path) -> str:
    """The output of a command of one allowed program, with the workspace in its place. No shell: nothing else can be started."""
    words = [word.replace("/workspace", str(workspace)) for word in shlex.split(command)]
    assert words[0] in ALLOWED, command
    done = subprocess.run(words, cwd=workspace, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout + done.stderr).replace(str(workspace), "/workspace")


async def solve(model: OpenAIModel, request: str, workspace: Path) -> tuple[int, str]:
    """Steps and answer of a loop of at most four steps."""
    dialect = NativeDialect()
    messages: list[Message] = [{"role": "system", "content": dialect.build_system("", [BASH])}, {"role": "user", "content": request}]
    for step in range(1, 5):
        reader, events = dialect.open_reader("run", step), []
        async for chunk in model.stream(dialect.build_request(messages, [BASH])):
            events += reader.feed(chunk)
        last, end = reader.finish()
        observed = []
        for event in [*events, *last]:
            if isinstance(event, CallRequested):
                output = run(str(event.call.arguments["command"]), workspace)
                observed.append((event.model_id, ToolResult(call_id=event.call.id, name="bash_tool", success=True, output=output)))
        if not observed:
            return step, end.text
        messages += [end.message, *dialect.build_observations(observed)]
    return 4, "(no answer)"


@pytest.mark.parametrize(("request_text", "fact"), JOBS.items(), ids=["lines", "sha", "sum"])
async def test_a_demo_job_is_done_in_two_steps(server: LocalModelServer, workspace: Path, request_text: str, fact: str) -> None:
    steps, answer = await solve(server.open_model(), request_text, workspace)
    assert fact in answer
    assert steps == 2


async def test_the_server_refuses_whoever_has_no_key(server: LocalModelServer) -> None:
    stranger = OpenAIModel("local", server.base_url, "wrong", retries=0)
    with pytest.raises(ModelUnavailable, match="refuses the API key"):
        await anext(aiter(stranger.stream(ModelRequest([{"role": "user", "content": "hi"}]))))
    await stranger.aclose()


async def test_the_key_is_not_on_the_servers_command_line(server: LocalModelServer) -> None:
    done = subprocess.run(["cat", f"/proc/{server.pid}/cmdline"], capture_output=True, text=True, check=True)  # noqa: ASYNC221
    assert server.api_key not in done.stdout


async def test_the_server_ends_with_its_owner() -> None:
    weights = load_weights(cache_dir=DEFAULT_CACHE, hub_url=None)
    async with LocalModelServer(weights) as running:
        pid = running.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
