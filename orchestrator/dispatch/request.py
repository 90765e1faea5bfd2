"""Request of one tool call with its destination, time limits and options; the same after its check; and one attempt to
send it.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, GRACE_S, ToolCall, ToolContext
from toolcrew.contract.names import POOL_QUEUES
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.dispatch.call_event_listener import Handler
from toolcrew.store.call_messages import CallAttempt
from toolcrew.store.slots import Priority

SANDBOX_GRACE_S = 20.0
"""Seconds that the sender waits beyond a call's limit and grace period. Sandboxd may have to remove a container, which
can be slow.
"""


@dataclass(frozen=True)
class Request:
    """Request for one call of a tool, as the caller makes it."""

    call: ToolCall
    tenant: str
    session: str | None = None
    queue: str | None = None
    """Queue of the call; None: the queue of the session's host, or of the tool's pool."""
    timeout_s: float | None = None
    """Limit in seconds; None: the `timeout` argument of the call, otherwise the tool's default."""
    default_timeout_s: float = DEFAULT_TIMEOUT_S
    """Limit of tools without a default of their own, in seconds."""
    run: str | None = None
    model: str | None = None
    blob: str | None = None
    """Redis key of the bytes that the call sends along, such as the content of a file (store/blobs.py)."""
    text_arguments: bool = False
    """All arguments are strings, as on a command line."""
    audience: Literal["model", "session"] = "model"
    priority: Priority = "interactive"
    """"batch": the call waits for the tenant's interactive calls when slots are few."""
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    """Handlers of the events of the running call, by kind (contract/call_events.py)."""
    keeps_result: bool = False
    """Redis keeps the result until `Dispatcher.settle`, so that another process finds it if this process dies. A
    caller that stops waiting does not cancel the call.
    """
    digest: str = ""
    """Digest of the content of a call whose caller chose its id (`with_digest`). A call with the same id and content
    gets the same result, also when it is made by another process; other content is refused. "": the id is new.
    """
    sent_since: float | None = None
    """Earliest time, in Unix seconds, at which another process may have sent the call. If that process did, the call
    is awaited and not sent. None: no other process sent it.
    """


@dataclass(frozen=True, kw_only=True)
class CheckedRequest(Request):
    """Request that the dispatcher has checked, with what it needs to be sent."""

    spec: ToolSpec
    """Specification of the tool that the worker runs: skill_tool for a tenant's own skill."""
    worker_call: ToolCall
    """The call as the worker receives it: arguments prepared, a tenant's own skill as a call of skill_tool."""
    policy: TenantPolicy
    context: ToolContext
    """Signed context of the call. `sent_at` is the time at which the call began to wait for a slot."""
    aliases: list[str] = field(default_factory=list)
    """Aliases that the call used for parameters, as `alias -> canonical`."""
    queue_wait_s: float
    """Limit of the wait for a slot and in the queue, in seconds."""

    @property
    def runs_in_session(self) -> bool:
        """Return whether the call runs on its session's host, and not in a pool of workers without sessions."""
        return self.spec.pool not in POOL_QUEUES

    @property
    def wait_s(self) -> float:
        """Return the number of seconds that the sender waits for a result after sending."""
        return self.queue_wait_s + self.context.timeout_s + GRACE_S + SANDBOX_GRACE_S

    @property
    def celery_limit_s(self) -> float | None:
        """Return the limit that Celery enforces, in a pool of workers without sandboxes; else None."""
        return None if self.runs_in_session else self.context.timeout_s

    @property
    def shown_as(self) -> str | None:
        """Return the tool name for operators, if the worker runs another tool; else None."""
        return self.call.name if self.call.name != self.worker_call.name else None


@dataclass(frozen=True, kw_only=True)
class Attempt(CallAttempt):
    """Attempt to send a request: its signed envelope for a queue."""

    request: CheckedRequest
    envelope: str
    published_as: str | None = None
    """Task id under which a process that has died published this attempt. The attempt is only awaited."""


def with_digest(request: Request) -> Request:
    """Return the request of a call whose caller chose its id. Its result stays in Redis for others with this id."""
    call = request.call
    # The key of a blob ends with the digest of the bytes, and begins with random characters.
    content = [call.name, call.arguments, request.session, request.timeout_s, (request.blob or "")[-64:]]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return replace(request, digest=digest, keeps_result=True)


def derive_call_id(kind: str, scope: str, key: str) -> str:
    """Return the id of a call to which its caller gave a key. `scope`: whose key it is, such as a session's."""
    return hashlib.sha256(f"{kind}\0{scope}\0{key}".encode()).hexdigest()[:32]


def build_cancel(call_id: str) -> ToolCall:
    """Return the order to a worker to cancel a call. Workers read orders at once, even when they are busy: a waiting
    call never starts, and a running call ends.
    """
    return ToolCall(id=secrets.token_hex(16), name="session.cancel", arguments={"call_id": call_id})
