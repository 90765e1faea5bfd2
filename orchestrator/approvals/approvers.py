"""Approvers, which decide about calls: by a setting, by asking a person at a terminal, by a function, or by refusing
every call.
"""

import asyncio
import contextlib
import json
import math
import os
import sys
import termios
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TextIO

from toolcrew.contract.approvals import Decision
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.terminal.text import escape_controls

MAX_ANSWER_BYTES = 64
_INVISIBLE = frozenset(
    {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)}
)
"""Characters that Unicode classifies as printable but that are not visible."""


@dataclass(frozen=True)
class ApprovalRequest:
    """Request for a decision about one call with these arguments, for one tenant.

    The decision is valid for this call only. `call`: a copy with validated arguments, including defaults. If an
    approver changes the copy, the call is refused. `digest`: the digest that binds the decision to the call. `reason`:
    why a decision is needed. `warning`: why the call is dangerous, "" for other calls. `expires_at`: Unix seconds; a
    later approval does not count.
    """

    call: ToolCall
    spec: ToolSpec
    tenant: str = "default"
    session: str | None = None
    digest: str = ""
    reason: str = ""
    warning: str = ""
    expires_at: float = math.inf
    run: str = ""

    @property
    def command(self) -> str | None:
        """Return the shell command of the call, or None when its tool takes no command."""
        command = self.call.arguments.get(self.spec.command_parameter) if self.spec.command_parameter else None
        return command if isinstance(command, str) else None


class Approver(Protocol):
    """Interface of an object that decides about calls.

    `decide` may be called for several calls at the same time. An exception counts as a refusal.
    """

    async def decide(self, request: ApprovalRequest) -> Decision: ...


class AutoApprover:
    """Approves every call, for pools whose sandboxes are sufficient protection.

    Calls that the policy denies never reach an approver.
    """

    async def decide(self, request: ApprovalRequest) -> Decision:
        return Decision(True)


class RefusingApprover:
    """Refuses every call that needs approval, because no person can be asked.

    The refusal contains `reason` and why the call needs approval.
    """

    def __init__(self, reason: str = "the call needs approval, and no approver is configured") -> None:
        self._reason = reason

    async def decide(self, request: ApprovalRequest) -> Decision:
        reason = request.warning or request.reason
        return Decision(False, f"{self._reason} ({reason})" if reason else self._reason)


class CallbackApprover:
    """Calls a plain or async function: `fn(request) -> Decision | bool`.

    Only the value True or a Decision can approve the call.
    """

    def __init__(self, fn: Callable[[ApprovalRequest], Decision | bool | Awaitable[Decision | bool]]) -> None:
        self._fn = fn

    async def decide(self, request: ApprovalRequest) -> Decision:
        answer = self._fn(request)
        if isinstance(answer, Awaitable):
            answer = await answer
        return (
            answer
            if isinstance(answer, Decision)
            else Decision(answer is True, "" if answer is True else "the call was denied")
        )


class ConsoleApprover:
    """Asks a person at a terminal, one question at a time.

    Only "y" or "yes" and Enter approves. Use one approver for each terminal. Arguments are shown in full, and invisible
    characters are shown as escapes. Input that was typed before the question appeared does not answer the question.
    After a question is withdrawn, no thread continues to read the terminal, so the next line is not lost.
    """

    def __init__(self, read: TextIO | None = None, write: TextIO | None = None) -> None:
        self._read = read or sys.stdin
        self._write = write or sys.stderr
        self._turn = asyncio.Lock()

    async def decide(self, request: ApprovalRequest) -> Decision:
        async with self._turn:
            _forget_typed(self._read)
            self._write.write(build_question(request))
            self._write.flush()
            try:
                answer = await _read_line(self._read)
            except asyncio.CancelledError:
                self._write.write("\n(withdrawn: no answer is needed any more)\n")
                self._write.flush()
                raise
        return Decision(True) if answer.strip().lower() in ("y", "yes") else Decision(False, "the user denied the call")


def is_interactive() -> bool:
    """Return whether a person can answer questions at this process's terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def choose_approver(mode: Literal["auto", "ask", "never"], *, is_interactive: bool) -> Approver:
    """Return the approver for TOOLCREW_APPROVALS, except for "queue" (orchestrator/approvals/asking.py).

    "ask" without a terminal refuses and gives that reason.
    """
    if mode == "auto":
        return AutoApprover()
    if mode == "never":
        return RefusingApprover("calls that need approval are denied here (TOOLCREW_APPROVALS=never)")
    if is_interactive:
        return ConsoleApprover()
    return RefusingApprover(
        "the call needs approval, and this process has no terminal for the question: set TOOLCREW_APPROVALS=auto "
        "to allow all such calls, TOOLCREW_APPROVALS=queue to wait for a decision (`toolcrew approvals list`), or "
        "allow the call with a rule in the file of TOOLCREW_APPROVAL_POLICY"
    )


def build_question(request: ApprovalRequest) -> str:
    """Return the text of the question at a terminal."""
    return "\n" + describe_request(request) + "\nrun it? [y/N] "


def describe_request(request: ApprovalRequest) -> str:
    """Return the description of the request for a person.

    The warning is last, so that long arguments cannot scroll the warning out of view.
    """
    lines = call_lines(request.call, request.tenant, request.session, request.command)
    if request.reason and not request.warning:
        lines.append(f"asked because {request.reason}")
    if request.warning or request.spec.dangerous:
        lines.append(f"WARNING: {request.warning or 'this tool is marked dangerous'}")
    return make_visible("\n".join(lines))


def call_lines(call: ToolCall, tenant: str, session: str | None, command: str | None) -> list[str]:
    """Return the lines that show the complete call. The caller passes the lines to `make_visible`."""
    lines = [
        f"{call.name} needs approval (tenant {tenant}{f', session {session}' if session else ''})",
        json.dumps(call.arguments, ensure_ascii=False, indent=2, sort_keys=True),
    ]
    if command is not None:
        # Every line has a mark, so that a command cannot imitate a question of its own.
        lines += ["command:", *(f"  | {line}" for line in command.split("\n"))]
    return lines


def make_visible(text: str) -> str:
    """Replace control characters and invisible characters with escapes. Line breaks stay."""
    return "".join(character if _is_seen(character) else _escape(character) for character in escape_controls(text))


def _is_seen(character: str) -> bool:
    return character == "\n" or (character.isprintable() and ord(character) not in _INVISIBLE)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _forget_typed(stream: TextIO) -> None:
    """Discard unread input of a terminal. Text that was typed before the question does not answer the question."""
    with contextlib.suppress(OSError, ValueError, termios.error):
        if stream.isatty():
            termios.tcflush(stream.fileno(), termios.TCIFLUSH)


async def _read_line(stream: TextIO) -> str:
    """Read one line, or return "" at the end of input.

    Cancellation leaves no reader behind. A thread that is blocked in `readline` could not be stopped.
    """
    loop = asyncio.get_running_loop()
    typed: asyncio.Future[bytes] = loop.create_future()
    line = bytearray()

    def take(descriptor: int) -> None:
        # Read one byte at a time, because the bytes after this line belong to another reader.
        try:
            byte = os.read(descriptor, 1)
        except BlockingIOError:
            return
        except OSError:
            byte = b""
        if byte in (b"", b"\n"):
            loop.remove_reader(descriptor)
            if not typed.done():
                typed.set_result(bytes(line) if byte else b"")
        elif len(line) < MAX_ANSWER_BYTES:
            line.extend(byte)

    try:
        descriptor = stream.fileno()
        loop.add_reader(descriptor, take, descriptor)
    except (OSError, ValueError, NotImplementedError):
        # The stream has no descriptor or is a plain file, so a read does not wait for a person.
        read = await asyncio.to_thread(stream.readline, MAX_ANSWER_BYTES)
        return read if read.endswith("\n") else ""
    try:
        return (await typed).decode(errors="replace")
    finally:
        loop.remove_reader(descriptor)
