"""How many runs one process works at a time. A run that only waits for people gives its place to another one, and takes
one again when it goes on; one that waits for a sandbox lends its place to those that go on."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sized
from contextlib import asynccontextmanager, contextmanager

from contract.approvals import Decision
from contract.calls import ToolCall, ToolResult
from orchestrator.approvals.approvers import ApprovalRequest, Approver
from orchestrator.loop.call_runner import RunCall
from store.tasks import is_being_cancelled

MOST_AWAY = 16
"""For each place so many runs may lie here in all, those that wait included: each keeps its messages in memory."""


class Places:
    """Of one process. Until it is told how many runs are worked, none waits for a place."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._runs: Sized = ()
        self._reserved = 0
        self._away: set[RunPlace] = set()
        self._lent: set[RunPlace] = set()
        """Of those that are away: only who comes back may have their places."""
        self._returning: deque[RunPlace] = deque()

    def serve(self, count: int, runs: Sized) -> None:
        """`runs`: all that lie here, as they come and go, `count` of them in places."""
        self._count, self._runs = count, runs

    def room(self) -> int:
        """How many runs may be begun, after those that want their place back. To be asked whenever a run has ended."""
        self._let_back()
        return max(
            0, min(self._free() - len(self._lent), (self._count or 0) * MOST_AWAY - len(self._runs) - self._reserved)
        )

    @contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """Around the claim of so many runs, until they are among those that lie here: nobody comes back to their places
        meanwhile.
        """
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count
            self._let_back()

    @asynccontextmanager
    async def run(self) -> AsyncIterator["RunPlace"]:
        """Around a run that has been begun in a place. It leaves the block in one, too, but when the block is cancelled
        or raises.
        """
        place = RunPlace(self)
        try:
            yield place
            await place.until_placed()
        finally:
            # What is left to do for it here it does as one that has a place.
            self._away.discard(place)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Around a run's wait for its sandbox, and left in a place: those that come back have theirs already, and could
        not end without a place.
        """
        place = RunPlace(self)
        self._lent.add(place)
        self.give_up(place)
        try:
            yield
            await place.until_placed()
        finally:
            self._lent.discard(place)
            self._away.discard(place)

    def give_up(self, place: "RunPlace") -> None:
        """Another run may have it."""
        if self._count is not None and place not in self._away:
            self._away.add(place)
            place.leave()
            self._let_back()

    def wish(self, place: "RunPlace") -> None:
        """It wants to be back, however many of its calls do."""
        if place not in self._returning:
            self._returning.append(place)
        self._let_back()

    def withdraw(self, place: "RunPlace") -> None:
        """Nothing of it wants to be back any more."""
        if place in self._returning:
            self._returning.remove(place)

    def _free(self) -> int:
        return (self._count or 0) - self._reserved - (len(self._runs) - len(self._away))

    def _let_back(self) -> None:
        """The one that has waited longest first."""
        while self._returning and self._free() > 0:
            place = self._returning.popleft()
            self._away.discard(place)
            self._lent.discard(place)
            place.come_back()


class RunPlace:
    """The place of one run, which gives it up while it has calls and none of them is at work. Between calls the run
    itself is.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._calls: set[str] = set()
        """That have begun and not ended."""
        self._at_work: set[str] = set()
        self._returning: set[str] = set()
        self._is_back = asyncio.Event()
        self._is_back.set()

    def around(self, run_call: RunCall) -> RunCall:
        """Carries out calls as `run_call` does, in this place."""

        async def placed(call: ToolCall) -> ToolResult:
            async with self.call(call.id):
                return await run_call(call)

        return placed

    @asynccontextmanager
    async def call(self, call: str) -> AsyncIterator[None]:
        """Around a call, from its beginning to its end, what it waits for included. Begun while the others wait, it
        waits for a place first.
        """
        self._calls.add(call)
        try:
            await self.until_placed(call)
            try:
                yield
            finally:
                # A question that nobody answers in time breaks off within the call, and the run goes on all the same.
                if not is_being_cancelled():
                    await self.until_placed(call)
        finally:
            self._calls.discard(call)
            self.rest(call)

    def rest(self, call: str) -> None:
        """The call has no need of the place, until `until_placed`."""
        self._at_work.discard(call)
        if self._calls and not self._at_work:
            self._places.give_up(self)

    async def until_placed(self, call: str = "") -> None:
        """Wait until the run has its place; the call is at work then. Without one: whether calls of it are there or
        not.
        """
        if self._is_back.is_set():
            self._at_work.add(call)
            return
        self._returning.add(call)
        try:
            self._places.wish(self)
            await self._is_back.wait()
        finally:
            self._returning.discard(call)
            if not self._returning:
                self._places.withdraw(self)

    def leave(self) -> None:
        """It has no place any more."""
        self._is_back.clear()

    def come_back(self) -> None:
        """It has a place; each of its calls that waited for that is at work from now, also when it has not noticed
        yet.
        """
        self._at_work |= self._returning
        self._is_back.set()


class PlacedApprover:
    """Asks another approver, who waits for people; from then on the call has no need of the run's place. Whoever sends
    the call waits for that: within the question a yes would be lost that came before a place was free."""

    def __init__(self, approver: Approver, place: RunPlace) -> None:
        self._approver, self._place = approver, place

    async def decide(self, request: ApprovalRequest) -> Decision:
        self._place.rest(request.call.id)
        return await self._approver.decide(request)
