"""The run slots of one process: how many runs it works at a time.

A run that only waits for people releases its slot to another run and takes one again when it continues. A run that
waits for a sandbox lends its slot to runs that continue, because those could not end without one.

Invariant: runs in memory minus runs without a slot never exceed the number of slots. A run that wants to continue gets
the next free slot before a new run is claimed; the one that has waited longest comes first.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sized
from contextlib import asynccontextmanager, contextmanager

from contract.approvals import Decision
from contract.calls import ToolCall, ToolResult
from orchestrator.approvals.approvers import ApprovalRequest, Approver
from orchestrator.loop.call_runner import RunCall
from store.tasks import is_being_cancelled

MAX_RUNS_PER_SLOT = 16
"""Runs in memory for each slot, waiting ones included: each keeps its messages in memory."""


class RunSlots:
    """The slots of one process. Until `configure` was called, no run waits for a slot."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._runs: Sized = ()
        self._reserved = 0
        self._away: set[RunSlot] = set()
        """Slots of runs that have released them."""
        self._lent: set[RunSlot] = set()
        """Those of `_away` that only a returning run may take."""
        self._returning: deque[RunSlot] = deque()

    def configure(self, count: int, runs: Sized) -> None:
        """Set the number of slots. `runs`: all runs in memory, kept up to date by the caller."""
        self._count, self._runs = count, runs

    def count_free(self) -> int:
        """Return how many runs may be claimed, after those that want their slot back. Call it when a run has ended."""
        self._grant_returning()
        limit = (self._count or 0) * MAX_RUNS_PER_SLOT
        return max(0, min(self._free() - len(self._lent), limit - len(self._runs) - self._reserved))

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve slots while runs are claimed, until these are among the runs in memory: no run returns to them."""
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count
            self._grant_returning()

    @asynccontextmanager
    async def run(self) -> AsyncIterator["RunSlot"]:
        """Wrap a run that has started in a slot. It leaves the block with a slot, unless the block is cancelled or
        raises.
        """
        slot = RunSlot(self)
        try:
            yield slot
            await slot.wait()
        finally:
            # The rest of the run's work here counts as work in a slot.
            self._away.discard(slot)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[None]:
        """Lend the run's slot to returning runs while it waits for its sandbox; it leaves the block with a slot."""
        slot = RunSlot(self)
        self._lent.add(slot)
        self.release(slot)
        try:
            yield
            await slot.wait()
        finally:
            self._lent.discard(slot)
            self._away.discard(slot)

    def release(self, slot: "RunSlot") -> None:
        """Let another run have the slot."""
        if self._count is not None and slot not in self._away:
            self._away.add(slot)
            slot.leave()
            self._grant_returning()

    def request(self, slot: "RunSlot") -> None:
        """Queue a run that wants to continue, once for all its calls."""
        if slot not in self._returning:
            self._returning.append(slot)
        self._grant_returning()

    def cancel_request(self, slot: "RunSlot") -> None:
        """Remove a run from the queue: none of its calls wants to continue any more."""
        if slot in self._returning:
            self._returning.remove(slot)

    def _free(self) -> int:
        return (self._count or 0) - self._reserved - (len(self._runs) - len(self._away))

    def _grant_returning(self) -> None:
        while self._returning and self._free() > 0:
            slot = self._returning.popleft()
            self._away.discard(slot)
            self._lent.discard(slot)
            slot.grant()


class RunSlot:
    """The slot of one run. It is released while the run has calls and none of them is at work. Between calls the run
    itself is at work.
    """

    def __init__(self, slots: RunSlots) -> None:
        self._slots = slots
        self._calls: set[str] = set()
        """Calls that have begun and not ended."""
        self._at_work: set[str] = set()
        self._returning: set[str] = set()
        self._is_granted = asyncio.Event()
        self._is_granted.set()

    def wrap(self, run_call: RunCall) -> RunCall:
        """Return a function that runs calls as `run_call` does, in this slot."""

        async def run_in_slot(call: ToolCall) -> ToolResult:
            async with self.call(call.id):
                return await run_call(call)

        return run_in_slot

    @asynccontextmanager
    async def call(self, call: str) -> AsyncIterator[None]:
        """Wrap a call from its beginning to its end. A call that begins while the others wait first waits for a
        slot.
        """
        self._calls.add(call)
        try:
            await self.wait(call)
            try:
                yield
            finally:
                # An approval that times out raises in the call, and the run continues: it needs its slot again.
                if not is_being_cancelled():
                    await self.wait(call)
        finally:
            self._calls.discard(call)
            self.rest(call)

    def rest(self, call: str) -> None:
        """Note that a call needs no slot until it calls `wait`."""
        self._at_work.discard(call)
        if self._calls and not self._at_work:
            self._slots.release(self)

    async def wait(self, call: str = "") -> None:
        """Wait until the run has a slot; the call is at work then. `call` "": the run itself waits."""
        if self._is_granted.is_set():
            self._at_work.add(call)
            return
        self._returning.add(call)
        try:
            self._slots.request(self)
            await self._is_granted.wait()
        finally:
            self._returning.discard(call)
            if not self._returning:
                self._slots.cancel_request(self)

    def leave(self) -> None:
        """Note that the run has no slot."""
        self._is_granted.clear()

    def grant(self) -> None:
        """Note that the run has a slot. Its waiting calls count as at work at once: until they wake up, another call
        that ends must not release the slot again.
        """
        self._at_work |= self._returning
        self._is_granted.set()


class SlotReleasingApprover:
    """Asks another approver, which waits for people. From then on the call needs no slot.

    The caller waits for the slot after the decision, not inside `decide`: a decision that came before a slot was free
    would be lost there.
    """

    def __init__(self, approver: Approver, slot: RunSlot) -> None:
        self._approver, self._slot = approver, slot

    async def decide(self, request: ApprovalRequest) -> Decision:
        self._slot.rest(request.call.id)
        return await self._approver.decide(request)
