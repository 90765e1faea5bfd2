"""The session verbs: their requests to the guest, and their handling of replies."""

from typing import Any

import pytest

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from contract.schema import check_schema
from tests.builders import build_context, build_exec_response
from tests.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from workers.sandbox_client import GuestResponse
from workers.tools.builtin import build_registry
from workers.tools.session import EXEC_CAPTURE_BYTES

KILL = {"signalled": 3, "survivors": 0, "method": "tree", "ms": 5.0}
FACTS = {"host": "h1", "queue": "host.h1.b00t"}


class Bench:
    """The built-in tools over a scripted guest."""

    def __init__(self, *answers: Any, content: bytes = b"", **context: Any) -> None:
        self.client = FakeSandboxClient(*answers)
        self.blobs = MemoryBlobs()
        if content:
            context["blob"] = self.blobs.leave("acme", content)
        self.context = build_context(**context)
        self.executor = build_executor(build_registry(), self.client, MemoryLedger(), self.blobs, FACTS)

    def run(self, tool: str, **arguments: Any) -> ToolResult:
        return self.executor.execute(ToolCall(id="call-1", name=tool, arguments=arguments), self.context)

    @property
    def request(self) -> dict[str, Any]:
        return self.client.requests[-1]


# Session verbs


def test_open_tells_where_the_session_lives() -> None:
    bench = Bench()
    result = bench.run("session.open", image="python")
    assert result.metadata == {
        "image": "python",
        "network": "none",
        "hosts": [],
        "workspace": "image",
        "start_s": 0.25,
        **FACTS,
    }
    assert (result.sandbox is not None, bench.request) == (True, {"image": "python", "ttl_s": 1800})


def test_open_hands_on_the_checkpoint_and_the_network_that_are_wanted() -> None:
    bench = Bench()
    assert bench.run("session.open", restore="c1", network="egress").success
    assert bench.request == {"image": None, "ttl_s": 1800, "restore": "c1", "network": "egress"}


@pytest.mark.parametrize("wrong", [{"restore": "../x"}, {"restore": ""}, {"network": "host"}])
def test_what_is_no_checkpoint_or_network_is_not_asked_for(wrong: dict[str, str]) -> None:
    bench = Bench()
    assert bench.run("session.open", **wrong).error_code is ErrorCode.INVALID_ARGUMENTS
    assert bench.client.requests == []


def test_a_checkpoint_is_of_the_sandbox_of_the_context() -> None:
    bench = Bench()
    metadata = {"checkpoint": "c1", "bytes": 10240, "sha256": "0" * 64, "skipped": 0, "torn": False}
    assert bench.run("session.checkpoint").metadata == metadata
    assert bench.client.names == ["acme:s1"]


def test_a_checkpoint_is_deleted_by_its_id_for_the_tenant_of_the_context() -> None:
    bench = Bench()
    assert bench.run("session.delete_checkpoint", checkpoint="c1").metadata == {"deleted": True}
    assert (bench.client.names, bench.request) == (["acme:s1"], {"checkpoint": "c1"})


@pytest.mark.parametrize("ttl_s", [0, -1, 86401])
def test_a_time_to_live_has_limits(ttl_s: float) -> None:
    assert Bench().run("session.open", ttl_s=ttl_s).error_code is ErrorCode.INVALID_ARGUMENTS


def test_close_names_the_sandbox_of_the_context() -> None:
    bench = Bench()
    assert bench.run("session.close").metadata == {"closed": True}
    assert bench.client.closed == ["acme:s1"]


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


def test_exec_says_when_output_was_dropped() -> None:
    counts = {name: {"total": EXEC_CAPTURE_BYTES + 1, "head": 1, "tail": 0} for name in ("stdout", "stderr")}
    assert Bench(build_exec_response(b"x", b"y", streams=counts)).run("session.exec", argv=["x"]).truncated


def test_whole_files_travel_as_they_are() -> None:
    bench = Bench(GuestResponse({"created": True, "size": 3}), content=b"\x00\xff\n")
    assert bench.run("session.write_file", path="/tmp/a").metadata == {"size_bytes": 3, "created": True}
    assert bench.client.bodies == [b"\x00\xff\n"]
    bench = Bench(GuestResponse({"size": 3}, {"file": b"\x00\xff\n"}))
    assert bench.blobs.kept[str(bench.run("session.read_file", path="/tmp/a").blob)] == b"\x00\xff\n"


def test_import_unpacks_the_content_and_export_gives_the_archive() -> None:
    bench = Bench(build_exec_response(), content=b"tar")
    assert bench.run("session.import").success
    assert (bench.request["argv"][-1], bench.client.bodies) == ("/workspace", [b"tar"])
    bench = Bench(build_exec_response(b"tar"))
    assert bench.blobs.kept[str(bench.run("session.export").blob)] == b"tar"


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


def test_every_tool_and_verb_has_a_schema_that_is_one() -> None:
    for spec in build_registry().specs():
        check_schema(spec.parameters)
    assert {spec.name for spec in build_registry().specs() if spec.audience == "model"} >= {
        "bash_tool",
        "read_tool",
        "write_tool",
    }


def test_what_changes_files_asks_for_permission_and_what_reads_does_not() -> None:
    flags = {spec.name: (spec.requires_permission, spec.read_only) for spec in build_registry().specs()}
    assert flags["write_tool"] == (True, False)
    assert flags["read_tool"] == (False, True)
