"""Who may decide on a call, and what a decision does to it."""

import io

import pytest

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from contract.specs import ToolSpec
from orchestrator.approvals import (
    ApprovalRequest,
    Approver,
    AutoApprover,
    CallbackApprover,
    ConsoleApprover,
    Decision,
    RefusingApprover,
    choose_approver,
    review,
)

CALL = ToolCall(id="c1", name="write_tool", arguments={"file_path": "a", "content": "\x1b[2J\u202ex"})


def build_spec(**flags: bool) -> ToolSpec:
    return ToolSpec(name="write_tool", description="writes", parameters={"type": "object"}, **flags)  # type: ignore[arg-type]


async def test_a_tool_that_needs_no_permission_is_not_asked_about() -> None:
    assert await review(CALL, build_spec(), RefusingApprover()) is CALL


@pytest.mark.parametrize("flag", ["requires_permission", "dangerous"])
async def test_a_marked_tool_without_anybody_to_ask_is_refused(flag: str) -> None:
    result = await review(CALL, build_spec(**{flag: True}), RefusingApprover())

    assert isinstance(result, ToolResult)
    assert result.error_code is ErrorCode.PERMISSION_DENIED


async def test_an_approval_lets_the_call_through_as_it_is() -> None:
    assert await review(CALL, build_spec(requires_permission=True), AutoApprover()) == CALL


async def test_modified_arguments_replace_the_models() -> None:
    approver = CallbackApprover(lambda _: Decision(True, arguments={"file_path": "b", "content": ""}))

    reviewed = await review(CALL, build_spec(requires_permission=True), approver)

    assert isinstance(reviewed, ToolCall)
    assert (reviewed.id, reviewed.arguments) == ("c1", {"file_path": "b", "content": ""})


async def test_a_callback_may_be_async_and_only_a_plain_true_allows() -> None:
    async def say(request: ApprovalRequest) -> bool:
        return request.call.name == "write_tool"

    allowed = await CallbackApprover(say).decide(ApprovalRequest(CALL, build_spec()))
    odd = await CallbackApprover(lambda _: "yes").decide(ApprovalRequest(CALL, build_spec()))  # type: ignore[arg-type,return-value]

    assert (allowed.is_allowed, odd.is_allowed) == (True, False)


@pytest.mark.parametrize(
    ("typed", "allowed"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False), ("yy\n", False)]
)
async def test_at_the_console_anything_but_yes_is_no(typed: str, allowed: bool) -> None:
    decision = await ConsoleApprover(io.StringIO(typed), io.StringIO()).decide(ApprovalRequest(CALL, build_spec()))

    assert decision.is_allowed is allowed


async def test_the_console_shows_control_characters_escaped_and_warns_of_danger() -> None:
    shown = io.StringIO()

    await ConsoleApprover(io.StringIO("n\n"), shown).decide(ApprovalRequest(CALL, build_spec(dangerous=True)))

    assert "WARNING" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()
    assert "\u202e" not in shown.getvalue()


@pytest.mark.parametrize(
    ("mode", "interactive", "kind"),
    [("auto", False, AutoApprover), ("never", True, RefusingApprover), ("ask", True, ConsoleApprover), ("ask", False, RefusingApprover)],
)
def test_the_setting_chooses_the_approver_and_fails_closed(mode: str, interactive: bool, kind: type[Approver]) -> None:
    assert isinstance(choose_approver(mode, is_interactive=interactive), kind)  # type: ignore[arg-type]
