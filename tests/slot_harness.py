"""The slot of a run, released while the run waits for an approval."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.runs.run_slots import RunSlot


@asynccontextmanager
async def released_slot(slot: RunSlot, call: str) -> AsyncIterator[None]:
    """Release the slot around the wait of a call. The block ends after the run has a slot again."""
    slot.rest(call)
    yield
    await slot.wait(call)
