"""Run the demo in a data folder of its own: three instructions through the whole path, and a check of each answer."""

import asyncio
import hashlib
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from toolcrew import ToolClient
from toolcrew.contract.errors import ConfigError, ModelUnavailable, ToolcrewError
from toolcrew.contract.settings import OrchestratorSettings, load_settings
from toolcrew.orchestrator.models.choice import SCRIPTED, ChosenModel, choose_model
from toolcrew.orchestrator.terminal.output import RunPrinter

NOTES = "The release meeting moved to Friday at noon.\nBring the budget draft.\n"
NUMBERS = (12, 30, 45, 70)
PEOPLE = (
    ("alice", "paris", 34),
    ("bob", "madrid", 27),
    ("carol", "berlin", 31),
    ("dave", "rome", 45),
    ("erin", "oslo", 29),
    ("frank", "vienna", 52),
    ("grace", "lisbon", 38),
    ("heidi", "prague", 41),
    ("ivan", "sofia", 33),
    ("judy", "dublin", 26),
)


@dataclass(frozen=True)
class Job:
    """An instruction, and the text that a correct answer contains."""

    instruction: str
    fact: str


def make_data(folder: Path) -> list[Job]:
    """Write the data files, and return the jobs with the facts that follow from the files."""
    lines = ["name,city,age", *(f"{name},{city},{age}" for name, city, age in PEOPLE)]
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    (folder / "notes.txt").write_text(NOTES)
    (folder / "numbers.txt").write_text("".join(f"{number}\n" for number in NUMBERS))
    return [
        Job("How many lines are in /workspace/data.csv? Use the tool.", str(len(lines))),
        Job("Compute the sha256 checksum of /workspace/notes.txt.", hashlib.sha256(NOTES.encode()).hexdigest()),
        Job("Use awk to print the sum of the numbers in /workspace/numbers.txt.", str(sum(NUMBERS))),
    ]


@asynccontextmanager
async def demo_model(settings: OrchestratorSettings, console: Console) -> AsyncIterator[ChosenModel]:
    """Yield the model of the configured endpoint, or else the local model, or else the scripted model with a notice."""
    columns = TextColumn("weights of the local model"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("weights", total=None, visible=False)
        context = choose_model(
            settings, progress=lambda completed, total: bar.update(task, completed=completed, total=total, visible=True)
        )
        try:
            chosen = await context.__aenter__()
        except (ConfigError, ModelUnavailable) as error:
            if settings.openai_base_url or settings.openai_api_key or settings.model:
                raise
            console.print(
                f"[bold red]no model is available[/]: {error}\n[bold red]The scripted model stands in: it plays a fixed "
                "part, nothing is thought.[/]"
            )
            context = choose_model(settings, SCRIPTED)
            chosen = await context.__aenter__()
    try:
        yield chosen
    finally:
        await context.__aexit__(None, None, None)


async def run_jobs(folder: Path, jobs: list[Job], console: Console) -> bool:
    """Run all jobs on one embedded stack. Return whether every answer contains its fact."""
    settings, view = load_settings(), RunPrinter(console)
    right = 0
    started = time.monotonic()
    async with demo_model(settings, console) as chosen, ToolClient.embedded(settings=settings) as client:
        assert client.stack is not None
        console.print(
            f"model {chosen.model.name} and stack are up after {time.monotonic() - started:.1f} s: redis, sandboxd, "
            "worker, Flower\n"
        )
        for number, job in enumerate(jobs, start=1):
            console.rule(f"job {number} of {len(jobs)}: {job.instruction}", align="left")
            result = await client.run(job.instruction, workspace=folder, model=chosen, on_event=view.on_event)
            is_right = job.fact in result.answer
            right += is_right
            console.print(
                f"[bold green]right[/]: it says {job.fact}\n"
                if is_right
                else f"[bold red]wrong[/]: the answer should say {job.fact}\n"
            )
        console.print(f"{right} of {len(jobs)} answers are right, {time.monotonic() - started:.1f} s in all")
    return right == len(jobs)


NEXT = """
The stack was stopped. Next steps:

  . .venv/bin/activate
  toolcrew up                                       a permanent stack with Flower: open the URL that it prints
  toolcrew run 'How many files are in /workspace?' --workspace docs
  toolcrew call bash_tool command='uname -a'        one tool call through the whole path
  toolcrew doctor                                   what this host guarantees
"""


def main() -> int:
    logging.getLogger("toolcrew").setLevel(logging.CRITICAL)
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="toolcrew-demo-") as name:
        try:
            is_right = asyncio.run(run_jobs(Path(name), make_data(Path(name)), console))
        except ToolcrewError as error:
            console.print(f"[bold red]demo:[/] {error}")
            return 1
        except KeyboardInterrupt:
            console.print("interrupted: the stack was stopped")
            return 130
    console.print(NEXT, markup=False, highlight=False)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
