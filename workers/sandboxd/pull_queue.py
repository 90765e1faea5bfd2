"""The order of image pulls: fair among tenants, so that slow images of one tenant do not keep others waiting."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from toolcrew.contract.errors import SandboxUnavailable

AT_ONCE: Final = 3
"""Maximum number of pulls at a time. More pulls would only share the same network and disk."""
AT_ONCE_OF_TENANT: Final = AT_ONCE - 1
"""Maximum number of pulls at a time for one tenant. A pull may take half an hour, so one slot is left for others."""
MAX_PULLS: Final = 200
"""Maximum number of running and waiting pulls. A pull continues to wait even if the session that asked for it is
closed.
"""
MAX_PULLS_OF_TENANT: Final = 20


@dataclass(eq=False)
class PullTicket:
    """A pull that waits or runs. `requester`: the tenant that began it; "" for the pool. `tenants`: all that wait."""

    requester: str
    tenants: set[str]
    runs_for: str | None = None
    may_start: asyncio.Event = field(default_factory=asyncio.Event)


class PullQueue:
    """Starts pulls in turn. The next one is for a tenant for which the fewest pulls run."""

    def __init__(self) -> None:
        self._tickets: list[PullTicket] = []

    def join(self, tenant: str) -> PullTicket:
        """Return a ticket for a new pull. Raises SandboxUnavailable: too many pulls wait, of the tenant or in total."""
        if sum(ticket.requester == tenant for ticket in self._tickets) >= MAX_PULLS_OF_TENANT:
            raise SandboxUnavailable(
                f"{MAX_PULLS_OF_TENANT} images are already being pulled on this host for tenant {tenant}: try again "
                "when some of them have arrived"
            )
        if len(self._tickets) >= MAX_PULLS:
            raise SandboxUnavailable(f"{MAX_PULLS} images are already being pulled on this host: try again later")
        ticket = PullTicket(tenant, {tenant})
        self._tickets.append(ticket)
        return ticket

    def share(self, ticket: PullTicket, tenant: str) -> None:
        """Let another tenant wait for the pull too: it then has its turn with that tenant's own pulls."""
        ticket.tenants.add(tenant)
        self._start_next()

    def leave(self, ticket: PullTicket) -> None:
        """Forget a pull that has ended."""
        self._tickets.remove(ticket)
        self._start_next()

    @asynccontextmanager
    async def turn(self, ticket: PullTicket) -> AsyncIterator[None]:
        """Wait until the pull may start."""
        self._start_next()
        await ticket.may_start.wait()
        yield

    def _start_next(self) -> None:
        while True:
            running = Counter(ticket.runs_for for ticket in self._tickets if ticket.runs_for is not None)
            waiting = [ticket for ticket in self._tickets if ticket.runs_for is None]
            turns = [
                (running[tenant], at, tenant)
                for at, ticket in enumerate(waiting)
                for tenant in ticket.tenants
                if running[tenant] < AT_ONCE_OF_TENANT
            ]
            if not turns or running.total() >= AT_ONCE:
                return
            _, at, tenant = min(turns)
            waiting[at].runs_for = tenant
            waiting[at].may_start.set()
