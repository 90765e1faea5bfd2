"""The place of a run, as what waits for people gives it up."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.runs.places import RunPlace


@asynccontextmanager
async def given_up(place: RunPlace, call: str) -> AsyncIterator[None]:
    """Around what a call waits for; the block is left when the run has a place."""
    place.rest(call)
    yield
    await place.until_placed(call)
