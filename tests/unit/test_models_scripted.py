"""The shipped fake model and its demo script."""

from typing import Any

import pytest

from contract.calls import ToolResult
from contract.errors import ModelUnavailable
from orchestrator.dialects.base import CallRequested, Dialect
from orchestrator.dialects.json_decision import JsonDecisionDialect
from orchestrator.dialects.model import Message, ModelRequest
from orchestrator.dialects.native import NativeDialect
from orchestrator.dialects.profiles import SMALL
from orchestrator.dialects.tags import TagsDialect
from orchestrator.models.scripted import ScriptedModel, demo_script
from tests.builders import build_spec

JOBS = {
    "How many lines are in /workspace/data.csv?": "wc -l /workspace/data.csv",
    "Compute the sha256 checksum of /workspace/notes.txt.": "sha256sum /workspace/notes.txt",
    "Use awk to print the sum of the numbers in /workspace/numbers.txt.": (
        "awk '{sum += $1} END {print sum}' /workspace/numbers.txt"
    ),
}


async def text_of(model: ScriptedModel, content: str = "hi") -> str:
    chunks = [chunk async for chunk in model.stream(ModelRequest([{"role": "user", "content": content}]))]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def test_each_request_gets_the_next_turn() -> None:
    model = ScriptedModel(["first answer", lambda messages: f"echo {messages[-1]['content']}"])
    assert [await text_of(model), await text_of(model, "x")] == ["first answer", "echo x"]


async def test_a_script_that_has_ended_says_so() -> None:
    with pytest.raises(ModelUnavailable, match="has 0 turns"):
        await text_of(ScriptedModel([]))


async def react(dialect: Dialect, model: ScriptedModel, request: str) -> tuple[list[str], str]:
    """Run a minimal loop. Return the requested commands and the answer."""
    specs = [build_spec("bash_tool")]
    messages: list[Message] = [
        {"role": "system", "content": dialect.build_system("", specs)},
        {"role": "user", "content": request},
    ]
    commands: list[str] = []
    for step in range(5):
        reader, observed = dialect.open_reader("r", step), []
        events: list[Any] = []
        async for chunk in model.stream(dialect.build_request(messages, specs)):
            events += reader.feed(chunk)
        last, end = reader.finish()
        for event in [*events, *last]:
            if isinstance(event, CallRequested):
                commands.append(str(event.call.arguments["command"]))
                observed.append(
                    (
                        event.model_id or event.call.id,
                        ToolResult(call_id=event.call.id, name="bash_tool", success=True, output="42 out"),
                    )
                )
        messages += [end.message, *dialect.build_observations(observed)]
        if not observed:
            return commands, end.text
    raise AssertionError("the script never answered")


@pytest.mark.parametrize(
    "dialect",
    [NativeDialect(), TagsDialect(), TagsDialect(profile=SMALL), JsonDecisionDialect()],
    ids=["native", "tags", "hint", "json"],
)
@pytest.mark.parametrize(("request_text", "command"), JOBS.items())
async def test_the_demo_script_runs_the_command(dialect: Dialect, request_text: str, command: str) -> None:
    model = ScriptedModel(demo_script())
    commands, answer = await react(dialect, model, request_text)
    assert commands == [command]
    assert "42 out" in answer


def test_the_demo_script_reports_of_a_failure() -> None:
    assert (
        demo_script()([{"role": "tool", "content": "Error [TIMEOUT]: too slow"}])
        == "The tool failed. Error [TIMEOUT]: too slow"
    )


def test_the_demo_script_says_what_it_cannot_do() -> None:
    assert "demo jobs" in str(demo_script()([{"role": "user", "content": "Sing."}]))
