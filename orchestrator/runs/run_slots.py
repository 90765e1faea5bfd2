"""Run slots of one process. The number of slots limits how many runs the process executes at a time.

A run that only waits for people releases its slot to another run, and takes a slot again before the run continues.
A run that waits for a sandbox lends its slot to runs that continue, because those runs cannot end without a slot.

Invariant: the number of runs in memory minus the number of runs without a slot never exceeds the number of slots. A
run that wants to continue gets the next free slot before a new run is claimed. The run that has waited longest is
first.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sized
from contextlib import asynccontextmanager, contextmanager

from toolcrew.concurrency.tasks import is_being_cancelled
from toolcrew.contract.approvals import Decision
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.orchestrator.approvals.approvers import ApprovalRequest, Approver
from toolcrew.orchestrator.loop.call_runner import RunCall

MAX_RUNS_PER_SLOT = 16
"""Maximum number of runs in memory for each slot, including waiting runs. Each run keeps its messages in memory."""


class RunSlots:
    """Slots of one process. No run waits for a slot until `configure` was called."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._runs: Sized = ()
        self._reserved = 0
        self._released: set[RunSlot] = set()
        """Slots that their runs have released."""
        self._in_use: set[RunSlot] = set()
        """Slots in `_released` that were only lent: a run that continues may take them, a new run may not."""
        self._returning: deque[RunSlot] = deque()

    def configure(self, count: int, runs: Sized) -> None:
        """Set the number of slots. `runs`: all runs in memory. The caller keeps this collection up to date."""
        self._count, self._runs = count, runs

    def count_free(self) -> int:
        """Return how many runs may be claimed. Runs that want their slot back have priority. Call this method when a
        run has ended.
        """
        self._grant_returning()
        limit = (self._count or 0) * MAX_RUNS_PER_SLOT
        return max(0, min(self._free() - len(self._in_use), limit - len(self._runs) - self._reserved))

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve slots until the claimed runs are among the runs in memory. No run returns to a reserved slot."""
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count
            self._grant_returning()

    @asynccontextmanager
    async def run(self) -> AsyncIterator["RunSlot"]:
        """Context manager for the start of a run, which takes a slot. The run also has a slot after the block, unless
        the block is cancelled or raises.
        """
        slot = RunSlot(self)
        try:
            yield slot
            await slot.wait()
        finally:
            # The rest of the run's work in this process counts as work in a slot.
            self._released.discard(slot)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[None]:
        """Lend the run's slot to returning runs while the run waits for its sandbox. The run has a slot after the
        block.
        """
        slot = RunSlot(self)
        self._in_use.add(slot)
        self.release(slot)
        try:
            yield
            await slot.wait()
        finally:
            self._in_use.discard(slot)
            self._released.discard(slot)

    def release(self, slot: "RunSlot") -> None:
        """Release the slot, so that another run can use it."""
        if self._count is not None and slot not in self._released:
            self._released.add(slot)
            slot.leave()
            self._grant_returning()

    def request(self, slot: "RunSlot") -> None:
        """Queue a run that wants to continue. A run is queued only once, even if several of its calls wait."""
        if slot not in self._returning:
            self._returning.append(slot)
        self._grant_returning()

    def cancel_request(self, slot: "RunSlot") -> None:
        """Remove a run from the queue: none of its calls wants to continue any more."""
        if slot in self._returning:
            self._returning.remove(slot)

    def _free(self) -> int:
        """Return the number of free slots. May be negative."""
        return (self._count or 0) - self._reserved - (len(self._runs) - len(self._released))

    def _grant_returning(self) -> None:
        """Give free slots to the runs that have waited longest."""
        while self._returning and self._free() > 0:
            slot = self._returning.popleft()
            self._released.discard(slot)
            self._in_use.discard(slot)
            slot.grant()


class RunSlot:
    """Slot of one run. The run releases the slot while the run has calls and none of the calls needs the slot.

    Between calls the run itself needs the slot.
    """

    def __init__(self, slots: RunSlots) -> None:
        self._slots = slots
        self._calls: set[str] = set()
        """Calls that have started and not ended."""
        self._at_work: set[str] = set()
        self._returning: set[str] = set()
        self._is_granted = asyncio.Event()
        self._is_granted.set()

    def wrap(self, run_call: RunCall) -> RunCall:
        """Return a function that executes calls as `run_call` does, in this slot."""

        async def run_in_slot(call: ToolCall) -> ToolResult:
            async with self.call(call.id):
                return await run_call(call)

        return run_in_slot

    @asynccontextmanager
    async def call(self, call: str) -> AsyncIterator[None]:
        """Wrap a call from its start to its end. If the run has no slot at the start, the call waits for a slot
        first.
        """
        self._calls.add(call)
        try:
            await self.wait(call)
            try:
                yield
            finally:
                # If an approval times out, the call raises and the run continues, so the run needs its slot again.
                if not is_being_cancelled():
                    await self.wait(call)
        finally:
            self._calls.discard(call)
            self.rest(call)

    def rest(self, call: str) -> None:
        """Record that a call needs no slot until it calls `wait`."""
        self._at_work.discard(call)
        if self._calls and not self._at_work:
            self._slots.release(self)

    async def wait(self, call: str = "") -> None:
        """Wait until the run has a slot. The call needs the slot from then on. `call`: id of the call that waits; "":
        the run itself waits.
        """
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
        """Record that the run has no slot."""
        self._is_granted.clear()

    def grant(self) -> None:
        """Give the slot to the run.

        The waiting calls count as active at once. Until they wake up, another call that ends must not release the slot
        again.
        """
        self._at_work |= self._returning
        self._is_granted.set()


class SlotReleasingApprover:
    """Approver that asks another approver, which waits for people. The call needs no slot after this point.

    The caller waits for the slot after the decision and not inside `decide`. A decision that arrives before a slot is
    free would be lost inside `decide`.
    """

    def __init__(self, approver: Approver, slot: RunSlot) -> None:
        self._approver = approver
        self._slot = slot

    async def decide(self, request: ApprovalRequest) -> Decision:
        """Return the decision of the other approver. The call needs no slot from now on."""
        self._slot.rest(request.call.id)
        return await self._approver.decide(request)
