"""`toolcrew sessions shell` at a real terminal, with a service that has one process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.api.stream_service import FakeProcess, StreamService, serving
from tests.support.cli.pty_command import at_terminal
from tests.support.stack.waiting import wait_until
from toolcrew.orchestrator.terminal.local_terminal import DetachKeys

SOON_S = 30.0


@pytest.fixture
def service() -> Iterator[tuple[StreamService, dict[str, str]]]:
    service = StreamService(FakeProcess())
    with serving(service.app) as url:
        yield service, {"TOOLCREW_URL": url, "TOOLCREW_API_KEY": "tc_key", "TOOLCREW_REDIS_URL": ""}


def test_keys_sizes_and_the_exit_code_pass(service: tuple[StreamService, dict[str, str]]) -> None:
    fake, env = service
    fake.process = process = FakeProcess([(1, b"prompt$ ")], reads=7, echoes=True)
    with at_terminal("sessions", "shell", "s", "--", "top", "-d", "1", env=env, cols=100, rows=40) as command:
        before = command.modes()
        command.wait_for(b"prompt$ ")
        assert command.modes() != before, "the terminal is raw"
        command.type(b"a\x03\x10b")
        command.wait_for(b"ab")
        command.resize(120, 50)
        wait_until(lambda: ("resize", {"cols": 120, "rows": 50}) in process.requests, SOON_S, "the size arrived")
        command.type("é\r".encode())
        assert command.wait() == 3
        assert command.modes() == before
    name, body = process.requests[0]
    assert (name, body["argv"], body["pty"]) == ("start", ["top", "-d", "1"], {"cols": 100, "rows": 40})
    assert bytes(process.typed) == "a\x03\x10bé\r".encode()


def test_a_terminal_gets_nothing_that_types_or_stays(service: tuple[StreamService, dict[str, str]]) -> None:
    fake, env = service
    fake.process = FakeProcess([(1, b"\x1b[?1049h\x1b[6n\x1b]52;c;aGk=\x07\x1b[31mred"), (1, b" text")])
    with at_terminal("sessions", "shell", "s", env=env) as command:
        assert command.wait() == 3
    assert b"\x1b[31mred text" in command.screen
    assert b"6n" not in command.screen
    assert b"52;c" not in command.screen
    assert b"\x1b[?1049l" in command.screen, "the alternate screen was left"


def test_detaching_leaves_the_process_and_attaching_shows_it_again(
    service: tuple[StreamService, dict[str, str]],
) -> None:
    fake, env = service
    fake.process = process = FakeProcess([(1, b"prompt$ ")], reads=1, echoes=True, pty={"cols": 80, "rows": 24})
    with at_terminal("sessions", "shell", "s", env=env) as command:
        before = command.modes()
        command.wait_for(b"prompt$ ")
        command.type(b"\x10")
        command.type(b"\x11")
        assert command.wait() == 0
        assert command.modes() == before
    assert b"sessions shell s --process 7" in command.screen
    assert [name for name, _ in process.requests if name != "resize"] == ["start"]
    with at_terminal("sessions", "shell", "s", "--process", "7", env=env) as command:
        command.wait_for(b"prompt$ ")
        command.type(b"x")
        assert command.wait() == 3
    assert process.attached[-1]["from"] == "start"
    assert bytes(process.typed) == b"x"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_killed_hangs_up_and_restores_the_terminal(
    service: tuple[StreamService, dict[str, str]], number: signal.Signals
) -> None:
    fake, env = service
    fake.process = process = FakeProcess([(1, b"\x1b[?25lprompt$ ")], reads=1)
    with at_terminal("sessions", "shell", "s", env=env) as command:
        before = command.modes()
        command.wait_for(b"prompt$ ")
        command.process.send_signal(number)
        assert command.wait() == 128 + number
        assert command.modes() == before
    assert b"\x1b[?25h" in command.screen
    assert process.requests[-1] == ("signal", {"signal": 1, "tree": True})


def test_pipes_are_passed_unchanged(service: tuple[StreamService, dict[str, str]]) -> None:
    fake, env = service
    output = b"\x00\x1b[6n\xff"
    fake.process = process = FakeProcess([(1, output), (2, b"problem")], reads=100_000, reads_to_end=True)
    done = run(env, "shell", "s", "--", "cat", stdin=bytes(100_000))
    assert (done.returncode, done.stdout, done.stderr) == (3, output, b"problem")
    assert bytes(process.typed) == bytes(100_000)
    assert process.requests[0][1]["pty"] is None


def test_a_program_that_a_signal_ended_and_lost_output_are_reported(
    service: tuple[StreamService, dict[str, str]],
) -> None:
    fake, env = service
    fake.process = FakeProcess([(1, b"0123456789")], ring_start=4)
    fake.process.end = {"exit_code": None, "signal": 9, "lost_bytes": 4}
    done = run(env, "shell", "s", "--process", "7")
    assert (done.returncode, done.stdout) == (137, b"456789")
    assert b"4 bytes" in done.stderr


def test_the_processes_of_a_session_are_listed(service: tuple[StreamService, dict[str, str]]) -> None:
    _, env = service
    assert b"running" in run(env, "processes", "s").stdout
    listed = json.loads(run(env, "processes", "s", "--json").stdout)
    assert [process["process"] for process in listed["processes"]] == [7]


@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2, 3]])
def test_the_keys_to_detach_are_found_at_any_cut(cuts: list[int]) -> None:
    data, keys, passed = b"a\x10\x11rest", DetachKeys(), b""
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        piece, has_detached = keys.feed(data[start:end])
        passed += piece
        if has_detached:
            break
    assert (passed, has_detached) == (b"a", True)
    assert keys.feed(b"\x10\x10b\x11") == (b"\x10\x10b\x11", False)


def run(env: dict[str, str], *arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    argv = [sys.executable, "-m", "toolcrew.orchestrator", "sessions", *arguments]
    return subprocess.run(argv, input=stdin, env={**os.environ, **env}, capture_output=True, timeout=60, check=False)
