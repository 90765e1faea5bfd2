"""Effects of signals on a command that runs a batch, and the traces of items that started again."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from contract.errors import ConfigError
from orchestrator.cli.batches_run import BatchInterrupts, find_rows
from orchestrator.cli.run_files import RunFiles
from orchestrator.runs.runner import Runner
from orchestrator.traces.reading import find_attempts
from store.batches import RowLocation


@dataclass
class FakeRunner:
    asked: list[str] = field(default_factory=list)
    running: int = 2

    def drain(self) -> None:
        self.asked.append("drain")

    def stop(self) -> None:
        self.asked.append("stop")


class Told:
    """A command that receives signals, with its output and exit status."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._heard = asyncio.Event()
        self.left: list[int] = []
        self.runner = FakeRunner()
        self.interrupts = BatchInterrupts("`again`", self._say, self.left.append)
        self.interrupts.listen()

    def begin(self) -> None:
        self.interrupts.begin(cast(Runner, self.runner))

    async def hear(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self._heard.clear()
            signal.raise_signal(number)
            await self._heard.wait()

    def _say(self, text: str) -> None:
        self.said.append(text)
        self._heard.set()


async def test_each_interrupt_asks_for_more() -> None:
    result = Told()
    result.begin()
    await result.hear(signal.SIGINT, signal.SIGINT)
    assert (result.runner.asked, result.left) == (["drain", "stop"], [])
    assert "2 running items are finished first" in result.said[0]
    await result.hear(signal.SIGINT)
    assert result.left == [130]
    assert all("`again`" in sentence for sentence in result.said)


async def test_an_interrupt_before_the_work_began_is_not_lost() -> None:
    result = Told()
    await result.hear(signal.SIGINT)
    result.begin()
    assert result.runner.asked == ["drain"]


async def test_a_service_managers_stop_gives_back_at_once() -> None:
    result = Told()
    result.begin()
    await result.hear(signal.SIGTERM)
    assert (result.runner.asked, result.interrupts.exit_code) == (["stop"], 143)


def place(output: Path, host: str) -> RowLocation:
    return RowLocation(host=host, output=str(output), errors=str(output.with_name("e.jsonl")))


def test_rows_of_another_host_are_not_written_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on host elsewhere-1"):
        find_rows("b", place(tmp_path / "o.jsonl", "elsewhere-1"), None, None)


RUN = "0123456789abcdef01234567"


@pytest.fixture
def traces(tmp_path: Path) -> Callable[..., Path]:
    def write(*names: str) -> Path:
        (tmp_path / "default").mkdir(exist_ok=True)
        for name in names:
            (tmp_path / "default" / f"{name}.jsonl").write_text("")
        return tmp_path

    return write


def test_the_attempts_of_an_item_are_found_by_its_run_the_last_one_at_the_end(traces: Callable[..., Path]) -> None:
    folder = traces(RUN, f"{RUN}-2", f"{RUN}-10")
    assert [path.stem for path in find_attempts(folder, RUN)] == [RUN, f"{RUN}-2", f"{RUN}-10"]
    assert [path.stem for path in find_attempts(folder, f"{RUN}-2")] == [f"{RUN}-2"]


def test_runs_of_programs_that_only_look_like_attempts_are_their_own(traces: Callable[..., Path]) -> None:
    assert [path.stem for path in find_attempts(traces("job", "job-2", RUN), "job")] == ["job"]
    assert [path.stem for path in find_attempts(traces(f"{RUN}-02", f"{RUN}-x"), RUN)] == [RUN]


def test_errors_without_an_output_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--errors needs --output"):
        find_rows("b", None, None, tmp_path / "e.jsonl")


def test_a_trajectory_that_cannot_be_written_is_reported_before_the_run(tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "nowhere" / "run.json"):
        with pytest.raises(ConfigError, match="give another file with -o"):
            RunFiles(output)
