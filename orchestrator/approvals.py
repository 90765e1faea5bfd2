"""Decisions before dispatch: a call that its tool's spec wants approved is asked about; nobody to ask means no.

Only calls that a model asks for are gated: what a program calls itself, by `Session.call`, is that program's own decision.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TextIO

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from contract.specs import ToolSpec
from orchestrator.terminal import escape_controls


@dataclass(frozen=True)
class ApprovalRequest:
    """What is asked about: this call, of this tool. A decision holds for it alone."""

    call: ToolCall
    spec: ToolSpec


@dataclass(frozen=True)
class Decision:
    """Yes or no, with a reason the model may read. `arguments`: run with these instead; they are validated again."""

    is_allowed: bool
    reason: str = ""
    arguments: Mapping[str, Any] | None = None


class Approver(Protocol):
    """Whoever decides."""

    async def decide(self, request: ApprovalRequest) -> Decision: ...


class AutoApprover:
    """Says yes to everything: for pools whose sandbox is protection enough."""

    async def decide(self, request: ApprovalRequest) -> Decision:
        return Decision(True)


class RefusingApprover:
    """Says no to everything that must be asked about: nobody is there to ask."""

    def __init__(self, reason: str = "it needs approval and nobody can be asked") -> None:
        self._reason = reason

    async def decide(self, request: ApprovalRequest) -> Decision:
        return Decision(False, self._reason)


class CallbackApprover:
    """Asks a function, plain or async: `fn(request) -> Decision | bool`."""

    def __init__(self, fn: Callable[[ApprovalRequest], Decision | bool | Awaitable[Decision | bool]]) -> None:
        self._fn = fn

    async def decide(self, request: ApprovalRequest) -> Decision:
        answer = self._fn(request)
        if isinstance(answer, Awaitable):
            answer = await answer
        return answer if isinstance(answer, Decision) else Decision(answer is True, "" if answer is True else "it was refused")


class ConsoleApprover:
    """Asks a person at a terminal. Arguments are shown whole, control characters escaped; anything but y is no."""

    def __init__(self, read: TextIO | None = None, write: TextIO | None = None) -> None:
        self._read = read or sys.stdin
        self._write = write or sys.stderr

    async def decide(self, request: ApprovalRequest) -> Decision:
        warning = "WARNING: this tool is marked dangerous.\n" if request.spec.dangerous else ""
        shown = escape_controls(json.dumps(request.call.arguments, ensure_ascii=False, indent=2))
        self._write.write(f"\n{warning}{escape_controls(request.call.name)} asks for approval with\n{shown}\nrun it? [y/N] ")
        self._write.flush()
        answer = await asyncio.to_thread(self._read.readline)
        return Decision(True) if answer.strip().lower() in ("y", "yes") else Decision(False, "the user refused it")


def choose_approver(mode: Literal["auto", "ask", "never"], *, is_interactive: bool) -> Approver:
    """The approver of TOOLCREW_APPROVALS. "ask" without a terminal refuses, and says so."""
    if mode == "auto":
        return AutoApprover()
    if mode == "never":
        return RefusingApprover("approvals are switched off (TOOLCREW_APPROVALS=never)")
    if is_interactive:
        return ConsoleApprover()
    return RefusingApprover("it needs approval and there is no terminal to ask at; TOOLCREW_APPROVALS=auto allows it unasked")


async def review(call: ToolCall, spec: ToolSpec, approver: Approver) -> ToolCall | ToolResult:
    """The call to run, perhaps with other arguments, or the result that says why not."""
    if not (spec.requires_permission or spec.dangerous):
        return call
    request = ApprovalRequest(call, spec)
    decision = await approver.decide(request)
    if not decision.is_allowed:
        return ToolResult.failed(call, ErrorCode.PERMISSION_DENIED, f"{call.name} was not run: {decision.reason or 'it was refused'}")
    if decision.arguments is not None:
        return call.model_copy(update={"arguments": dict(decision.arguments)})
    return call
