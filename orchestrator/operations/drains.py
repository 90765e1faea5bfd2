"""Take workers out of service: send the order, wait until the worker reports that it drains, and follow it until its
end.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from toolcrew.contract.calls import ToolCall, ToolContext
from toolcrew.contract.envelope import encode_call
from toolcrew.contract.errors import ConfigError, OperatorError
from toolcrew.contract.hosts import DRAIN_ORDER, HostReport
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.store.audit import Actor, build_entry, local_actor
from toolcrew.store.hosts import ORDER_TTL_S, HostStore

ACCEPTED_WITHIN_S = 12.0
"""Seconds within which a worker must report that it has received an order. A worker normally reads and reports the
order immediately.
"""
POLL_S = 0.25

DrainState = Literal["draining", "drained", "lost"]


def find_workers(reports: Sequence[HostReport], name: str) -> list[HostReport]:
    """Return the workers of a host, or the worker of a queue. Raises ConfigError with the names of the hosts that
    report.
    """
    matches = [report for report in reports if name in (report.host, report.queue)]
    if not matches:
        hosts = ", ".join(sorted({report.host for report in reports}))
        raise ConfigError(
            f"no worker of a host '{name[:100]}' reports; these hosts report: {hosts}"
            if hosts
            else "no worker reports: start one (toolcrew serve worker)"
        )
    return matches


async def order_drain(
    hosts: HostStore, report: HostReport, keys: SigningKeys, *, lossy: bool = False, actor: Actor | None = None
) -> None:
    """Order a worker to drain; return when it reports that it drains. `actor` None: the user who runs this program.

    Raises ConfigError if its sessions would lose their files and `lossy` is False, OperatorError if the worker does
    not accept the order.
    """
    if report.kind == "sandbox" and report.store == "local" and not lossy:
        raise ConfigError(
            f"the checkpoints of {report.host} are stored only there, so its sessions would lose their files: set "
            "TOOLCREW_WORKSPACE_STORE of every sandboxd to one store that all hosts share, or use --lossy"
        )
    now = await hosts.now()
    call = ToolCall(id=secrets.token_hex(16), name=DRAIN_ORDER, arguments={"queue": report.queue, "lossy": lossy})
    envelope = encode_call(call, ToolContext(tenant=DEFAULT_TENANT, sent_at=now, deadline_at=now + ORDER_TTL_S), keys)
    details = {"lossy": "yes" if lossy else None, "host": report.host}
    await hosts.send_drain(
        report.queue, envelope, build_entry(actor or local_actor(), "host.drain", report.queue, details=details)
    )
    until = time.monotonic() + ACCEPTED_WITHIN_S
    while (current := await hosts.find(report.queue)) is not None and not current.draining:
        if time.monotonic() > until:
            raise OperatorError(
                f"{report.queue} was ordered to drain and does not report it: see the log of its worker"
            )
        await asyncio.sleep(POLL_S)


async def follow_drain(hosts: HostStore, report: HostReport) -> AsyncIterator[tuple[DrainState, HostReport]]:
    """Yield each changed report of the worker until it has ended, and then the last report again."""
    last = report
    while True:
        current = await hosts.find(report.queue)
        if current is None or current.worker != report.worker:
            # A worker that ends normally removes itself from the list of hosts. A lost worker stays in the list until
            # the reaper cleans up after it.
            yield ("lost" if await hosts.is_listed(report.queue) else "drained"), last
            return
        if (current.sessions, current.busy, current.problem, current.draining) != (
            last.sessions,
            last.busy,
            last.problem,
            last.draining,
        ):
            yield "draining", current
        last = current
        await asyncio.sleep(POLL_S)
