"""write_tool: its requests to the guest, and its handling of replies."""

from typing import Any

import pytest

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from tests.builders import build_context
from tests.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from workers.sandbox_client import GuestResponse
from workers.tools.builtin import build_registry
from workers.tools.text import MAX_OUTPUT_BYTES

REGISTRY = build_registry()


class Bench:
    """The tool over a scripted guest."""

    def __init__(self, *answers: Any, **context: Any) -> None:
        self.client = FakeSandboxClient(*answers)
        self._context = build_context(**context)
        self._executor = build_executor(
            REGISTRY, self.client, MemoryLedger(), MemoryBlobs(), {"host": "h1", "queue": "host.h1.b00t"}
        )

    def write(self, **arguments: Any) -> ToolResult:
        call = ToolCall(id="call-1", name="write_tool", arguments={"content": "", **arguments})
        return self._executor.execute(call, self._context)


def answer(text: bytes = b"", **fields: Any) -> GuestResponse:
    done = {"created": True, "size": 4, "mode_bits": 0o644, "written": 4, "lines": 2, "encoding": "utf-8"}
    return GuestResponse({**done, **fields}, {"file": text})


@pytest.mark.parametrize(
    ("mode", "created", "expected"),
    [
        ("overwrite", True, "created"),
        ("overwrite", False, "overwrote"),
        ("append", False, "appended to"),
        ("create", True, "created"),
    ],
)
def test_what_was_written_is_said(mode: str, created: bool, expected: str) -> None:
    bench = Bench(answer(created=created), timeout_s=7)
    result = bench.write(file_path="a", content="é\nb", mode=mode)
    assert (result.output, bench.client.bodies) == (f"{expected} a (4 bytes, 2 lines)", ["é\nb".encode()])
    assert result.metadata == {"size_bytes": 4, "created": created, "encoding": "utf-8"}
    assert bench.client.requests == [
        {
            "op": "write_text",
            "path": "a",
            "mode": mode,
            "encoding": "auto",
            "max_bytes": MAX_OUTPUT_BYTES,
            "timeout_s": 7,
        }
    ]


@pytest.mark.parametrize(
    "arguments",
    [{"mode": "w"}, {"encoding": ""}, {"content": "\ud800"}, {"content": 5}, {"file_path": ""}, {"text": "x"}],
)
def test_arguments_that_are_none_are_refused_before_anything_is_sent(arguments: dict[str, Any]) -> None:
    bench = Bench()
    assert bench.write(**{"file_path": "a", **arguments}).error_code is ErrorCode.INVALID_ARGUMENTS
    assert bench.client.requests == []


@pytest.mark.parametrize(
    "code", ["STALE_FILE", "NO_SPACE", "FILE_EXISTS", "IS_DIRECTORY", "NOT_A_DIRECTORY", "PATH_NOT_ALLOWED"]
)
def test_a_failure_of_the_guest_reads_as_it_is(code: str) -> None:
    result = Bench(GuestResponse({"error": {"code": code, "message": "a: words\n@@ diff"}})).write(file_path="a")
    assert result.text() == f"Error [{code}]: a: words\n@@ diff"


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
