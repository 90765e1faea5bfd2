"""Ends and failed starts of programs and stacks. No process, container or folder remains, and one sentence gives the
reason.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.log_lines import read_log
from tests.support.stack.stack import (
    TOOLCREW,
    Footprint,
    RedisServer,
    Stack,
    commands_in,
    end_process,
    open_footprint,
    open_redis_server,
    open_stack,
    read_line,
)
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, SandboxUnavailable
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.operations.local_stack import StackInfo
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.workers.__main__ import ORPHAN_GRACE_S

pytestmark = pytest.mark.stack

PROGRAM = """
import asyncio, sys
from toolcrew.orchestrator.sdk.client import ToolClient

async def main():
    async with ToolClient.embedded(workers_only=True) as client, await client.open_session() as session:
        print(client.stack.model_dump_json(), flush=True)
        print(await session.call("bash_tool", {"command": "setsid sleep 99 & sleep 99"}))

asyncio.run(main())
"""


class Program:
    """A user's program with an embedded stack, during a call."""

    def __init__(self, footprint: Footprint) -> None:
        self.footprint = footprint
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=footprint.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        line = read_line(self.process)
        assert line, "the embedded stack did not come up"
        self.info = StackInfo.model_validate_json(line)
        wait_until(self.is_busy, SOON_S, "the command runs")
        assert footprint.folders()

    def is_busy(self) -> bool:
        containers = self.footprint.containers()
        return len(containers) == 1 and list(commands_in(containers[0]).values()).count("sleep 99") == 2

    def assert_alone(self, within_s: float) -> None:
        """Fail unless no process and no container of the stack is left."""
        wait_until(
            lambda: not self._stack_left(), within_s, lambda: f"only the program is left, besides {self._stack_left()}"
        )

    def _stack_left(self) -> list[object]:
        processes = [(pid, command) for pid, command in self.footprint.processes().items() if pid != self.process.pid]
        return [*processes, *self.footprint.containers()]


@pytest.fixture
def program(footprint: Footprint) -> Iterator[Program]:
    started = Program(footprint)
    yield started
    end_process(started.process)


def test_a_killed_program_leaves_nothing_of_its_embedded_stack(program: Program) -> None:
    program.process.kill()
    program.process.wait()

    program.footprint.assert_nothing_left()


def test_a_killed_supervisor_ends_its_whole_stack(program: Program) -> None:
    """No process and no container is left. The program itself removes the folder at its end, because the killed
    keeper could not.
    """
    os.kill(program.info.pids["orchestrator"][0], signal.SIGKILL)

    program.assert_alone(30)
    os.killpg(program.process.pid, signal.SIGINT)
    program.process.wait(60)
    assert program.footprint.folders() == []


def test_a_supervisor_killed_after_redis_ends_a_worker_that_cannot_store_its_result(program: Program) -> None:
    """The worker's orderly end waits for a call that tries for minutes to store its result."""
    keeper = program.info.pids["orchestrator"][0]
    os.kill(keeper, signal.SIGSTOP)  # the keeper itself would stop the stack
    os.kill(program.info.pids["redis"][0], signal.SIGKILL)
    os.kill(program.info.pids["sandboxd"][0], signal.SIGTERM)
    log = Path(program.info.logs) / "worker.log"
    wait_until(
        lambda: "Failed operation" in log.read_text(errors="replace"), SOON_S, lambda: log.read_text(errors="replace")
    )

    os.kill(keeper, signal.SIGKILL)

    program.assert_alone(20)


def test_a_stopped_worker_finishes_its_running_call_before_it_ends(program: Program) -> None:
    """Only the end of the keeper limits the shutdown of a worker."""
    log = Path(program.info.logs) / "worker.log"
    os.kill(program.info.pids["orchestrator"][0], signal.SIGSTOP)  # the keeper would stop the stack after the worker
    os.kill(program.info.pids["worker"][0], signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in log.read_text(), SOON_S, log.read_text)
    over_s = time.monotonic() + ORPHAN_GRACE_S + 1
    while time.monotonic() < over_s:
        assert program.is_busy(), log.read_text()
        time.sleep(0.2)

    end_commands(program.footprint.containers()[0], "sleep 99")

    wait_until(lambda: "bash_tool" in [one["tool"] for one in read_log(log, "call_ended")], SOON_S, log.read_text)


def end_commands(container: str, command: str) -> None:
    for pid, found in commands_in(container).items():
        if found == command:
            os.kill(pid, signal.SIGKILL)


def test_killing_all_processes_at_once_leaves_no_container(program: Program) -> None:
    for pid in program.footprint.processes():
        # One process may already have ended with its keeper.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    program.process.wait()

    wait_until(lambda: not program.footprint.containers(), SOON_S, "the containers vanish by themselves")


def test_a_stack_stopped_during_a_call_ends_at_once_and_leaves_nothing(engine: APIClient) -> None:
    with open_stack(engine) as stack:
        caller = subprocess.Popen(
            [TOOLCREW, "call", "bash_tool", "command=sleep 99", "--json"],
            env=stack.footprint.environment({"TOOLCREW_REDIS_URL": stack.redis_url}),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_until(
                lambda: any(
                    "sleep 99" in commands_in(container).values() for container in stack.footprint.containers()
                ),
                SOON_S,
                "it runs",
            )
            started = time.monotonic()
            code = stack.end()
            took_s = time.monotonic() - started
        finally:
            caller.kill()
            caller.communicate()
        assert code == 0
        assert took_s < 60
        stack.footprint.assert_nothing_left(within_s=2)


@pytest.mark.parametrize("after_s", [0.7, 1.4, 2.1])
def test_a_stack_interrupted_while_it_starts_leaves_nothing(footprint: Footprint, after_s: float) -> None:
    process = subprocess.Popen(
        [TOOLCREW, "up", "--json"],
        env=footprint.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + after_s
    while time.monotonic() < until:
        footprint.processes()  # records sandboxd's name
        time.sleep(0.05)
    process.terminate()
    process.wait(60)

    footprint.assert_nothing_left(within_s=3)


# --- Bad input at start
# -----------------------------------------------------------------------------------------------


def assert_says(done: "subprocess.CompletedProcess[str]", *fragments: str) -> None:
    """Fail unless the exit code is 1 and stderr has one sentence with these words."""
    lines = [
        line for line in done.stderr.splitlines() if not line.startswith("TOOLCREW_REDIS_URL is not set: starting")
    ]
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr, done.stderr
    assert [line for line in lines if line.startswith("toolcrew: ")] == lines, done.stderr
    assert len(lines) == 1, done.stderr
    for word in fragments:
        assert word in lines[0], (word, lines[0])


def test_a_stack_without_an_engine_does_not_start_and_reports_what_to_do(footprint: Footprint) -> None:
    done = run_toolcrew(footprint, "up", "--json", environment={"DOCKER_HOST": "unix:///nonexistent.sock"})

    assert_error_object(done, "the Docker engine does not answer", "start it, or check DOCKER_HOST")
    footprint.assert_nothing_left(within_s=2)


def assert_error_object(done: "subprocess.CompletedProcess[str]", *fragments: str) -> None:
    """Fail unless the exit code is 1 and stdout has the error as an object, because of --json."""
    assert done.returncode == 1, done
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.startswith('{"error"'), done
    for word in fragments:
        assert word in done.stdout, (word, done.stdout)


@pytest.mark.parametrize("command", [("up",), ("call", "bash_tool", "command=true")], ids=["up", "call"])
def test_a_stack_without_the_image_does_not_start_and_reports_how_to_build_it(
    footprint: Footprint, command: tuple[str, ...]
) -> None:
    done = run_toolcrew(footprint, *command, environment={"TOOLCREW_SANDBOX_IMAGE": "toolcrew-sandbox:ever"})

    assert_says(done, "the engine has no image toolcrew-sandbox:ever", "scripts/build-image")
    footprint.assert_nothing_left(within_s=2)


@pytest.mark.parametrize("command", [("up",), ("tools", "list")], ids=["up", "tools"])
def test_an_unreachable_redis_is_reported_with_its_address_and_without_its_password(
    footprint: Footprint, command: tuple[str, ...]
) -> None:
    done = run_toolcrew(footprint, *command, environment={"TOOLCREW_REDIS_URL": "redis://:hidden-word@127.0.0.1:1/0"})

    assert_says(done, "redis://127.0.0.1:1/0", "TOOLCREW_REDIS_URL")
    assert "hidden-word" not in done.stdout + done.stderr
    footprint.assert_nothing_left(within_s=2)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with open_redis_server() as server:
        yield server


def test_a_wrong_redis_password_is_reported(footprint: Footprint, redis_server: RedisServer) -> None:
    url = f"redis://:wrong@127.0.0.1:{redis_server.port}/0"

    assert_says(
        run_toolcrew(footprint, "call", "bash_tool", "command=true", environment={"TOOLCREW_REDIS_URL": url}),
        "refuses user or password",
    )
    assert_says(run_toolcrew(footprint, "up", environment={"TOOLCREW_REDIS_URL": url}), "refuses user or password")
    footprint.assert_nothing_left(within_s=2)


def test_a_pool_without_a_worker_is_reported_with_how_to_start_one(
    footprint: Footprint, redis_server: RedisServer
) -> None:
    done = run_toolcrew(
        footprint, "call", "bash_tool", "command=true", environment={"TOOLCREW_REDIS_URL": redis_server.url}
    )

    assert_says(done, "no worker has published its tools", "toolcrew serve worker")


def test_a_client_with_another_secret_is_refused_with_the_name_of_the_setting(
    stack: Stack, footprint: Footprint
) -> None:
    environment = {"TOOLCREW_REDIS_URL": stack.redis_url, "TOOLCREW_SECRET": "another"}

    done = run_toolcrew(footprint, "call", "bash_tool", "command=true", environment=environment)
    as_object = run_toolcrew(footprint, "call", "bash_tool", "command=true", "--json", environment=environment)

    assert_says(done, "TOOLCREW_SECRET")
    assert "['" not in done.stderr, "a Python list is shown to the operator"
    assert_error_object(as_object, "ENVELOPE_REFUSED")


def test_a_redis_url_without_a_password_requires_a_signing_secret(footprint: Footprint) -> None:
    with open_redis_server(password=None) as server:
        done = run_toolcrew(footprint, "up", environment={"TOOLCREW_REDIS_URL": server.url})

        assert_says(done, "set TOOLCREW_SECRET")
        footprint.assert_nothing_left(within_s=2)


async def test_the_sdk_raises_operator_errors(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        async with ToolClient.connect("redis://:x@127.0.0.1:1/0"):
            pass
    with pytest.raises(ConfigError, match="no worker"):
        async with ToolClient.connect(redis_server.url):
            pass
    with pytest.raises(ConfigError, match="TOOLCREW_REDIS_URL is not set"):
        async with ToolClient.connect(settings=OrchestratorSettings(redis_url=None)):
            pass
    with open_footprint() as footprint:
        monkeypatch.setenv("TMPDIR", str(footprint.folder))
        monkeypatch.setenv("TOOLCREW_SANDBOX_IMAGE", "no-such-image:ever")
        with pytest.raises((SandboxUnavailable, Exception), match="the engine has no image"):
            async with ToolClient.embedded(workers_only=True):
                pass
        assert footprint.folders() == []


def test_the_folders_of_a_stack_are_private_to_the_user(stack: Stack) -> None:
    folder = os.stat(stack.info.logs)
    socket = os.stat(stack.info.sandboxd_socket)

    assert (folder.st_mode & 0o777, socket.st_mode & 0o777) == (0o700, 0o600)
