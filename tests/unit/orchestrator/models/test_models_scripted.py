"""The shipped fake model and its demo script."""

import pytest

from toolcrew import LocalTools, tool
from toolcrew.contract.errors import ModelUnavailable
from toolcrew.orchestrator.dialects.model import Message, ModelRequest
from toolcrew.orchestrator.dialects.profiles import SMALL, STANDARD, ModelProfile
from toolcrew.orchestrator.models.choice import ChosenModel
from toolcrew.orchestrator.models.scripted import ScriptedModel, demo_script

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


async def test_scripted_model_replies_with_the_next_turn() -> None:
    model = ScriptedModel(["first answer", lambda messages: f"echo {messages[-1]['content']}"])
    assert [await text_of(model), await text_of(model, "x")] == ["first answer", "echo x"]
    with pytest.raises(ModelUnavailable, match="has 2 turns"):
        await text_of(model)


@pytest.mark.parametrize(
    ("dialect", "profile"), [("native", STANDARD), ("tags", STANDARD), ("tags", SMALL), ("json", STANDARD)]
)
@pytest.mark.parametrize(("request_text", "command"), JOBS.items(), ids=["wc", "sha256sum", "awk"])
async def test_demo_script_runs_the_command_and_reports_failures(
    dialect: str, profile: ModelProfile, request_text: str, command: str
) -> None:
    commands: list[str] = []

    @tool
    def bash_tool(command: str) -> str:
        """Run a command."""
        commands.append(command)
        return "42 out"

    model = ChosenModel(ScriptedModel(demo_script()), profile)
    result = await LocalTools([bash_tool]).run(request_text, model=model, dialect=dialect)
    assert commands == [command]
    assert "42 out" in result.answer
    assert "demo jobs" in str(demo_script()([{"role": "user", "content": "Sing."}]))
    failure: list[Message] = [{"role": "tool", "content": "Error [TIMEOUT]: too slow"}]
    assert demo_script()(failure) == "The tool failed. Error [TIMEOUT]: too slow"
