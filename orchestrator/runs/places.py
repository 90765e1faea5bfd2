"""How many runs one process works at a time. A run that waits for a person gives its place to another one, and takes one again when it goes on."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sized
from contextlib import asynccontextmanager

from orchestrator.approvals.approvers import ApprovalRequest, Approver, Decision

MOST_AWAY = 16
"""For each place so many runs may lie here in all, those that wait included: each keeps its messages in memory."""


class Places:
    """Of one process. Until it is told how many runs are worked, none waits for a place."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._runs: Sized = ()
        self._away: dict[str, object] = {}
        """Run -> the absence; a run that is let back may be away again before it has noticed."""
        self._returning: deque[tuple[str, object, asyncio.Future[None]]] = deque()

    def serve(self, count: int, runs: Sized) -> None:
        """`runs`: all that lie here, as they come and go, `count` of them in places."""
        self._count, self._runs = count, runs

    def room(self) -> int:
        """How many runs may be begun, after those that want their place back. To be asked whenever a run has ended."""
        self._let_back()
        return max(0, min(self._free(), (self._count or 0) * MOST_AWAY - len(self._runs)))

    @asynccontextmanager
    async def given_up(self, run: str) -> AsyncIterator[None]:
        """Around what a run waits for; the block is left when there is a place. A run of whose calls another one waits already has none to give."""
        if self._count is None or run in self._away:
            yield
            return
        absence = self._away[run] = object()
        try:
            self._let_back()
            yield
            await self._until_back(run, absence)
        finally:
            # One that ends has no need of a place, and one that is back is away no more.
            self._end(run, absence)

    def _free(self) -> int:
        return (self._count or 0) - (len(self._runs) - len(self._away))

    def _end(self, run: str, absence: object) -> None:
        if self._away.get(run) is absence:
            del self._away[run]

    async def _until_back(self, run: str, absence: object) -> None:
        wish = (run, absence, asyncio.get_running_loop().create_future())
        self._returning.append(wish)
        self._let_back()
        try:
            await wish[2]
        finally:
            with contextlib.suppress(ValueError):
                self._returning.remove(wish)

    def _let_back(self) -> None:
        """The one that has waited longest first."""
        while self._returning and self._free() > 0:
            run, absence, wish = self._returning.popleft()
            if not wish.done():
                self._end(run, absence)
                wish.set_result(None)


class PlacedApprover:
    """Asks another approver, who waits for people, while the run has no place."""

    def __init__(self, approver: Approver, places: Places, run: str) -> None:
        self._approver, self._places, self._run = approver, places, run

    async def decide(self, request: ApprovalRequest) -> Decision:
        async with self._places.given_up(self._run):
            return await self._approver.decide(request)
