"""Approval of calls: the users who may decide, the call that a decision is bound to, and the effect of the decision."""

import asyncio
import contextlib
import hashlib
import io
import os
import pty
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from tests.support.records.builders import build_call, build_spec
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.approvals import (
    Approval,
    ApprovalRequest,
    Approver,
    AutoApprover,
    CallbackApprover,
    ConsoleApprover,
    Decision,
    RefusingApprover,
    choose_approver,
    digest_call,
    review,
)
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, PolicyDecision, Rule

BASH = build_spec("bash_tool", properties={"command": {"type": "string"}}, command_parameter="command")
WRITE = build_spec(
    "write_tool",
    properties={"path": {"type": "string"}, "mode": {"type": "integer", "default": 420}},
    requires_permission=True,
)
CALL = build_call("write_tool", path="a")


class Recorder:
    """An approver that approves everything and records the questions."""

    def __init__(self, arguments: dict[str, Any] | None = None) -> None:
        self.requests: list[ApprovalRequest] = []
        self._arguments = arguments

    async def decide(self, request: ApprovalRequest) -> Decision:
        self.requests.append(request)
        return Decision(True, arguments=self._arguments)


async def refuse(call: ToolCall, spec: ToolSpec, approver: Any, **terms: Any) -> ToolResult:
    result = await review(call, spec, approver, **terms)
    assert isinstance(result, ToolResult)
    assert not result.success
    return result


async def test_denied_call_is_refused_without_an_approval_request() -> None:
    approver = Recorder()
    catastrophic = await refuse(build_call("bash_tool", command="rm -rf /"), BASH, approver)
    forbidden = await refuse(CALL, WRITE, approver, policy=ApprovalPolicy((Rule("deny", tool="write_tool"),)))
    assert (catastrophic.error_code, forbidden.error_code) == (ErrorCode.SECURITY_REFUSED, ErrorCode.PERMISSION_DENIED)
    assert approver.requests == []


def test_digest_of_a_call_covers_every_field() -> None:
    call = build_call("t", call_id="c", b="é", a=1)
    canonical = '["acme","s1","c","t",{"a":1,"b":"\\u00e9"}]'
    assert digest_call(call, "acme", "s1") == hashlib.sha256(canonical.encode()).hexdigest()
    others = [
        digest_call(call, "acme"),
        digest_call(call, "other", "s1"),
        digest_call(build_call("t", call_id="d", b="é", a=1), "acme", "s1"),
        digest_call(build_call("u", call_id="c", b="é", a=1), "acme", "s1"),
        digest_call(build_call("t", call_id="c", b="é", a=1.0), "acme", "s1"),
        digest_call(build_call("t", call_id="c", b="é", a=True), "acme", "s1"),
    ]
    assert len({digest_call(call, "acme", "s1"), *others}) == 7


@pytest.mark.parametrize(
    ("digest", "now", "expected"),
    [("other", 5.0, "differ from the approved ones"), ("digest", 10.1, "too late"), ("digest", 10.0, None)],
)
def test_approval_is_valid_once_for_its_call_until_it_expires(digest: str, now: float, expected: str | None) -> None:
    approval = Approval("digest", 10.0)
    with pytest.raises(ToolFailure, match=expected) if expected else contextlib.nullcontext():
        approval.redeem(digest, now)
    with pytest.raises(ToolFailure, match="already used"):
        approval.redeem("digest", 0.0)


@pytest.mark.parametrize(
    "changed", [{"path": 5}, {"other": "x"}, {"path": {"a", "b"}}, {"path": "x", "mode": float("nan")}]
)
async def test_changed_arguments_are_validated_again(changed: dict[str, Any]) -> None:
    result = await refuse(CALL, WRITE, Recorder(changed))
    assert result.error_code is ErrorCode.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    "reply",
    [None, True, "yes", 1, Decision("yes"), Decision(1), Decision(True, arguments=[1]), Decision(True, reason=5)],
)  # type: ignore[arg-type]
async def test_invalid_reply_of_an_approver_is_a_refusal(reply: Any, caplog: pytest.LogCaptureFixture) -> None:
    class InvalidApprover:
        async def decide(self, request: ApprovalRequest) -> Any:
            return reply

    result = await refuse(CALL, WRITE, InvalidApprover())
    assert (result.error_code, "approver_answer_invalid" in caplog.text) == (ErrorCode.PERMISSION_DENIED, True)


async def test_exception_of_an_approver_is_a_refusal_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: ApprovalRequest) -> bool:
        raise OSError("secret")

    result = await refuse(CALL, WRITE, CallbackApprover(fail))
    assert result.error_code == ErrorCode.PERMISSION_DENIED
    assert "secret" not in str(result.error)
    assert "approver_failed" in caplog.text


async def test_callback_approver_may_be_async_and_allows_only_true() -> None:
    async def say(request: ApprovalRequest) -> bool:
        return request.call.name == "write_tool"

    allowed = await CallbackApprover(say).decide(ApprovalRequest(CALL, WRITE))
    non_boolean = await CallbackApprover(lambda _: "yes").decide(ApprovalRequest(CALL, WRITE))  # type: ignore[arg-type,return-value]
    assert (allowed.is_allowed, non_boolean.is_allowed) == (True, False)


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [
        ("y\n", True),
        ("YES\n", True),
        ("n\n", False),
        ("\n", False),
        ("", False),
        ("yy\n", False),
        ("y", False),
        ("y" * 99 + "\n", False),
    ],
)
async def test_console_approver_allows_only_yes(typed: str, allowed: bool) -> None:
    decision = await ConsoleApprover(io.StringIO(typed), io.StringIO()).decide(ApprovalRequest(CALL, WRITE))
    assert decision.is_allowed is allowed


async def test_console_approver_shows_tenant_session_command_and_warning() -> None:
    console_output = io.StringIO()
    approver = ConsoleApprover(io.StringIO("y\n"), console_output)
    call = build_call("bash_tool", command="rm -rf /srv/build")
    assert isinstance(await review(call, BASH, approver, tenant="acme", session="s1"), ToolCall)
    for part in ("tenant acme, session s1", "| rm -rf /srv/build\n", "WARNING: this command removes folders"):
        assert part in console_output.getvalue()


@pytest.mark.parametrize(
    ("mode", "interactive", "kind"),
    [
        ("auto", False, AutoApprover),
        ("never", True, RefusingApprover),
        ("ask", True, ConsoleApprover),
        ("ask", False, RefusingApprover),
    ],
)
def test_approval_setting_selects_the_approver(mode: str, interactive: bool, kind: type[Approver]) -> None:
    assert isinstance(choose_approver(mode, is_interactive=interactive), kind)  # type: ignore[arg-type]


async def test_slow_policy_decision_runs_in_a_thread() -> None:
    ran_in: list[threading.Thread] = []

    class WatchedPolicy(ApprovalPolicy):
        def decide(self, *args: Any) -> PolicyDecision:
            ran_in.append(threading.current_thread())
            return super().decide(*args)

    for command in ("ls", "rm -rf /" + "/*" * 50_000):
        await review(build_call("bash_tool", command=command), BASH, AutoApprover(), policy=WatchedPolicy())
    assert [thread is threading.current_thread() for thread in ran_in] == [True, False]


class WatchedConsole(io.StringIO):
    """The output of the console. `questions` counts the questions as they appear."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    def write(self, text: str) -> int:
        if "run it?" in text:
            self.asked.set()
        return super().write(text)


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """Return a terminal: the end at which a person types, and the end that a program reads."""
    person, program = pty.openpty()
    with open(program) as stream:
        yield person, stream
    os.close(person)


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """Return a pipe, which is no terminal: the written end, and the read end."""
    reading, writing = os.pipe()
    with open(reading) as stream:
        yield writing, stream
    os.close(writing)


async def ask(stream: TextIO) -> tuple[asyncio.Task[Decision], WatchedConsole, ConsoleApprover]:
    """Ask a question. Return after the console shows the question and waits for the answer."""
    console_output = WatchedConsole()
    approver = ConsoleApprover(stream, console_output)
    asking = asyncio.create_task(approver.decide(ApprovalRequest(CALL, WRITE)))
    await console_output.asked.wait()
    return asking, console_output, approver


async def test_input_typed_before_the_question_is_ignored(terminal: tuple[int, TextIO]) -> None:
    person, stream = terminal
    os.write(person, b"y\n")
    asking, _, _ = await ask(stream)
    os.write(person, b"n\n")
    assert not (await asking).is_allowed


async def test_cancelled_question_does_not_read_the_next_line(pipe: tuple[int, TextIO]) -> None:
    person, stream = pipe
    asking, console_output, approver = await ask(stream)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert "withdrawn" in console_output.getvalue()
    os.write(person, b"for another\n")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert os.read(stream.fileno(), 100) == b"for another\n"
    os.write(person, b"y\nrest\n")
    assert (await approver.decide(ApprovalRequest(CALL, WRITE))).is_allowed
    assert os.read(stream.fileno(), 100) == b"rest\n"
