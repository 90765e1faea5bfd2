"""Effects of signals on a command that runs a batch, and the traces of items that started again."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.cli.batches_run import BatchInterrupts, find_rows
from toolcrew.orchestrator.cli.run_files import RunFiles
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.orchestrator.traces.reading import find_attempts
from toolcrew.store.batches import RowLocation


@dataclass
class FakeRunner:
    requests: list[str] = field(default_factory=list)
    running: int = 2

    def drain(self) -> None:
        self.requests.append("drain")

    def stop(self) -> None:
        self.requests.append("stop")


class SignalledCommand:
    """A command that receives signals, with its output and exit status."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._was_handled = asyncio.Event()
        self.exit_codes: list[int] = []
        self.runner = FakeRunner()
        self.interrupts = BatchInterrupts("`again`", self._print, self.exit_codes.append)
        self.interrupts.listen()

    def begin(self) -> None:
        self.interrupts.begin(cast(Runner, self.runner))

    async def send(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self._was_handled.clear()
            signal.raise_signal(number)
            await self._was_handled.wait()

    def _print(self, text: str) -> None:
        self.messages.append(text)
        self._was_handled.set()


async def test_repeated_interrupts_drain_stop_and_exit() -> None:
    command = SignalledCommand()
    command.begin()
    await command.send(signal.SIGINT, signal.SIGINT)
    assert (command.runner.requests, command.exit_codes) == (["drain", "stop"], [])
    assert "2 running items are finished first" in command.messages[0]
    await command.send(signal.SIGINT)
    assert command.exit_codes == [130]
    assert all("`again`" in sentence for sentence in command.messages)


async def test_an_interrupt_before_the_runner_starts_drains_it() -> None:
    command = SignalledCommand()
    await command.send(signal.SIGINT)
    command.begin()
    assert command.runner.requests == ["drain"]


async def test_a_sigterm_stops_the_runner_at_once() -> None:
    command = SignalledCommand()
    command.begin()
    await command.send(signal.SIGTERM)
    assert (command.runner.requests, command.interrupts.exit_code) == (["stop"], 143)


def test_rows_of_another_host_are_refused(tmp_path: Path) -> None:
    location = RowLocation(host="elsewhere-1", output=str(tmp_path / "o.jsonl"), errors=str(tmp_path / "e.jsonl"))
    with pytest.raises(ConfigError, match="on host elsewhere-1"):
        find_rows("b", location, None, None)


RUN = "0123456789abcdef01234567"


@pytest.fixture
def traces(tmp_path: Path) -> Callable[..., Path]:
    def write(*names: str) -> Path:
        (tmp_path / "default").mkdir(exist_ok=True)
        for name in names:
            (tmp_path / "default" / f"{name}.jsonl").write_text("")
        return tmp_path

    return write


def test_the_attempts_of_a_run_are_listed_in_order(traces: Callable[..., Path]) -> None:
    folder = traces(RUN, f"{RUN}-2", f"{RUN}-10")
    assert [path.stem for path in find_attempts(folder, RUN)] == [RUN, f"{RUN}-2", f"{RUN}-10"]
    assert [path.stem for path in find_attempts(folder, f"{RUN}-2")] == [f"{RUN}-2"]


def test_run_ids_that_resemble_attempts_are_separate_runs(traces: Callable[..., Path]) -> None:
    assert [path.stem for path in find_attempts(traces("job", "job-2", RUN), "job")] == ["job"]
    assert [path.stem for path in find_attempts(traces(f"{RUN}-02", f"{RUN}-x"), RUN)] == [RUN]


def test_errors_without_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--errors needs --output"):
        find_rows("b", None, None, tmp_path / "e.jsonl")


def test_an_unwritable_trajectory_file_is_reported_before_the_run(tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "nowhere" / "run.json"):
        with pytest.raises(ConfigError, match="give another file with -o"):
            RunFiles(output)
