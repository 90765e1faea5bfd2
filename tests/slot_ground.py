"""The slot of a run, as what waits for people gives it up."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.runs.run_slots import RunSlot


@asynccontextmanager
async def given_up(slot: RunSlot, call: str) -> AsyncIterator[None]:
    """Around what a call waits for; the block is left when the run has a slot."""
    slot.rest(call)
    yield
    await slot.wait(call)
