"""Build records and responses for tests. Every argument has a harmless default, so that a test names only its
subject.
"""

import math
import time
from typing import Any

from toolcrew.contract.calls import GRACE_S, MAX_TIMEOUT_S, ToolCall, ToolContext
from toolcrew.contract.guest_protocol import A, FailedAnswer, GuestReply, GuestRequest, parse_guest_answer
from toolcrew.contract.names import call_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.dispatch.celery_transport import build_message
from toolcrew.orchestrator.dispatch.request import SANDBOX_GRACE_S, Attempt, CheckedRequest
from toolcrew.workers.sandbox_client import GuestResponse

KEY = SigningKeys.of("k" * 32)


def build_spec(
    name: str = "echo", *, properties: dict[str, Any] | None = None, required: list[str] | None = None, **fields: Any
) -> ToolSpec:
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}} if properties is None else properties,
        "required": required or [],
        "additionalProperties": False,
    }
    return ToolSpec(**{"name": name, "description": f"The tool {name}.", "parameters": parameters, **fields})


def build_call(name: str = "echo", *, call_id: str = "call-1", **arguments: Any) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def build_context(**fields: Any) -> ToolContext:
    now = time.time()
    return ToolContext(**{"tenant": "acme", "session": "s1", "sent_at": now, "deadline_at": now + 60, **fields})


def build_exec_done(**fields: Any) -> dict[str, Any]:
    """Return the `done` fields of an exec that printed nothing and exited with 0."""
    streams = {name: {"total": 0, "head": 0, "tail": 0} for name in ("stdout", "stderr", "merged")}
    plain = {
        "exit_code": 0,
        "signal": None,
        "timed_out": False,
        "cancelled": False,
        "oom": False,
        "run_s": 0.5,
        "streams": streams,
        "kill": None,
    }
    return {
        "ev": "done",
        **plain,
        "sandbox": {"id": "c0ffee", "generation": 1, "rebuilt": False},
        "sandbox_s": 0.75,
        **fields,
    }


def build_exec_response(
    stdout: bytes = b"", stderr: bytes = b"", *, merged: bytes | None = None, **fields: Any
) -> GuestResponse:
    """Return the response of an exec whose counts match its streams, with no dropped output."""
    streams = {"stdout": stdout, "stderr": stderr, "merged": stdout + stderr if merged is None else merged}
    counts = {name: {"total": len(data), "head": len(data), "tail": 0} for name, data in streams.items()}
    return GuestResponse(build_exec_done(**{"streams": counts, **fields}), streams)


def build_reply(request: GuestRequest[A], response: GuestResponse) -> GuestReply[A]:
    """Return the checked reply that a tool gets for this response of the guest."""
    answer = parse_guest_answer(request, response.done)
    assert not isinstance(answer, FailedAnswer), answer.error
    return GuestReply(answer, response.streams)


def build_read_response(
    raw: bytes, *, lines: int | None = None, size: int | None = None, **fields: Any
) -> GuestResponse:
    """Return the response of read_text for a plain UTF-8 file. `raw`: the lines that were sent, each with its
    newline.
    """
    count = raw.count(b"\n")
    done = {
        "ev": "done",
        "kind": "text",
        "size": len(raw) if size is None else size,
        "lines": count if lines is None else lines,
        "is_counted": True,
        "count": count,
        "is_out_of_room": False,
        "cuts": [],
        "encoding": "utf-8",
        "has_bom": False,
        "is_guess": False,
        "is_damaged": False,
        "newline": "lf" if count else "none",
        "final_newline": True,
        "type": "",
        "entries": 0,
    }
    return GuestResponse({**done, **fields}, {"file": raw})


def build_attempt(
    tool: str = "x",
    *,
    tenant: str = "acme",
    call_id: str = "c1",
    session: str | None = None,
    run: str | None = None,
    wait_s: float = 60.0,
    limit_s: float | None = None,
    timeout_s: float = 30.0,
    keeps_result: bool = False,
    shown_as: str | None = None,
    **fields: Any,
) -> Attempt:
    """Return an attempt whose sender waits for `wait_s` seconds.

    `limit_s`: the limit of a pool of workers without sandboxes; None means that the call runs in a session.
    `shown_as`: the tool name that the caller uses, when the worker runs another tool.
    """
    call = ToolCall(id=call_id, name=tool)
    context = build_context(tenant=tenant, session=session, run=run, timeout_s=limit_s or timeout_s)
    request = CheckedRequest(
        call=call.model_copy(update={"name": shown_as}) if shown_as else call,
        tenant=tenant,
        session=session,
        run=run,
        keeps_result=keeps_result,
        spec=build_spec(tool, pool="web" if limit_s is not None else "sandbox"),
        worker_call=call,
        policy=TenantPolicy(),
        context=context,
        queue_wait_s=wait_s - context.timeout_s - GRACE_S - SANDBOX_GRACE_S,
    )
    values = {
        "tenant": tenant,
        "call_id": call_id,
        "tool": tool,
        "queue": "q",
        "start_by": time.time() + 60,
        "session": session,
        "extra_s": max(0, math.ceil(request.context.timeout_s - MAX_TIMEOUT_S)),
        "envelope": "{}",
    }
    return Attempt(request=request, **{**values, **fields})


def publish_arguments(attempt: Attempt, task_id: str) -> tuple[Attempt, str, str]:
    """Return the arguments of `Publisher.publish` for a call of the deployment "d"."""
    record = call_key("d", attempt.tenant, attempt.call_id)
    return attempt, task_id, build_message(attempt, task_id, record)
