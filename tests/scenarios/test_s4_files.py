"""Rows S4-18 to S4-20 of the scenarios: writing a file, editing a file, and forbidden paths."""

import pytest

from tests.support.guest.guest_harness import Guest, needs_namespace
from tests.support.guest.guest_tools import GuestTools
from tests.support.records.builders import build_call
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.approvals import ApprovalRequest, CallbackApprover, RefusingApprover, review
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy
from toolcrew.workers.tools.base import WorkerTool
from toolcrew.workers.tools.edit import EDIT_TOOL
from toolcrew.workers.tools.write import WRITE_TOOL

pytestmark = needs_namespace


def test_s4_18_a_file_is_created_with_its_folders_and_overwritten(guest: Guest, tools: GuestTools) -> None:
    made = tools.run("write_tool", file_path="src/new/app.py", content="x = 1\n")
    assert made.output == "created src/new/app.py (6 bytes, 1 line)"
    again = tools.run("write_tool", file_path="src/new/app.py", content="x = 2\n")
    assert again.output == "overwrote src/new/app.py (6 bytes, 1 line)\n@@ -1,1 +1,1 @@\n-x = 1\n+x = 2"
    assert (guest.workspace / "src" / "new" / "app.py").read_text() == "x = 2\n"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [(WRITE_TOOL, {"content": "x"}), (EDIT_TOOL, {"old_string": "x", "new_string": "y"})],
    ids=["write", "edit"],
)
async def test_s4_18_permission_is_requested_before_a_file_is_changed(
    tool: WorkerTool, arguments: dict[str, str]
) -> None:
    spec = tool.spec
    call = build_call(spec.name, file_path="f", **arguments)
    requests: list[ApprovalRequest] = []

    def say(request: ApprovalRequest) -> bool:
        requests.append(request)
        return True

    allowed = await review(call, spec, CallbackApprover(say), policy=ApprovalPolicy(), tenant="acme", session="s1")
    assert isinstance(allowed, ToolCall)
    assert [(request.call.name, request.call.arguments["file_path"]) for request in requests] == [(spec.name, "f")]
    refused = await review(call, spec, RefusingApprover(), policy=ApprovalPolicy(), tenant="acme", session="s1")
    assert isinstance(refused, ToolResult)
    assert refused.error_code is ErrorCode.PERMISSION_DENIED


def test_s4_19_the_exact_string_is_replaced_and_nothing_else(guest: Guest, tools: GuestTools) -> None:
    tools.run("write_tool", file_path="f.txt", content="a.c abc\n\ta+c  \r\nlast")
    result = tools.run("edit_tool", file_path="f.txt", old_string="a.c", new_string="$1\\0")
    assert result.output == "replaced 1 in f.txt\n1\t$1\\0 abc\n2\t\ta+c  \n3\tlast"
    assert (guest.workspace / "f.txt").read_bytes() == b"$1\\0 abc\n\ta+c  \r\nlast"


def test_s4_19_a_failed_replacement_is_an_error_and_changes_nothing(guest: Guest, tools: GuestTools) -> None:
    tools.run("write_tool", file_path="f.txt", content="one\none\n")
    absent = tools.run("edit_tool", file_path="f.txt", old_string="One", new_string="x")
    assert (absent.success, absent.error_code) == (False, ErrorCode.NO_MATCH)
    assert absent.text().startswith("Error [NO_MATCH]: f.txt: old_string was not found")
    assert (
        tools.run("edit_tool", file_path="f.txt", old_string="one", new_string="x").error_code
        is ErrorCode.AMBIGUOUS_MATCH
    )
    assert (
        tools.run("edit_tool", file_path="f.txt", old_string="one", new_string="one").error_code is ErrorCode.NO_CHANGE
    )
    assert (
        tools.run("edit_tool", file_path="gone.txt", old_string="one", new_string="x").error_code
        is ErrorCode.FILE_NOT_FOUND
    )
    assert (guest.workspace / "f.txt").read_text() == "one\none\n"


def test_s4_19_several_edits_are_all_applied_or_none(guest: Guest, tools: GuestTools) -> None:
    tools.run("write_tool", file_path="f.txt", content="one\none\ntwo\n")
    assert str(
        tools.run("edit_tool", file_path="f.txt", old_string="one", new_string="1", replace_all=True).output
    ).startswith("replaced 2 in f.txt\n")
    edits = [{"old_string": "two", "new_string": "2"}, {"old_string": "three", "new_string": "3"}]
    assert tools.run("edit_tool", file_path="f.txt", edits=edits).error_code is ErrorCode.NO_MATCH
    assert (guest.workspace / "f.txt").read_text() == "1\n1\ntwo\n"
    edits[1] = {"old_string": "1\n1", "new_string": "one\nuno"}
    assert tools.run("edit_tool", file_path="f.txt", edits=edits).success
    assert (guest.workspace / "f.txt").read_text() == "one\nuno\n2\n"


@pytest.mark.parametrize(
    "path", ["../f", "/etc/passwd", "d/../../f", "link/f", "out", "/workspace/../etc/passwd", "d/./../../../tmp/f"]
)
def test_s4_20_a_path_outside_the_roots_is_refused_by_every_file_tool(
    guest: Guest, tools: GuestTools, path: str
) -> None:
    guest.run("mkdir d; ln -s .. link; ln -s /etc/passwd out")
    calls: dict[str, dict[str, str]] = {
        "read_tool": {},
        "write_tool": {"content": "x"},
        "edit_tool": {"old_string": "", "new_string": "x"},
    }
    for name, arguments in calls.items():
        assert tools.run(name, file_path=path, **arguments).error_code is ErrorCode.PATH_NOT_ALLOWED, name
    assert not (guest.workspace.parent / "f").exists()


def test_s4_20_a_path_that_resolves_inside_is_allowed_and_outputs_are_read_only(
    guest: Guest, tools: GuestTools
) -> None:
    guest.run(f"mkdir d; echo kept > {guest.output}/spilled.txt")
    assert tools.run("write_tool", file_path="d/../f", content="x\n").success
    assert tools.run("write_tool", file_path=str(guest.tmp / "f"), content="x\n").success
    path = str(guest.output / "spilled.txt")
    assert tools.run("read_tool", file_path=path).success
    assert tools.run("write_tool", file_path=path, content="x").error_code is ErrorCode.PATH_NOT_ALLOWED
    assert (
        tools.run("edit_tool", file_path=path, old_string="kept", new_string="x").error_code
        is ErrorCode.PATH_NOT_ALLOWED
    )


def test_a_file_changed_by_a_command_after_it_was_read_is_not_overwritten_at_once(
    guest: Guest, tools: GuestTools
) -> None:
    guest.run("seq 1 5 > f")
    assert tools.run("read_tool", file_path="f").success
    guest.run("sed -i s/3/three/ f")
    stale = tools.run("write_tool", file_path="f", content="mine\n")
    assert stale.error_code is ErrorCode.STALE_FILE
    assert "-3\n+three" in stale.text()
    assert tools.run("write_tool", file_path="f", content="mine\n").success


def test_a_missing_old_string_is_explained_by_a_change_of_another_process(guest: Guest, tools: GuestTools) -> None:
    guest.run("seq 1 5 > f")
    tools.run("read_tool", file_path="f")
    guest.run("sed -i s/3/three/ f")
    assert (
        "It was there when this session last read the file"
        in tools.run("edit_tool", file_path="f", old_string="2\n3", new_string="x").text()
    )
