"""Reports why a call waits for a slot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from orchestrator.terminal.commands import build_command
from store.slots import SlotRequest, WaitReason

NOTICE_S = 0.5
"""A call that has its slot sooner is not reported: on a busy pool most calls wait for some milliseconds."""


@dataclass(frozen=True)
class WaitNotice:
    """A call that waits for a slot. `message`: one sentence for people."""

    call_id: str
    tenant: str
    tool: str
    reason: WaitReason
    message: str


OnWaiting = Callable[[WaitNotice], None]
_listener: ContextVar[OnWaiting | None] = ContextVar("on_waiting", default=None)


@contextmanager
def report_waiting(listener: OnWaiting) -> Iterator[None]:
    """Call `listener` for every call of this task, and of the tasks that it starts in the block, that waits longer than
    NOTICE_S.

    A context variable, because calls are also made on the caller's behalf: opening a session is one.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def waiting_listener() -> OnWaiting | None:
    """Return the listener of the innermost `report_waiting` block, if there is one."""
    return _listener.get()


def once_per_reason(listener: OnWaiting) -> OnWaiting:
    """Return a listener that passes only the first notice of each tenant and reason on."""
    reported: set[tuple[str, WaitReason]] = set()

    def report(notice: WaitNotice) -> None:
        if (notice.tenant, notice.reason) not in reported:
            reported.add((notice.tenant, notice.reason))
            listener(notice)

    return report


def build_notice(request: SlotRequest, reason: WaitReason) -> WaitNotice:
    """Return the notice about a call that waits for that reason."""
    tenant, policy = request.tenant, request.policy
    pause = f" ({policy.pause_reason})" if policy.pause_reason else ""
    causes = {
        WaitReason.PAUSED: (
            f"tenant {tenant} is paused{pause}; an operator can resume it ({build_command('resume', tenant)})"
        ),
        WaitReason.IN_FLIGHT: f"tenant {tenant} has {policy.in_flight} calls in flight, which is its limit",
        WaitReason.RATE: f"tenant {tenant} may begin at most {policy.rate_per_s or 0:g} calls per second",
        WaitReason.SLOTS: f"the workers have no free slot for tenant {tenant} now",
    }
    message = f"{request.tool} waits: {causes[reason]}; it waits at most {request.wait_s:.0f} s"
    return WaitNotice(request.call_id, tenant, request.tool, reason, message)
