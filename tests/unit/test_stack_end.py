"""`toolcrew up` lists the deleted and the remaining data before it stops its stack."""

import asyncio
import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.errors import ConfigError
from orchestrator.operations import local_stack
from orchestrator.operations.local_stack import StackInfo, keep
from orchestrator.operations.stack_data import StackData, open_stack_data
from orchestrator.settings import OrchestratorSettings

INFO = StackInfo(deployment="default", redis_url="redis://h", sandboxd_socket="/s", flower_url=None, pids={}, logs="/l")


class FakeStack:
    """A stack without processes, which serves until it is stopped."""

    def __init__(
        self, settings: OrchestratorSettings, data: StackData | None, port: int | None, *, workers_only: bool
    ) -> None:
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


def test_the_data_folder_has_one_user_at_a_time_and_the_same_password_at_every_start(tmp_path: Path) -> None:
    again = open_stack_data(tmp_path / "data")
    with open_stack_data(tmp_path / "data") as first, pytest.raises(ConfigError, match="another `toolcrew up` uses"):
        again.__enter__()
    with open_stack_data(tmp_path / "data") as second:
        assert second == first
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "data" / "redis-password").stat().st_mode) == 0o600


def test_a_data_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--data"), open_stack_data(tmp_path / "file" / "data"):
        pass


def test_a_data_folder_beside_a_redis_of_ones_own_and_a_port_in_use_are_refused(tmp_path: Path) -> None:
    own = OrchestratorSettings.model_validate({"redis_url": "redis://h"})
    with pytest.raises(ConfigError, match="TOOLCREW_REDIS_URL"):
        asyncio.run(keep(own, send(signal.SIGINT), until_eof=False, data=tmp_path))
    settings = OrchestratorSettings.model_validate({})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="--port"):
            asyncio.run(keep(settings, send(signal.SIGINT), until_eof=False, port=port))
