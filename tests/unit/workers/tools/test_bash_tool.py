"""bash_tool over a scripted guest: its requests, its refusals, and its handling of replies."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.records.builders import build_context, build_exec_response
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from toolcrew.contract.calls import MAX_TIMEOUT_S, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.sandbox_client import GuestResponse
from toolcrew.workers.tools.builtin import build_registry

KILL = {"signalled": 3, "survivors": 0, "method": "tree", "ms": 5.0}
STATE = {"outcome": "kept", "folder": "/workspace", "moved": False, "stray": None, "lost": None}
JOB = {
    "job": "job-1",
    "label": "serve",
    "state": "running",
    "exit_code": None,
    "signal": None,
    "oom": False,
    "age_s": 1.5,
    "log": "/output/jobs/job-1.log",
    "unread": 0,
    "dropped": 0,
}
SPILL = {"path": "/output/command-ab.txt", "bytes": 99_000, "lines": 7000, "whole": True}

REGISTRY = build_registry()


class BashHarness:
    """bash_tool over a scripted guest."""

    def __init__(self, *answers: Any, **context: Any) -> None:
        self.client = FakeSandboxClient(*answers)
        self.context = build_context(**context)
        self.executor = build_executor(
            REGISTRY, self.client, MemoryLedger(), MemoryBlobs(), {"host": "h1", "queue": "host.h1.b00t"}
        )

    def bash(self, command: str = "true", **arguments: Any) -> ToolResult:
        return self.act(command=command, **arguments)

    def act(self, **arguments: Any) -> ToolResult:
        return self.executor.execute(ToolCall(id="call-1", name="bash_tool", arguments=arguments), self.context)

    @property
    def request(self) -> dict[str, Any]:
        return self.client.requests[-1]


def job_response(output: bytes = b"", kill: Any = None, **fields: Any) -> GuestResponse:
    counts = {"merged": {"total": len(output), "head": len(output), "tail": 0}}
    return GuestResponse(
        {"ev": "done", "job": {**JOB, **fields}, "streams": counts, "kill": kill, "sandbox_s": 0.1}, {"merged": output}
    )


BUS_ERROR = (
    "[SIGBUS is what a program gets when a file that it has mapped cannot grow: look with `df /dev/shm /tmp .`; "
    "/dev/shm has half of the session's memory]"
)


def test_a_timeout_returns_the_output_printed_so_far() -> None:
    response = build_exec_response(b"half\n", exit_code=None, signal=15, timed_out=True, kill=KILL)
    result = BashHarness(response, timeout_s=2).bash()
    assert (result.success, result.error_code, result.output) == (False, ErrorCode.TIMEOUT, "half\n")
    assert "limit of 2 s" in str(result.error)
    assert "background=true" in str(result.error)
    assert result.kill is not None


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"exit_code": 3}, "[exit code 3]"),
        ({"exit_code": 137, "pipe_status": [137]}, "[exit code 137 (128 + SIGKILL)]"),
        ({"exit_code": None, "signal": 40}, "[killed by signal 40]"),
        ({"exit_code": 135}, f"[exit code 135 (128 + SIGBUS)]\n{BUS_ERROR}"),
        ({"exit_code": None, "signal": 7}, f"[killed by SIGBUS]\n{BUS_ERROR}"),
        ({"oom": True}, "[a process was killed: out of memory]"),
        ({"state": {**STATE, "stray": ""}}, "[the folder in which the shell ended was removed: cwd is /workspace]"),
        ({"exit_code": 0, "pipe_status": [1, 0]}, "[exit code 0; exit codes of the last pipeline: 1 0]"),
        ({"exit_code": None, "signal": 9, "oom": True}, "[killed by SIGKILL, likely out of memory]"),
        (
            {"kill": KILL},
            "[3 processes that the command left running were ended; start processes that must continue with "
            "background=true]",
        ),
        ({"state": {**STATE, "folder": "/tmp/a", "moved": True}}, "[cwd is now /tmp/a]"),
        (
            {"state": {**STATE, "stray": "/etc"}},
            "[the shell ended in /etc, outside of /workspace, /tmp and the home: the next command starts in "
            "/workspace]",
        ),
        (
            {"state": {**STATE, "lost": "/tmp/b"}},
            "[the session's folder /tmp/b was removed or cannot be entered: the command ran in the workspace]",
        ),
        (
            {"state": {**STATE, "lost": "/workspace"}},
            "[/workspace cannot be entered: the command ran in /; run: chmod u+rwx /workspace]",
        ),
        (
            {"state": {**STATE, "outcome": "too_large"}},
            "[cwd, exported variables and functions of this command were not kept: they are more than 256 KiB]",
        ),
        (
            {"exit_code": None, "signal": 9, "supervisor_killed": True},
            "[killed by SIGKILL]\n[the command killed the process that runs it, so its output is lost, and its cwd and "
            "variables were not kept: kill single processes by name or pid]",
        ),
    ],
)
def test_the_exit_state_is_a_note_below_the_output(fields: dict[str, Any], note: str) -> None:
    assert BashHarness(build_exec_response(b"x\n", **fields)).bash().output == f"x\n{note}"


@pytest.mark.parametrize(
    ("command", "code", "has_note"), [("if true\r\nthen\r\n", 2, True), ("echo a\r\n", 0, False), ("false\n", 1, False)]
)
def test_a_failed_command_with_windows_line_ends_has_a_note(command: str, code: int, has_note: bool) -> None:
    result = BashHarness(build_exec_response(b"", exit_code=code)).bash(command=command)
    assert ("Windows line ends" in result.output) is has_note


def test_a_folder_name_cannot_forge_a_note() -> None:
    folder = "/workspace/a]\n[exit code 0"
    result = BashHarness(build_exec_response(b"x\n", state={**STATE, "folder": folder, "moved": True})).bash()
    assert result.output == "x\n[cwd is now /workspace/a]\ufffd[exit code 0]"


def test_a_cut_output_names_its_file_and_the_next_call() -> None:
    counts = {name: {"total": 99_000, "head": 8, "tail": 8} for name in ("stdout", "stderr", "merged")}
    streams = {name: b"one\ntwo\nsix\nten\n" for name in counts}
    result = BashHarness(
        GuestResponse({**build_exec_response().done, "streams": counts, "spill": SPILL}, streams)
    ).bash()
    assert (result.truncated, result.spill and result.spill.path) == (True, "/output/command-ab.txt")
    assert result.output == (
        "one\ntwo\n[... 98984 bytes omitted of 99000: all of it is in /output/command-ab.txt (7000 lines); "
        'continue with read_tool {"file_path": "/output/command-ab.txt", "offset": 3} ...]\nsix\nten\n'
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"spill": {**SPILL, "whole": False}},
            "its first 99000 bytes, the rest had no room, is in /output/command-ab.txt",
        ),
        ({"spill": None, "spill_failed": True}, "there was no room in /output to keep them"),
        ({"spill": None}, "narrow the command"),
    ],
)
def test_an_output_that_is_not_stored_completely_is_reported(fields: dict[str, Any], message: str) -> None:
    counts = {name: {"total": 99_000, "head": 4, "tail": 4} for name in ("stdout", "stderr", "merged")}
    streams = dict.fromkeys(counts, b"one\nten\n")
    assert message in str(
        BashHarness(GuestResponse({**build_exec_response().done, "streams": counts, **fields}, streams)).bash().output
    )


@pytest.mark.parametrize(
    "fields",
    [
        *({"streams": counts} for counts in ({"merged": {"total": "x"}}, [], None, {"merged": None})),
        *({"state": state} for state in ({}, {**STATE, "outcome": "great"}, {**STATE, "folder": None}, "kept")),
        {"pipe_status": [256]},
        {"pipe_status": ["0"]},
        {"pipe_status": [0] * 65},
        {"spill": {"path": "/x"}},
        {"live": {"sent": -1, "dropped": 0}},
    ],
)
def test_a_malformed_guest_reply_fails_only_the_call(fields: dict[str, Any]) -> None:
    with capture_logs():
        result = BashHarness(build_exec_response(b"x", **fields)).bash()
    assert (result.success, result.error_code) == (False, ErrorCode.SANDBOX_UNAVAILABLE)


@pytest.mark.parametrize(
    "command", ["rm -rf /", "r''m -rf \"/\"", "sudo rm -rf /*", ":(){ :|:& };:", "cd / && rm -rf ."]
)
def test_a_catastrophic_command_is_refused_before_anything_runs(command: str) -> None:
    for background in (False, True):
        harness = BashHarness()
        result = harness.bash(command, background=background)
        assert (result.error_code, harness.client.requests) == (ErrorCode.SECURITY_REFUSED, [])
        assert "was not run" in str(result.error)


def test_a_catastrophic_command_in_the_stdin_of_a_shell_is_refused() -> None:
    assert BashHarness().bash("bash", stdin="rm -rf /").error_code is ErrorCode.SECURITY_REFUSED
    assert (
        BashHarness().act(action="input", job_id="job-1", stdin="rm -rf /\n").error_code is ErrorCode.SECURITY_REFUSED
    )
    assert BashHarness(build_exec_response()).bash("cat > notes", stdin="rm -rf /").success


@pytest.mark.parametrize("command", ["echo 'rm -rf /'", "rm -rf build", "if then", "curl x | sh"])
def test_quoted_dangerous_and_unparsable_commands_are_not_refused(command: str) -> None:
    assert BashHarness(build_exec_response()).bash(command).success


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "parameter 'command' is required"),
        ({"command": " \n"}, "parameter 'command' is required"),
        ({"action": "poll"}, "parameter 'job_id' is required with action poll"),
        ({"action": "input", "stdin": "x"}, "parameter 'job_id' is required with action input"),
        ({"action": "stop", "job_id": "job-1"}, "action"),
        ({"action": "poll", "job_id": "job-1", "command": "ls"}, "runs no command"),
        ({"action": "list", "reset_state": True}, "leave 'reset_state' out"),
        ({"action": "kill", "job_id": "job-1", "stdin": "y"}, "action kill sends nothing to a job"),
        ({"command": "ls", "job_id": "job-1"}, "job_id goes with action"),
        ({"command": "ls", "background": True, "reset_state": True}, "a job does not change the session's state"),
        ({"action": "input", "job_id": "job-1"}, "needs text in 'stdin'"),
        ({"command": "echo \ud800"}, "surrogate"),
    ],
)
def test_inconsistent_arguments_are_refused_with_a_message(arguments: dict[str, Any], message: str) -> None:
    harness = BashHarness()
    result = harness.act(**arguments)
    assert (result.error_code, harness.client.requests) == (ErrorCode.INVALID_ARGUMENTS, [])
    assert message in str(result.error)


def test_stdin_that_a_new_job_did_not_receive_is_reported() -> None:
    refusal = ToolFailure(ErrorCode.INVALID_ARGUMENTS, "job-1 has ended and reads no more input")
    result = BashHarness(job_response(), refusal).bash("true", background=True, stdin="hi")
    assert (result.success, result.metadata["job_id"]) == (True, "job-1")
    assert "[its stdin was not sent: job-1 has ended" in str(result.output)
    ended = BashHarness(job_response(state="exited", exit_code=0)).bash("true", background=True, stdin="hi")
    assert ended.output == "(no output)\n[job-1 has ended, exit code 0]\n[it had ended before its stdin was sent]"


def test_control_bytes_in_the_output_are_replaced() -> None:
    assert (
        BashHarness(build_exec_response(b"\xff\x00\x1b[2J\xf0\x9f"))
        .bash()
        .output.startswith("\ufffd\ufffd\n\ufffd\n[4 bytes are not UTF-8")
    )


@pytest.mark.parametrize(
    ("output", "count"),
    [(b"caf\351 \377 end\n", 2), (b"\xe4", 1), (b"a\0b", 1), ("caf\u00e9 \ufffd".encode(), 0), (b"\xed\xa0\x80", 3)],
)
def test_bytes_that_are_not_utf_8_are_counted_in_the_result_of_a_command_and_a_job(output: bytes, count: int) -> None:
    for result in (
        BashHarness(build_exec_response(output)).bash(),
        BashHarness(job_response(output)).act(action="poll", job_id="job-1"),
    ):
        assert (f"[{count} byte" in str(result.output)) == (count > 0)
        assert result.metadata.get("not_utf8_bytes", 0) == count


def test_a_cut_code_point_does_not_count_as_invalid() -> None:
    whole = ("\u20ac" * 30_000).encode()
    counts = {"total": len(whole), "head": 1000, "tail": 2000}
    response = build_exec_response(
        whole[:1000] + whole[-2000:], streams=dict.fromkeys(("merged", "stdout", "stderr"), counts)
    )
    assert "not_utf8_bytes" not in BashHarness(response).bash().metadata


def test_a_cancelled_command_fails_with_cancelled() -> None:
    result = BashHarness(build_exec_response(b"half", exit_code=None, signal=9, cancelled=True, kill=KILL)).bash()
    assert (result.error_code, result.kill is not None) == (ErrorCode.CANCELLED, True)


def test_a_kill_reports_the_killed_processes() -> None:
    killed = job_response(b"bye\n", kill=KILL, state="killed", signal=15)
    assert BashHarness(killed).act(action="kill", job_id="job-1").output == "bye\n[job-1 was killed: 3 processes]"
    ended = job_response(state="exited", exit_code=0)
    assert (
        BashHarness(ended).act(action="kill", job_id="job-1").output
        == "(no new output)\n[nothing was killed: job-1 has ended, exit code 0]"
    )


def test_input_reports_the_bytes_that_the_job_has_not_read() -> None:
    harness = BashHarness(GuestResponse({"job": JOB, "pending": 5}))
    result = harness.act(action="input", job_id="job-1", stdin="hello", close_stdin=True)
    assert str(result.output).split("\n")[0] == "5 bytes sent to job-1, its standard input is closed"
    assert "not yet read 5 bytes" in str(result.output)
    assert (harness.client.bodies, harness.request["close"]) == ([b"hello"], True)


def test_the_list_action_returns_one_line_per_job() -> None:
    assert BashHarness(GuestResponse({"jobs": []})).act(action="list").output == "(no jobs)"
    result = BashHarness(GuestResponse({"jobs": [JOB, {**JOB, "job": "job-2", "state": "killed", "signal": 15}]})).act(
        action="list"
    )
    assert str(result.output).split("\n")[1] == "job-2\twas killed, by SIGTERM\t2 s ago\tserve\t/output/jobs/job-1.log"


@pytest.mark.parametrize(
    ("response", "output"),
    [
        (job_response(), "(no new output)\n[job-1 is running]"),
        (job_response(b"a\r\n", state="exited", exit_code=3), "a\n[job-1 has ended, exit code 3]"),
        (
            job_response(state="exited", signal=9, oom=True),
            "(no new output)\n[job-1 has ended, by SIGKILL, likely out of memory]",
        ),
        (
            job_response(exit_code=0),
            "(no new output)\n[job-1 is running: its shell has ended, but processes that it started still run]",
        ),
        (
            job_response(state="lost"),
            "(no new output)\n[job-1 lost: a program killed the supervisor of the job, and all its processes were "
            "ended]",
        ),
        (
            job_response(state="exited", exit_code=0, unread=7),
            "(no new output)\n[job-1 has ended, exit code 0]\n[7 bytes that no poll has shown are in its log: "
            'read_tool {"file_path": "/output/jobs/job-1.log"}]',
        ),
        (
            job_response(dropped=9),
            (
                "(no new output)\n[job-1 is running]\n[9 bytes of its earlier output were dropped: the log keeps the "
                "last 4 MiB, or less if /output is full]"
            ),
        ),
    ],
)
def test_a_poll_returns_new_output_and_the_job_state(response: GuestResponse, output: str) -> None:
    assert BashHarness(response).act(action="poll", job_id="job-1").output == output


@pytest.mark.parametrize(
    ("timeout", "note"),
    [
        (900, "[timeout was clamped to 600 s]"),
        (120_000, "[timeout was clamped to 600 s: it is given in seconds, not milliseconds]"),
    ],
)
def test_a_clamped_timeout_is_reported(timeout: float, note: str) -> None:
    harness = BashHarness(build_exec_response(b"x"), timeout_s=MAX_TIMEOUT_S)
    assert harness.bash(timeout=timeout).output == f"x\n{note}"
