"""Whose call or session a log line is about, bound while it is worked, so that no line has to say it by itself."""

from contextlib import AbstractContextManager
from typing import Any

from structlog.contextvars import bound_contextvars

from contract.calls import ToolCall, ToolContext


def bound_to_call(call: ToolCall, context: ToolContext) -> AbstractContextManager[Any]:
    """What is logged in there carries the call's names; threads that it starts do not."""
    names = {"tenant": context.tenant, "session": context.session, "run": context.run, "call": call.id, "tool": call.name}
    return bound_contextvars(**{name: value for name, value in names.items() if value is not None})


def bound_to_session(name: object) -> AbstractContextManager[Any]:
    """The same of a session as sandboxd names it, `tenant:session`; of what is no such name nothing is bound."""
    tenant, colon, session = name.partition(":") if isinstance(name, str) else ("", "", "")
    return bound_contextvars(tenant=tenant, session=session) if colon else bound_contextvars()
