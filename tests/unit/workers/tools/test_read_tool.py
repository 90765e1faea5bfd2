"""read_tool: its requests to the guest, and the lines, notes and footers that it makes of the reply."""

from typing import Any

import pytest

from tests.support.records.builders import build_context, build_read_response
from tests.support.records.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.workers.sandbox_client import GuestResponse
from toolcrew.workers.tools.builtin import build_registry

REGISTRY = build_registry()


class Bench:
    """The tool over a scripted guest."""

    def __init__(self, *answers: Any) -> None:
        self.client = FakeSandboxClient(*answers)
        facts = {"host": "h1", "queue": "host.h1.b00t"}
        self._executor = build_executor(REGISTRY, self.client, MemoryLedger(), MemoryBlobs(), facts)

    def read(self, **arguments: Any) -> ToolResult:
        call = ToolCall(id="call-1", name="read_tool", arguments={"file_path": "a.txt", **arguments})
        return self._executor.execute(call, build_context())


def read(response: GuestResponse, **arguments: Any) -> ToolResult:
    return Bench(response).read(**arguments)


def footer(response: GuestResponse, **arguments: Any) -> list[str]:
    """Return the lines in brackets."""
    return [line for line in str(read(response, **arguments).output).split("\n") if line.startswith("[")]


def test_page_shorter_than_requested_is_truncated() -> None:
    assert read(build_read_response(b"a\n" * 2000, lines=2001)).truncated
    assert read(build_read_response(b"a\n", lines=5, is_out_of_room=True), limit=3).truncated
    assert not read(build_read_response(b"a\n" * 2000)).truncated


def test_cut_line_says_how_to_continue() -> None:
    cut = build_read_response(b"x" * 2000 + b"\n", lines=1, cuts=[[1, 2000, 9000]])
    result = read(cut)
    assert str(result.output).endswith(
        "x\n[line 1 cut at 2000 of 9000 characters; continue with offset=1 limit=1 column=2001]"
    )
    assert result.truncated


def test_unknown_line_total_is_shown_as_a_minimum() -> None:
    part = build_read_response(b"a\n", lines=70_000, is_counted=False)
    assert footer(part) == ["[lines 1-1 of at least 70000; continue with offset=2]"]
    assert read(part).metadata["lines_counted"] is False
    endless = build_read_response(b"a\nx\n", lines=2, is_counted=False, cuts=[[2, 2000, 10**8]])
    assert (
        footer(endless)[0]
        == "[line 2 cut at 2000 of at least 100000000 characters; continue with offset=2 limit=1 column=2001]"
    )
    assert footer(endless)[1].startswith("[lines 1-2 of at least 2;")


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"newline": "crlf"}, "CRLF line ends"),
        ({"newline": "mixed"}, "some line ends are CRLF, some LF"),
        ({"newline": "cr"}, "CR line ends only, so that all is one line"),
        ({"has_bom": True}, "byte order mark at the start"),
        ({"final_newline": False}, "no newline at the end of the file"),
        ({"encoding": "utf-16-le"}, "not UTF-8 but utf-16-le"),
        (
            {"encoding": "gb18030", "is_guess": True},
            "not UTF-8 but gb18030, which is a guess: pass encoding if it reads wrong",
        ),
        ({"is_guess": True, "is_damaged": True}, "bytes that are no utf-8 are shown as U+FFFD"),
        ({"is_guess": True}, "bytes elsewhere in the file are no UTF-8"),
        ({"newline": "crlf", "has_bom": True}, "byte order mark at the start; CRLF line ends"),
    ],
)
def test_invisible_file_properties_are_noted_above_the_footer(fields: dict[str, Any], note: str) -> None:
    assert footer(build_read_response(b"a\n", **fields)) == [f"[note: {note}]", "[end of file: 1 line]"]


def test_nul_characters_are_replaced_and_noted() -> None:
    result = read(build_read_response(b"a\0b\n"))
    assert result.output == "1\ta\ufffdb\n[note: NUL characters are shown as U+FFFD]\n[end of file: 1 line]"


def test_file_line_cannot_imitate_a_footer() -> None:
    result = read(build_read_response(b"[end of file: 1 line]\n[empty file]\n", lines=3))
    assert str(result.output).split("\n")[0] == "1\t[end of file: 1 line]"
    assert str(result.output).split("\n")[-1] == "[lines 1-2 of 3; continue with offset=3]"


def test_directory_is_an_error_with_names_and_image_is_described() -> None:
    result = read(build_read_response(b"a/\nb.txt\n", kind="directory", entries=2), file_path="src")
    assert (result.success, result.error_code, result.output) == (False, ErrorCode.IS_DIRECTORY, "a/\nb.txt\n")
    many = read(build_read_response(b"a\n", kind="directory", entries=500))
    assert ("the first 1 of 500 entries are below" in str(many.error), many.truncated) == (True, True)
    assert read(build_read_response(b"", kind="directory")).output is None
    picture = read(build_read_response(b"", size=12345, kind="image", type="a PNG image"))
    assert (picture.success, picture.metadata) == (True, {"size_bytes": 12345, "type": "a PNG image"})
    assert picture.output == "[a PNG image, 12345 bytes: it cannot be shown as text]"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("BINARY_FILE", ErrorCode.BINARY_FILE),
        ("FILE_TOO_LARGE", ErrorCode.FILE_TOO_LARGE),
        ("PATH_NOT_ALLOWED", ErrorCode.PATH_NOT_ALLOWED),
        ("NOT_A_REGULAR_FILE", ErrorCode.PATH_NOT_ALLOWED),
    ],
)
def test_guest_error_is_returned(code: str, expected: ErrorCode) -> None:
    result = read(GuestResponse({"error": {"code": code, "message": "a.txt: words"}}))
    assert (result.error_code, str(result.error).startswith("a.txt: words")) == (expected, True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"offset": 0},
        {"offset": -1},
        {"limit": 0},
        {"limit": 10_001},
        {"column": 0},
        {"file_path": ""},
        {"encoding": ""},
        {"offset": "5"},
        {"lines": 5},
    ],
)
def test_argument_outside_its_limits_is_refused(arguments: dict[str, Any]) -> None:
    assert read(build_read_response(b""), **arguments).error_code is ErrorCode.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "program"},
        {"lines": -1},
        {"lines": "1"},
        {"cuts": [[1, 2]]},
        {"cuts": [[1, 2, 3]] * 101},
        {"cuts": [["1", 2, 3]]},
        {"encoding": "a b"},
        {"encoding": "x" * 41},
        {"newline": "[end of file]"},
        {"type": "a\nb"},
        {"is_counted": 1},
    ],
)
def test_invalid_guest_reply_closes_the_sandbox(fields: dict[str, Any]) -> None:
    bench = Bench(build_read_response(b"a\n", **fields))
    assert bench.read().error_code is ErrorCode.SANDBOX_UNAVAILABLE
    assert bench.client.closed


def test_invalid_bytes_from_the_guest_become_text() -> None:
    assert read(build_read_response(b"\xff\xf0\x9f\n")).output == "1\t\ufffd\ufffd\n[end of file: 1 line]"
    assert read(build_read_response(b"no newline")).output == "[empty file]"
