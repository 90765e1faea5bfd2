"""Who may have a slot now: what the dispatcher asks before a call is sent."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from contract.calls import RunFailure, ToolResult
from contract.errors import ErrorCode
from store.slots import SlotRequest

NOT_ADMITTED = RunFailure.ADMISSION.metadata
"""In the metadata of what admission refuses."""


def was_not_admitted(result: ToolResult) -> bool:
    """Whether the call has not been sent, so that it may be made again under its own id; one whose tool says that it is
    asked too often has been.
    """
    return result.error_code is ErrorCode.RATE_LIMITED and result.run_failure is RunFailure.ADMISSION


class Slot:
    """A slot of one call. `used_s`: what the tenant is charged when it is given back: seconds of a worker, as the
    result's clocks tell; None: as long as it was held. `pending`: the id of the request in Redis while it is not known
    whether the call has the slot; "" once it has."""

    def __init__(self, pending: str = "") -> None:
        self.used_s: float | None = None
        self.pending = pending

    async def wait(self) -> None:
        """Return when the call has the slot. Raises what `Admission.slot` raises."""


class Admission(Protocol):
    """Slots in fair shares."""

    def slot(self, request: SlotRequest, *, is_early: bool = False) -> AbstractAsyncContextManager[Slot]:
        """Waits for a slot and holds it until the block ends. A request with the policy of a paused tenant waits and
        never gets one.

        `is_early`: the block may begin when the request is on its way to Redis. A call that is published in the block's
        first turn is then in the same pipeline, on condition that it has the slot `Slot.pending`; when it has not,
        `Slot.wait` waits.

        Raises ToolFailure(RATE_LIMITED) with `retry_after_s` in its metadata when the tenant has too many calls
        waiting, or none became free within `wait_s`; BrokerUnavailable.
        """
        ...

    async def aclose(self) -> None:
        """Give everything back."""
        ...


class Unlimited:
    """For programs without a pool: everybody has a slot at once."""

    @asynccontextmanager
    async def slot(self, request: SlotRequest, *, is_early: bool = False) -> AsyncIterator[Slot]:
        yield Slot()

    async def aclose(self) -> None:
        """Nothing is held."""
