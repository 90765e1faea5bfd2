"""`toolcrew up` says what is deleted and what remains before it takes its stack down."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from orchestrator.cli import main as cli
from orchestrator.operations import local_stack
from orchestrator.operations.local_stack import StackInfo, keep
from orchestrator.settings import OrchestratorSettings

INFO = StackInfo(deployment="default", redis_url="redis://h", sandboxd_socket="/s", flower_url=None, pids={}, logs="/l")


class FakeStack:
    """A stack without processes, which serves until it is stopped."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        self.settings = settings

    async def start(self) -> StackInfo:
        return INFO

    async def watch(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        return None


@pytest.fixture(autouse=True)
def fake_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_stack, "LocalStack", FakeStack)


def send(number: int) -> Callable[[StackInfo], None]:
    return lambda _: os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGHUP, 0)])
def test_the_end_is_announced_once_where_a_terminal_can_show_it(number: int, ends: int) -> None:
    announced: list[str] = []
    code = asyncio.run(
        keep(
            OrchestratorSettings.model_validate({}),
            send(number),
            until_eof=False,
            announce_end=lambda: announced.append("end"),
        )
    )
    assert (code, len(announced)) == (0, ends)


@pytest.mark.parametrize(
    ("is_kept", "words"),
    [
        (False, "the sessions and the embedded Redis with its tenants, API keys, runs and batches are deleted"),
        (True, "tenants, API keys, runs and batches remain in the Redis that TOOLCREW_REDIS_URL names"),
    ],
)
def test_the_sentence_says_what_is_deleted_and_what_remains(
    is_kept: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(
        keep(
            OrchestratorSettings.model_validate({}),
            send(signal.SIGINT),
            until_eof=False,
            announce_end=lambda: cli._print_stack_end(is_kept=is_kept),
        )
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("stopping: running calls are stopped")
    assert words in lines[0]
