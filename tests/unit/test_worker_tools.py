"""The session verbs and write_tool: their requests to the guest, and their handling of replies."""

from typing import Any

import pytest

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from tests.builders import build_context, build_exec_response
from tests.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from workers.sandbox_client import GuestResponse
from workers.tools.builtin import build_registry

KILL = {"signalled": 3, "survivors": 0, "method": "tree", "ms": 5.0}
FACTS = {"host": "h1", "queue": "host.h1.b00t"}


REGISTRY = build_registry()


class Bench:
    """The built-in tools over a scripted guest."""

    def __init__(self, *answers: Any, content: bytes = b"", **context: Any) -> None:
        self.client = FakeSandboxClient(*answers)
        self.blobs = MemoryBlobs()
        if content:
            context["blob"] = self.blobs.leave("acme", content)
        self.context = build_context(**context)
        self.executor = build_executor(REGISTRY, self.client, MemoryLedger(), self.blobs, FACTS)

    def run(self, tool: str, **arguments: Any) -> ToolResult:
        return self.executor.execute(ToolCall(id="call-1", name=tool, arguments=arguments), self.context)

    def write(self, **arguments: Any) -> ToolResult:
        return self.run("write_tool", **{"content": "", **arguments})

    @property
    def request(self) -> dict[str, Any]:
        return self.client.requests[-1]


# Session verbs


@pytest.mark.parametrize("wrong", [{"restore": "../x"}, {"restore": ""}, {"network": "host"}])
def test_what_is_no_checkpoint_or_network_is_not_asked_for(wrong: dict[str, str]) -> None:
    bench = Bench()
    assert bench.run("session.open", **wrong).error_code is ErrorCode.INVALID_ARGUMENTS
    assert bench.client.requests == []


@pytest.mark.parametrize("ttl_s", [0, -1, 86401])
def test_a_time_to_live_has_limits(ttl_s: float) -> None:
    assert Bench().run("session.open", ttl_s=ttl_s).error_code is ErrorCode.INVALID_ARGUMENTS


def test_a_cancel_is_no_call_that_could_wait_behind_what_it_ends() -> None:
    assert Bench().run("session.cancel", call_id="c9").error_code is ErrorCode.TOOL_NOT_FOUND


def test_exec_gives_both_streams_apart_in_one_blob() -> None:
    bench = Bench(build_exec_response(b"out", b"error", merged=b"", exit_code=2), content=b"in")
    result = bench.run("session.exec", argv=["cat", "-"], env={"A": "b"}, cwd="/tmp")
    assert bench.blobs.kept[str(result.blob)] == b"outerror"
    assert (result.metadata["returncode"], result.metadata["stdout_bytes"]) == (2, 3)
    assert bench.client.bodies == [b"in"]
    assert {name: bench.request[name] for name in ("argv", "env", "cwd", "script_bytes")} == {
        "argv": ["cat", "-"],
        "env": {"A": "b"},
        "cwd": "/tmp",
        "script_bytes": 0,
    }


@pytest.mark.parametrize(("fields", "code"), [({"signal": 15}, -15), ({"signal": None}, -9)])
def test_exec_of_a_killed_program_returns_the_signal(fields: dict[str, Any], code: int) -> None:
    result = Bench(build_exec_response(exit_code=None, timed_out=True, kill=KILL, **fields)).run(
        "session.exec", argv=["x"]
    )
    assert (result.success, result.metadata["returncode"], result.metadata["timed_out"]) == (True, code, True)


@pytest.mark.parametrize(
    ("fields", "stderr", "code"),
    [
        ({"timed_out": True, "exit_code": None}, b"", ErrorCode.TIMEOUT),
        ({"cancelled": True, "exit_code": None, "signal": 9}, b"", ErrorCode.CANCELLED),
        ({"exit_code": 2}, b"tar: a: No space left on device", ErrorCode.NO_SPACE),
        ({"exit_code": 2}, b"tar: this does not look like a tar archive", ErrorCode.INVALID_ARGUMENTS),
        ({"exit_code": None, "signal": 15}, b"tar: a: No space left on device", ErrorCode.NO_SPACE),
        ({"exit_code": 2}, b"tar: ../x: Member name contains '..'", ErrorCode.PATH_NOT_ALLOWED),
        ({"exit_code": 0}, b"tar: Removing leading `/' from member names", ErrorCode.PATH_NOT_ALLOWED),
    ],
)
def test_a_copy_that_failed_says_why(fields: dict[str, Any], stderr: bytes, code: ErrorCode) -> None:
    assert Bench(build_exec_response(b"", stderr, **fields), content=b"x").run("session.import").error_code is code


def test_an_export_that_was_cancelled_says_so() -> None:
    assert (
        Bench(build_exec_response(b"ta", cancelled=True, exit_code=None, signal=9)).run("session.export").error_code
        is ErrorCode.CANCELLED
    )


def test_an_export_that_does_not_fit_is_an_error_and_not_half_an_archive() -> None:
    counts = {"stdout": {"total": 99, "head": 3, "tail": 0}, "stderr": {"total": 0, "head": 0, "tail": 0}}
    result = Bench(build_exec_response(b"tar", streams=counts)).run("session.export")
    assert (result.error_code, result.blob) == (ErrorCode.FILE_TOO_LARGE, None)


def answer(text: bytes = b"", **fields: Any) -> GuestResponse:
    done = {"created": True, "size": 4, "mode_bits": 0o644, "written": 4, "lines": 2, "encoding": "utf-8"}
    return GuestResponse({**done, **fields}, {"file": text})


@pytest.mark.parametrize(
    "arguments",
    [{"mode": "w"}, {"encoding": ""}, {"content": "\ud800"}, {"content": 5}, {"file_path": ""}, {"text": "x"}],
)
def test_arguments_that_are_none_are_refused_before_anything_is_sent(arguments: dict[str, Any]) -> None:
    bench = Bench()
    assert bench.write(**{"file_path": "a", **arguments}).error_code is ErrorCode.INVALID_ARGUMENTS
    assert bench.client.requests == []


@pytest.mark.parametrize("fields", [{"lines": "2"}, {"written": -1}, {"encoding": "x\ny"}, {"encoding": None}])
def test_an_answer_that_is_none_costs_the_sandbox(fields: dict[str, Any]) -> None:
    bench = Bench(answer(**fields))
    assert bench.write(file_path="a").error_code is ErrorCode.SANDBOX_UNAVAILABLE
    assert bench.client.closed == ["acme:s1"]


def test_what_a_failure_counts_is_reported_as_a_success_reports_it() -> None:
    error = {"code": "FILE_TOO_LARGE", "message": "a: too large", "size": 9, "lines": 3, "other": 1}
    assert Bench(GuestResponse({"error": error})).write(file_path="a").metadata == {"size_bytes": 9, "lines": 3}
    for wrong in (-1, True, 2**70):
        assert Bench(GuestResponse({"error": {**error, "size": wrong}})).write(file_path="a").metadata == {"lines": 3}


def test_a_path_of_any_signs_is_shown_on_one_line() -> None:
    assert str(Bench(answer()).write(file_path="a\n\udcff").output).startswith("created a\ufffd? (")
