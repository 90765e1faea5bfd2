"""A call of a tool with where, when and how it runs, and one sending of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from contract.calls import DEFAULT_TIMEOUT_S, GRACE_S, ToolCall, ToolContext
from contract.names import POOL_QUEUES
from contract.specs import ToolSpec
from contract.tenancy import TenantPolicy
from orchestrator.dispatch.call_events import Handler
from store.slots import Priority

SANDBOX_GRACE_S = 20.0
"""Beyond a call's limit and grace: sandboxd may have to remove a container, which the engine may do slowly."""


@dataclass
class Request:
    """One call of a tool. The caller fills the first part. The dispatcher fills the second part once, after it has
    checked the call; from then on nothing changes until the worker has the call.
    """

    call: ToolCall
    tenant: str
    session: str | None = None
    queue: str | None = None
    """None: the queue of the host where the session lives, or of the tool's pool."""
    timeout_s: float | None = None
    """None: the call's own `timeout` argument, else the tool's default."""
    default_timeout_s: float = DEFAULT_TIMEOUT_S
    """For tools without a default of their own."""
    run: str | None = None
    model: str | None = None
    blob: str | None = None
    """The key of bytes for a session verb."""
    text_arguments: bool = False
    """The arguments are texts, as a command line has them."""
    audience: Literal["model", "session"] = "model"
    priority: Priority = "interactive"
    """batch: after the tenant's interactive calls, when slots are few."""
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    """Handlers of the events of the running call, by kind (contract/call_events.py)."""
    config: Mapping[str, JsonValue] = field(default_factory=dict)
    """What tools find in their context's configuration."""
    keeps_result: bool = False
    """Redis keeps the result until `Dispatcher.settle`, so that another process finds it when this one dies. A caller
    that stops waiting does not cancel the call.
    """
    sent_since: float | None = None
    """Unix seconds of the first moment at which another process may have sent the call: it is then awaited, not sent.
    None: it was never sent.
    """

    spec: ToolSpec = field(init=False)
    """Of the tool that the worker runs: skill_tool for a tool that is a tenant's own skill."""
    worker_call: ToolCall = field(init=False)
    """The call as the worker receives it: arguments prepared, a tenant's own skill as a call of skill_tool."""
    policy: TenantPolicy = field(init=False)
    context: ToolContext = field(init=False)
    """`sent_at` is the time at which the call began to wait for a slot."""
    aliases: list[str] = field(init=False, default_factory=list)
    """Other names by which the call gave parameters, as `given -> canonical`."""
    queue_wait_s: float = field(init=False)
    """How long the call may wait for a slot and in its queue."""

    @property
    def runs_in_session(self) -> bool:
        """Whether the call runs where its session lives, and not in a pool of workers without sessions."""
        return self.spec.pool not in POOL_QUEUES

    @property
    def wait_s(self) -> float:
        """How long the sender waits for a result, from sending on."""
        return self.queue_wait_s + self.context.timeout_s + GRACE_S + SANDBOX_GRACE_S

    @property
    def celery_limit_s(self) -> float | None:
        """The call's limit where Celery enforces it: in a pool of workers without sandboxes."""
        return None if self.runs_in_session else self.context.timeout_s

    @property
    def shown_as(self) -> str | None:
        """The tool's name that operators see, when the worker runs another one."""
        return self.call.name if self.call.name != self.worker_call.name else None


@dataclass
class Attempt:
    """One sending of a request: its signed envelope on the way to a queue."""

    request: Request
    queue: str
    envelope: str
    start_by: float
    """Unix seconds of the shared clock after which the call must not start."""
    number: int = 1
    """More than 1 when a lost call is sent again."""
    fence: int | None = None
    """Of the location of the session that lives on the queue's host. None: any worker of the queue may run the call."""
    published_as: str | None = None
    """The task id under which a process that has died published this attempt; it is only awaited."""
    ticket: str = ""
    """A signed text that the call's record has until a worker begins the call (store/calls.py)."""
    slot: str = ""
    """The slot that the attempt must hold to be published (orchestrator/admission.py); "" when it has one."""

    @property
    def call_id(self) -> str:
        return self.request.call.id

    @property
    def tenant(self) -> str:
        return self.request.tenant
