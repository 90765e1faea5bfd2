"""bash_tool, read_tool, write_tool and the session verbs: what they ask of the guest, and what they make of its answer."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from contract.calls import MAX_TIMEOUT_S, ToolCall, ToolResult
from contract.errors import ErrorCode
from contract.schema import check_schema
from tests.builders import build_context, build_exec_response, build_read_response
from tests.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger
from workers.executor import Executor
from workers.sandbox_client import GuestResponse
from workers.tools.builtin import build_registry
from workers.tools.session import EXEC_CAPTURE_BYTES
from workers.tools.text import MAX_LINES, MAX_OUTPUT_BYTES, cut_lines, decode, join_capture

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
        self.executor = Executor(build_registry(), self.client, MemoryLedger(), self.blobs, FACTS)

    def run(self, tool: str, **arguments: Any) -> ToolResult:
        return self.executor.execute(ToolCall(id="call-1", name=tool, arguments=arguments), self.context)

    def bash(self, command: str = "true", **arguments: Any) -> ToolResult:
        return self.run("bash_tool", command=command, **arguments)

    @property
    def request(self) -> dict[str, Any]:
        return self.client.requests[-1]


# bash_tool


def test_a_command_that_worked_gives_its_output_and_metadata() -> None:
    result = Bench(build_exec_response(b"out\n", b"err\n")).bash()
    assert (result.success, result.output) == (True, "out\nerr\n")
    assert result.metadata == {"stdout": "out\n", "stderr": "err\n", "exit_code": 0, "cwd": "/workspace"}


def test_a_command_that_failed_is_a_result_with_its_exit_code() -> None:
    result = Bench(build_exec_response(b"oops\n", exit_code=3)).bash()
    assert (result.success, result.output, result.metadata["exit_code"]) == (True, "oops\n[exit code 3]", 3)


def test_silence_is_said() -> None:
    assert Bench(build_exec_response()).bash().output == "(no output)"
    assert Bench(build_exec_response(exit_code=1)).bash().output == "(no output)\n[exit code 1]"


def test_a_timeout_gives_what_was_printed_until_then() -> None:
    response = build_exec_response(b"half\n", exit_code=None, signal=9, timed_out=True, kill=KILL)
    result = Bench(response, timeout_s=2).bash()
    assert (result.success, result.error_code, result.output) == (False, ErrorCode.TIMEOUT, "half\n")
    assert "limit of 2 s" in str(result.error)
    assert result.kill is not None


def test_a_cancelled_command_says_so() -> None:
    result = Bench(build_exec_response(b"half", exit_code=None, signal=9, cancelled=True, kill=KILL)).bash()
    assert (result.error_code, result.kill is not None) == (ErrorCode.CANCELLED, True)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"exit_code": None, "signal": 11}, "[killed by signal 11]"),
        ({"exit_code": None, "signal": 9, "oom": True}, "[killed by signal 9, out of memory]"),
        ({"exit_code": 0, "oom": True}, "[a process was killed: out of memory]"),
        ({"exit_code": 0, "kill": KILL}, "[processes that the command had left running were ended with it: 3]"),
        ({"exit_code": 127}, "[exit code 127]"),
    ],
)
def test_how_it_ended_is_a_note_below_the_output(fields: dict[str, Any], note: str) -> None:
    assert Bench(build_exec_response(b"x\n", **fields)).bash().output == f"x\n{note}"


def test_signal_and_memory_are_in_the_metadata_only_when_there_were_any() -> None:
    killed = Bench(build_exec_response(exit_code=None, signal=9, oom=True)).bash()
    assert (killed.metadata["signal"], killed.metadata["oom"], killed.metadata["exit_code"]) == (9, True, None)
    assert not {"signal", "oom"} & set(Bench(build_exec_response()).bash().metadata)


def test_a_timeout_that_was_clamped_is_said() -> None:
    bench = Bench(build_exec_response(b"x"), timeout_s=MAX_TIMEOUT_S)
    assert bench.bash(timeout=900).output == "x\n[timeout was clamped to 600 s]"


def test_bytes_that_the_guest_dropped_are_said_where_they_were() -> None:
    counts = {name: {"total": 1000, "head": 4, "tail": 4} for name in ("stdout", "stderr", "merged")}
    streams = {name: b"headtail" for name in counts}
    result = Bench(GuestResponse({**build_exec_response().done, "streams": counts}, streams)).bash()
    assert result.truncated
    assert str(result.output).startswith("head\n[... 992 bytes omitted of 1000")
    assert str(result.output).endswith("...]\ntail")


def test_too_many_lines_are_cut_in_the_middle_and_said() -> None:
    result = Bench(build_exec_response(b"".join(b"%d\n" % n for n in range(MAX_LINES * 2)))).bash()
    assert result.truncated
    assert "lines omitted of" in str(result.output)
    assert str(result.output).startswith("0\n1\n")


def test_the_script_and_its_input_go_as_one_body() -> None:
    bench = Bench(build_exec_response())
    bench.bash("echo é", stdin="in", cwd="/tmp")
    assert bench.client.bodies == ["echo éin".encode()]
    assert (bench.request["script_bytes"], bench.request["cwd"], bench.request["argv"]) == (len("echo é".encode()), "/tmp", None)


def test_the_limit_of_the_context_is_the_guests() -> None:
    bench = Bench(build_exec_response(), timeout_s=7)
    bench.bash(timeout=3)
    assert bench.request["timeout_s"] == 7


def test_hostile_output_is_text() -> None:
    result = Bench(build_exec_response(b"\xff\x00\x1b[2J\xf0\x9f")).bash()
    assert result.output == "\ufffd\ufffd\x1b[2J\ufffd"


def test_hostile_counts_do_not_crash_the_worker() -> None:
    for counts in ({"merged": {"total": "x"}}, [], None, {"merged": None}):
        with capture_logs():
            result = Bench(build_exec_response(b"x", streams=counts)).bash()
        assert result.success is False


# text


def test_text_that_is_whole_is_left_alone() -> None:
    assert join_capture(b"abc", {"total": 3, "head": 3, "tail": 0}) == ("abc", False)
    assert cut_lines("a\n" * (MAX_LINES - 1)) == ("a\n" * (MAX_LINES - 1), False)


def test_a_code_point_cut_in_two_leaves_no_half() -> None:
    data = "é".encode()
    text, cut = join_capture(data[:1] + data[1:], {"total": 100, "head": 1, "tail": 1})
    assert cut
    assert "\ufffd" not in text


def test_exactly_as_many_lines_as_allowed_are_whole() -> None:
    assert cut_lines("a\n" * MAX_LINES) == ("a\n" * MAX_LINES, False)


def test_binary_output_at_the_cut_is_not_swallowed() -> None:
    text, _ = join_capture(b"\xff" * 20, {"total": 100, "head": 10, "tail": 10})
    assert text.count("\ufffd") >= 14


@pytest.mark.parametrize("sign", ["é", "€", "😀"])
def test_every_byte_that_is_not_shown_is_counted(sign: str) -> None:
    raw = sign.encode() * 40
    for head in range(20, 25):
        data = raw[:head] + raw[-21:]
        text, _ = join_capture(data, {"total": len(raw), "head": head, "tail": 21})
        omitted = int(text.partition("[... ")[2].partition(" bytes")[0])
        assert "\ufffd" not in text
        assert text.count(sign) * len(sign.encode()) + omitted == len(raw)


def test_cut_lines_keep_their_last_newline_and_count_lines() -> None:
    text, cut = cut_lines("a\n" * (MAX_LINES + 5))
    assert (cut, text.endswith("a\n"), "[... 5 lines omitted of 2005 ...]" in text) == (True, True, True)


def test_nul_becomes_visible() -> None:
    assert decode(b"a\0b") == "a\ufffdb"


# read_tool


def read(response: GuestResponse, **arguments: Any) -> ToolResult:
    return Bench(response).run("read_tool", file_path="a.txt", **arguments)


def test_lines_are_numbered_and_the_end_is_said() -> None:
    result = read(build_read_response(b"one\ntwo\n"))
    assert result.output == "1\tone\n2\ttwo\n[end of file: 2 lines]"
    assert (result.metadata, result.truncated) == ({"size_bytes": 8, "lines": 2}, False)


def test_a_part_says_where_to_go_on() -> None:
    result = read(build_read_response(b"five\nsix\n", offset=5, lines=9, size=40), offset=5, limit=2)
    assert result.output == "5\tfive\n6\tsix\n[lines 5-6 of 9; continue with offset=7]"


def test_a_missing_last_newline_is_said() -> None:
    assert str(read(build_read_response(b"one")).output).endswith("[end of file: 1 lines; no newline at the end]")


def test_an_empty_file_is_said() -> None:
    assert read(build_read_response(b"")).output == "[empty file]"


def test_a_binary_file_is_refused_without_its_bytes() -> None:
    result = read(build_read_response(b"\x7fELF\0\0"))
    assert (result.error_code, "ELF" in str(result.error), result.output) == (ErrorCode.BINARY_FILE, False, None)


def test_a_long_line_is_cut_and_said() -> None:
    result = read(build_read_response(b"x" * 3000 + b"\nshort\n"))
    assert result.truncated
    assert "lines cut at 2000 characters: 1" in str(result.output)


def test_carriage_returns_and_broken_text_do_not_show_as_such() -> None:
    assert str(read(build_read_response(b"a\r\n\xffb\n")).output).startswith("1\ta\n2\t\ufffdb\n")


@pytest.mark.parametrize("arguments", [{"offset": 0}, {"limit": 0}, {"limit": 10_001}, {"offset": -1}])
def test_a_range_outside_its_limits_is_refused(arguments: dict[str, int]) -> None:
    assert read(build_read_response(b""), **arguments).error_code is ErrorCode.INVALID_ARGUMENTS


def test_a_file_that_is_not_there_is_the_models_to_know() -> None:
    result = read(GuestResponse({"error": {"code": "FILE_NOT_FOUND", "message": "/workspace/a.txt: no such file"}}))
    assert (result.error_code, result.error) == (ErrorCode.FILE_NOT_FOUND, "/workspace/a.txt: no such file")


def test_a_line_that_the_byte_limit_cut_is_not_passed_over() -> None:
    # 40 whole lines of 800 bytes fill all but the last 768 bytes of the window: line 41 comes in part.
    raw = (b"x" * 799 + b"\n") * 60
    sent = raw[:MAX_OUTPUT_BYTES]
    result = read(build_read_response(sent, lines=60, size=len(raw), cut=True, count=41, final_newline=True))
    output = str(result.output)
    assert "continue with offset=41]" in output or "lines cut" in output


def test_reading_on_where_it_says_gives_every_line_once() -> None:
    raw = b"".join(b"%03d" % number + b"x" * 796 + b"\n" for number in range(1, 101))
    seen: list[str] = []
    offset = 1
    while True:
        sent = raw[(offset - 1) * 800 :][:MAX_OUTPUT_BYTES]
        cut = len(sent) < len(raw) - (offset - 1) * 800
        output = str(
            read(build_read_response(sent, offset=offset, lines=100, size=len(raw), cut=cut, final_newline=True), offset=offset).output
        )
        seen += [line.split("\t")[1][:3] for line in output.splitlines()[:-1]]
        assert all(len(line) >= 799 for line in output.splitlines()[:-1])
        if "continue with" not in output:
            break
        offset = int(output.rpartition("offset=")[2].rstrip("]"))
    assert seen == [f"{number:03d}" for number in range(1, 101)]


def test_a_line_that_alone_is_longer_than_the_byte_limit_is_shown_cut_and_passed_over() -> None:
    response = build_read_response(b"x" * MAX_OUTPUT_BYTES, lines=2, size=10**6, cut=True, final_newline=True)
    output = str(read(response).output)
    assert "continue with offset=2; lines cut at 2000 characters: 1" in output


# write_tool


@pytest.mark.parametrize(
    ("mode", "created", "said"),
    [("overwrite", True, "created"), ("overwrite", False, "overwrote"), ("append", False, "appended to"), ("create", True, "created")],
)
def test_what_was_written_is_said(mode: str, created: bool, said: str) -> None:
    bench = Bench(GuestResponse({"created": created, "size": 7}))
    result = bench.run("write_tool", file_path="a", content="é\nb", mode=mode)
    assert result.output == f"{said} a (4 bytes, 2 lines)"
    assert (bench.request["mode"], bench.client.bodies) == (mode, ["é\nb".encode()])


def test_a_mode_that_is_none_is_refused() -> None:
    assert Bench().run("write_tool", file_path="a", content="", mode="w").error_code is ErrorCode.INVALID_ARGUMENTS


@pytest.mark.parametrize("name", ["path", "filename", "filePath"])
def test_a_file_may_be_named_as_other_agents_do(name: str) -> None:
    result = Bench(GuestResponse({"created": True, "size": 0})).run("write_tool", content="", **{name: "a"})
    assert result.metadata["aliases_used"] == [f"{name} -> file_path"]


# Session verbs


def test_open_tells_where_the_session_lives() -> None:
    bench = Bench()
    result = bench.run("session.open", image="python")
    assert result.metadata == {"image": "python", "start_s": 0.25, **FACTS}
    assert (result.sandbox is not None, bench.request) == (True, {"image": "python", "ttl_s": 1800})


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
def test_exec_of_a_program_that_was_killed_gives_the_signal_as_subprocess_does(fields: dict[str, Any], code: int) -> None:
    result = Bench(build_exec_response(exit_code=None, timed_out=True, kill=KILL, **fields)).run("session.exec", argv=["x"])
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
    assert (bench.request["argv"][:2], bench.client.bodies) == (["tar", "-x"], [b"tar"])
    bench = Bench(build_exec_response(b"tar"))
    assert bench.blobs.kept[str(bench.run("session.export").blob)] == b"tar"


@pytest.mark.parametrize(
    ("fields", "stderr", "code"),
    [
        ({"timed_out": True, "exit_code": None}, b"", ErrorCode.TIMEOUT),
        ({"exit_code": 2}, b"tar: a: No space left on device", ErrorCode.NO_SPACE),
        ({"exit_code": 2}, b"tar: this does not look like a tar archive", ErrorCode.INTERNAL),
    ],
)
def test_a_copy_that_failed_says_why(fields: dict[str, Any], stderr: bytes, code: ErrorCode) -> None:
    assert Bench(build_exec_response(b"", stderr, **fields), content=b"x").run("session.import").error_code is code


def test_an_export_that_does_not_fit_is_an_error_and_not_half_an_archive() -> None:
    counts = {"stdout": {"total": 99, "head": 3, "tail": 0}, "stderr": {"total": 0, "head": 0, "tail": 0}}
    result = Bench(build_exec_response(b"tar", streams=counts)).run("session.export")
    assert (result.error_code, result.blob) == (ErrorCode.FILE_TOO_LARGE, None)


def test_every_tool_and_verb_has_a_schema_that_is_one() -> None:
    for spec in build_registry().specs():
        check_schema(spec.parameters)
    assert {spec.name for spec in build_registry().specs() if spec.audience == "model"} >= {"bash_tool", "read_tool", "write_tool"}


def test_what_changes_files_asks_for_permission_and_what_reads_does_not() -> None:
    flags = {spec.name: (spec.requires_permission, spec.read_only) for spec in build_registry().specs()}
    assert flags["write_tool"] == (True, False)
    assert flags["read_tool"] == (False, True)
